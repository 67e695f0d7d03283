"""The cells that measure on the reader's own machine: off in the book, at work when on."""

import json
import re
import subprocess
import sys

import pytest

from bookkit.chapters import ROOT, read_chapters

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
import re, sys
from bookkit.chapters import ROOT, read_chapters
from bookkit.stage import Stage, prepare

(chapter,) = (c for c in read_chapters(ROOT) if c.name == sys.argv[1])
(target,) = (i for i, cell in enumerate(chapter.code_cells) if {switch!r} in cell.source)
stage = Stage(chapter)
on = stage.sources[target].replace({switch!r}, "measure = True  #")
on = re.sub(r"^tried = .*", "tried = (16, 32)", on, flags=re.MULTILINE) + '''
import json
lines = {{line.get_label(): line.get_xydata().tolist() for line in sides[-1].lines}}
print(json.dumps(lines), flush=True)
'''
prepare(chapter)
said = stage.attempt(0, target, {{target: on}}, set())
assert said == "passed", said
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
