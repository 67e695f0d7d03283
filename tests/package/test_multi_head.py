"""Multi-head attention and its heads: what plugs in, what is refused, PyTorch's layer."""

import copy
import gc
import importlib
import pkgutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import attnlib
from attnlib import (
    BaseAttention,
    LearnedBiasAttention,
    MultiHeadAttention,
    PhysicsGuidedAttention,
    Projection,
    ScaledDotProductAttention,
    mask_from_torch,
    padding_mask,
)
from attnlib.linear import LinearAttention
from attnlib.multi_head import split_heads
from attnlib.parallel import HeadAttention, RingAttention
from attnlib.programs import ProgramAttention
from attnlib.sparse import ChosenAttention
from attnlib.testing import check_attention
from drawn import close, each_refused, normal, refuses


class Guided(PhysicsGuidedAttention):
    """Guided in every call, by a residual for however many keys there are."""

    def forward(self, query, key, value, mask=None):
        self.guide(torch.linspace(0.0, 2.0, key.shape[-2]))
        return super().forward(query, key, value, mask)


class NeedsAName(ScaledDotProductAttention):
    def __init__(self, name):
        super().__init__()


class WithoutWeights(ScaledDotProductAttention):
    """An attention that never forms its weights, as far as anyone can see."""

    def forward(self, query, key, value, mask=None):
        return super().forward(query, key, value, mask)[0], None


def learned(causal):
    attention = LearnedBiasAttention(2, max_distance=3, causal=causal)
    nn.init.normal_(attention.bias, generator=torch.Generator().manual_seed(0))
    return attention


ANY, TWO_HEADS = ((), (3,), (2, 2)), ((2,), (3, 2))
SCALED = ScaledDotProductAttention
FACTORIES = {
    "scaled": (SCALED, ANY),
    "scaled, causal": (partial(SCALED, causal=True), ANY),
    "scaled, dropout": (partial(SCALED, dropout=0.3, scale=0.7), ANY),
    "scaled, window": (partial(SCALED, window=2), ANY),
    "scaled, all": (partial(SCALED, 0.3, causal=True, window=1), ANY),
    "learned bias": (partial(learned, False), TWO_HEADS),
    "learned bias, causal": (partial(learned, True), TWO_HEADS),
    "physics, not guided": (PhysicsGuidedAttention, ANY),
    "physics": (partial(Guided, strength=1.5), ANY),
    "physics, causal": (partial(Guided, causal=True), ANY),
    "without weights": (WithoutWeights, ANY),
    "flash": (partial(attnlib.FlashAttention, block_size=3), ANY),
    "flash, causal": (partial(attnlib.FlashAttention, causal=True, block_size=2), ANY),
    "linear": (LinearAttention, ANY),
    "linear, causal": (partial(LinearAttention, causal=True, piece=2), ANY),
    "chosen keys": (partial(ChosenAttention, 3, 50), ANY),
    "chosen keys, causal": (partial(ChosenAttention, 3, 50, causal=True), ANY),
    "programs": (partial(ProgramAttention, block_size=5), ANY),
    "programs, causal": (partial(ProgramAttention, block_size=5, causal=True), ANY),
    "ring of one, causal": (partial(RingAttention, causal=True), ANY),
    "heads of one rank, causal": (partial(HeadAttention, causal=True), ((3,), (2, 2))),
}


@pytest.mark.parametrize(("factory", "leading"), FACTORIES.values(), ids=FACTORIES)
def test_conformance(factory, leading, as_shipped):
    check_attention(factory, leading)


def test_every_attention_of_the_package_is_put_through_the_suite():
    for module in pkgutil.walk_packages(attnlib.__path__, "attnlib."):
        importlib.import_module(module.name)
    tested = {cls for factory, _ in FACTORIES.values() for cls in type(factory()).__mro__}
    gc.collect()  # the classes that an export makes for itself are garbage by now
    waiting, found = [BaseAttention], set()
    while waiting:
        waiting += waiting[0].__subclasses__()
        found.add(waiting.pop(0))
    package = {cls for cls in found if cls.__module__.startswith("attnlib.")}
    assert len(package) >= 4 and package <= tested


X, MEMORY = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
TWO = MultiHeadAttention(12, 2)
DIMS = "mask: expected 2 dimensions (queries, keys) or 4 (batch, heads, queries, keys), got"


def from_torch(**options):
    options = {"batch_first": True} | options
    MultiHeadAttention.from_torch(nn.MultiheadAttention(8, 2, **options))


THREE = LearnedBiasAttention(3, 2)
VALUES = {
    "embed_dim: expected a multiple of num_heads = 4, got 10":
        lambda: MultiHeadAttention(10, 4),
    "attention: expected 3 instances, one a head, got 2":
        lambda: MultiHeadAttention(12, 3, attention=[SCALED()] * 2),
    f"{DIMS} shape (5,)…": lambda: TWO(X, mask=torch.ones(5) > 0),
    f"{DIMS} shape (1, 1, 1, 5, 5)…": lambda: TWO(X, mask=torch.ones(1, 1, 1, 5, 5) > 0),
    f"{DIMS} shape (2, 5, 5); one mask for each sequence of the batch is mask[:, None]":
        lambda: TWO(X, mask=torch.ones(2, 5, 5) > 0),
    "mask: expected 2 dimensions (queries, keys) as the tokens have no batch, "
    "got shape (1, 1, 1, 5)": lambda: TWO(X[0], mask=padding_mask([5])),
    "key: expected at least 2 dimensions, the last of 12 features, got shape (2, 7, 11)":
        lambda: TWO(X, MEMORY[..., :11]),
    "key: expected leading dimensions (2, 2) as query, got shape (1, 2, 7, 6)":
        lambda: TWO(X, MEMORY[:1]),
    "mask: …, (2, 3, 5, 5), got (2, 5); one row for each sequence is "
    "mask[:, None, None], see padding_mask":
        lambda: MultiHeadAttention(12, 3)(X, mask=torch.ones(2, 5) > 0),
    "lengths: expected one number for each sequence, got [[3, 1]]":
        lambda: padding_mask([[3, 1]]),
    "input: …, the last of 4 features, got shape (5,)":
        lambda: Projection(4, 3)(torch.ones(5)),
    "query: expected 3 heads, shape (..., heads, tokens, d_k), got shape (2, 5, 4)":
        lambda: THREE(*torch.ones(3, 2, 5, 4)),
    "query: expected 3 heads, shape (..., heads, tokens, d_k), got shape (5, 4)":
        lambda: THREE(*torch.ones(3, 5, 4)),
    "residual: expected finite numbers, got NaN or infinity":
        lambda: PhysicsGuidedAttention().guide(torch.tensor([1.0, torch.nan])),
    "module: expected batch_first=True…": lambda: from_torch(batch_first=False),
    "module: expected kdim and vdim of embed_dim, add_bias_kv=False and …":
        lambda: from_torch(kdim=6),
    "module: … add_bias_kv=False …": lambda: from_torch(add_bias_kv=True),
    "module: … add_zero_attn=False, …": lambda: from_torch(add_zero_attn=True),
}  # fmt: skip
test_values = each_refused(ValueError, VALUES)
HEAD = "attention: expected a BaseAttention subclass, an instance, or a list of them, got"
MADE = "attention: expected an instance, or a class that needs no argument but num_heads;"


def heads(attention):
    MultiHeadAttention(12, 2, attention=attention)


TYPES = {
    f"{HEAD} <class 'torch.nn.modules.linear.Linear'>": lambda: heads(nn.Linear),
    f"{HEAD} Identity()": lambda: heads(nn.Identity()),
    f"{HEAD} a list with 'causal'": lambda: heads([SCALED(), "causal"]),
    f"{MADE} NeedsAName gives: …": lambda: heads(NeedsAName),
    "key: …as the weights, got torch.float64": lambda: TWO(X, MEMORY.double()),
    "lengths: expected whole numbers, got [2.5, 1.0]": lambda: padding_mask([2.5, 1.0]),
    "lengths: …numbers, got [True, True]": lambda: padding_mask(torch.ones(2) > 0),
    "attn_mask: …; a mask of PyTorch's is mask=mask_from_torch(attn_mask)":
        lambda: TWO(X, attn_mask=torch.ones(5, 5) > 0),
    "key_padding_mask: …; that is mask=mask_from_torch(key_padding_mask=...)":
        lambda: TWO(X, key_padding_mask=torch.ones(2, 5) > 0),
    "is_causal: …; heads with causal=True are: attention=FlashAttention(causal=True)":
        lambda: TWO(X, is_causal=True),
    "chace: expected mask, need_weights, cache or positions": lambda: TWO(X, chace=1),
    "residual: expected a floating-point tensor, got tensor([1, 1, 1])":
        lambda: PhysicsGuidedAttention().guide(torch.ones(3, dtype=torch.int64)),
}  # fmt: skip
test_types = each_refused(TypeError, TYPES)


def test_padding_in_one_compiled_graph(as_shipped):
    """Its lengths decide nothing while it is traced, if the longest is known."""
    torch.compiler.reset()
    made = torch.compile(lambda x: padding_mask(x, 4), fullgraph=True, backend="eager")
    lengths = torch.tensor([3, 0, 4])
    assert torch.equal(made(lengths), padding_mask(lengths, 4))


def test_several_threads_on_one_layer():
    inputs = [normal(2, 5, 12, seed=i).float() for i in range(6)]
    expected = [TWO(x)[0] for x in inputs]
    with ThreadPoolExecutor(6) as pool:
        for found in (list(pool.map(lambda x: TWO(x)[0], inputs)) for _ in range(20)):
            assert all(map(torch.equal, found, expected))


@given(
    st.integers(1, 3), st.integers(1, 5), st.integers(1, 6), st.sampled_from([1, 2, 4]),
    st.booleans(), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_equal_to_torch(batch, queries, keys, heads, bias, padded, seed):
    torch.manual_seed(seed)
    theirs = nn.MultiheadAttention(8, heads, bias=bias, batch_first=True).double()
    for parameter in theirs.parameters():  # PyTorch starts every bias at 0
        nn.init.normal_(parameter, std=0.4)
    ours = MultiHeadAttention.from_torch(theirs)
    query = torch.randn(batch, queries, 8, dtype=torch.float64)
    memory, values = torch.randn(2, batch, keys, 8, dtype=torch.float64)
    masks = {"attn_mask": torch.randn(queries, keys, dtype=torch.float64)}
    if padded:
        lengths = torch.randint(1, keys + 1, (batch,))
        blocked = ~padding_mask(lengths, keys)[:, 0, 0]
        added = torch.zeros(batch, keys, dtype=torch.float64)
        masks["key_padding_mask"] = added.masked_fill(blocked, -torch.inf)
    expected, weights = theirs(query, memory, values, average_attn_weights=False, **masks)
    output, per_head = ours(query, memory, values, mask_from_torch(**masks))
    close(output, expected)
    close(torch.stack(per_head, 1), weights)

    output.square().sum().backward()
    expected.square().sum().backward()
    projections = (ours.q_proj, ours.k_proj, ours.v_proj)
    pairs = [(torch.cat([p.W.grad.T for p in projections]), theirs.in_proj_weight)]
    pairs.append((ours.out_proj.W.grad.T, theirs.out_proj.weight))
    if bias:
        pairs.append((torch.cat([p.b.grad for p in projections]), theirs.in_proj_bias))
        pairs.append((ours.out_proj.b.grad, theirs.out_proj.bias))
    for gradient, parameter in pairs:
        close(gradient, parameter.grad, atol=1e-10)


def test_masks_from_torch():
    blocked, padding = torch.rand(5, 7) < 0.5, torch.rand(2, 7) < 0.5
    both = mask_from_torch(blocked, padding)
    assert both.shape == (2, 1, 5, 7) and both.dtype == torch.bool
    assert torch.equal(both, ~blocked & ~padding[:, None, None])
    assert mask_from_torch() is None
    assert torch.equal(mask_from_torch(blocked), ~blocked)
    per_head = torch.rand(2 * 3, 5, 7) < 0.5
    assert torch.equal(mask_from_torch(per_head, num_heads=3), ~per_head.view(2, 3, 5, 7))
    mixed = mask_from_torch(torch.ones(5, 7), padding)
    assert torch.equal(mixed == -torch.inf, padding[:, None, None].expand(2, 1, 5, 7))
    assert (mixed[mixed.isfinite()] == 1).all()


def test_from_torch_keeps_mode_dropout_and_dtype_and_copies():
    theirs = nn.MultiheadAttention(8, 2, dropout=0.25, batch_first=True).eval().bfloat16()
    ours = MultiHeadAttention.from_torch(theirs)
    assert not ours.training and ours.attention.dropout == 0.25
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    before = copy.deepcopy(ours.state_dict())
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.zero_()
    assert all(torch.equal(a, before[name]) for name, a in ours.state_dict().items())


def test_mixed_heads_equal_separate_calls():
    """One causal, one biased, one plain, and one without weights, under a 4-D mask."""
    torch.manual_seed(0)
    bias = LearnedBiasAttention(1, 3)
    nn.init.normal_(bias.bias)
    kinds = [SCALED(causal=True), bias, SCALED(), WithoutWeights()]
    layer = MultiHeadAttention(12, 4, attention=kinds)
    mask = torch.rand(2, 4, 5, 5) < 0.7
    mask[..., 0] = True
    output, weights = layer(X, mask=mask)
    views = [split_heads(p(X), 4) for p in (layer.q_proj, layer.k_proj, layer.v_proj)]
    outputs = []
    for h, kind in enumerate(kinds):
        head, own = kind(*(view[:, [h]] for view in views), mask[:, [h]])
        outputs.append(head.squeeze(1))
        assert (own is None) == (weights[h] is None)
        if own is not None:
            torch.testing.assert_close(weights[h], own.squeeze(1))
    torch.testing.assert_close(output, layer.out_proj(torch.cat(outputs, dim=-1)))


def test_what_an_attention_can_be():
    """A class, an instance or a list; a class that asks for it gets the number of heads."""
    for attention in (SCALED, SCALED(), (SCALED(), SCALED()), WithoutWeights()):
        layer = MultiHeadAttention(12, 2, attention=attention)
        layer.load_state_dict(TWO.state_dict())
        output, weights = layer(X, MEMORY)
        torch.testing.assert_close(output, TWO(X, MEMORY)[0])
        assert (weights is None) == isinstance(attention, WithoutWeights)
    assert MultiHeadAttention(12, 2, [WithoutWeights()] * 2)(X)[1] is None
    made = MultiHeadAttention(12, 3, attention=LearnedBiasAttention)
    assert made.attention.bias.shape == (3, 2 * 16 + 1) and made(X)[0].shape == X.shape
    again = attnlib.TransformerBlock(12, 2, attention=LearnedBiasAttention)
    assert again.attention.attention.num_heads == 2


def test_any_leading_dimensions_and_empty_sequences():
    layer, x = MultiHeadAttention(12, 3), X.clone().requires_grad_()
    torch.testing.assert_close(layer(X[0])[0], layer(X)[0][0])
    torch.testing.assert_close(layer(X[None])[0][0], layer(X)[0])
    output, weights = layer(X, MEMORY[:, :0])
    torch.testing.assert_close(output, layer.out_proj.b.expand_as(output))
    assert len(weights) == 3 and weights[0].shape == (2, 5, 0)
    output, weights = layer(x, mask=padding_mask([5, 0]))  # a sequence of padding alone
    torch.testing.assert_close(output[1], layer.out_proj.b.expand_as(output[1]))
    assert all((w[1] == 0).all() for w in weights)
    gradients = torch.autograd.grad(output.sum(), [x, *layer.parameters()])
    assert all(g.isfinite().all() for g in gradients)


def test_padding_mask():
    assert padding_mask([]).shape == (0, 1, 1, 0)
    for made in (padding_mask([1, 3], device="cpu"), padding_mask(torch.tensor([1, 3]))):
        assert made.flatten(1).tolist() == [[True, False, False], [True, True, True]]
    assert padding_mask([1, 2], device="meta").device.type == "meta"


SHOWN = [
    (Projection(3, 2, bias=False), "in_features=3, out_features=2, bias=False"),
    (attnlib.LayerNorm(7, eps=0.1), "d_model=7, eps=0.1"),
    (WithoutWeights(0.1, True, 2.0, window=3),
     "dropout=0.1, causal=True, scale=2.0, window=3"),
    (PhysicsGuidedAttention(2.0),
     "strength=2.0, floor=0.01, dropout=0.0, causal=False, scale=None, window=None"),
    (attnlib.FlashAttention(causal=True),
     "causal=True, scale=None, block_size=None, backend='auto', window=None"),
]  # fmt: skip


def test_what_print_shows():
    for made, text in SHOWN:
        assert repr(made) == f"{type(made).__name__}({text})"
    shown = repr(MultiHeadAttention(12, 3, attention=LearnedBiasAttention(3, 4)))
    assert "embed_dim=12, num_heads=3" in shown
    assert "Projection(in_features=12, out_features=12, bias=True)" in shown
    assert "LearnedBiasAttention(num_heads=3, max_distance=4, dropout=0.0," in shown


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Projection(4, 4), nn.Linear(4, 4)),  # square, and yet the transpose of ours
        (MultiHeadAttention(4, 2), nn.MultiheadAttention(4, 2)),
    ],
)
def test_a_foreign_state_dict_is_refused_by_name(ours, theirs):
    with pytest.raises(RuntimeError, match=r'Missing key.*"(q_proj\.)?W"'):
        ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize(
    "make",
    [
        *(SCALED, attnlib.FlashAttention),
        *(partial(LearnedBiasAttention, 2, 3), partial(Guided, strength=0.0)),
    ],
)
def test_autocast_takes_what_pytorchs_function_takes(make, as_shipped):
    """float32 masks, and queries of another dtype than the keys, as after a rotation."""
    torch.manual_seed(0)
    inputs, mask = torch.randn(3, 2, 2, 5, 8).unbind(), torch.randn(5, 5)
    wide = [x.double() for x in inputs]
    with pytest.raises(TypeError, match=r"^mask: expected a boolean tensor"):
        make()(*wide, mask)
    plain, _ = make()(*wide, mask.double())
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            given = [inputs[0].to(dtype), *(x.bfloat16() for x in inputs[1:])]
            output, _ = make()(*given, mask)
            expected = F.scaled_dot_product_attention(*given, attn_mask=mask)
            assert output.dtype == expected.dtype == torch.bfloat16
            torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)
        alone, _ = make()(*wide, mask.double())  # it leaves float64 alone
    torch.testing.assert_close(alone, plain)  # of the same dtype, too


def test_autocast_export_and_state(as_shipped):
    layer = MultiHeadAttention(12, 3, attention=LearnedBiasAttention(3, 4)).eval()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(X)[0].dtype == torch.bfloat16
    exported = torch.export.export(layer, (X,)).module()
    torch.testing.assert_close(exported(X)[0], layer(X)[0])
    assert "attention.bias" in layer.state_dict()
    again = MultiHeadAttention(12, 3, attention=LearnedBiasAttention(3, 4))
    again.load_state_dict(layer.state_dict())
    torch.testing.assert_close(again(X)[0], layer(X)[0])


@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("batched", [True, False])
def test_masks_from_torch_with_and_without_a_batch(kind, batched):
    theirs = nn.MultiheadAttention(8, 2, batch_first=True).double()
    ours, x = MultiHeadAttention.from_torch(theirs), normal(*([3] if batched else []), 5, 8)
    shape = (3, 5) if batched else (5,)
    padding, blocked = torch.zeros(shape) > 0, torch.ones(5, 5).triu(1) > 0
    padding[..., 3:] = True
    if kind == "additive":
        padding, blocked = (0.0 - 9 * m.double() for m in (padding, blocked))
    for masks in ((None, padding), (blocked, padding), (blocked, None)):
        mask = mask_from_torch(*masks)
        expected, _ = theirs(x, x, x, attn_mask=masks[0], key_padding_mask=masks[1])
        close(ours(x, mask=mask)[0], expected)


def test_a_mask_of_each_head_for_one_sequence():
    theirs = nn.MultiheadAttention(8, 2, batch_first=True).double()
    ours, x = MultiHeadAttention.from_torch(theirs), normal(5, 8)
    mask = mask_from_torch(blocked := torch.rand(2, 5, 5) < 0.3, num_heads=2)
    expected, _ = theirs(x, x, x, attn_mask=blocked)
    close(ours(x[None], mask=mask)[0][0], expected)
    words = "mask: expected 2 dimensions …, got …; a mask for each head needs a batch: …"
    with refuses(words):
        ours(x, mask=mask)


BOOLS = torch.ones(2, 5) > 0
EITHER = "expected a boolean tensor (True = blocked) or a floating-point one that is added"
FOREIGN = {
    f"attn_mask: {EITHER} to the scores, got torch.int64": {"attn_mask": BOOLS.long()},
    f"attn_mask: {EITHER} to the scores, got torch.uint8": {"attn_mask": BOOLS.byte()},
    f"attn_mask: {EITHER} to the scores, got list": {"attn_mask": [[True]]},
    f"key_padding_mask: {EITHER} …, got torch.int64": {"key_padding_mask": BOOLS.long()},
    f"key_padding_mask: {EITHER} …, got torch.complex64": {"key_padding_mask": BOOLS + 0j},
}
test_foreign_masks = each_refused(TypeError, FOREIGN, lambda m: mask_from_torch(**m))
UNLIKE = {
    "attn_mask: expected 2 or 3 dimensions, got shape (5,)": (BOOLS[0], None),
    "attn_mask: expected 2 or 3 dimensions, got shape (1, 1, 2, 5)":
        (BOOLS[None, None], None),
    "key_padding_mask: expected 1 or 2 dimensions, got shape (1, 2, 5)":
        (None, BOOLS[None]),
    "attn_mask: expected a multiple of 2 heads, got shape (3, 5, 5)":
        (torch.ones(3, 5, 5) > 0, None, 2),
    "key_padding_mask: expected 5 keys as attn_mask, got 4": (BOOLS, BOOLS[:, :4]),
    "key_padding_mask: expected a batch of 3 as attn_mask has for each head, got 2":
        (torch.ones(6, 5, 5) > 0, BOOLS, 2),
    "key_padding_mask: expected a batch of 1 as attn_mask has for each head, got no":
        (torch.ones(2, 5, 5) > 0, BOOLS[0], 2),
}  # fmt: skip
test_unlike_masks = each_refused(ValueError, UNLIKE, lambda m: mask_from_torch(*m))
