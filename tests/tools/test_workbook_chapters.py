"""Each chapter of the workbook: our answers, others and mistakes; and the milestones."""

import json
import re
import subprocess
import sys
import tomllib
from functools import cache

import pytest

from bookkit.chapters import read_chapters
from bookkit.mistakes import read_faults
from editions import workbook_record
from editions.blanks import read_blanks
from other_answers import WRITTEN, other_answers
from tiny_book import ROOT, edit
from workbench import check, write
from workkit.jobs import small_tests
from workkit.package import read_data

CHAPTERS = {chapter.key: chapter for chapter in read_chapters(ROOT)}
TASKED = [key for key, c in CHAPTERS.items() if any(cell.exercise for cell in c.code_cells)]
RECORDED = sorted(p.name[:2].rstrip("_") for p in (ROOT / "book/workbook").glob("*.json"))
ANSWERED = sorted(path.stem for path in WRITTEN.glob("*.py"))
ENTRIES = tomllib.loads((ROOT / "book/workbook/blanks.toml").read_text("utf-8"))["blank"]
SMALL = small_tests(ROOT / "book/workbook/folder")
every_chapter = pytest.mark.parametrize("key", TASKED)


@cache
def entries_of(key):
    """What is said of each blank of a chapter."""
    cells = CHAPTERS[key].code_cells
    modules = {cell.module.replace("/", ".") for cell in cells if cell.module}
    return [e for e in ENTRIES if e["name"].rpartition(".")[0] in modules]


def blanks_of(key):
    return repr(entries_of(key))


def small_tests_of(key):
    """The small tests of the definitions of a chapter."""
    return repr([SMALL.get(entry["name"]) for entry in entries_of(key)])


TOOLS = ("tools/workkit/*.py", "tools/editions/workbook*.py", "book/workbook/folder/*")
TOOLS += ("!tools/editions/colab.py",)  # which the site is built with, and no workbook
# The two programs that try all of the package: a chapter needs of them its own tests.
OTHERS = ("!tools/workkit/trials.py", "!book/workbook/folder/small_tests.py")
WORK = (*TOOLS, *OTHERS, "book/{key}_*.ipynb#code", blanks_of, small_tests_of)


@pytest.mark.costly("workbook/{key}", *WORK)
@every_chapter
def test_our_answers_pass(folder, ours, key):
    pass_all(folder, ours, key)


def pass_all(folder, answers, key):
    write(folder, answers)
    done = check(folder, key, "--json", folder / "grade.json")
    assert done.returncode == 0, done.stdout + done.stderr
    (grade,) = json.loads((folder / "grade.json").read_text("utf-8"))["chapters"]
    assert [t for t in grade["tests"] if not t["score"]] == []


def others(folder, key):
    """Right answers that are written in another way than ours."""
    blanks = read_data(folder)[key]["blanks"]
    return other_answers(key, {name: blank["source"] for name, blank in blanks.items()})


def test_each_definition_has_another_answer_from_chapter_4_on(untouched):
    asked = {key: {*known["blanks"]} for key, known in read_data(untouched).items()}
    found = {key: {*others(untouched, key)} for key in ANSWERED}
    assert found == {key: of for key, of in asked.items() if of and key > "03"}


@pytest.mark.costly("answers/{key}", *WORK, "tests/book/workbook_answers/{key}.py")
@pytest.mark.parametrize("key", ANSWERED)
def test_right_answers_of_another_kind_pass(folder, ours, key):
    """Those of a chapter; in the others, ours."""
    pass_all(folder, ours | others(folder, key), key)


@pytest.mark.costly(
    *("named/{key}", *WORK), *("book/workbook/{key}_*.json", "book/faults/{key}_*.toml")
)
@pytest.mark.skipif(sys.platform != "linux", reason="mistakes are entered in forks")
@pytest.mark.parametrize("key", RECORDED)
def test_each_mistake_entered_is_named(key):
    """Four of a chapter's mistakes, but for those that its record calls silent.

    `python tools workbook_mistakes NN --check 99` enters all; that takes a quarter of an
    hour for a chapter whose checks train a network.
    """
    program = [sys.executable, ROOT / "tools", "workbook_mistakes", key, "--check", "4"]
    done = subprocess.run(program, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr


# ── milestones ──


def milestone(name):
    """The mark of what tries a milestone, on all that the reader has written."""
    needs = ("attnlib/**/*.py", "book/workbook/blanks.toml", "book/workbook.md")
    return pytest.mark.costly(f"milestone/{name}", *TOOLS, *needs)


MILESTONES = {  # what it shows; a mistake of a chapter, and what is said of it
    "attention": (
        "ScaledDotProductAttention(causal=True) keeps the contract",
        *("01", "Without a mask, the module lets softmax run over the queries."),
        "the weights of a row do not sum to 1",
    ),
    "english": (
        "are words of the text",
        *("09", "The model's attention sees the later tokens too."),
        "the model sees what comes later",
    ),
    "backward": (
        "Loss on a text that it has not seen",
        *("12", "The table's use by the logits is forgotten."),
        "the gradient of token_embedding.weight is not autograd's",
    ),
    "tiles": (
        "the largest differences are\n  output",
        *("14", "A tile that the diagonal cuts is taken for whole."),
        "causal: output is off by up to",
    ),
    "kernel": (
        "the largest differences are\n  output",
        *("15", "The last query of the block says what is whole."),
        "causal: output is off by up to",
    ),
}


def every_milestone(test):
    names = [n for n in MILESTONES if n != "kernel" or sys.platform == "linux"]  # Triton
    return pytest.mark.parametrize("name", names)(test)


@milestone("{name}")
@every_milestone
def test_a_milestone_is_reached_by_what_the_package_does(folder, ours, name):
    write(folder, ours)
    done = check(folder, "milestone", name)
    assert done.returncode == 0 and "Reached: Your" in done.stdout, done.stdout
    assert MILESTONES[name][0] in done.stdout and f"\n✓ {name}" in done.stdout
    if name == "backward":  # what the page of the book shows
        page = (ROOT / "book" / "workbook.md").read_text("utf-8")
        block = page[page.index("36 gradients") : page.index("Reached: ")].splitlines()
        said = {re.sub(r"\d[\d.e-]*", "#", line) for line in done.stdout.splitlines()}
        assert {re.sub(r"\d[\d.e-]*", "#", line) for line in block} - said == {"  …"}
    assert "1 of 6 milestones" in check(folder).stdout
    page = (folder / "PROGRESS.md").read_text("utf-8")
    (reached,) = [line for line in page.splitlines() if line.startswith("- [x]")]
    assert reached.endswith(f"milestone {name}`")


@milestone("{name}")
@every_milestone
def test_a_milestone_is_not_reached_with_a_mistake(folder, ours, name):
    _, key, sentence, told = MILESTONES[name]
    (chapter,) = [c for c in read_chapters(ROOT) if c.key == key]
    mine = {n: ours[n] for n in read_data(folder)[key]["blanks"]}
    tried = workbook_record.entered(read_faults(ROOT, chapter), mine)
    (changed,) = [changed for fault, changed in tried if fault.mistake == sentence]
    write(folder, ours | changed)
    state = {"milestones": {name: True}}  # from before the mistake
    (folder / "yours").mkdir(exist_ok=True)
    (folder / "yours" / "progress.json").write_text(json.dumps(state), encoding="utf-8")
    done = check(folder, "milestone", name)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert "Not reached:" in done.stdout and told in done.stdout, done.stdout
    assert f"\n· {name}" in done.stdout


@milestone("english")
def test_what_the_model_writes_is_looked_at(folder, ours):
    name = "generation.token_probabilities"
    drawn = ours[name].replace("(logits, dim=-1)", "(logits, dim=-1) ** 0")
    assert drawn != ours[name]
    write(folder, ours | {name: drawn})
    done = check(folder, "milestone", "english")
    assert done.returncode == 1 and "what it writes is no English" in done.stdout


@milestone("attention")
def test_a_milestone_takes_what_is_written_and_no_loans(folder, ours):
    done = check(folder, "milestone")
    assert (
        "Next, attention: First write `apply_mask` (chapter 1) and 3 more." in done.stdout
    )
    assert "Then: python check.py milestone attention" in done.stdout
    write(folder, {n: a for n, a in ours.items() if n != "masks.causal_mask"})
    done = check(folder, "milestone", "attention")
    assert done.returncode == 1
    assert "Not tried. First write `causal_mask` (chapter 1)." in done.stdout
    check(folder, "lend", 1)
    done = check(folder, "milestone", "attention")
    assert done.returncode == 1
    assert "Not tried. Ours stand in for `causal_mask` (chapter 1);" in done.stdout
    write(folder, {"masks.causal_mask": ours["masks.causal_mask"] + "\n("})
    done = check(folder, "milestone", "attention")
    assert done.returncode == 1 and "Not tried. masks.causal_mask: line" in done.stdout
    assert check(folder, "milestone", "nonsense").returncode == 2


@milestone("attention")
def test_a_milestone_without_end_ends_with_a_message(folder, ours):
    edit(folder / "tools/workkit/jobs.py", "SECONDS = 180", "SECONDS = 8")
    loop = ours["masks.causal_mask"].replace(
        "keys = ", "while True:\n        pass\n    keys = ", 1
    )
    write(folder, ours | {"masks.causal_mask": loop})
    done = check(folder, "milestone", "attention")
    assert done.returncode == 1 and "no end after 8 seconds" in done.stdout
    assert "of attnlib/masks.py" in done.stdout.replace("\\", "/")


@milestone("final")
@pytest.mark.skipif(sys.platform != "linux", reason="without Triton it isn't all")
def test_the_package_is_installed_and_tested(folder, ours):
    write(folder, ours)
    for path in (folder / "tests").glob("test_*.py"):
        if path.name != "test_multi_head.py":
            path.unlink()
    missing = f"{len(read_blanks(ROOT))} are missing"
    assert missing in check(folder, "milestone", "final").stdout
    state = {"passed": dict.fromkeys(read_blanks(ROOT), True)}
    (folder / "yours" / "progress.json").write_text(json.dumps(state), encoding="utf-8")
    done = check(folder, "milestone", "final")
    assert done.returncode == 0 and "✓ final " in done.stdout, done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if "Attention" in line]
    assert [row[0] for row in rows if len(row) == 5] == ["yours"] * 2 + ["ours"] * 2
