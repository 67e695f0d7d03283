"""Backward through several heads: what plugs in; test_backprop_layers judges it."""

import numpy as np
import pytest

from attnlib.backprop import (
    LanguageModel,
    MultiHeadAttention,
    ScaledDotProductAttention,
    TransformerBlock,
    cast,
    gradient_check,
)
from attnlib.backprop.multi_head import merge_heads, split_heads
from drawn import normal

RNG = np.random.default_rng(0)
X = normal(3, 4).numpy()


def test_split_and_merge_are_inverse_and_the_heads_blocks_of_columns():
    x = normal(2, 5, 12).numpy()
    np.testing.assert_array_equal(merge_heads(split_heads(x, 3)), x)
    np.testing.assert_array_equal(split_heads(x, 3)[:, 1], x[..., 4:8])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_dtype_is_kept(dtype):
    layer = cast(TransformerBlock(4, 2, dropout=0.2, rng=RNG), dtype)
    output = layer.forward(X.astype(dtype))
    arrays = [output, layer.backward(np.ones((3, 4), dtype)), *layer.gradients().values()]
    assert {array.dtype for array in arrays} == {np.dtype(dtype)}


class Scaled(ScaledDotProductAttention):
    """The output times a learned number; the weights are its own affair."""

    def __init__(self):
        super().__init__()
        self.gain = np.array([1.5])

    def forward(self, query, key, value, mask=None):
        self._unscaled, _ = super().forward(query, key, value, mask)
        return self.gain * self._unscaled, None

    def backward(self, d_output):
        self._gradients = {"gain": np.array([(d_output * self._unscaled).sum()])}
        return super().backward(self.gain * d_output)


@pytest.mark.parametrize(
    ("heads", "gains", "shapes"),
    [
        (Scaled, ["attention.gain"], None),
        (Scaled(), ["attention.gain"], None),
        ([Scaled(), Scaled()], ["attention.0.gain", "attention.1.gain"], None),
        ([Scaled(), ScaledDotProductAttention()], ["attention.0.gain"], [None, (3, 3)]),
    ],
)
def test_attention_can_be_a_class_an_instance_or_a_list(heads, gains, shapes):
    layer = MultiHeadAttention(4, 2, heads, rng=RNG)
    assert [name for name in gradient_check(layer, X) if "gain" in name] == gains
    weights = layer.forward(X)[1]
    assert shapes == (weights and [w if w is None else w.shape for w in weights])


def test_one_generator_decides_about_everything_random():
    def block():
        return TransformerBlock(4, 2, dropout=0.5, rng=np.random.default_rng(3))

    def model():
        rng = np.random.default_rng(3)
        return LanguageModel(5, 4, 4, 2, 1, dropout=0.5, rng=rng)

    for make, x in ((block, X), (model, np.arange(4))):
        np.testing.assert_array_equal(make().forward(x), make().forward(x))
