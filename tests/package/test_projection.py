"""The projection where PyTorch or a library has changed it, and what it refuses, when."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from attnlib import (
    FeedForwardNetwork,
    GatedFeedForward,
    LanguageModel,
    LayerNorm,
    MultiHeadAttention,
    Projection,
    RMSNorm,
    TransformerBlock,
)
from attnlib.llama import LlamaBlock, LlamaConfig, NormedProjection
from drawn import close, each_refused, normal, refuses

X = normal(2, 5, 8, dtype=torch.float32)
LAYERS = {
    "bias": lambda: Projection(8, 6),
    "no bias": lambda: Projection(8, 6, bias=False),
    "network": lambda: FeedForwardNetwork(8, 6),
    "gated": lambda: GatedFeedForward(8, 6),
    "normed": lambda: NormedProjection(8, 6, True, 3, 1e-6),
}
each_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


class Around(nn.Module):
    """What LoRA puts in the place of a layer: without its attributes."""

    def __init__(self, layer, width):
        super().__init__()
        self.base, self.extra = layer, nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return self.base(x) + self.extra


def wrap(module):
    """Every projection and norm inside, in an `Around`."""
    for name, part in list(module.named_children()):
        if isinstance(part, Projection):
            setattr(module, name, Around(part, part.out_features))
        elif isinstance(part, LayerNorm | RMSNorm):
            setattr(module, name, Around(part, part.d_model))
        else:
            wrap(part)


@pytest.mark.parametrize("cls", [FeedForwardNetwork, GatedFeedForward])
def test_networks_of_wrapped_projections(cls):
    network = cls(8, 6)
    before = network(X)
    wrap(network)
    close(network(X), before)


def test_heads_with_a_wrapped_norm():
    projection = NormedProjection(8, 6, True, 3, 1e-6)
    before = projection(X)
    wrap(projection)
    assert isinstance(projection.norm, Around)
    close(projection(X), before)


@pytest.mark.parametrize(
    "make",
    [lambda: TransformerBlock(8, 2), lambda: LlamaBlock(LlamaConfig(7, 9, 8, 2, 1, 6))],
)
def test_a_block_whose_network_and_norms_are_wrapped(make):
    block = make()
    before = block(X)
    wrap(block.feed_forward)
    block.norm_1, block.norm_2 = (Around(n, 8) for n in (block.norm_1, block.norm_2))
    block.attention.out_proj = Around(block.attention.out_proj, 8)
    close(block(X), before)


@each_layer
def test_a_pruned_layer_follows_to_another_dtype(make):
    """The tensor that pruning has left in place of W is of the dtype before."""
    layer = make()
    for part in [p for p in layer.modules() if isinstance(p, Projection)]:
        prune.identity(part, "W")
    before = layer(X)
    close(layer.double()(X.double()), before.double(), atol=1e-5)


def test_another_width_than_at_the_start():
    projection = Projection(8, 6)
    projection.W = nn.Parameter(projection.W[2:].detach())
    assert projection(X[..., 2:]).shape == (2, 5, 6)
    with refuses("input: expected …, the last of 6 features, got shape (2, 5, 8)"):
        projection(X)


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@each_layer
def test_what_pytorch_would_multiply_in_silence(make, as_shipped):
    layer = make()
    with refuses("input: expected device cpu, got meta"):
        layer(X.to("meta"))
    complex_layer = make().to(torch.complex64)
    with refuses("input: expected a floating-point tensor, got torch.complex64", TypeError):
        complex_layer(X + 0j)


@each_layer
def test_float64_under_autocast(make):
    layer = make()
    words = "input: expected torch.float32 as the weights, got torch.float64, as autocast"
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert layer(X.to(dtype)).shape[:-1] == X.shape[:-1]
        with refuses(f"{words} does not convert float64", TypeError):
            layer(X.double())
        with refuses("input: expected torch.float64 as the weights, got …32, …", TypeError):
            make().double()(X)


@each_layer
def test_an_error_that_is_not_of_the_input_stays(make):
    """What is wrong with the layer is not said of the input."""
    layer = make()
    for part in layer.modules():
        if isinstance(part, Projection):
            part.b = nn.Parameter(torch.zeros(5))
    with pytest.raises(RuntimeError, match=r"size|shape"):
        layer(X)


@each_layer
def test_one_graph(make, as_shipped):
    layer = make()
    torch.compiler.reset()
    close(torch.compile(layer, fullgraph=True, backend="eager")(X), layer(X))


SIZES = {  # by the name in the message: what is made with a size
    "in_features": lambda n: Projection(n, 2),
    "out_features": lambda n: Projection(2, n),
    "d_model": lambda n: FeedForwardNetwork(n),
    "d_model ": lambda n: GatedFeedForward(n),
    " d_model": LayerNorm,
    " d_model ": RMSNorm,
    "embed_dim": lambda n: TransformerBlock(n, 2),
    "vocab_size": lambda n: LanguageModel(n, 4, 4, 2, 1),
    "context_length": lambda n: LanguageModel(4, n, 4, 2, 1),
    "embed_dim ": lambda n: LanguageModel(4, 4, n, 2, 1, positions="rotary"),
    "num_heads": lambda n: LanguageModel(4, 4, 4, n, 1, positions="rotary"),
    "num_layers": lambda n: LanguageModel(4, 4, 4, 2, n),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_whole_numbers(name, as_shipped):
    for size in (4.0, True, "4", None, torch.tensor(4.0)):
        with refuses(f"{name.strip()}: expected a whole number, got {size!r}", TypeError):
            SIZES[name](size)


CASES = {
    "linear: expected an nn.Linear, got Projection":
        lambda: Projection.from_linear(Projection(3, 2)),
}  # fmt: skip
test_types = each_refused(TypeError, CASES)


def test_what_a_wrapped_projection_refuses_is_told_as_it_is():
    layer = MultiHeadAttention(8, 2)
    wrap(layer)  # which hides how many features there should be
    with refuses("input: expected …, the last of 8 features, got shape (2, 5, 5)"):
        layer(X[..., :5])
    layer.q_proj = nn.Softmax(dim=-1)  # without parameters
    with pytest.raises(RuntimeError, match="unflatten"):
        layer(X[..., :5])
