"""The workbook from inside a notebook: cells become part of the package when they run."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workkit import checking, cli
from workkit import help as helping
from workkit.store import homes_of, name_of
from workkit.workbook import Workbook


class Desk:
    """What the setup cell calls `workbook`."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key

    def check(self) -> None:
        """Runs the checks of this chapter on what you wrote."""
        with contextlib.chdir(self.folder):
            try:
                cli.main(self.folder, [self.key], in_kernel=True)
            except SystemExit as reason:  # such as another run that goes on
                print(reason)

    def hint(self, name: str) -> None:
        """The next of two hints."""
        self.tell(helping.hint, name)

    def answer(self, name: str) -> None:
        """Our answer, after the hints."""
        self.tell(helping.answer, name)

    def tell(self, action: Callable[[Workbook, str], str], name: str) -> None:
        """What it says, or why it says nothing; a cell is not to end with SystemExit."""
        book = Workbook(self.folder, in_kernel=True)
        try:
            said = action(book, self.full(name))
        except SystemExit as reason:
            said = str(reason)
        print("\n".join([*book.asides, said]))

    def full(self, name: str) -> str:
        """The definition of this chapter, where two chapters have one of that name."""
        blanks = Workbook(self.folder).data[self.key]["blanks"]
        return next((n for n, b in blanks.items() if b["symbol"] == name), name)

    def ran(self, result: Any) -> None:
        """After a cell has run: an answer is kept, and written to the package."""
        source = result.info.raw_cell or ""
        name = name_of(source)
        if name is None:
            return
        book = Workbook(self.folder, in_kernel=True)
        with book.store.changing():
            book.store.collect(homes_of(book.data), put_back=False)  # older than this cell
            book.store.put(name, source)
        for said in book.sync():
            print(said)
        if problem := book.problems.get(name):
            print(f"Kept, but not in your package yet. {problem}")
        for module in [m for m in sys.modules if m.partition(".")[0] == "attnlib"]:
            del sys.modules[module]  # the next import takes the new one


def begin(key: str) -> Desk:
    """Called by the setup cell, in the folder of the notebooks."""
    folder = Path("..").resolve()
    os.environ.setdefault("TRITON_INTERPRET", "1")
    desk = Desk(folder, key)
    if names := checking.absent(Workbook(folder).data[key]):
        print(checking.asked(key, names))
    try:
        from IPython import get_ipython

        events = get_ipython().events
    except (ImportError, AttributeError):
        return desk
    for callback in list(events.callbacks["post_run_cell"]):
        if type(getattr(callback, "__self__", None)).__name__ == "Desk":
            events.unregister("post_run_cell", callback)  # the setup cell ran before
    events.register("post_run_cell", desk.ran)
    return desk
