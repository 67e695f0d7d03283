"""The milestone of chapter 12: a network that learns without autograd."""

from __future__ import annotations

from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from attnlib import backprop
from workkit.training import SYMBOLS, Say, compare, pieces, texts, train


def backward(say: Say) -> None:
    """The training of chapter 12, without autograd; and first its gradients beside it."""
    learn, test = texts()
    rng = np.random.default_rng(4)
    model = backprop.LanguageModel(len(SYMBOLS), 24, 48, num_heads=4, num_layers=2, rng=rng)
    torch.manual_seed(7)
    beside_autograd(model, pieces(learn, 24, 4), say)
    model = backprop.cast(model, np.float32)
    optimizer, cross_entropy = backprop.Adam(model, lr=1e-2), backprop.CrossEntropy()

    def loss_of(batch: Tensor) -> float:
        ids = batch.numpy()
        return float(cross_entropy.forward(model.forward(ids[:, :-1]), ids[:, 1:]))

    def step(lr: float) -> float:
        optimizer.lr = lr
        loss = loss_of(pieces(learn, 24, 16))
        model.backward(cross_entropy.backward())
        optimizer.step()
        return loss

    held_out = pieces(test, 24, 200)
    say(f"Loss before the training: {loss_of(held_out):.2f}")
    refuse = mock.Mock(side_effect=AssertionError("PyTorch's autograd was called"))
    with mock.patch.multiple(torch.autograd, grad=refuse, backward=refuse):
        train(step, 1e-2, 400, say)
    compare(loss_of(held_out), learn, test, say)


def beside_autograd(model: backprop.LanguageModel, batch: Tensor, say: Say) -> None:
    """Logits and gradients by hand, and by PyTorch's functions and its autograd."""
    ids, cross_entropy = batch.numpy(), backprop.CrossEntropy()
    logits = model.forward(ids[:, :-1])
    cross_entropy.forward(logits, ids[:, 1:])
    model.backward(cross_entropy.backward())
    arrays = {n: torch.tensor(p).requires_grad_() for n, p in model.parameters().items()}
    theirs = by_pytorch(arrays, batch[:, :-1], len(model.blocks), heads=4)
    gap = np.abs(logits - theirs.detach().numpy()).max()
    assert gap < 1e-9, f"its logits differ from those of PyTorch's functions by {gap:.1g}"
    loss = F.cross_entropy(theirs.flatten(0, 1), batch[:, 1:].flatten())
    judged = dict(zip(arrays, torch.autograd.grad(loss, [*arrays.values()]), strict=True))
    gaps = {n: np.abs(g - judged[n].numpy()).max() for n, g in model.gradients().items()}
    worst = max(gaps, key=gaps.__getitem__)
    said = f"{len(gaps)} gradients by hand, beside autograd's"
    say(f"{said}: the largest difference is {gaps[worst]:.0e}.")
    wrong = f"the gradient of {worst} is not autograd's: off by {gaps[worst]:.1g}"
    assert gaps.keys() == arrays.keys() and gaps[worst] < 1e-10, wrong


def by_pytorch(arrays: dict[str, Tensor], ids: Tensor, blocks: int, heads: int) -> Tensor:
    """The logits of chapter 9's model, with PyTorch's functions alone."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, arrays[f"{name}.W"].T, arrays[f"{name}.b"])

    def norm(name: str, x: Tensor) -> Tensor:
        gamma, beta = arrays[f"{name}.gamma"], arrays[f"{name}.beta"]
        return F.layer_norm(x, gamma.shape, gamma, beta)

    table = arrays["token_embedding.weight"]
    x = table[ids] + arrays["positions"][: ids.shape[-1]]
    for block in (f"blocks.{i}" for i in range(blocks)):
        normed, at = norm(f"{block}.norm_1", x), f"{block}.attention"
        qkv = (linear(f"{at}.{role}_proj", normed) for role in "qkv")
        split = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in qkv)
        read = F.scaled_dot_product_attention(*split, is_causal=True)
        x = x + linear(f"{at}.out_proj", read.transpose(1, 2).flatten(2))
        hidden = linear(f"{block}.feed_forward.linear_1", norm(f"{block}.norm_2", x))
        x = x + linear(f"{block}.feed_forward.linear_2", hidden.relu())
    return norm("norm", x) @ table.T
