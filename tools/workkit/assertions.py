"""Assertions of a cell as calls that note what they compare; the labels that they check."""

from __future__ import annotations

import ast
import io
import tokenize

from bookkit.grammar import CHECKS

ALIKE = {"same", "equal", "allclose", "close", "array_equal", "isclose"}


class Soft(ast.NodeTransformer):
    """Assertions as calls of `__seen__`, each `and` in them as one of its own."""

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
        given = [ast.Constant(ast.unparse(test)), ast.Constant(form)]
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
