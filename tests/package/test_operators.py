"""Attention among PyTorch's own operators: exported, compiled, batched, twice derived.

What every back end owes a graph: PyTorch's own `opcheck`, and one graph with free sizes
that trains; and the same numbers under `torch.func` as without.
"""

import itertools
import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from attnlib import (
    FlashAttention,
    MultiHeadAttention,
    ScaledDotProductAttention,
    SelfAttention,
    flash_attention,
    fused_attention,
)
from attnlib.flash import flash_backward, flash_forward, fused_suits
from drawn import Largest, close, draw, leaves


def plain(query, key, value, mask=None, **options):
    return ScaledDotProductAttention(**options)(query, key, value, mask)[0]


MASKS = {
    "no mask": lambda: None,
    "boolean": lambda: torch.tensor([[1, 1, 0, 1, 1, 0]] * 4 + [[0] * 6] * 2) > 0,
    "added": lambda: torch.linspace(-1, 1, 6, dtype=torch.float64)[None],
}


@pytest.mark.parametrize(
    ("mask", "dtype"),
    [("no mask", torch.float64), ("boolean", torch.float32), ("added", torch.bfloat16)],
)
def test_opcheck(mask, dtype):
    """With a window where there is no mask."""
    mask, window = MASKS[mask](), 2 if mask == "no mask" else None
    if mask is not None:
        mask = mask[:5] if mask.dtype == torch.bool else mask.to(dtype)
    for grad in (False, True):
        inputs = (*draw(2, queries=5, dtype=dtype, grad=grad), mask)
        torch.library.opcheck(flash_forward, (*inputs, True, 0.5, [2, 3], window))
    inputs = [x.detach() for x in inputs[:3]]
    output, lse, *kept = flash_forward(*inputs, mask, True, 0.5, [2, 3], window)
    mask_too = mask is not None and mask.dtype != torch.bool
    tensors = (*inputs, mask, output, *kept, output, lse.exp())
    torch.library.opcheck(flash_backward, (*tensors, mask_too, True, 0.5, None, window))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_fused_attention_takes_every_mask_that_broadcasts(added, causal):
    """Of as many dimensions as the scores, or fewer, each of them whole or 1.

    Gradients: test_window.
    """
    for leading in ((), (3,), (2, 3), (4, 2, 3)):
        inputs, sizes = draw(*leading, queries=5, d_v=4), (*leading, 5, 6)
        every = itertools.product(*((1, n) for n in sizes))
        for shape in {x[i:] for x in every for i in range(len(sizes) + 1)}:
            mask = torch.rand(shape) < 0.7
            if added:
                mask = torch.randn(shape).double().masked_fill(~mask, -torch.inf)
            found = fused_attention(*inputs, mask, causal=causal, scale=0.3)
            close(found, plain(*inputs, mask, causal=causal, scale=0.3))


class OnGPU(torch.Tensor):
    """Says that it lies on a GPU."""

    is_cuda = True


def test_what_pytorchs_function_suits():
    """Only where it forms no matrix of queries by keys."""
    for leading in ((), (2,), (2, 3)):
        for queries, keys, causal in ((5, 6, False), (5, 5, True), (1, 6, True)):
            inputs = draw(*leading, queries=queries, keys=keys, d_v=4)
            assert fused_suits(*inputs, None, causal)
            assert fused_suits(*inputs, torch.ones(keys) > 0, False)
            assert not fused_suits(*inputs, torch.ones(keys) > 0, True)
            added = torch.zeros(keys, dtype=torch.float64)
            assert fused_suits(*inputs, added, False)
            assert not fused_suits(*inputs, added.requires_grad_(), False)
            on_gpu = [x.as_subclass(OnGPU) for x in inputs]
            assert not fused_suits(*on_gpu, None, causal)
            assert fused_suits(*(x.float() for x in on_gpu), None, causal)
        for queries, keys in ((5, 6), (6, 5), (2, 4), (5, 1)):
            inputs = draw(*leading, queries=queries, keys=keys, d_v=4)
            assert not fused_suits(*inputs, None, True)
        assert not fused_suits(*draw(*leading), None, False)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 2, 3)])
def test_no_weights_are_formed_whatever_the_leading_dimensions(leading):
    """PyTorch forms them for all but four dimensions; "auto" and the heads must not."""
    n = 80
    query, key, value = (torch.randn(*leading, n, 4) for _ in range(3))
    padding = torch.rand(*leading, 1, n) < 0.9
    matrices = query[..., 0, 0].numel()
    for call in (
        lambda: FlashAttention()(query, key, value),
        lambda: FlashAttention(True)(query, key, value),
        lambda: FlashAttention()(query, key, value, padding),
        lambda: SelfAttention(4, 4)(query),
    ):
        with Largest() as largest:
            call()
        assert largest.numbers < matrices * n * n
    with Largest() as largest:
        plain(query, key, value)
    assert largest.numbers == matrices * n * n


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_heads_that_nobody_asks_for_weights(mask, causal):
    """The same output, and no weights; while weights are dropped, the same ones."""
    heads = ScaledDotProductAttention(dropout=0.4, causal=causal)
    layer = MultiHeadAttention(8, 2, heads).double().eval()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    m = MASKS[mask]()
    m = None if m is None else m[:5, :5]
    for training in (False, True):
        layer.train(training)
        torch.manual_seed(1)
        expected, weights = layer(x, mask=m)
        torch.manual_seed(1)
        found, none = layer(x, mask=m, need_weights=False)
        assert len(weights) == 2 and none is None
        close(found, expected)


def test_a_forward_of_ones_own_is_never_told():
    """A subclass without the argument is called as ever, and what it computes counts."""

    class Sharper(ScaledDotProductAttention):
        def forward(self, query, key, value, mask=None):
            return super().forward(2 * query, key, value, mask)

    layer = MultiHeadAttention(8, 2, Sharper)
    x = torch.randn(3, 5, 8)
    close(layer(x, need_weights=False)[0], layer(x)[0], atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("mask", "window"),
    [("no mask", None), ("no mask", 2), ("boolean", None), ("added", None)],
)
def test_second_derivatives_of_the_tiles(mask, window, causal):
    """By finite differences of the gradients, through output and log-sum-exp."""
    inputs, m = draw(1, queries=3, keys=4, d_v=2, grad=True), MASKS[mask]()
    m = None if m is None else m[-3:, :4]
    options = {"causal": causal, "window": window, "block_size": (2, 3), "return_lse": True}

    def both(*inputs):
        output, lse = flash_attention(*inputs, m, **options)
        return output, lse.masked_fill(~lse.isfinite(), 0.0)  # where nothing is allowed

    assert torch.autograd.gradgradcheck(both, inputs, fast_mode=True)


@pytest.mark.parametrize(("queries", "keys"), [(0, 6), (5, 0), (0, 0)])
def test_no_queries_or_no_keys(queries, keys):
    """Nothing to attend from, or to: zeros, with derivatives of zero."""
    inputs = draw(2, queries=queries, keys=keys, grad=True)
    output = flash_attention(*inputs)
    close(output, torch.zeros(2, queries, 3, dtype=torch.float64))
    gradients = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    seconds = torch.autograd.grad(sum(x.sum() for x in gradients), inputs)
    for x, first, second in zip(inputs, gradients, seconds, strict=True):
        close(first, torch.zeros_like(x))
        close(second, torch.zeros_like(x))


def test_second_derivatives_that_are_refused():
    inputs, same = draw(2, queries=5, grad=True), draw(2, 1, d_v=4, grad=True)
    mask = torch.zeros(5, 6, dtype=torch.float64, requires_grad=True)
    for output, first, error, words in (
        (flash_attention(*inputs, mask), inputs[0], NotImplementedError,
         r"^mask: expected one that needs no grad"),
        # PyTorch's function is fused for equal widths
        (fused_attention(*same), same[0], RuntimeError, "not implemented"),
    ):  # fmt: skip
        (gradient,) = torch.autograd.grad(output.cos().sum(), first, create_graph=True)
        with pytest.raises(error, match=words):
            gradient.sum().backward()
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(fused_attention, same)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(flash_attention, tuple(inputs), tuple(inputs))


@pytest.mark.parametrize("attend", [flash_attention, plain])
def test_torch_func(attend):
    """vmap over any input, or the mask alone; gradients of each sample; second ones."""
    tensors = [*draw(3, queries=5), torch.rand(3, 5, 6) < 0.7]
    inputs, masks = tensors[:3], tensors[3]
    every = [(0, 0, 0, 0), (None, None, None, 0)]
    every += [tuple(None if i == shared else 0 for i in range(4)) for shared in range(4)]
    for dims in every:
        given = [x[1] if d is None else x for x, d in zip(tensors, dims, strict=True)]
        found = torch.vmap(attend, in_dims=dims)(*given)
        for i in range(3):
            own = (x if d is None else x[i] for x, d in zip(given, dims, strict=True))
            close(found[i], attend(*own))
    one = [x[0] for x in inputs]

    def score(query, key, value):
        return attend(query, key, value, masks[0]).cos().sum()

    each = torch.vmap(torch.func.grad(score, argnums=(0, 1, 2)))(*inputs)
    for i in range(3):
        sample = leaves([x[i] for x in inputs])
        close([x[i] for x in each], list(torch.autograd.grad(score(*sample), sample)))
    hessian = torch.func.jacrev(torch.func.grad(score))(*one)
    close(hessian, torch.autograd.functional.hessian(lambda q: score(q, *one[1:]), one[0]))


@pytest.mark.parametrize("shape", [(6,), (5, 1), (5, 6), (2, 1, 6), (2, 5, 6)])
@pytest.mark.parametrize("dim", [None, 0, -1])
def test_the_gradient_of_a_mask_under_vmap(shape, dim):
    """One that all share, or one for each, with its batch in front or at the end."""
    inputs = draw(3, 2, queries=5)
    biases = torch.randn(3, *shape, dtype=torch.float64)
    biases = biases if dim is not None else biases[:1].expand(3, *shape)

    def score(bias, *qkv):
        return flash_attention(*qkv, bias).cos().sum()

    each = torch.vmap(torch.func.grad(score, (0, 1, 2, 3)), in_dims=(dim, 0, 0, 0))
    given = biases[0] if dim is None else biases.movedim(0, dim)
    found = each(given, *inputs)
    for i in range(3):
        own = leaves([x[i] for x in (biases, *inputs)])
        close([x[i] for x in found], list(torch.autograd.grad(score(*own), own)))


GRAPHS = """
import sys, torch
from attnlib import FlashAttention, LanguageModel, MultiHeadAttention
from attnlib import ScaledDotProductAttention

heads = {
    "scaled dot product": ScaledDotProductAttention(causal=True),
    "tiles": FlashAttention(causal=True, backend="torch"),
    "auto": FlashAttention(causal=True),
}[sys.argv[1]]


def same(found, expected, theirs, ours):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    theirs = torch.autograd.grad(found.cos().sum(), theirs)
    ours = torch.autograd.grad(expected.cos().sum(), ours)
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


layer = MultiHeadAttention(8, 2, heads)
compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
for tokens in (5, 9):
    x = torch.randn(2, tokens, 8, requires_grad=True)
    found, expected = (call(x, need_weights=False)[0] for call in (compiled, layer))
    leaves = [x, *layer.parameters()]
    same(found, expected, leaves, leaves)

model = LanguageModel(11, 16, 8, 2, 1, attention=heads)
ids, other = torch.randint(11, (2, 7)), torch.randint(11, (3, 12))
free = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens", max=16)},)
for strict in (False, True):
    program = torch.export.export(model, (ids,), dynamic_shapes=free, strict=strict)
    trained = program.module()
    theirs, ours = dict(trained.named_parameters()), dict(model.named_parameters())
    assert set(theirs) == set(ours)
    theirs = [theirs[name] for name in ours]
    same(trained(other), model(other), theirs, list(ours.values()))
"""


@pytest.mark.costly(
    "graphs/{heads}",
    *("attnlib/flash/*.py", "attnlib/multi_head.py", "attnlib/scaled_dot_product.py"),
    *("attnlib/transformer.py", "attnlib/fused.py", "attnlib/base.py"),
)
@pytest.mark.skipif(torch.__version__ < "2.13", reason="the page says PyTorch 2.13")
@pytest.mark.parametrize("heads", ["scaled dot product", "tiles", "auto"])
def test_one_graph_and_free_sizes_with_gradients(heads):
    """In a process of its own: a graph can't look into the check of annotations."""
    subprocess.run([sys.executable, "-c", GRAPHS, heads], check=True)


def test_checkpoints_and_counted_operations():
    inputs = draw(2, queries=5, grad=True)
    expected = torch.autograd.grad(flash_attention(*inputs).cos().sum(), inputs)
    output = checkpoint(flash_attention, *inputs, use_reentrant=False)
    close(torch.autograd.grad(output.cos().sum(), inputs), expected)
    with FlopCounterMode(display=False) as counter:
        flash_attention(*(x.detach() for x in inputs), block_size=3)
    assert counter.get_total_flops() == 2 * 2 * 5 * 6 * (4 + 3)
    output = flash_attention(*inputs)
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 5 * 6 * (3 * 4 + 2 * 3)
