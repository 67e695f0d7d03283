"""Copies of PyTorch's layers: what is frozen stays so, what computes otherwise is not."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from attnlib import (
    FeedForwardNetwork,
    LayerNorm,
    MultiHeadAttention,
    Projection,
    RMSNorm,
    TransformerBlock,
)
from drawn import close, each_refused, normal, refuses

X = normal(2, 5, 8)


def encoder(cls=nn.TransformerEncoderLayer, **options):
    torch.manual_seed(0)
    options = {"dim_feedforward": 12, "dropout": 0.0, "batch_first": True, **options}
    return cls(8, 2, **options).double()


MODULES = {
    "linear": (Projection.from_linear, lambda: nn.Linear(8, 6)),
    "LayerNorm": (LayerNorm.from_torch, lambda: nn.LayerNorm(8)),
    "RMSNorm": (RMSNorm.from_torch, lambda: nn.RMSNorm(8, eps=1e-5)),
}
each_module = pytest.mark.parametrize(("convert", "make"), MODULES.values(), ids=MODULES)


@each_module
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_what_is_frozen_stays_frozen(convert, make, frozen):
    theirs = make().double()
    named = dict(theirs.named_parameters())
    named.get(frozen, theirs.weight).requires_grad_(False)  # one of them has no bias
    ours = convert(theirs)
    learned = [p.requires_grad for p in ours.parameters()]
    assert learned == [p.requires_grad for p in theirs.parameters()]
    close(ours(X), theirs(X))


def test_a_frozen_part_of_a_block_stays_frozen():
    layer = encoder()
    for part in (layer.linear1, layer.norm2):
        part.requires_grad_(False)
    block = TransformerBlock.from_torch(layer)
    frozen = {name for name, p in block.named_parameters() if not p.requires_grad}
    own = {"feed_forward.linear_1.W", "feed_forward.linear_1.b"}
    assert frozen == own | {"norm_2.gamma", "norm_2.beta"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("convert", "theirs"),
    [
        (LayerNorm.from_torch, nn.LayerNorm(8, elementwise_affine=False)),
        (LayerNorm.from_torch, nn.LayerNorm(8, bias=False)),
        (RMSNorm.from_torch, nn.RMSNorm(8, eps=1e-5, elementwise_affine=False)),
    ],
    ids=str,
)
def test_a_norm_has_the_parameters_and_takes_the_types_of_pytorchs(convert, theirs, dtype):
    theirs = copy.deepcopy(theirs).to(dtype)
    ours = convert(theirs)
    assert len(list(ours.parameters())) == len(list(theirs.parameters()))
    close(ours(X.to(dtype)), theirs(X.to(dtype)), atol=torch.finfo(dtype).eps * 8)
    with refuses("input: expected …, the last of 8 features, got shape (2, 5, 7)"):
        ours(X[..., 1:].to(dtype))


@each_module
def test_a_subclass_with_its_own_forward_is_refused(convert, make):
    theirs = make()

    class Wide(type(theirs)):
        def forward(self, x):
            return super().forward(2 * x)

    theirs.__class__ = Wide
    with refuses("…: expected an nn.…, got Wide with its own forward", TypeError):
        convert(theirs)
    theirs = make()
    theirs.forward = lambda x: x
    with refuses("…: expected an nn.…, got … with its own forward", TypeError):
        convert(theirs)


@each_module
def test_a_weight_that_is_made_of_others(convert, make):
    """A hook makes it at each call, so that it may be of yesterday; a property never is."""
    hooked, fresh = make(), make().double()
    prune.identity(hooked, "weight")
    with refuses("…: expected an nn.… whose weight is a parameter, got a tensor made of …"):
        convert(hooked)
    parametrize.register_parametrization(fresh, "weight", nn.Tanh())
    close(convert(fresh)(X), fresh(X))


@pytest.mark.parametrize("method", ["forward", "_sa_block", "_ff_block"])
@pytest.mark.parametrize("of_class", [True, False])
def test_a_block_with_its_own_arithmetic_is_refused(method, of_class):
    layer = encoder()

    def own(self, *args, **options):
        return -getattr(nn.TransformerEncoderLayer, method)(self, *args, **options)

    if of_class:
        layer.__class__ = type("Other", (nn.TransformerEncoderLayer,), {method: own})
    else:
        setattr(layer, method, own.__get__(layer))
    words = f"layer: expected an nn.TransformerEncoderLayer, got … with its own {method}"
    with refuses(words, TypeError):
        TransformerBlock.from_torch(layer)


def test_a_subclass_that_changes_nothing_is_copied():
    layer = encoder(type("Same", (nn.TransformerEncoderLayer,), {"note": "mine"}))
    close(TransformerBlock.from_torch(layer)(X), layer(X))


def test_modes_and_dropouts(as_shipped):
    layer = encoder(dropout=0.3)
    layer.dropout.p = 0.1
    layer.self_attn.eval()
    block = TransformerBlock.from_torch(layer)
    assert (block.dropout, block.feed_forward.dropout) == (0.3, 0.1)
    assert block.training and not block.attention.training
    layer.dropout2.p = 0.2
    with refuses("layer: expected dropout1 and dropout2 of one …, got 0.2 … and 0.3 …"):
        TransformerBlock.from_torch(layer)
    layer.dropout2 = nn.Dropout(0.3).eval()
    with refuses("layer: expected dropout1 and dropout2 of one …=False and 0.3 with …"):
        TransformerBlock.from_torch(layer)
    layer.dropout2 = nn.Identity()
    with refuses("dropout: expected an nn.Dropout, got Identity", TypeError):
        TransformerBlock.from_torch(layer)


def test_the_activation_is_copied_with_its_parameters():
    layer = encoder(activation=nn.PReLU())
    block = TransformerBlock.from_torch(layer)
    before = block(X)
    with torch.no_grad():
        layer.activation.weight.fill_(7.0)
    assert torch.equal(block(X), before)


OTHERS = {
    "module: expected an nn.LayerNorm, got RMSNorm":
        lambda: LayerNorm.from_torch(nn.RMSNorm(4, eps=1e-5)),
    "module: expected an nn.RMSNorm, got LayerNorm":
        lambda: RMSNorm.from_torch(nn.LayerNorm(4)),
    "linear: expected an nn.Linear, got Bilinear":
        lambda: Projection.from_linear(nn.Bilinear(4, 4, 2)),
    "linear: expected an nn.Linear, got Identity":
        lambda: FeedForwardNetwork.from_torch(nn.Linear(4, 8), nn.Identity()),
    "layer: expected an nn.TransformerEncoderLayer, got TransformerDecoderLayer":
        lambda: TransformerBlock.from_torch(nn.TransformerDecoderLayer(4, 2)),
}  # fmt: skip
test_other_classes = each_refused(TypeError, OTHERS)


def attention(**options):
    torch.manual_seed(0)
    return nn.MultiheadAttention(8, 2, batch_first=True, **options).double()


@pytest.mark.parametrize("frozen", ["in_proj_weight", "in_proj_bias", "out_proj.weight"])
def test_a_frozen_matrix_of_all_heads_stays_frozen(frozen):
    theirs = attention()
    theirs.get_parameter(frozen).requires_grad_(False)
    ours = MultiHeadAttention.from_torch(theirs)
    found = {name for name, p in ours.named_parameters() if not p.requires_grad}
    three = [f"{x}_proj.{'b' if 'bias' in frozen else 'W'}" for x in "qkv"]
    assert found == ({"out_proj.W"} if "out" in frozen else set(three))
    close(ours(X)[0], theirs(X, X, X)[0])


class OwnHeads(nn.MultiheadAttention):
    def forward(self, *inputs, **options):
        return super().forward(*inputs, **options)


@pytest.mark.usefixtures("as_shipped")
def test_attention_that_computes_otherwise_is_refused():
    own = OwnHeads(8, 2, batch_first=True)
    said = "module: expected an nn.MultiheadAttention, got OwnHeads with its own forward"
    with refuses(said, TypeError):
        MultiHeadAttention.from_torch(own)
    with refuses("module: expected an nn.MultiheadAttention, got Linear", TypeError):
        MultiHeadAttention.from_torch(nn.Linear(8, 8))
    pruned = prune.random_unstructured(attention(), "in_proj_weight", 0.5)
    with refuses("module: …whose in_proj_weight is a parameter, got a tensor…", ValueError):
        MultiHeadAttention.from_torch(pruned)
