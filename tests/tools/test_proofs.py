"""What a proof depends on, and that none is forgotten: in a repository of its own."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output

from bookkit.proofs import Proofs, read_record
from tiny_book import ROOT, write

WORKFLOW = ROOT / ".github" / "workflows" / "proof.yml"


@pytest.fixture
def house(tmp_path):
    """A package of three modules, a program, a chapter."""
    files = {
        "requirements.txt": "torch==2.13.0\n",
        "attnlib/__init__.py": "from attnlib.one import one\nfrom attnlib.two import two\n",
        "attnlib/one.py": "from attnlib.base import base\n\ndef one():\n    return base\n",
        "attnlib/two.py": "def two():\n    return 2\n",
        "attnlib/base.py": "base = 1\n",
        "tools/room/show.py": "import attnlib.two\n",
        "book/_static/data.json": "{}\n",
        "book/faults.toml": "a = 1\n",
    }
    for name, text in files.items():
        write_text(tmp_path / name, text)
    chapter(tmp_path)
    return tmp_path


def write_text(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


CODE = (
    '# checks eq-a\nfrom attnlib import one\n\nassert one() and open("_static/data.json")'
)


def chapter(root, code=CODE, text="Words.\n<!-- eq-a | here | attnlib.one -->", out="1"):
    output = new_output("stream", name="stdout", text=out)
    cell = new_code_cell(code, outputs=[output])
    write(root / "book" / "01_one.ipynb", cell, new_markdown_cell(text))


def keys(root):
    """Of the chapter as a whole, of its run, of its code, and of a program."""
    proofs, chapter = Proofs(root), "book/01_one.ipynb"
    parts = {"w": chapter, "r": f"{chapter}#run", "c": f"{chapter}#code"}
    parts |= {"p": "tools/room/show.py"}
    return {letter: proofs.key([part]) for letter, part in parts.items()}


def changed(root, before):
    """The first letters of those that are others now."""
    return {letter for letter, key in keys(root).items() if key != before[letter]}


USES = {  # of `import attnlib`, and whether a change of what it does not name counts
    "attnlib.one()": False,
    "one = attnlib.one": False,
    "print(attnlib)": True,
    "attnlib.one(attnlib)": True,
    "pass": True,
}


@pytest.mark.parametrize("use", USES)
def test_of_a_package_counts_what_is_named(house, use):
    program = "tools/room/show.py"
    write_text(house / program, f"import attnlib\n\n{use}\n")
    before = Proofs(house).key([program])
    write_text(house / "attnlib/two.py", "def two():\n    return 3\n")
    after = Proofs(house).key([program])
    assert (after != before) == USES[use]
    write_text(house / "attnlib/base.py", "base = 3\n")
    assert Proofs(house).key([program]) != after


def test_what_is_left_out_counts_for_nothing(house):
    """Nor does what it alone leads to; neither named by a pattern, nor imported."""
    write_text(house / "tools" / "room" / "main.py", "from room import show\n\nshow\n")
    needs = "tools/room/*.py", "!tools/room/show.py", "tools/room/show.py#main"
    before = Proofs(house).key(needs), Proofs(house).key(needs[:1])
    write_text(house / "attnlib/two.py", "def two():\n    return 3\n")
    write_text(house / "tools/room/show.py", "import attnlib.two\n\nprint()\n")
    after = Proofs(house).key(needs), Proofs(house).key(needs[:1])
    assert after[0] == before[0] and after[1] != before[1]
    with pytest.raises(FileNotFoundError, match="depends on tools/none"):
        Proofs(house).key(["!tools/none"])


EDITS = {
    "nothing": (("attnlib/one.py", "one", "one"), ""),
    "a module that it imports": (("attnlib/one.py", "return base", "return 2"), "wrc"),
    "what that one imports": (("attnlib/base.py", "1", "2"), "wrc"),
    "a module of another name": (("attnlib/two.py", "2", "3"), "p"),
    "a comment": (("attnlib/one.py", "return base", "return base  # why"), ""),
    "a docstring": (("attnlib/one.py", "    return", '    """Why."""\n    return'), ""),
    "where a name comes from": (
        ("attnlib/__init__.py", "attnlib.one import one", "attnlib.two import one"),
        "wrc",
    ),
    "the pins": (("requirements.txt", "2.13", "2.14"), "wrcp"),
    "a file that it reads": (("book/_static/data.json", "{}", "[]"), "wrc"),
    "a file that nobody reads": (("book/faults.toml", "1", "2"), ""),
    "a new file": (("attnlib/three.py", "", "x = 1"), ""),
}


@pytest.mark.parametrize(("edit", "changes"), EDITS.values(), ids=EDITS)
def test_an_edit_changes_the_keys_of_what_depends_on_it(house, edit, changes):
    name, old, new = edit
    before, path = keys(house), house / name
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    assert changed(house, before) == {*changes}


HELP = """
from attnlib import two

def helped():
    return two()

def other():
    return 1
"""
FILE = """
import pytest
from help import helped, other

CASES = [1, 2]
MORE = [3]

@pytest.fixture
def given():
    return CASES

def test_it(given):
    assert helped()

def test_another():
    assert other() and MORE
"""
INTO = "import os\nos.environ['A'] = 'b'"
AUTO = "@pytest.fixture(autouse=True)\ndef auto():\n    pass"
IN_TESTS = {
    "the test": ("test_a.py", "assert helped()", "assert not helped()", True),
    "its fixture": ("test_a.py", "return CASES", "return CASES + [3]", True),
    "what that one uses": ("test_a.py", "[1, 2]", "[1, 4]", True),
    "a fixture for all": ("test_a.py", "other() and MORE", f"1\n\n{AUTO}", True),
    "a mark for all": ("test_a.py", "MORE = [3]", "MORE = [3]\npytestmark = []", True),
    "what runs at once": ("test_a.py", "MORE = [3]", "MORE = [3]\nprint(1)", True),
    "what it writes into": ("test_a.py", "MORE = [3]", f"MORE = [3]\n{INTO}", True),
    "a helper": ("help.py", "return two()", "return 3", True),
    "what that one imports": ("help.py", "import two", "import one as two", True),
    "another test": ("test_a.py", "other() and MORE", "MORE", False),
    "what that one uses of it": ("test_a.py", "[3]", "[4]", False),
    "another helper": ("help.py", "return 1", "return 2", False),
}  # fmt: skip


@pytest.mark.parametrize("edit", IN_TESTS)
def test_of_a_file_of_tests_counts_what_the_test_uses(house, edit):
    name, old, new, changes = IN_TESTS[edit]
    folder = house / "tests" / "room"
    write_text(folder / "test_a.py", FILE)
    write_text(folder / "help.py", HELP)
    of_it = ["tests/room/test_a.py#test_it"]
    before, text = Proofs(house).key(of_it), (folder / name).read_text("utf-8")
    assert text.count(old) == 1
    write_text(folder / name, text.replace(old, new))
    assert (Proofs(house).key(of_it) != before) == changes


def test_what_a_helper_imports_counts_where_it_is_used(house):
    """Of a module of the package that only another helper uses, nothing."""
    files = {"test_a.py": FILE, "help.py": HELP.replace("return 1", "import attnlib.one")}
    for name, text in files.items():
        write_text(house / "tests" / "room" / name, text)
    tests = ("#test_it", "#test_another", "")
    before = [Proofs(house).key([f"tests/room/test_a.py{test}"]) for test in tests]
    write_text(house / "attnlib" / "base.py", "base = 2\n")
    after = [Proofs(house).key([f"tests/room/test_a.py{test}"]) for test in tests]
    assert [a != b for a, b in zip(after, before, strict=True)] == [False, True, True]


CHAPTERS = {
    "code": ({"code": CODE.replace("assert", "x = 1\nassert")}, "wrc"),
    "a label": ({"code": CODE.replace("eq-a", "eq-b")}, "wrc"),
    "an equation's code": ({"text": "Words.\n<!-- eq-a | here | attnlib.two -->"}, "wrc"),
    "words": ({"text": "Others.\n<!-- eq-a | here | attnlib.one -->"}, "w"),
    "an output": ({"out": "2"}, "wr"),
}


@pytest.mark.parametrize(("given", "changes"), CHAPTERS.values(), ids=CHAPTERS)
def test_a_part_of_a_chapter_counts_for_what_it_does(house, given, changes):
    before = keys(house)
    chapter(house, **given)
    assert changed(house, before) == {*changes}


def test_a_part_of_a_chapter_is_no_name_in_it(house):
    """What the chapter imports counts, though it defines a `run` that uses nothing."""
    use = "from attnlib import one\n\ndef use():\n    return one()\n\nrun = code = 1"
    chapter(house, code=use)
    before = keys(house)
    write_text(house / "attnlib" / "base.py", "base = 2\n")
    after = keys(house)
    assert {kind[0] for kind in after if after[kind] != before[kind]} == {*"wrc"}


ONE, TWO = "def one():\n    return 1\n", "def two():\n    return one()\n"
SIZED = "def one(size=size):\n    return size\n"
IN_CLASS = ["    def one(self):\n        return 1\n", "    def two(self):\n        pass\n"]
PROPERTY = f"    @property\n{IN_CLASS[0]}"
SETTER = "    @one.setter\n    def one(self, value):\n        pass\n"
ORDERS = {  # what stands before, two statements, and whether their order counts
    "functions": ("", ONE, TWO, False),
    "a class": ("", ONE, "class Two:\n    pass\n", False),
    "a name bound twice": ("", ONE, "def one():\n    return 2\n", True),
    "a name bound again": ("", ONE, "one = max\n", True),
    "a name bound again, perhaps": ("", ONE, "if 1:\n    def one():\n        pass\n", True),
    "a default": ("size = 1\n", SIZED, "size = 2\n", True),
    "a decorator": ("from attnlib.two import two\n", f"@two\n{ONE}", "x = two()\n", True),
    "calls": ("", "print(1)\n", "print(2)\n", True),
    "numbers": ("", "one = 1\n", "two = 2\n", True),
    "methods": ("class One:\n    x = 0\n", *IN_CLASS, False),
    "a property": ("class One:\n    x = 0\n", PROPERTY, SETTER, True),
    "a method and a number": (
        "class One:\n    x = 0\n",
        IN_CLASS[0],
        "    one = 1\n",
        True,
    ),
}


@pytest.mark.parametrize(("before", "one", "other", "counts"), ORDERS.values(), ids=ORDERS)
def test_functions_and_classes_may_change_places(house, before, one, other, counts):
    found = []
    for order in ((before, one, other), (before, other, one)):
        write_text(house / "attnlib" / "one.py", "\n".join(order))
        found.append(keys(house)["c"])
    assert (found[0] != found[1]) == counts


def test_of_a_tool_counts_what_another_imports(house):
    """Of one that is imported as a whole, all of it."""
    write_text(house / "tools/room/show.py", "from room.help import helped\n")
    write_text(house / "tools/room/all.py", "from room import help\n")
    write_text(house / "tools/room/help.py", HELP)
    needs = ["tools/room/show.py"], ["tools/room/all.py"]
    before = [Proofs(house).key(need) for need in needs]
    write_text(house / "tools/room/help.py", HELP.replace("return 1", "return 2"))
    after = [Proofs(house).key(need) for need in needs]
    assert after[0] == before[0] and after[1] != before[1]
    write_text(house / "tools/room/help.py", HELP.replace("two()", "two() + 1"))
    assert Proofs(house).key(needs[0]) != after[0]


def test_what_is_not_there_is_refused(house):
    with pytest.raises(FileNotFoundError, match=r"depends on book/faults/02\.toml"):
        Proofs(house).key(["book/faults/02.toml"])


# ── which tests run ──────────────────────────────────────────────────────────────────

TESTS = """
import time

import pytest

SUBJECTS = [f"{n:02}" for n in range(40)]


@pytest.mark.costly("number/{n}", "data/{n}.txt")
@pytest.mark.parametrize("n", SUBJECTS)
def test_number(n):
    text = open(f"data/{n}.txt").read()
    if text == "stop":
        time.sleep(60)
    assert text == "good"


@pytest.mark.costly("number/{n}", "data/{n}.txt")
@pytest.mark.parametrize("n", SUBJECTS[:2])
def test_second(n):
    assert open("second").read() == "good"


def test_quick():
    if open("second").read() == "none":
        pytest.skip("no such thing here")
"""


many = pytest.mark.costly("proofs", "tests/costly.py", ".github/workflows/proof.yml")


@pytest.fixture
def suite(tmp_path):
    """Forty proofs, the first two of two tests each, and a quick test."""
    for name in ("tests/costly.py", "tools/bookkit/proofs.py", "tools/bookkit/grammar.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    (tmp_path / "data").mkdir()
    for n in range(40):
        (tmp_path / "data" / f"{n:02}.txt").write_text("good")
    (tmp_path / "second").write_text("good")
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "tests" / "conftest.py").write_text('pytest_plugins = ["costly"]\n')
    (tmp_path / "tests" / "test_numbers.py").write_text(TESTS)
    settings = '[tool.pytest.ini_options]\ntestpaths = ["tests"]\npythonpath = ["tools"]\n'
    (tmp_path / "pyproject.toml").write_text(settings)
    return tmp_path


def tried(suite, *options):
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:nbval", *options]
    return subprocess.run(command, cwd=suite, capture_output=True, encoding="utf-8")


def ran(suite, *options):
    """The tests that ran, each with what became of it."""
    said = tried(suite, *options).stdout
    return dict(re.findall(r"(test_\w+(?:\[\w+\])?) (PASSED|FAILED)", said))


@many
def test_what_was_proven_runs_no_more_but_for_a_few(suite):
    assert len(ran(suite)) == 43  # nothing is on record
    assert "test_quick" not in ran(suite, "--prove") and len(read_record(suite)) == 40
    again = ran(suite)
    assert "test_quick" in again and 1 <= len(again) <= 8
    assert len(ran(suite, "--everything")) == 43
    few = {"test_number[03]", "test_number[04]", "test_quick"}
    assert {*ran(suite, "--subjects", "number/0[34]")} == few
    with (suite / "tests" / "conftest.py").open("a") as file:
        file.write("# another frame\n")
    assert len(ran(suite)) == 43


@many
def test_what_has_changed_runs_and_is_not_proven_until_it_passes(suite):
    ran(suite, "--prove")
    (suite / "data" / "07.txt").write_text("bad")
    assert ran(suite)["test_number[07]"] == "FAILED"
    assert ran(suite, "--prove") == {"test_number[07]": "FAILED"}
    assert "number/07" not in read_record(suite)
    (suite / "data" / "07.txt").write_text("good ")
    assert ran(suite, "--prove") == {"test_number[07]": "FAILED"}
    (suite / "data" / "07.txt").write_text("good")
    assert ran(suite, "--prove") == {"test_number[07]": "PASSED"}
    assert len(read_record(suite)) == 40


@many
def test_a_proof_of_two_tests_wants_both(suite):
    """Also of those that an option leaves out."""
    (suite / "second").write_text("bad")
    assert ran(suite, "--prove")["test_second[01]"] == "FAILED"
    assert len(read_record(suite)) == 38
    ran(suite, "--prove", "-k", "test_number")
    assert len(read_record(suite)) == 38
    assert "--prove takes no files" in tried(suite, "--prove", "tests").stderr


@many
def test_a_record_that_is_wrong_is_forgotten(suite):
    """By `--prove --everything`, where one fails; and of proofs that are no more."""
    ran(suite, "--prove")
    path = suite / "tests" / "proofs.json"
    path.write_text(json.dumps(read_record(suite) | {"number/99": "gone"}))
    (suite / "second").write_text("bad")
    ran(suite, "--prove", "--everything")
    assert read_record(suite).keys() == {f"number/{n:02}" for n in range(2, 40)}


@many
@pytest.mark.parametrize("side", [(), ("-n", "1", "--dist", "loadscope")])
def test_an_interrupted_run_keeps_what_was_proven(suite, side):
    ran(suite, "--prove", "--subjects", "number/3?")
    (suite / "data" / "20.txt").write_text("stop")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:nbval", "--prove", *side]
    with subprocess.Popen(command, cwd=suite, stdout=subprocess.DEVNULL) as run:
        while "number/19" not in read_record(suite):
            assert run.poll() is None
            time.sleep(0.1)
        run.send_signal(signal.SIGINT)
    assert read_record(suite).keys() >= {f"number/{n}" for n in (*range(12, 20), 30, 39)}


@many
def test_side_by_side_it_is_the_same(suite):
    side = ("-n", "2", "--dist", "loadscope")
    assert len(ran(suite, *side, "--prove")) == 0  # the lines of workers are others
    assert len(read_record(suite)) == 40
    (suite / "data" / "30.txt").write_text("bad")
    assert "FAILED tests/test_numbers.py::test_number[30]" in tried(suite, *side).stdout


@many
@pytest.mark.parametrize("ci", ["", "true"])
def test_what_is_skipped_in_ci_has_to_be_known(suite, monkeypatch, ci):
    """Of all tests, that is: what is skipped every night runs nowhere."""
    monkeypatch.setenv("CI", ci)
    (suite / "second").write_text("none")
    for options, code in (([], 0), (["--everything"], 1 if ci else 0)):
        done = tried(suite, "-k", "quick", *options)
        assert done.returncode == code, done.stdout
    assert ("runs nowhere: Skipped: no such thing here" in done.stdout) is bool(ci)


@many
def test_the_nightly_run_leaves_nothing_out(suite):
    """Its shards are all of them, and each proof is in one."""
    jobs = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]
    (job,) = [job for job in jobs.values() if "strategy" in job]
    shards = job["strategy"]["matrix"]["shard"]
    assert shards == [*range(1, len(shards) + 1)]
    (step,) = [step for step in job["steps"] if "make test" in step.get("run", "")]
    assert step["run"] == 'make test PYTEST="--everything --shard $SHARD"'
    assert step["env"] == {"SHARD": f"${{{{ matrix.shard }}}}/{len(shards)}"}
    options = [("--everything", "--shard", f"{n}/{len(shards)}") for n in shards]
    parts = [{*ran(suite, *option)} for option in options]
    assert sum(map(len, parts)) == len(set().union(*parts)) == 43
