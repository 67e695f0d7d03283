"""A class that a later cell of its module continues: `class X(X):`, and methods.

In the notebook the continuation is a subclass that has the same name; in the module its
methods stand in the one class.
"""

import ast
import symtable
from dataclasses import dataclass

from bookkit.statements import Statement, statements


@dataclass
class Member:
    """A statement of a class's body, with the comments and blank lines above it."""

    text: str
    names: list[str]


def members(text: str) -> tuple[str, list[Member]]:
    """A class as its head, down to the colon, and what stands in its body."""
    (node,) = ast.parse(text).body
    lines, found = text.split("\n"), []
    start = head = end_of_head(node, lines)
    for part in node.body:
        own = "\n".join(lines[start : part.end_lineno])
        found.append(Member(own, names_of(part)))
        start = part.end_lineno
    return "\n".join(lines[:head]), found


def end_of_head(node: ast.ClassDef, lines: list[str]) -> int:
    """The number of lines down to the colon; comments below it belong to the body."""
    for end in range(node.lineno, node.body[0].lineno):
        try:
            ast.parse("\n".join([*lines[node.lineno - 1 : end], "    pass"]))
        except SyntaxError:
            continue
        return end
    return node.body[0].lineno - 1


def names_of(part: ast.stmt) -> list[str]:
    """What a statement of a class's body defines."""
    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [part.name]
    names = [n for n in ast.walk(part) if isinstance(n, ast.Name)]
    return [n.id for n in names if isinstance(n.ctx, ast.Store)]


def joined(first: Statement, more: list[Statement], where: str) -> Statement:
    """The class in one piece, its methods in the order of the book."""
    if not more:
        return first
    bodies = ["\n".join(m.text for m in members(s.text)[1]).strip("\n") for s in more]
    return statements("\n\n".join([first.text, *bodies]), where)[0]


def misuse(s: Statement, alone: bool, before: list[Statement]) -> str:
    """Why a continuation can't join its class, of the cells before; empty if it can."""
    name = s.node.name
    first = [b for b in before if isinstance(b.node, ast.ClassDef) and b.node.name == name]
    if not first:
        return f"no earlier cell of the module defines a class {name}"
    if not alone:
        return "give it a cell of its own"
    if s.text.lstrip("\n").partition("\n")[0] != f"class {name}({name}):":
        head = "without other bases, decorators, or comments above it"
        return f"begin it with `class {name}({name}):`, {head}"
    return misplaced(s.node) or clash(s, before)


def misplaced(node: ast.ClassDef) -> str:
    """What a continuation holds besides methods."""
    if ast.get_docstring(node) is not None:
        return "the class has its docstring already, in its first cell"
    for part in node.body:
        if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            return f"it holds methods only, not `{ast.unparse(part).partition(chr(10))[0]}`"
    return ""


def clash(s: Statement, before: list[Statement]) -> str:
    """What would mean one thing in the notebook and another in the module."""
    name = s.node.name
    own = [b for b in before if name in (b.continues, getattr(b.node, "name", ""))]
    has = {n for b in own for m in members(b.text)[1] for n in m.names}
    if again := has & {part.name for part in s.node.body}:
        return f"the class already has {', '.join(sorted(again))}"
    asked = [n for n in ast.walk(s.node) if isinstance(n, ast.Attribute) and n.attr in has]
    for node in asked:
        if ast.unparse(node.value).startswith("super("):
            base = "and that of its base in the module"
            return f"super().{node.attr} is {name}'s own in the notebook, {base}"
    (scope,) = symtable.symtable(s.text, "", "exec").get_children()
    read = {symbol.get_name() for symbol in scope.get_symbols() if symbol.is_referenced()}
    if seen := has & read:
        names = ", ".join(sorted(seen))
        return f"outside of its methods it uses {names}, which is the class's own there"
    return ""
