"""The tool that plants faults in the package tells which of them the tests notice."""

import ast
import json
import subprocess
import sys
import tomllib

import pytest

from tiny_book import ROOT

BENCHMARKS = ROOT / "benchmarks"
RECORD = BENCHMARKS / "results" / "mutants.json"
REASONS = BENCHMARKS / "mutants_equivalent.toml"

MODULE = """def larger(a, b=1):
    # Which of two numbers is larger?
    return a if a > b else b
"""
FREEZES = """import gc


def pytest_collection_finish():
    gc.freeze()
"""
# At least two threads, one of which a fork would wait for.
TESTS = """import torch
from attnlib.three import larger

ONES = torch.ones(300, 300).tril()


def test_larger():
    assert larger(0) == 1 and larger(2, 1) == 2
    assert ONES.tril().sum() == ONES.sum()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mistakes are planted in forks")
@pytest.mark.costly("mutants", "benchmarks/mutants.py")
def test_a_mutant_that_no_test_notices_is_told(tmp_path):
    for name, text in {
        "attnlib/__init__.py": "",
        "attnlib/three.py": MODULE,
        "tests/conftest.py": FREEZES,  # as that of this repository
        "tests/test_three.py": TESTS,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    tool = [sys.executable, str(BENCHMARKS / "mutants.py"), "--root", str(tmp_path)]
    done = subprocess.run(
        [*tool, "--show"], capture_output=True, encoding="utf-8", timeout=100
    )
    told = [line for line in done.stdout.splitlines() if line.startswith("three: ")]
    assert told == [
        "three: larger: return a if a > b else b: a > b → a >= b",
        "three: 3 of 4 mutants noticed",
    ], done.stdout + done.stderr


def test_each_operator_of_the_package_can_be_changed(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from changes import SWAPS

    trees = (ast.parse(path.read_text("utf-8")) for path in ROOT.glob("attnlib/**/*.py"))
    nodes = [node for tree in trees for node in ast.walk(tree)]
    operators = {type(node) for node in nodes if isinstance(node, ast.operator | ast.cmpop)}
    assert operators and operators <= SWAPS.keys()


def survivors():
    record = json.loads(RECORD.read_text(encoding="utf-8"))["modules"]
    return {
        (module, *(place[key] for key in ("in", "line", "change")))
        for module, tried in record.items()
        for place in tried["survivors"]
    }


def test_each_survivor_is_explained():
    entries = tomllib.loads(REASONS.read_text(encoding="utf-8"))["survivor"]
    explained = [
        (entry["module"], entry["in"], entry["line"], change)
        for entry in entries
        for change in entry["changes"]
    ]
    assert len(explained) == len(set(explained)), "one is explained twice"
    assert survivors() - set(explained) == set(), "say why, in mutants_equivalent.toml"
    assert set(explained) - survivors() == set(), "the tests notice it"
    for entry in entries:
        assert entry["why"].endswith(".") and len(entry["why"]) >= 20, entry
