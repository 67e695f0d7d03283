"""Runs a chapter's code statement by statement, and notes what each assertion compared.

An assertion that fails does not end the cell: it is noted with what came and what was
expected, and the next statement runs. What needs the result of a statement that failed is
passed over. Each note says which of the reader's definitions stand behind it.
"""

from __future__ import annotations

import ast
import linecache
import symtable
from collections import Counter
from typing import Any

from bookkit.grammar import only_python
from bookkit.stage import touched
from bookkit.statements import global_names
from workkit.cells import Soft, attributes, caught, labels_by_line, set_by
from workkit.errors import left_word, place_in, raised, raised_in, running
from workkit.values import (
    CARRY_NOTHING,
    NO_STATE,
    apart,
    differences,
    digits,
    holds,
    looked_at,
    sides,
    unseen,
)

LONG = 60  # symbols of a statement or an assertion, for its key


class Tracer:
    """A namespace, and what happened in it."""

    def __init__(self, namespace: dict[str, Any], owner: dict[str, str]) -> None:
        self.namespace = namespace
        self.owner = owner  # of a name: the blank that defines it
        self.behind: dict[str, set[str]] = {}  # a name: blanks that its value came from
        self.lost: set[str] = set()  # names that a failed statement would have made
        self.notes: list[dict[str, Any]] = []
        self.at: dict[str, Any] = {}
        self.places: Counter[str] = Counter()  # statements and assertions, by text
        self.turns: Counter[str] = Counter()  # how often each of these assertions ran
        namespace["__seen__"] = self.seen

    def run_cell(self, name: str, source: str, blank: str | None = None) -> None:
        """The statements of a cell, one after the other."""
        source = only_python(source)
        file = f"<{name}>"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        labels = labels_by_line(source)
        self.soft = Soft(lambda test: self.place(ast.get_source_segment(source, test)))
        for node in ast.parse(source).body:
            decorators = getattr(node, "decorator_list", [])
            first = min(n.lineno for n in (node, *decorators))
            behind = labels[max((n for n in labels if n <= first), default=0)]
            text = ast.get_source_segment(source, node) or ""
            self.at = {"cell": name, "labels": behind}
            self.at["key"] = self.place(text)
            self.run_statement(node, text, file, blank)

    def place(self, text: str) -> str:
        """By what a mistake's record knows a statement or an assertion again.

        Its first label and its text: what is written beside it changes nothing. The second
        with the same ones has a number.
        """
        label = "".join(self.at["labels"][:1])
        return counted(f"{label}: {' '.join(text.split())[:LONG]}", self.places)

    def run_statement(
        self, node: ast.stmt, text: str, file: str, blank: str | None
    ) -> None:
        table = symtable.symtable(text or "pass", file, "exec")
        uses, makes = set(global_names(table)), touched(text or "pass")
        uses = uses - set_by(node) - caught(node) | attributes(node, self.namespace)
        makes -= caught(node)
        behind = self.owners_of(uses) | ({blank} if blank else set())
        self.at |= {"uses": sorted(behind), "assert": isinstance(node, ast.Assert)}
        definition = isinstance(node, ast.FunctionDef | ast.ClassDef)
        tree = ast.Module([node], [])
        if not isinstance(node, ast.ClassDef):
            tree = self.soft.visit(tree)
        if not definition and uses & self.lost:
            self.lost |= makes
            self.note("skipped", text)
            return
        plain = {s.get_name() for s in table.get_symbols() if s.is_assigned()}
        if definition:  # what it changes when it is called; the rest is its own
            makes &= plain | set(global_names(table))
        calls = {*self.owner} if definition else set()  # it will, and changes none
        calls |= {n for n in makes if isinstance(self.namespace.get(n), NO_STATE)}
        for name in makes - (calls - plain):
            kept = set() if name in plain else self.behind.get(name, set())
            self.behind[name] = behind | kept
        self.lost -= makes
        code = compile(ast.fix_missing_locations(tree), file, "exec")
        before = len(self.notes)
        left_word()  # of what was caught
        try:
            exec(code, self.namespace)
            called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            if called and self.at["labels"] and len(self.notes) == before:
                self.note("passed", text)  # such as check_attention(…)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.lost |= makes
            self.failure(raised_in(node, error, file) or text, error)
            self.notes[-1]["story"] = self.notes[-1]["kind"] == "raised"

    def owners_of(self, names: set[str]) -> set[str]:
        """The reader's definitions that stand behind what has these names."""
        carry = [n for n in names if not isinstance(self.namespace.get(n), CARRY_NOTHING)]
        behind = set().union(*(self.behind.get(name, set()) for name in carry))
        return behind | {self.owner[name] for name in names if name in self.owner}

    def failure(self, text: str, error: BaseException) -> None:
        came = raised(error)
        kind = came.kind(self.lost)
        said = came.said if kind == "failed" else f"{came.name}: {came.said}"
        known = [came.name, digits(came.stuck or came.said[:400])]
        more: dict[str, Any] = {"place": ""}
        if kind in ("raised", "unwritten"):
            more["running"] = running(came.frames)
            mine = [n for n in self.owner.values() if n in more["running"]]
            more["place"] = place_in(came.frames, mine[-1:] if came.stuck else mine)
        self.note(kind, text, came=said[:400], digits=known, **more)

    def seen(
        self, place: str, text: str, form: str, names: dict, work: Any, message: Any
    ) -> None:
        """What an assertion calls in place of raising: `work` gives its parts.

        Each of the `names` in it is given by a function, as it may be one of a check's own.
        """
        self.at["key"] = counted(place, self.turns, "turn ")
        if self.at["assert"]:  # each part of it for itself
            tree = ast.parse(text)
            part = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
            part |= attributes(tree, self.namespace)
            self.at["uses"] = sorted(self.owners_of(part))
        try:
            parts = work()
            good = holds(form, parts)
            said = "" if good or message is None else str(message())
        except BaseException as error:
            self.failure(text, error)
            return
        if good:
            self.note("passed", text)
            return
        values = apart(form, parts)
        shown = {n: v for n, look in names.items() if (v := looked_at(look))}
        self.note(
            "failed",
            text,
            compared=sides(values),
            differs=differences(form, values),
            digits=[digits(v) for v in values] + unseen(form, values),
            inputs=shown,
            message=said,
        )

    def note(self, kind: str, text: str, **more: Any) -> None:
        at = {name: self.at[name] for name in ("key", "cell", "labels", "uses")}
        self.notes.append(at | {"kind": kind, "text": text[:400]} | more)


def counted(name: str, found: Counter[str], word: str = "") -> str:
    """The name; from its second time on, with a number."""
    found[name] += 1
    return name if found[name] == 1 else f"{name} ({word}{found[name]})"
