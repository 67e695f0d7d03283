"""The examples run, and what they build in their own words is what the package builds."""

import runpy

import pytest
import torch

from attnlib import LanguageModel, LayerNorm, Projection
from drawn import ROOT, close

EXAMPLES = ROOT / "examples"


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
    model.token_embedding.weight, model.positions = tiny.table, tiny.positions
    model.norm = LayerNorm.from_torch(tiny.norm)
    for own, block in zip(tiny.blocks, model.blocks, strict=True):
        block.norm_1, block.norm_2 = map(LayerNorm.from_torch, (own.norm_1, own.norm_2))
        places = [
            (block.feed_forward, own, name, name) for name in ("linear_1", "linear_2")
        ]
        for name in ("query", "key", "value", "out"):
            to = f"{name if name == 'out' else name[0]}_proj"
            places.append((block.attention, own.attention, to, name))
        for part, there, to, name in places:
            setattr(part, to, Projection.from_linear(getattr(there, name)))
    return model


def test_the_tiny_transformer_is_the_package_s():
    torch.manual_seed(0)
    example = runpy.run_path(str(EXAMPLES / "tiny_transformer.py"))
    tiny = example["Model"](symbols=11, tokens=7, d_model=12, heads=3, blocks=2).double()
    for part in tiny.modules():
        if isinstance(part, torch.nn.LayerNorm):
            torch.nn.init.normal_(part.weight)
            torch.nn.init.normal_(part.bias)
    model = same_model(tiny)
    ids = torch.tensor([3, 1, 4, 1, 5, 9])
    close(tiny(ids), model(ids))
    with torch.no_grad():
        tiny.blocks[1].attention.key.weight[0, 0] += 0.1
    assert not torch.allclose(tiny(ids), model(ids), rtol=0, atol=1e-6)
