"""Which statements of a function are left to the reader of the workbook, in runs."""

from __future__ import annotations

import ast
import re

PLUMBING = re.compile(
    r"refuse_|require_|as_autocast|under_autocast|^super$|fused_attention|^with_batch$"
)


def runs_of(function: ast.FunctionDef, given: list[str]) -> list[tuple[ast.stmt, ast.stmt]]:
    """Statements of the body that follow each other and are left to the reader."""
    needed: set[str] = set()
    starts = tuple(g for g in given if not g.isidentifier())
    stays = {s for s in function.body if ast.unparse(s).startswith(starts)}
    later: set[str] = set()  # what the statements behind it read
    for statement in reversed(function.body):
        reads = names_of(statement, ast.Load)
        if statement not in stays:  # what those need that stay anyway may well be left
            made = names_of(statement, ast.Store)
            handed = isinstance(statement, ast.Assign) and made & needed  # to a refusal
            if is_plumbing(statement, made & later) or handed:
                stays.add(statement)
                needed |= reads
        later |= reads
    left = [s for s in function.body if s not in stays]
    if all(trivial(s) for s in left):
        return []  # nothing but `self.scale = scale`
    runs: list[tuple[ast.stmt, ast.stmt]] = []
    for before, statement in zip([None, *function.body], function.body, strict=False):
        if statement in left:
            joins = before in left
            runs[-1 if joins else len(runs) :] = [
                (runs[-1][0] if joins else statement, statement)
            ]
    return runs


def handed_on(function: ast.FunctionDef, first: ast.stmt, last: ast.stmt) -> list[str]:
    """What a run makes, and nothing before it, that a statement after it uses."""
    start, end = (function.body.index(s) for s in (first, last))
    after = set().union(*(names_of(s, ast.Load) for s in function.body[end + 1 :]))
    before = set().union(*(names_of(s, ast.Store) for s in function.body[:start]))
    run = function.body[start : end + 1]
    parts = ast.walk(ast.Module(run, []))
    names = [n for n in parts if isinstance(n, ast.Name)]
    stored = [n.id for n in names if isinstance(n.ctx, ast.Store)]
    stored += [s.name for s in run if isinstance(s, ast.FunctionDef)]
    return [n for n in dict.fromkeys(stored) if n in after - before]


def names_of(node: ast.AST, context: type) -> set[str]:
    found = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n.id for n in found if isinstance(n.ctx, context)}


def is_plumbing(statement: ast.stmt, results: set[str]) -> bool:
    """Whether a statement refuses or hands on; one that computes `results` does more."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return True  # the docstring
    if isinstance(statement, ast.Try):
        return False  # what is tried is the answer; only its handlers refuse
    raises = any(isinstance(n, ast.Raise) for n in ast.walk(statement)) and not results
    return raises or any(PLUMBING.search(n) for n in names_of(statement, ast.Load))


def trivial(statement: ast.stmt) -> bool:
    """`self.scale = scale`, or `pass`."""
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name):
        targets = {ast.unparse(target) for target in statement.targets}
        return targets == {f"self.{statement.value.id}"}
    return isinstance(statement, ast.Pass)
