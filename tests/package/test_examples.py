"""The examples run, and what they build in their own words is what the package builds."""

import runpy
from pathlib import Path

import pytest
import torch

from attnlib import LanguageModel

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tiny_transformer", "the cat sat on the mat and the dog lay on the rug\n"),
        ("your_own_head", "(2, 64, 65)\n"),
    ],
)
def test_an_example_runs(name, said, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out.endswith(said)


def same_model(tiny):
    """The package's model with the weights of the example's."""
    model = LanguageModel(11, 7, embed_dim=12, num_heads=3, num_layers=2).double()
    with torch.no_grad():
        model.token_embedding.weight.copy_(tiny.table)
        model.positions.copy_(tiny.positions)
        copy_norm(tiny.norm, model.norm)
        for own, block in zip(tiny.blocks, model.blocks, strict=True):
            copy_norm(own.norm_1, block.norm_1)
            copy_norm(own.norm_2, block.norm_2)
            for name in ("query", "key", "value", "out"):
                to = getattr(block.attention, f"{name if name == 'out' else name[0]}_proj")
                copy_linear(getattr(own.attention, name), to)
            copy_linear(own.linear_1, block.feed_forward.linear_1)
            copy_linear(own.linear_2, block.feed_forward.linear_2)
    return model


def copy_norm(norm, to):
    torch.nn.init.normal_(norm.weight)
    to.gamma.copy_(norm.weight)
    to.beta.copy_(torch.nn.init.normal_(norm.bias))


def copy_linear(linear, to):
    to.W.copy_(linear.weight.T)
    to.b.copy_(linear.bias)


def test_the_tiny_transformer_is_the_package_s():
    torch.manual_seed(0)
    example = runpy.run_path(str(EXAMPLES / "tiny_transformer.py"))
    tiny = example["Model"](symbols=11, tokens=7, d_model=12, heads=3, blocks=2).double()
    model = same_model(tiny)
    ids = torch.tensor([3, 1, 4, 1, 5, 9])
    torch.testing.assert_close(tiny(ids), model(ids), rtol=0, atol=1e-12)
    with torch.no_grad():
        tiny.blocks[1].attention.key.weight[0, 0] += 0.1
    assert not torch.allclose(tiny(ids), model(ids), rtol=0, atol=1e-6)
