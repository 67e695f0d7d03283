"""Runs a chapter's code statement by statement, and notes what each assertion compared.

An assertion that fails does not end the cell: it is noted with what came and what was
expected, and the next statement runs. What needs the result of a statement that failed is
passed over. Each note says which of the reader's definitions stand behind it.
"""

from __future__ import annotations

import ast
import io
import linecache
import symtable
import tokenize
from typing import Any

from bookkit.grammar import CHECKS, only_python
from bookkit.stage import touched
from bookkit.statements import global_names
from workkit.values import brief, digits, holds

ALIKE = {"same", "equal", "allclose", "close", "array_equal", "isclose"}
YOURS = "yours to write"


class Tracer:
    """A namespace, and what happened in it."""

    def __init__(self, namespace: dict[str, Any], owner: dict[str, str]) -> None:
        self.namespace = namespace
        self.owner = owner  # of a name: the blank that defines it
        self.behind: dict[str, set[str]] = {}  # a name: blanks that its value came from
        self.lost: set[str] = set()  # names that a failed statement would have made
        self.notes: list[dict[str, Any]] = []
        self.at: dict[str, Any] = {}
        namespace["__seen__"] = self.seen

    def run_cell(self, name: str, source: str, blank: str | None = None) -> None:
        """The statements of a cell, one after the other."""
        source = only_python(source)
        file = f"<{name}>"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        labels = labels_by_line(source)
        for number, node in enumerate(ast.parse(source).body):
            first = min([node.lineno, *(d.lineno for d in decorators(node))])
            behind = labels[max((n for n in labels if n <= first), default=0)]
            text = ast.get_source_segment(source, node) or ""
            self.at = {"cell": name, "statement": number, "labels": behind, "parts": 0}
            self.run_statement(node, text, file, blank)

    def run_statement(self, node: ast.stmt, text: str, file: str, blank: str | None) -> None:
        table = symtable.symtable(text or "pass", file, "exec")
        uses, makes = set(global_names(table)), touched(text or "pass")
        uses |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
        behind = set().union(*(self.behind.get(name, set()) for name in uses))
        behind |= {self.owner[name] for name in uses if name in self.owner}
        behind |= {blank} if blank else set()
        self.at |= {"uses": sorted(behind)}
        definition = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if not definition and uses & self.lost:
            self.lost |= makes
            self.note("skipped", text)
            return
        plain = {s.get_name() for s in table.get_symbols() if s.is_assigned()}
        for name in makes:
            kept = set() if name in plain else self.behind.get(name, set())
            self.behind[name] = behind | kept
        self.lost -= makes
        tree = ast.Module([node], [])
        if not definition:  # assertions in functions stay hard
            tree = Soft().visit(tree)
        code = compile(ast.fix_missing_locations(tree), file, "exec")
        try:
            exec(code, self.namespace)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self.lost |= makes
            self.failure(text, error)

    def failure(self, text: str, error: BaseException) -> None:
        said = str(error)
        kind = "failed" if isinstance(error, AssertionError) else "raised"
        if isinstance(error, NameError) and getattr(error, "name", "") in self.lost:
            kind = "skipped"
        if isinstance(error, NotImplementedError) and YOURS in said:
            kind = "unwritten"
        name = type(error).__name__
        came = said if kind == "failed" else f"{name}: {said}"
        self.note(kind, text, came=came[:400], digits=[name, digits(said[:400])])

    def seen(self, text: str, form: str, names: list[str], work: Any, message: Any) -> None:
        """What an assertion calls in place of raising: `work` gives its parts."""
        self.at["parts"] += 1
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
        values = list(parts[-2:]) if form != "value" else []
        shown = {n: brief(self.namespace[n]) for n in names if shows(self.namespace.get(n))}
        self.note(
            "failed",
            text,
            compared=[brief(v, values[1 - i]) for i, v in enumerate(values)],
            digits=[digits(v) for v in values],
            inputs=shown,
            message=said,
        )

    def note(self, kind: str, text: str, **more: Any) -> None:
        at = self.at
        key = f"{at['cell']}:{at['statement']}:{at['parts']}"
        kept = {"kind": kind, "key": key, "cell": at["cell"], "text": text[:400]}
        self.notes.append(kept | {"labels": at["labels"], "uses": at["uses"]} | more)


def shows(value: Any) -> bool:
    return hasattr(value, "shape") or isinstance(value, int | float | list | tuple)


class Soft(ast.NodeTransformer):
    """Assertions as calls of `__seen__`, each `and` in them as one of its own."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.stmt | list[ast.stmt]:
        if any(isinstance(n, ast.NamedExpr) for n in ast.walk(node)):
            return node
        tests = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
        if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.Or):
            tests = [node.test]
        return [ast.copy_location(self.call(test, node.msg), node) for test in tests]

    def call(self, test: ast.expr, message: ast.expr | None) -> ast.stmt:
        form, parts = parts_of(test)
        names = sorted({n.id for n in ast.walk(test) if isinstance(n, ast.Name)})
        empty = ast.arguments([], [], None, [], [], None, [])
        work = ast.Lambda(empty, ast.Tuple(parts, ast.Load()))
        told = ast.Lambda(empty, message) if message else ast.Constant(None)
        given = [ast.Constant(ast.unparse(test)), ast.Constant(form)]
        given += [ast.List([ast.Constant(n) for n in names], ast.Load()), work, told]
        return ast.Expr(ast.Call(ast.Name("__seen__", ast.Load()), given, []))


def parts_of(test: ast.expr) -> tuple[str, list[ast.expr]]:
    """How a test compares, and the expressions that are to be evaluated, each once."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return type(test.ops[0]).__name__, [test.left, test.comparators[0]]
    if isinstance(test, ast.Call) and len(test.args) == 2:
        name = getattr(test.func, "id", getattr(test.func, "attr", ""))
        plain = not any(isinstance(a, ast.Starred) for a in test.args)
        if name in ALIKE and plain and all(k.arg for k in test.keywords):
            keys = [ast.Constant(k.arg) for k in test.keywords]
            options = ast.Dict(keys, [k.value for k in test.keywords])
            return "call", [test.func, options, *test.args]
    return "value", [test]


def decorators(node: ast.stmt) -> list[ast.expr]:
    return getattr(node, "decorator_list", [])


def labels_by_line(source: str) -> dict[int, list[str]]:
    """The labels that a cell's comments name, by the line from which on they hold."""
    found: dict[int, list[str]] = {0: []}
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        match = CHECKS.match(token.string) if token.type == tokenize.COMMENT else None
        if match:
            line = token.start[0]
            before = found.pop(last) if last == line - 1 else []
            found[line] = before + match[2].split(", ")
            last = line
    return found
