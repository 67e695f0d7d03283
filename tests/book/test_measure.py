"""The cells that measure on the reader's own machine: off in the book, at work when on."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bookkit.chapters import read_chapters

ROOT = Path(__file__).resolve().parents[2]
SWITCH = "measure = False  #"
# GFLOPs a second, and µs for a billion scores, even of a busy machine or an interpreter
PLAUSIBLE = {"14": (1e-5, 1e4), "15": (1e2, 1e13)}
CHAPTERS = [
    chapter
    for chapter in read_chapters(ROOT)
    if any(SWITCH in cell.source for cell in chapter.code_cells)
]
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda c: c.name)

# Runs the cell, switched on, after the cells that make what it uses; prints what it found.
PROGRAM = """
import json, re, symtable, sys
from bookkit.chapters import ROOT, read_chapters
from bookkit.stage import Stage, prepare, used

name = sys.argv[1]
(chapter,) = (c for c in read_chapters(ROOT) if c.name == name)
stage = Stage(chapter)
sources = stage.sources
(target,) = (i for i, source in enumerate(sources) if {switch!r} in source)


def made(source):
    symbols = symtable.symtable(source, "", "exec").get_symbols()
    return {{s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}}


wanted, taken = used(sources[target]) - made(sources[target]), []
for i in reversed(range(target)):
    if found := wanted & made(sources[i]):
        taken.append(i)
        wanted = wanted - found | used(sources[i])
prepare(chapter)
for i in reversed(taken):
    stage.run(str(i), sources[i])
on = sources[target].replace({switch!r}, "measure = True  #")
on = re.sub(r"^tried = .*", "tried = (16, 32)", on, flags=re.MULTILINE)
stage.run("measure", on)
*_, axes = stage.module.sides
print(json.dumps({{line.get_label(): line.get_xydata().tolist() for line in axes.lines}}))
"""


def test_chapters_have_such_cells():
    assert [chapter.key for chapter in CHAPTERS] == list(PLAUSIBLE)


@each_chapter
def test_nothing_is_measured_in_the_book(chapter):
    (cell,) = (cell for cell in chapter.code_cells if SWITCH in cell.source)
    assert not cell.outputs
    assert "set measure = True" in cell.source.partition("\n")[0]
    (body,) = re.findall(
        r"^def measured\(.*?(?=^\S)", cell.source, re.MULTILINE | re.DOTALL
    )
    assert len(body.strip().splitlines()) <= 30


@pytest.mark.costly(
    *("measure/{chapter.name}", "book/{chapter.name}.ipynb"),
    *("attnlib/**/*.py", "tools/bookkit/*.py"),
)
@each_chapter
def test_it_measures(chapter):
    if chapter.key == "15":
        pytest.importorskip("triton")
    program = [sys.executable, "-c", PROGRAM.format(switch=SWITCH), chapter.name]
    done = subprocess.run(
        program, cwd=ROOT / "tools", capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    *told, lines = done.stdout.splitlines()
    assert [row.split()[0] for row in told[-2:]] == ["16", "32"]  # the progress
    drawn, (least, most) = json.loads(lines), PLAUSIBLE[chapter.key]
    assert len(drawn) == 3
    for points in drawn.values():
        assert [tokens for tokens, _ in points] == [16, 32]
        assert all(least < number < most for _, number in points)
