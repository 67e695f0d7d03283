"""The workbook: no answer in it, ours pass, a mistake is named, and nothing is lost."""

import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bookkit.chapters import BookError, read_chapters
from bookkit.mistakes import read_faults
from bookkit.modules import read_modules
from bookkit.statements import formatted
from editions import workbook_record
from editions.blanks import read_blanks, read_given, without_answer
from editions.reflow import answers_of
from editions.workbook import write_workbook
from editions.workbook_mistakes import renewed
from editions.workbook_record import Book, owed, read_book, read_record, write_record
from tiny_book import ROOT, edit
from workbench import cell_of, check, sources, write
from workkit import alone, checking, cli
from workkit.jobs import small_tests
from workkit.naming import alike, judge, named, signature
from workkit.notebook import Desk, begin
from workkit.package import read_data, texts_of
from workkit.report import detail, folded, in_words, next_step, pace, told
from workkit.store import Store, name_of
from workkit.tracing import Tracer
from workkit.workbook import Workbook

in_use = pytest.mark.costly(
    *("workbook", "tools/workkit/*.py", "book/workbook/folder/*"),
    *("book/workbook/blanks.toml", "book/0[1-3]_*.ipynb#code"),
)


@pytest.fixture
def says(folder, capsys, monkeypatch):
    """What the program says, in this process."""
    monkeypatch.setenv("ATTNLIB_BOOK", str(ROOT / "attnlib"))

    def run(*words):
        capsys.readouterr()
        cli.main(folder, [*map(str, words)])
        return capsys.readouterr().out

    return run


# What is in the folder


def test_no_answer_is_in_the_folder(untouched, ours):
    blanks = read_blanks(ROOT)
    assert blanks.keys() < ours.keys()
    kinds = (".ipynb", ".py", ".json", ".md", ".toml")
    texts = [p.read_text("utf-8") for p in untouched.rglob("*") if p.suffix in kinds]
    plain = ["".join(t.split()).replace("\\n", "").replace('\\"', '"') for t in texts]
    for name, source in ((name, ours[name]) for name in blanks):
        body = source.partition("\n")[2]
        blank = without_answer(blanks[name], body)[0]
        kept = {line.strip() for line in blank.splitlines()}
        lost = [line for line in body.splitlines() if line.strip() not in kept]
        answer = "".join("".join(lost).split())
        assert len(answer) > 10 and not any(answer in text for text in plain), name


def test_what_later_chapters_add_is_given(untouched):
    """Chapter 5's reader knows no cache, and is asked for all four projections."""
    asked = cell_of(untouched, "multi_head.MultiHeadAttention")
    assert "place_heads(self, q, k, v" in asked and "shared = self.num_kv_heads" in asked
    assert "d_k, num_kv_heads = head_sizes(" in asked
    assert "self.q_proj(" not in asked and "self.k_proj(" not in asked
    model = cell_of(untouched, "transformer.LanguageModel")
    assert "known = cut if cache is None" in model and "F.linear(" not in model
    for name in ("flash.tiles.visible_tiles", "flash_triton.split.split_kernel"):
        assert "    if window is not None:" in cell_of(untouched, name)


def test_the_story_has_each_name_once_and_says_what_to_write(untouched):
    cells = sources(untouched, "16")
    assert sum("def rotate_neighbors(" in cell for cell in cells) == 1
    text = {key: "\n".join(sources(untouched, key)) for key in ("01", "02")}
    several = "Until one of them is written"  # and one blank is no choice
    assert several in text["01"] and several not in text["02"]
    assert "Until it is written" in text["02"]


def test_a_class_is_asked_for_once_before_its_user(untouched):
    cells = sources(untouched, "19")
    asked, later = (
        [i for i, c in enumerate(cells) if f"class {s}" in c]
        for s in ("PagedCache:", "PagedSequences:")
    )
    assert asked < later and len(asked + later) == 2
    assert name_of(cells[asked[0]]) == "paged.PagedCache"
    assert [i for i, c in enumerate(cells) if "def fork(" in c] == asked


def test_our_answers_make_our_package(untouched, ours):
    answers = {name: ours[name] for name in read_blanks(ROOT)}
    texts, problems = texts_of(read_data(untouched), answers)
    assert not problems
    for file, text in texts.items():
        assert formatted(text, file, ROOT) == (ROOT / file).read_text("utf-8"), file


def test_an_untouched_workbook_says_what_to_do_first(folder, says, monkeypatch):
    said = says()
    assert f"0 of {len(read_blanks(ROOT))} definitions" in said
    assert "write `apply_mask`" in said
    said = checked(folder, monkeypatch, "03")[1]
    assert "CausalAttention: not yet written" in said and "0 of 6 equations" in said


def test_what_needs_no_run_comes_without_torch(untouched):
    """Progress, hints and answers in a second, not in the three that it takes to load.

    Nor is there a need of what only the makers of the book have.
    """
    program = "import sys, workkit.cli; assert not {'torch', 'ruff'} & {*sys.modules}"
    done = subprocess.run([sys.executable, "-c", program], cwd=untouched / "tools")
    assert done.returncode == 0


# What the reader is told


@in_use
def test_a_wrong_turn_is_named(folder, ours):
    write(folder, ours | {LATER: ours[LATER].replace("causal=True", "causal=False")})
    done = check(folder, 3)
    assert done.returncode == 1
    assert "known mistake: The layer has no mask" in done.stdout
    assert "left: " in done.stdout and "right: " in done.stdout
    assert "✓ Exercise 3.1" in done.stdout and "✗ Exercise 3.3" in done.stdout


def test_the_words():
    """Mistakes that share their numbers are told together, a line is folded."""
    assert told(["A."]) == ["These are the numbers of a known mistake: A."]
    assert told(["A.", "B."])[1:] == ["Either: A.", "or: B."]
    wide = folded("  " + "word " * 40)
    assert len(wide) > 1 and max(map(len, wide)) <= 84 and wide[1][:8] == " " * 8
    assert pace(1.9) == "The checks take 1.9 times as long as with ours"
    assert pace(2.1).endswith("more than 2 times is too slow")


def test_each_mistake_is_known_by_its_own_numbers(untouched):
    """Two mistakes that compute the same are told together; at most one of ten is."""
    kept = [m for known in read_data(untouched).values() for m in known["mistakes"]]
    silent = [m for m in kept if "named" in m]
    keys = [json.dumps([m["blanks"], m["signature"]]) for m in kept]
    shared = [m for m, key in zip(kept, keys, strict=True) if keys.count(key) > 1]
    assert len(kept) > 50
    alike = [m["mistake"] for m in silent + shared]
    assert len(alike) <= len(kept) / 10, alike


TAB = " " * 8
ENDS = {
    "a loop": (f"while True:\n{TAB}    pass\n{TAB}", "no end after 8 seconds"),
    "a crash": (f"__import__('os')._exit(3)\n{TAB}", "status 3"),
}


@in_use
@pytest.mark.parametrize("kind", ENDS)
def test_what_breaks_ends_with_a_message(folder, ours, kind):
    new, told = ENDS[kind]
    if kind == "a loop":
        edit(folder / "tools/workkit/jobs.py", "SECONDS = 180", "SECONDS = 8")
    broken = ours[LATER].replace("self.attention = ", f"{new}self.attention = ")
    write(folder, ours | {LATER: broken})
    done = check(folder, 3)
    assert done.returncode == 1 and "✗ CausalAttention" in done.stdout, done.stderr
    assert told in done.stdout and "Traceback" not in done.stderr


def test_of_two_definitions_the_first_that_does_not_pass_is_meant(folder, says):
    told = says("hint", "ScaledDotProductAttention")
    this = "This is scaled_dot_product.ScaledDotProductAttention, chapter 1"
    assert told.startswith(this)
    assert "say backprop.attention.ScaledDotProductAttention.\nHint 1 of 2" in told
    book = Workbook(folder)
    book.state["passed"]["layer_norm.LayerNorm"] = True
    assert book.find("LayerNorm")[0] == "backprop.layer_norm.LayerNorm"
    assert book.find("layer_norm.LayerNorm")[0] == "layer_norm.LayerNorm"


@in_use
def test_hints_come_before_the_answer_and_loans_are_counted(folder, says):
    name, masks = "causal_mask", folder / "attnlib" / "masks.py"
    for words, answer in (
        (("hint", name), "Hint 1 of 2"),
        (("answer", name), "Hint 2 of 2"),
        (("answer", name), "def causal_mask"),
        (("lend", 1), "4 definitions are ours"),
        ((), "on loan"),
    ):
        assert answer in says(*words)
    assert "j <= i[:, None]" in masks.read_text("utf-8")
    says("return")
    assert "j <= i[:, None]" not in masks.read_text("utf-8")


# The record of the mistakes

ONE = "def one(x):\n    return {}"
CHECKED = "# checks eq-one\nfor x in (2, 3):\n    assert one(x) == x\n{}assert {} == 1"


def noted(answer, check=CHECKED, added=""):
    """What is noted with an answer, where the second of two definitions is right."""
    tracer = Tracer({}, {"one": "a.one", "two": "a.two"})
    tracer.run_cell("a.one", ONE.format(answer), "a.one")
    tracer.run_cell("a.two", "def two(x):\n    return x", "a.two")
    tracer.run_cell("check", check.format(added, "one(1) + two(0)"))
    return tracer.notes


def test_what_is_asserted_beside_it_leaves_a_mistakes_record_as_it_is():
    before = "import math\n# checks eq-two\nassert two(3) == 3\nassert one(1) is not None\n"
    added = "assert two(1) == 1\n"
    kept = signature(noted("x + 1"))
    assert len(kept) == 3 and kept[2][0] == "eq-one: one(1) + two(0) == 1"
    changed = noted("x + 1", before + CHECKED, added)
    assert signature(changed) == kept
    made = {"blanks": ["a.one"], "mistake": "One too many.", "signature": kept}
    assert judged(changed, "a.one", mistakes=[made])["mistakes"] == ["One too many."]


def test_an_assertion_is_known_by_its_text_and_its_turn():
    twice = f"{CHECKED.format('', 'one(1)')}\nassert one(1) == 1\nif one(1): 1 / 0"
    keys = [key.partition(": ")[2] for key, *_ in signature(noted("x + 1", twice))]
    assert keys[:2] == ["one(x) == x", "one(x) == x (turn 2)"]
    assert keys[2:] == ["one(1) == 1", "one(1) == 1 (2)", "if one(1): 1 / 0"]


def test_only_the_mistakes_of_one_subject_are_entered(tmp_path):
    (chapter,) = [c for c in read_chapters(ROOT) if c.key == "03"]
    for folder in ("faults", "workbook"):
        (tmp_path / "book" / folder).mkdir(parents=True)
    for path in (ROOT / "book").glob(f"*/{chapter.name}.*"):
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    file = tmp_path / "book" / "workbook" / f"{chapter.name}.json"
    ours = answers_of(read_book(ROOT).shown(chapter))
    known = {"blanks": {name: {"labels": []} for name in ours}, "mistakes": []}
    bench = SimpleNamespace(root=tmp_path, ours=ours, data={"03": known})
    bench.try_answers = lambda _, answers: [[["3.1", "failed", "so"], []] for _ in answers]
    bench.try_out = lambda _, mine: [note("failed", name) for name in mine]
    for subject in ("eq-dropout", "3.1"):
        old = file.read_text("utf-8").splitlines()
        write_record(tmp_path, chapter, renewed(bench, chapter, subject))
        pairs = zip(old, file.read_text("utf-8").splitlines(), strict=True)
        changed = [a for a, b in pairs if a != b]
        assert changed and all(f'"subject": "{subject}"' in a for a in changed)
    with pytest.raises(BookError, match="in eq-nothing, a reader can make no mistake"):
        renewed(bench, chapter, "eq-nothing")


def test_nothing_is_owed():
    """No definition without a blank, and no record of mistakes but that of now."""
    said = {chapter.name: owed(ROOT, chapter) for chapter in read_chapters(ROOT)}
    assert {name: texts for name, texts in said.items() if texts} == {}
    modules = read_book(ROOT).modules.values()
    dotted = {m.name.replace("/", "."): m.bodies for m in modules}
    defined = {f"{m}.{n}" for m in dotted for b in dotted[m] for s in b for n in s.names}
    assert read_given(ROOT) <= {*dotted, *defined}


def owed_after(monkeypatch, old, new):
    """What chapter 3 owes when this text of its code is another."""
    chapters = read_chapters(ROOT)
    (chapter,) = [c for c in chapters if c.key == "03"]
    (cell,) = [c for c in chapter.code_cells if old in c.source]
    cell.source = cell.source.replace(old, new)
    book = Book(chapters, read_modules(chapters), read_blanks(ROOT))
    monkeypatch.setattr(workbook_record, "read_book", lambda _: book)
    return owed(ROOT, chapter)


RECORD = "the record of the workbook's mistakes"
AGAIN = "run python tools workbook_mistakes 03"


def test_what_a_change_of_a_chapter_owes_is_said(monkeypatch):
    held, whole = "assert same(chance @ dropped, p)", f"{RECORD}: {AGAIN}"
    assert owed_after(monkeypatch, held, f"# In words.\n{held}") == []
    assert owed_after(monkeypatch, held, f"assert 1\n{held}") == [whole]
    name = "causal_attention.CausalAttention"
    asked = f"a blank and a hint for {name} in book/workbook/blanks.toml"
    fewer = {n: b for n, b in read_blanks(ROOT).items() if n != name}
    monkeypatch.setitem(globals(), "read_blanks", lambda _: fewer)
    (blank, counts) = owed_after(monkeypatch, held, held)
    assert blank.startswith(asked) and counts.startswith("counts on the page book/workbook")


def test_a_mistake_without_its_record_is_said(monkeypatch):
    (chapter,) = [c for c in read_chapters(ROOT) if c.key == "03"]
    faults = read_faults(ROOT, chapter)
    (shared,) = [f for f in faults if f.mistake == "The layer has no mask."]
    for other in (replace(shared, mistake="It is new."), replace(shared, changes=[])):
        found = [other if f is shared else f for f in faults]
        monkeypatch.setattr(workbook_record, "read_faults", lambda *_, found=found: found)
        said = f"{RECORD} in eq-causal-attention: {AGAIN} --only eq-causal-attention"
        assert said in owed(ROOT, chapter)
    monkeypatch.undo()
    record = read_record(ROOT, chapter)
    record["mistakes"][-1]["signature"] = []
    monkeypatch.setattr(workbook_record, "read_record", lambda *_: record)
    assert owed(ROOT, chapter) == [f"{RECORD} in 3.3: {AGAIN} --only 3.3"]


def test_a_blank_needs_two_hints(tmp_path):
    (tmp_path / "book" / "workbook").mkdir(parents=True)
    text = 'given = []\n[[blank]]\nname = "a.b"\nminutes = 1\ntodo = ""\nhints = ["One."]'
    (tmp_path / "book" / "workbook" / "blanks.toml").write_text(text, encoding="utf-8")
    with pytest.raises(BookError, match="needs two hints"):
        read_blanks(tmp_path)


# Nothing is lost

FIRST, NAME = "01_scaled_dot_product.ipynb", "masks.apply_mask"
MINE = "# attnlib/masks.py: yours, apply_mask\ndef apply_mask(scores, mask):\n    return 1"


@in_use
def test_building_again_keeps_every_answer(folder):
    write(folder, {NAME: MINE, "1.1": "# Exercise 1.1: yours\nx = 1"})
    old = (folder / "book" / FIRST).read_bytes()
    write_workbook(ROOT, folder, None)
    assert cell_of(folder, NAME) == MINE and "x = 1" in cell_of(folder, "1.1")
    assert [p.read_bytes() for p in (folder / "yours" / "before").iterdir()] == [old]
    write(folder, {NAME: MINE + "  # better"})
    write_workbook(ROOT, folder, None)
    assert cell_of(folder, NAME).endswith("# better")


@in_use
def test_what_was_written_before_is_kept(folder, says):
    """Whatever becomes of the stored answers, and of a cell that is emptied."""
    for number in "123":
        write(folder, {NAME: MINE.replace("1", number)})
        says()
    history = folder / "yours" / "history.jsonl"
    lines = history.read_text("utf-8").splitlines()
    assert [json.loads(line)["source"][-1] for line in lines] == ["1", "2"]
    (folder / "yours" / "answers.json").write_text("{", encoding="utf-8")
    assert "yours/answers.json was damaged, and is kept as yours/answers-dam" in says()
    (aside,) = (folder / "yours").glob("answers-damaged-*.json")
    assert aside.read_text("utf-8") == "{"
    assert Store(folder, {}).kept[NAME]["now"][-1] == "3"
    assert "is empty again" in says("reset", "apply_mask")
    assert "raise NotImplementedError" in cell_of(folder, NAME)
    assert "return 3" in history.read_text("utf-8")


@in_use
def test_two_runs_at_once_and_an_interrupted_write(folder):
    write(folder, {NAME: MINE})
    command = [sys.executable, folder / "check.py"]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
    assert [run.wait(60) for run in runs] == [0, 0, 0]
    assert Store(folder, {}).kept[NAME]["now"] == MINE
    (folder / "yours" / "answers.json.77.new").write_text("{", encoding="utf-8")
    assert check(folder).returncode == 0  # and nothing has kept the lock


def test_two_runs_keep_what_both_have_found(folder):
    """`check.py all` takes long, and answers come in meanwhile."""
    long, short = Workbook(folder), Workbook(folder)
    desk_says(folder, MINE)
    short.state["passed"]["b"], short.state["lent"]["c"] = "1", True
    short.save()
    long.state["passed"]["a"] = "2"
    long.save()
    long.sync()
    book = Workbook(folder)
    assert book.state["passed"] == {"a": "2", "b": "1"} and book.state["lent"] == {
        "c": True
    }
    assert book.store.kept[NAME]["now"] == MINE
    book.state["lent"] = {}
    book.save()
    assert Workbook(folder).state["lent"] == {}


def desk_says(folder, source):
    """A cell of an open notebook runs, which its editor has not saved."""
    Desk(folder, "01").ran(SimpleNamespace(info=SimpleNamespace(raw_cell=source)))


def test_a_kernel_writes_no_notebook(folder, capsys):
    """Its editor would ask which of two versions counts, and one of them is lost."""
    write(folder, {NAME: MINE})
    Workbook(folder).sync()
    write(folder, {NAME: Workbook(folder).store.blanks[NAME]})  # blank again
    path = folder / "book" / FIRST
    before = path.read_bytes()
    desk_says(folder, "# Exercise 1.1: yours\nx = 1")
    Desk(folder, "01").hint("apply_mask")
    assert path.read_bytes() == before and "put back" not in capsys.readouterr().out
    cli.main(folder, [])  # a command does
    assert cell_of(folder, NAME) == MINE


def test_progress_that_is_damaged_is_told_and_kept(folder, says):
    (folder / "yours").mkdir(exist_ok=True)
    (folder / "yours" / "progress.json").write_text("[", encoding="utf-8")
    assert "yours/progress.json was damaged" in says("hint", "apply_mask")
    assert "Hint 2" in says("hint", "apply_mask")


def test_two_cells_of_one_name_are_told(folder):
    path = folder / "book" / FIRST
    notebook = json.loads(path.read_text("utf-8"))
    first, second = MINE, MINE.replace("1", "2")
    others = [
        {"cell_type": "code", "source": s, "metadata": {}, "outputs": []}
        for s in (first, second)
    ]
    notebook["cells"] += others
    path.write_text(json.dumps(notebook), encoding="utf-8")
    said = "Two cells are the answer of `apply_mask`: {} counts; empty the other."
    assert Workbook(folder).sync() == [said.format("the last")]
    assert Store(folder, {}).kept[NAME]["now"] == second
    desk_says(folder, first)
    for _ in range(2):  # and stays
        assert Workbook(folder).sync() == [said.format("the one that ran last")]
    assert Store(folder, {}).kept[NAME]["now"] == first
    assert len((folder / "yours" / "history.jsonl").read_text("utf-8").splitlines()) == 1


def test_a_copy_of_a_notebook_does_not_count(folder):
    write(folder, {NAME: MINE})
    path = folder / "book" / FIRST
    copied = path.with_name("zz-Copy1.ipynb")
    shutil.copyfile(path, copied)
    write(folder, {NAME: MINE.replace("1", "2")})
    assert Workbook(folder).sync() == [
        f"book/{copied.name} does not count: book/{FIRST} does."
    ]
    assert Store(folder, {}).kept[NAME]["now"].endswith("2")


def test_an_answer_in_a_cell_that_does_not_run_is_told(folder):
    path = folder / "book" / FIRST
    notebook = json.loads(path.read_text("utf-8"))
    notebook["cells"].append({"cell_type": "raw", "source": MINE, "metadata": {}})
    path.write_text(json.dumps(notebook), encoding="utf-8")
    said = f"The answer of `apply_mask` in book/{FIRST} is a raw cell: make it a code cell."
    assert Workbook(folder).sync() == [said]


def test_a_folder_that_cannot_be_written_is_told_at_once(folder):
    shutil.rmtree(folder / "yours", ignore_errors=True)
    (folder / "yours").write_text("a file", encoding="utf-8")
    start = time.time()
    with pytest.raises(SystemExit, match=r"can't be (read|written)"):
        Workbook(folder).sync()
    assert time.time() - start < 5


def test_another_python_is_told_of_the_environment(folder):
    shutil.rmtree(folder / "tools" / "bookkit")
    done = subprocess.run(
        [sys.executable, folder / "check.py"], capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 2 and "is that the Python of your .venv?" in done.stderr
    assert "Traceback" not in done.stderr


# What else a reader stumbles over

LATER = "causal_attention.CausalAttention"
PASSED = ["masks.apply_mask", "masks.causal_mask", "self_attention.SelfAttention", LATER]


def note(kind, name, **more):
    """What happened in a cell, with one definition behind it."""
    made = {"kind": kind, "key": f"cell:0:{name}", "cell": "cell", "text": "x == y"}
    return made | {"labels": [], "uses": [name], "digits": [], "came": ""} | more


def judged(seen, *names, mistakes=()):
    """What is found of definitions that are written, the first one's."""
    known = {"blanks": {n: {"labels": []} for n in names}, "mistakes": [*mistakes]}
    return judge(known, seen, dict.fromkeys(names, "written"))[names[0]]


def test_a_failure_that_names_no_definition_counts_against_the_one_before_it():
    """Such as scores that `apply_mask` has changed: a line that sees it names only them."""
    seen = [note("passed", "a.one"), note("failed", "", key="cell:1", uses=[])]
    assert judged(seen, "a.one")["state"] == "failed"


def test_a_class_of_which_a_part_is_not_written_has_not_passed():
    said = "One.backward: this is yours to write"
    came = f"NotImplementedError: {said}"
    seen = [note("passed", "a.One"), note("unwritten", "a.One", came=came)]
    assert judged(seen, "a.One")["state"] == "passed"
    seen[1]["running"] = ["cell", "a.One"]
    assert judged(seen, "a.One") == {"state": "failed", "problem": said}


def test_none_passes_beside_an_assertion_that_fails_with_it():
    both = note("failed", "a.one", uses=["a.one", "a.two"])
    seen = [note("passed", "a.one"), both]
    assert judged(seen, "a.one", "a.two") == {"state": "waits", "for": ["a.two"]}
    known = {"blanks": {key: {"labels": []} for key in ("a.one", "a.two")}, "mistakes": []}
    states = {"a.one": "written", "a.two": "lent"}  # what is lent is right
    assert judge(known, seen, states)["a.one"]["state"] == "failed"


def test_a_mistake_is_named_by_its_numbers_alone():
    """All that it makes fail, with digits that are near in proportion, and nothing else."""
    signs = [["1", "failed", 1, ["1 1.41e-08"]], ["2", "failed", 1, []]]
    made = [{"blanks": ["a.one"], "mistake": "It is so.", "signature": signs}]

    def told(first, *more):
        seen = [note("failed", "a.one", key="1", digits=[first]), *more]
        return named(made, seen)

    second = note("failed", "a.one", key="2")
    assert told("1 1.411e-08", second) == ["It is so."]
    assert told("1 2.82e-08", second) == []  # twice as much is another mistake
    assert told("1 1.41e-08") == []
    assert told("1 1.41e-08", second, note("failed", "a.one", key="3")) == []
    made[0]["signature"] = [["1", "failed", 1, []], ["2", "failed", 1, []]]
    assert told("1 1.41e-08", second) == []  # without digits it could be any
    assert alike("4 0 2 1e-09 2", "4 0 2 -3e-09 2") and not alike("1 1e-09", "1 3e-09")
    assert alike("4 0 2", "4 1e-06 2") and not alike("4 0 2", "4 1e-05 2")  # of a sum, too


def found_among(monkeypatch, folder, answers, wrong):
    """What is found of chapter 10 where those `wrong` fail whatever they are tried with."""
    write(folder, answers)
    book, tried = Workbook(folder), []
    book.sync()

    def judged(among, names):
        tried.append([*names])
        blame = [name for name in names if name in wrong][-1:]
        states = {name: "failed" if name in blame else "waits" for name in names}
        return {n: {"state": s if blame else "passed"} for n, s in states.items()}

    monkeypatch.setattr(alone.Among, "judged", judged)
    blanks = {key: {"state": "waits"} for key in answers} | {
        [*answers][-1]: {"state": "failed"}
    }
    alone.sort_out(book, "10", blanks, [])
    return {name: found["state"] for name, found in blanks.items()}, tried


@in_use
def test_each_that_does_not_pass_is_tried_among_ours(folder, ours, monkeypatch):
    monkeypatch.setenv("ATTNLIB_BOOK", str(ROOT / "attnlib"))
    names = [n for n in read_data(folder)["10"]["blanks"]][:4]
    answers = {name: ours[name] for name in names}
    found, tried = found_among(monkeypatch, folder, answers, {names[1]})
    assert [*found.values()] == ["passed", "failed", "passed", "passed"]
    assert tried[0] == [names[3]] and tried[-1] == [names[0], *names[2:]]
    found, _ = found_among(monkeypatch, folder, answers, {names[0], names[3]})
    assert [*found.values()] == ["failed", "passed", "passed", "failed"]
    monkeypatch.setenv("ATTNLIB_BOOK", str(folder / "nowhere"))  # ours are not here
    found, tried = found_among(monkeypatch, folder, answers, {names[0]})
    assert [*found.values()] == ["waits"] * 3 + ["failed"] and tried == []


def test_what_fails_with_no_one_behind_it_is_looked_for(folder, ours, monkeypatch):
    """Whoever passed is tried among ours; alone, whatever fails is its fault."""
    monkeypatch.setenv("ATTNLIB_BOOK", str(ROOT / "attnlib"))
    name = "masks.causal_mask"
    write(folder, {name: ours[name]})
    book = Workbook(folder)
    book.sync()
    seen = [note("passed", name), note("failed", "masks.apply_mask", key="2")]
    ran = {"notes": seen, "ended": "", "trace": "", "seconds": 0.0}
    monkeypatch.setattr(alone, "run", lambda *_, **__: ran)
    blanks = {name: {"state": "passed"}}
    alone.sort_out(book, "01", blanks, seen)
    assert blanks[name]["state"] == "failed"


BY_ITSELF = re.compile(
    r"flash_triton\.(?!split\.choose)|parallel\.(?!places\.[RS]|places\.sh)"
)


@in_use
def test_a_loop_in_small_tests_ends_soon(folder, ours):
    """And counts against the definition whose tests they are, not the chapter's first."""
    edit(folder / "tools/workkit/runner.py", "SOON = 20", "SOON = 4")
    name = "scaled_dot_product.masked_softmax"
    loop = ours[name].replace(
        "    nothing", "    while True:\n        pass\n    nothing", 1
    )
    first = {n: ours[n] for n in ("masks.apply_mask", "masks.causal_mask")}
    assert loop != ours[name]
    write(folder, first | {name: loop})
    done = check(folder, 1)
    assert "✗ masked_softmax" in done.stdout and "after 4 seconds" in done.stdout
    assert "✓ apply_mask" in done.stdout and "✓ causal_mask" in done.stdout


def test_each_blank_has_small_tests_that_can_fail(untouched, as_shipped):
    """But for kernels, for what needs processes, and for what reads a file."""
    blanks, small = read_blanks(ROOT), small_tests(untouched)
    by_itself = {name for name in blanks if BY_ITSELF.match(name)}
    assert blanks.keys() - small.keys() == by_itself | {"pretrained.load_into"}
    for name, tests in small.items():
        exec(tests, {})
        if name == "flash.tiles.TiledAttention":  # tried through flash_attention
            continue
        stub = f"{blanks[name].symbol} = lambda *_, **__: None\n    torch.manual_seed"
        with pytest.raises(Exception):  # noqa: B017, whatever it is
            exec(tests.replace("torch.manual_seed", stub, 1), {})


WRONG = {  # what is written in place of something in a definition of chapter 10
    "central": ("(values[0] - values[3]) + 8 * (", "6 * ("),
    "by twelve": ("/ (12 * step)", "/ 12 * step"),
    "signs": ("8 * (values[2] - values[1])", "8 * (values[1] - values[2])"),
    "writes": ("array.copy(), np", "array, np"),
}


@in_use
@pytest.mark.parametrize("kind", WRONG)
def test_one_definition_is_checked_by_small_tests_of_its_own(folder, ours, kind):
    """None of these was found, or the wrong one was blamed, where ours are on loan."""
    name = "backprop.gradient_check.finite_differences"
    old, new = WRONG[kind]
    assert ours[name].count(old) == 1
    write(folder, {name: ours[name].replace(old, new)})
    done = check(folder, 10, "finite_differences")
    assert done.returncode == 1 and "✗ finite_differences" in done.stdout, done.stderr
    assert "this should hold:" in done.stdout
    write(folder, {name: ours[name]})
    done = check(folder, 10, "finite_differences")
    assert done.returncode == 0 and done.stdout.startswith("✓ finite_differences\n")


@in_use
def test_a_definition_is_judged_before_the_others_are_written(folder, ours):
    name = "masks.causal_mask"
    late = ours[name].replace("keys - queries", "0")
    for source, sign in ((late, "✗"), (ours[name], "✓")):
        write(folder, {name: source})
        done = check(folder, 1)
        assert f"{sign} causal_mask" in done.stdout, done.stdout
        assert "· masked_softmax: not yet written" in done.stdout


def test_a_chapter_is_watched(folder, ours, monkeypatch, says):
    """What is written while it is watched is checked when it is saved."""
    name, seen = "masks.causal_mask", []

    def sleep(_):
        if seen:
            raise KeyboardInterrupt
        write(folder, {name: ours[name]})

    monkeypatch.setattr(cli, "tell", lambda _, *which: seen.append(which))
    monkeypatch.setattr(cli.time, "sleep", sleep)
    says("watch", 1)
    assert seen == [("01", name)]


@in_use
def test_a_definition_that_has_passed_stands_beside_ours(folder, ours, says):
    name = "masks.causal_mask"
    assert "has not passed as it stands now" in says("compare", "causal_mask")
    source = ours[name].replace("keys - queries", "-(queries - keys)")
    assert source != ours[name]
    write(folder, {name: source})
    check(folder, 1)
    said = says("compare", "causal_mask")
    assert "lines, yours and ours" in said and "times as long as with ours" in said
    assert any(
        line[0] == "-" and "-(queries - keys)" in line for line in said.split("\n") if line
    )
    assert any(
        line[0] == "+" and "keys - queries" in line for line in said.split("\n") if line
    )
    assert "answers seen" not in says("progress")
    write(folder, {name: ours[name]})
    check(folder, 1)
    assert "the same, line by line" in says("compare", "causal_mask")


@in_use
def test_a_verdict_is_contradicted_in_a_file(folder, ours, says):
    assert "is not written yet" in says("disagree", "causal_mask")
    source = ours["masks.causal_mask"].replace("keys - queries", "0")
    write(folder, {"masks.causal_mask": source})
    where = says("disagree", "causal_mask").split()[0]
    page = (folder / where).read_text("utf-8")
    assert source in page and "✗ causal_mask" in page and "this should hold:" in page
    assert "torch 2" in page and "What I think" in page
    mine = page.replace("and why:\n", "and why:\n0 is right.\n")
    (folder / where).write_text(mine, encoding="utf-8")
    says("disagree", "causal_mask")
    assert (folder / where).read_text("utf-8") == mine  # a second time, words stay


def test_what_is_next_is_on_the_path(folder, says):
    assert "which milestone" in says("path", "nowhere")
    said = says("path", "backward")
    assert "On your path, chapters 10 11 12: 0 of" in said
    assert "Next: write" in said and "(chapter 10," in said
    assert "(chapter 10," in says("progress")
    assert "(chapter 1," in says("path", "final")


def test_an_editor_finds_its_tasks(untouched):
    tasks = json.loads((untouched / ".vscode" / "tasks.json").read_text("utf-8"))["tasks"]
    assert [task["args"][0] for task in tasks] == ["check.py", "check.py"]
    assert cli.key_of(Workbook(untouched), "03_causal_attention") == "03"


def test_the_name_of_a_caught_error_is_not_missed_later():
    """Two statements catch one each; the first of them fails for another reason."""
    lines = "    {}\nexcept ValueError as error:\n    told = str(error)\n"
    tries = ["try:\n" + lines.format(body) for body in ("1 / 0", "raise ValueError")]
    tracer = Tracer({}, {})
    tracer.run_cell("cell", "\n".join(tries) + "assert told == ''\n")
    assert [note["kind"] for note in tracer.notes] == ["raised", "passed"]


def checked(folder, monkeypatch, key, *notes, ended="", trace=""):
    """A check in which this has happened: the book, and what the reader is told."""
    ran = {"notes": list(notes), "ended": ended, "trace": trace, "seconds": 0.0}
    monkeypatch.setattr(checking, "run", lambda *_: ran)
    monkeypatch.setattr(checking, "sort_out", lambda *_: None)
    book = Workbook(folder)
    return book, in_words(book, checking.check(book, key))


@in_use
def test_what_has_changed_since_it_passed_is_said_first(folder, ours, monkeypatch):
    write(folder, {name: ours[name] for name in PASSED})
    good = [note("passed", name) for name in PASSED]
    bad = note("failed", LATER)
    for key in ("01", "02"):
        checked(folder, monkeypatch, key, *good)
    said = checked(folder, monkeypatch, "03", bad)[1]
    assert "✗ CausalAttention" in said and "first." not in said
    changed = ours["masks.causal_mask"].replace("keys - queries", "0")
    write(folder, {"masks.causal_mask": changed})
    book, said = checked(folder, monkeypatch, "03", bad)
    warned = "`causal_mask` (chapter 1) has changed since it passed: run python check.py 1 "
    assert said.splitlines()[1].startswith(warned)
    assert "… CausalAttention waits for causal_mask" in said
    assert next_step(book).startswith("write `masked_softmax`")  # the first of chapter 1
    checked(folder, monkeypatch, "01", note("failed", "masks.causal_mask"))
    book, said = checked(folder, monkeypatch, "03", bad)
    assert "`causal_mask` (chapter 1) does not pass: run python check.py 1" in said
    assert next_step(book).startswith("mend `causal_mask`")
    write(folder, {"masks.causal_mask": ours["masks.causal_mask"] + "\n\n"})
    checked(folder, monkeypatch, "01", *good)
    said = checked(folder, monkeypatch, "03", note("passed", LATER))[1]
    assert "✓ CausalAttention" in said and "first." not in said


@in_use
def test_a_definition_waits_for_one_of_an_earlier_chapter(folder, ours):
    write(folder, {n: a for n, a in ours.items() if n != "masks.causal_mask"})
    done = check(folder, 3, ATTNLIB_BOOK=folder / "nowhere")
    assert done.returncode == 1
    assert "… CausalAttention waits for causal_mask" in done.stdout
    assert "Next: write `causal_mask`" in done.stdout
    assert "✓ CausalAttention" in check(folder, 3).stdout  # with ours of chapter 1


def story(source):
    """The note of a cell of the story."""
    tracer = Tracer({}, {})
    tracer.run_cell("story", source)
    (found,) = tracer.notes
    return found


def told_of(found):
    known = {"blanks": {}, "equations": {}}
    return detail(known, {"note": found, "mistakes": [], "labels": [], "others": 0})


def test_the_line_that_raised_is_shown_and_no_more():
    source = "for n in (2, 0):\n    y = n  # words\n    z = round(\n        1 / y\n    )"
    told = told_of(story(f"x = 1\n{source}"))
    assert told[0] == "this cell of the chapter could not run:"
    assert told[1:4] == ["  z = round(", "      1 / y", "  )"]
    loop = "for n in (6, 7):\n    "
    raised = story(f"{loop}if (m := n) != n or n == 7:\n        raise OSError")
    assert told_of(raised)[1] == "  raise OSError"
    failed = story(f"{loop}y = n\n    assert (m := n) == 6")
    assert told_of(failed)[:2] == ["this should hold:", "  assert (m := n) == 6"]


def test_shapes_and_types_are_told_before_numbers():
    head = "import torch\nx = torch.arange(8.0).reshape(2, 4) / 3\n"
    for compared, digits in (
        ("x.tolist() == x.T.tolist()", 3),  # no mistake with other shapes has them
        ("torch.equal(x, x.T)", 2),  # they say so themselves
    ):
        found = story(f"{head}assert {compared}")
        assert told_of(found)[2] == "  shape (2, 4), expected (4, 2)"
        assert len(found["digits"]) == digits
    alike = "import torch\nsame = lambda a, b: a.dtype == b.dtype\nx = torch.ones(2)\n"
    told = told_of(story(f"{alike}assert same(x, x.double())"))
    assert "  dtype float32, expected float64" in told
    assert not story(f"{head}assert x.shape == (2, 4, 1)")["differs"]  # sizes, not values


def test_sides_that_differ_are_shown_to_differ():
    source = "import torch\nx = torch.tensor([0.1966, -0.0], dtype=float)\n"
    found = story(f"{source}assert torch.equal(x, x + torch.tensor([1e-8, 0]))")
    assert found["compared"] == ["[0.1966, 0]", "[0.19660001, 0]"]


def test_a_function_without_return_is_told(folder, ours, monkeypatch):
    came = "TypeError: 'NoneType' object is not subscriptable"

    def said_of(answer):
        write(folder, {NAME: answer})
        return checked(folder, monkeypatch, "01", note("raised", NAME, came=came))[1]

    said = said_of(ours[NAME].replace("return scores + mask", "scores + mask"))
    assert "`apply_mask` returned None: is there a `return`?" in said
    said = said_of(ours[NAME])
    assert "'NoneType' object" in said and "is there" not in said
    said = said_of(ours[NAME].replace("return scores + mask", "return (scores + mask"))
    assert "✗ apply_mask" in said and "'(' was never closed" in said


UNKNOWN = {
    "a slip": (
        *("masks.apply_mask", "return scores + mask", "return score + mask"),
        "line 19: `score`: did you mean `scores`?",
    ),
    "of the story": (
        *("scaled_dot_product.masked_softmax", "torch.softmax(", "softmax("),
        "line 17: `softmax` belongs to the story; the package doesn't have it",
    ),
    "of the package": (
        *("self_attention.SelfAttention", "super()", "apply_mask, super()"),
        "`apply_mask`: import it in this cell: from attnlib.masks import apply_mask",
    ),
    "a module": (
        *("masks.apply_mask", "return scores + mask", "return math.inf * mask"),
        "line 19: `math`: import it in this cell: import math",
    ),
}


@pytest.mark.parametrize(("name", "old", "new", "said"), UNKNOWN.values(), ids=UNKNOWN)
def test_an_unknown_name_is_told_with_its_line(untouched, ours, name, old, new, said):
    assert old in ours[name]
    answer = ours[name].replace(old, new)
    problems = texts_of(read_data(untouched), {name: answer})[1]
    assert problems[name].startswith(f"{name}: line ") and problems[name].endswith(said)


def test_a_notebook_that_is_missing_or_broken_is_told_and_gets_its_answers_back(
    folder, says
):
    assert Workbook(folder).sync() == []
    write(folder, {NAME: MINE})
    Workbook(folder).sync()
    path = folder / "book" / FIRST
    path.rename(path.with_name("mine.ipynb"))
    assert Workbook(folder).sync() == []  # it is read under its new name
    path.with_name("mine.ipynb").unlink()
    checks = "the stored answers are checked; copy it back from data/notebooks/"
    assert f"book/{FIRST} is missing: {checks}{FIRST}." in says()
    whole = (folder / "data" / "notebooks" / FIRST).read_bytes()
    path.write_bytes(whole[:1000])
    (said,) = Workbook(folder).sync()
    assert said.startswith(f"book/{FIRST} can't be read: is it whole? The stored answers")
    path.write_bytes(whole)
    said = says()
    assert said.startswith("1 answer of yours was put back") and "check.py reset" in said
    assert cell_of(folder, NAME) == MINE


def test_an_answer_in_another_cell_is_told(folder):
    path, caption = folder / "book" / FIRST, MINE.partition("\n")[0]
    counts = f"what counts is the cell that begins with `{caption}`"
    notebook = json.loads(path.read_text("utf-8"))
    other = {"cell_type": "code", "source": MINE.partition("\n")[2], "metadata": {}}

    def said_of(*cells):
        path.write_text(json.dumps(notebook | {"cells": cells}), encoding="utf-8")
        (said,) = Workbook(folder).sync()
        return said

    said = said_of(*notebook["cells"], other)
    assert said == f"`apply_mask` is defined in another cell; {counts}."
    kept = [c for c in notebook["cells"] if name_of("".join(c["source"])) != NAME]
    assert said_of(*kept, other).endswith(f"{counts}: put that line back as its first.")
    store = Store(folder, {})
    with store.changing():
        store.put(NAME, MINE)
    said = said_of(*kept)
    assert said.startswith("The cell of `apply_mask`") and "stored answer is" in said


def test_a_wrong_name_offers_a_near_one(folder, capsys):
    desk = Desk(folder, "01")
    desk.hint("aply_mask")  # and no SystemExit
    assert capsys.readouterr().out.endswith(": did you mean `apply_mask`?\n")
    desk.answer("nonsense")
    said = capsys.readouterr().out
    assert "those of chapter 1 are `apply_mask`" in said and "LayerNorm" not in said
    assert cli.main(folder, ["99"]) == 2
    said = capsys.readouterr().err
    assert said == "there is no chapter 99; chapters are 1 to 31 and E\n"


def test_a_check_is_stopped(folder, capsys, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checking, "run", stop)
    assert cli.main(folder, ["1"]) == 130
    assert capsys.readouterr().out == "\nStopped; nothing was changed.\n"


def test_what_failed_is_next_and_what_waits_for_it_is_not(folder, ours, monkeypatch):
    name, loop = "masks.causal_mask", "no end after 9 seconds: is there a loop without end?"
    write(folder, {n: ours[n] for n in PASSED})
    trace = f'File "<{name}>", line 18'
    said = checked(folder, monkeypatch, "01", ended=loop, trace=trace)[1]
    where = "9 seconds, in line 18 of your cell: is there a loop without end?"
    assert where in " ".join(said.split())
    assert "… apply_mask waits for causal_mask" in said
    assert "Next: mend `causal_mask`" in said


def test_a_library_that_is_missing_is_told_in_one_line(folder, ours, capsys, monkeypatch):
    """And what passed before has passed; chapters without such a library are checked."""
    name, where = "gpt2.gelu_tanh", "python -m pip install -r requirements.txt"
    needs = "Chapter 20 needs safetensors, tokenizers and transformers, which are not "
    needs += f"installed: {where}\n"
    write(folder, {name: ours[name], NAME: MINE})
    book = Workbook(folder)
    book.state["passed"][name] = True
    book.save()
    monkeypatch.setattr(checking, "find_spec", lambda name: None)
    assert cli.main(folder, ["20", "--json", str(folder / "grade.json")]) == 1
    said = capsys.readouterr().out
    assert needs in said
    assert "… gelu_tanh waits for safetensors, tokenizers, transformers\n" in said
    assert "Traceback" not in said and "✗" not in said
    (grade,) = json.loads((folder / "grade.json").read_text("utf-8"))["chapters"]
    assert grade["score"] == 0 and grade["max_score"] > 10
    assert Workbook(folder).state["passed"][name] is True
    monkeypatch.chdir(folder / "book")
    begin("20")
    assert capsys.readouterr().out.startswith(needs)
    begin("19")
    assert capsys.readouterr().out == ""
    assert "needs" not in checked(folder, monkeypatch, "01", note("failed", NAME))[1]
