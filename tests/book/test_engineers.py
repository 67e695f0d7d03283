"""The page for engineers says what is so: examples, requirements, the table of exports."""

import doctest
import itertools
import re
import tomllib
from functools import partial
from pathlib import Path

import pytest
import torch

from attnlib import (
    CausalAttention,
    FlashAttention,
    LanguageModel,
    LearnedBiasAttention,
    MultiHeadAttention,
    SelfAttention,
)

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "book" / "engineers.md"
TEXT = PAGE.read_text(encoding="utf-8")
X = torch.randn(2, 6, 16)  # (batch, tokens, embed_dim)


def takes_models():
    """Whether transformers is installed, and takes a PyTorch as old as the one here."""
    try:
        from transformers.utils import is_torch_available
    except ImportError:
        return False
    return is_torch_available()


def test_examples(as_shipped):
    """The code blocks of the page, one after the other, as one session."""
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    if not takes_models():
        blocks = [block for block in blocks if "import transformers" not in block]
    session = "\n".join(blocks)
    parsed = doctest.DocTestParser().get_doctest(session, {}, PAGE.name, None, None)
    assert len(parsed.examples) > 30
    said: list[str] = []
    doctest.DocTestRunner().run(parsed, out=said.append)
    assert not said, "".join(said)


def test_examples_can_be_pasted():
    """Into Python's own prompt, where an indented block ends with an empty line."""
    for block in re.findall(r"```python\n(>>>.*?)```", TEXT, re.DOTALL):
        lines = [*block.splitlines(), ""]
        for line, after in itertools.pairwise(lines):
            if re.match(r"\.\.\. +\S", line) and not after.startswith("..."):
                raise AssertionError(f"no empty line behind {line!r}")


def test_examples_of_the_first_page(as_shipped):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:  # each by itself
        exec(block, {})


def test_requirements_are_those_of_the_package():
    told = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(told)["project"]
    least = [project["requires-python"], *project["dependencies"]]
    said = re.search(r"It needs (.*?), or newer", TEXT)[1]
    assert re.findall(r"[\d.]*\d", said) == [text.split(">=")[1] for text in least]


# ── export and compile ───────────────────────────────────────────────────────────────

IDS = torch.randint(11, (2, 6))
ROTARY = LanguageModel(11, 12, 16, 2, 2, positions="rotary")
WHOLE = {
    "SelfAttention": (SelfAttention(16, 16), X),
    "CausalAttention": (CausalAttention(16, 16), X),
    "LearnedBiasAttention": (MultiHeadAttention(16, 4, LearnedBiasAttention(4, 3)), X),
    "LanguageModel": (LanguageModel(11, 12, 16, 2, 2), IDS),
    "RotaryPositions": (ROTARY, IDS),
    "FlashAttention": (MultiHeadAttention(16, 4, FlashAttention()), X),
    "its tiles": (MultiHeadAttention(16, 4, FlashAttention(backend="torch")), X),
}

assert_same = partial(torch.testing.assert_close, rtol=0, atol=1e-5)


def test_the_table_lists_what_is_tested():
    """A part is tested with the whole that it belongs to."""
    whole = re.search(r"## Export.*?\n\n(\|.*?)\n\n", TEXT, re.DOTALL)[1].splitlines()
    assert all("| yes | as one graph |" in row for row in whole[2:])
    said = set(re.findall(r"~attnlib\.(\w+)", "".join(whole)))
    modules = [part for module, _ in WHOLE.values() for part in module.modules()]
    assert said <= {type(part).__name__ for part in modules}


@pytest.mark.parametrize("name", WHOLE)
def test_exports_and_compiles_as_one_graph(name, as_shipped):
    """The graph that torch.compile takes, here without a compiler behind it."""
    module, x = WHOLE[name]
    program = torch.export.export(module, (x,), strict=False).module()
    assert_same(program(x), module(x))
    torch.compiler.reset()
    assert_same(torch.compile(module, fullgraph=True, backend="eager")(x), module(x))
