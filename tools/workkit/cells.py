"""What code needs, imports and checks; its assertions as calls that note."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Callable
from types import ModuleType
from typing import Any

from bookkit.grammar import CHECKS, only_python
from bookkit.stage import touched, used

ALIKE = {"same", "equal", "allclose", "close", "array_equal", "isclose"}


def is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def imported(cells: list[dict]) -> set[str]:
    """The modules that cells import."""
    trees = [ast.parse(only_python(cell["source"])) for cell in cells]
    imports = [n for tree in trees for n in ast.walk(tree) if is_import(n)]
    names = {n.module or "" for n in imports if isinstance(n, ast.ImportFrom)}
    return names | {a.name for n in imports if isinstance(n, ast.Import) for a in n.names}


def starts_processes(cells: list[dict]) -> bool:
    return "torch.distributed" in imported(cells)


def attributes(tree: ast.AST, namespace: dict[str, Any]) -> set[str]:
    """The names of attributes, but for what belongs to another library's module."""
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    owners = [namespace.get(getattr(n.value, "id", "")) for n in nodes]
    theirs = [isinstance(o, ModuleType) and "attnlib" not in o.__name__ for o in owners]
    return {n.attr for n, other in zip(nodes, theirs, strict=True) if not other}


def set_by(node: ast.stmt) -> set[str]:
    """What a loop counts with: its values before the loop do not matter."""
    if not isinstance(node, ast.For):
        return set()
    read = {n.id for n in ast.walk(node.iter) if isinstance(n, ast.Name)}
    return {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)} - read


def caught(node: ast.stmt) -> set[str]:
    """Names of errors that it catches: they are gone when it has run."""
    handlers = [n for n in ast.walk(node) if isinstance(n, ast.ExceptHandler)]
    return {n.name for n in handlers if n.name}


def is_check(source: str) -> bool:
    return any(CHECKS.match(line) for line in source.splitlines())


def counting(source: str) -> set[str]:
    """What a comprehension gives a value: only from Python 3.12 on does it look global."""
    parts = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.comprehension)]
    names = [n for part in parts for n in ast.walk(part.target)]
    return {n.id for n in names if isinstance(n, ast.Name)}


def needed(cells: list[dict]) -> set[int]:
    """The cells that checks and exercises need: they define or change what those use."""
    sources = [only_python(cell["source"]) for cell in cells]
    imported = set()
    for source in sources:
        for node in filter(is_import, ast.walk(ast.parse(source))):
            imported |= {(a.asname or a.name).partition(".")[0] for a in node.names}
    uses = [(used(source) | counting(source)) - imported for source in sources]
    makes = [(touched(source) | counting(source)) - imported for source in sources]
    chosen = {i for i, source in enumerate(sources) if is_check(source)}
    chosen |= {i for i, source in enumerate(sources) if source.startswith("# attnlib/")}
    for index, cell in enumerate(cells):
        if "exercise" in cell:  # what its check needs, and its answer
            chosen.add(index)
            uses[index] |= set(cell["checks"]) | set(cell.get("names", []))
    while True:
        more = {
            i
            for last in chosen
            for i in range(last)
            if i not in chosen and makes[i] & uses[last]
        }
        if not more:
            return chosen
        chosen |= more


class Soft(ast.NodeTransformer):
    """Assertions as calls of `__seen__`, each `and` in them as one of its own.

    `place` gives the name by which each is known again.
    """

    def __init__(self, place: Callable[[ast.expr], str]) -> None:
        self.place = place

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """A function without arguments is a check in parts; in others they stay hard."""
        return node if ast.unparse(node.args) else self.generic_visit(node)

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
        values = [ast.Lambda(empty, ast.Name(n, ast.Load())) for n in names]
        given = [self.place(test), ast.unparse(test), form]
        given = [ast.Constant(said) for said in given]
        given += [ast.Dict([ast.Constant(n) for n in names], values), work, told]
        return ast.Expr(ast.Call(ast.Name("__seen__", ast.Load()), given, []))


def parts_of(test: ast.expr) -> tuple[str, list[ast.expr]]:
    """How a test compares, and the expressions that are to be evaluated, each once."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return type(test.ops[0]).__name__, [test.left, test.comparators[0]]
    if isinstance(test, ast.Compare):
        return " ".join(type(op).__name__ for op in test.ops), [
            test.left,
            *test.comparators,
        ]
    if isinstance(test, ast.Call) and getattr(test.func, "id", "") == "all":
        made = test.args[0]
        if isinstance(made, ast.GeneratorExp) and (same := comparison(made.elt)):
            pair = ast.Tuple(same[2:], ast.Load())
            return "all", [*same[:2], ast.ListComp(pair, made.generators)]
    if same := comparison(test):
        return "call", same
    return "value", [test]


def comparison(test: ast.expr) -> list[ast.expr]:
    """Function, options and values of such a call as same(a, b); empty if it is none."""
    if not isinstance(test, ast.Call) or len(test.args) < 2:
        return []
    name = getattr(test.func, "id", getattr(test.func, "attr", ""))
    plain = not any(isinstance(a, ast.Starred) for a in test.args)
    if name not in ALIKE or not plain or not all(k.arg for k in test.keywords):
        return []
    keys = [ast.Constant(k.arg) for k in test.keywords]
    return [test.func, ast.Dict(keys, [k.value for k in test.keywords]), *test.args]


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
