"""Whatever happens to the workbook's files, in any order, no answer is lost."""

import json
import shutil
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from workkit import store, workbook
from workkit.notebook import Desk
from workkit.store import Store, name_of
from workkit.workbook import Workbook

FIRST = "01_scaled_dot_product.ipynb"
NAMES = {
    "masks.apply_mask": "# attnlib/masks.py: yours, apply_mask",
    "1.1": "# Exercise 1.1: yours",
}
names, number = st.sampled_from(sorted(NAMES)), st.integers(0, 3)


def sources_of(path):
    """The named code cells of a notebook, as (name, source); none if it is not whole."""
    try:
        cells = json.loads(path.read_text("utf-8"))["cells"]
    except (OSError, ValueError):
        return []
    texts = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    return [(name_of(text), text) for text in texts if name_of(text) in NAMES]


class Learner(RuleBasedStateMachine):
    """Saves, cells that run, commands, copies and kills, as they come."""

    def __init__(self):
        super().__init__()
        shutil.rmtree(self.folder / "yours", ignore_errors=True)
        for path in (self.folder / "book").glob("*.ipynb"):
            path.unlink()
        shutil.copyfile(self.pristine, self.path)
        self.given = set()  # all that was ever answered, and saved or run

    def cells(self, change):
        try:
            notebook = json.loads(self.path.read_text("utf-8"))
        except (OSError, ValueError):
            return
        for cell in notebook["cells"]:
            change(cell, name_of("".join(cell["source"])))
        self.path.write_text(json.dumps(notebook), encoding="utf-8")

    @rule(name=names, number=number)
    def saves(self, name, number):
        source = f"{NAMES[name]}\nx = {number}"

        def change(cell, found):
            if cell["cell_type"] == "code" and found == name:
                cell["source"] = source

        self.cells(change)
        if (name, source) in sources_of(self.path):
            self.command()
            self.given.add((name, source))

    @rule(name=names, number=number)
    def runs(self, name, number):
        """In an open notebook, whose file does not say it yet."""
        before = self.path.read_bytes() if self.path.exists() else None
        source = f"{NAMES[name]}\nx = {number}"
        Desk(self.folder, "01").ran(SimpleNamespace(info=SimpleNamespace(raw_cell=source)))
        now = self.path.read_bytes() if self.path.exists() else None
        unchanged = before == now  # in CI, pytest takes minutes to compare the two
        assert unchanged, "a kernel has written to a notebook"
        self.given.add((name, source))
        assert Workbook(self.folder).store.answers.get(name) == source

    @rule()
    def command(self):
        Workbook(self.folder).sync()

    @rule()
    def unpacks_anew(self):
        shutil.copyfile(self.pristine, self.path)

    @rule()
    def copies(self):
        if self.path.exists():
            shutil.copyfile(self.path, self.path.with_name("Copy1.ipynb"))

    @rule(kept=st.integers(0, 40))
    def dies_while_writing(self, kept):
        """What is written whole leaves a part beside it."""
        answers = self.folder / "yours" / "answers.json"
        if answers.exists():
            text = answers.read_text("utf-8")
            answers.with_name("answers.json.1.new").write_text(
                text[:kept], encoding="utf-8"
            )

    @rule(cut=st.integers(1, 40))
    def is_damaged(self, cut):
        answers = self.folder / "yours" / "answers.json"
        if answers.exists():
            text = answers.read_text("utf-8")
            answers.write_text(text[:-cut], encoding="utf-8")

    def teardown(self):
        self.command()
        files = [p for p in (self.folder / "yours").iterdir() if p.name != "lock"]
        books = (self.folder / "book").glob("*")
        kept = "".join(path.read_text("utf-8") for path in files)
        kept += "".join(source for path in books for _, source in sources_of(path))
        for name, source in self.given:
            body = json.dumps(source)[1:-1]
            assert body in kept or source in kept, (name, source)


@pytest.fixture
def machine(folder, monkeypatch):
    """Only the answers count here: no package is written, and chapters are read once."""
    data = workbook.read_data(folder)
    monkeypatch.setattr(workbook, "read_data", lambda _: data)
    monkeypatch.setattr(workbook, "texts_of", lambda *_: ({}, {}))
    monkeypatch.setattr(workbook, "write_package", lambda *_: None)
    pristine = folder / "pristine.ipynb"
    shutil.copyfile(folder / "book" / FIRST, pristine)

    class Here(Learner):
        pass

    Here.folder, Here.path, Here.pristine = folder, folder / "book" / FIRST, pristine
    return Here


def run(machine):
    options = settings(
        max_examples=25, phases=[Phase.generate], stateful_step_count=12,
        deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=options)


def test_no_answer_is_lost(machine):
    run(machine)


collect = Store.collect
LOSSES = {
    "what a cell said before is forgotten": (Store, "remember", lambda *_: None),
    "a damaged file is thrown away": (store, "put_aside", lambda path: path.unlink()),
    "a kernel writes notebooks": (
        Store,
        "collect",
        lambda s, homes, put_back=0: collect(s, homes),
    ),
    "no notebook is read": (Store, "collect", lambda *_, **__: 0),
    "an answer counts as a blank": (Store, "untouched", lambda *_: True),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_seen(loss, machine, monkeypatch):
    monkeypatch.setattr(*LOSSES[loss])
    with pytest.raises(AssertionError):
        run(machine)
