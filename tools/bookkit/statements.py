"""Python source as top-level statements, each with what it defines and what it uses."""

import ast
import subprocess
import symtable
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bookkit.chapters import BookError
from bookkit.grammar import continuing


@dataclass
class Statement:
    """A top-level statement, with the comments and blank lines above it."""

    text: str
    node: ast.stmt
    names: list[str]  # what it defines, in order
    uses: set[str]  # the global names that it reads

    @property
    def is_import(self) -> bool:
        return isinstance(self.node, ast.Import | ast.ImportFrom)

    @property
    def continues(self) -> str:
        """The class of an earlier cell to which it adds methods."""
        return self.node.name if continuing(self.node) else ""

    @property
    def package(self) -> str:
        """What `from … import` imports from."""
        return getattr(self.node, "module", None) or ""

    @property
    def is_docstring(self) -> bool:
        value = getattr(self.node, "value", None)
        text = value.value if isinstance(value, ast.Constant) else None
        return isinstance(text, str) and bool(text.strip()) and self.text.endswith('"""')

    @property
    def keys(self) -> list[str]:
        """What the statement is recognized by after an edit."""
        return self.names or [ast.dump(self.node)]


@cache  # a chapter's cells are asked for again and again
def statements(source: str, where: str) -> list[Statement]:
    """The top-level statements of a source, in their order; not to be changed."""
    try:
        nodes = ast.parse(source).body
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise BookError(f"{where}: not Python: {error.msg}: {line}") from error
    lines, start, found = source.split("\n"), 0, []
    for node in nodes:
        text = "\n".join(lines[start : node.end_lineno])
        if not text:
            raise BookError(
                f"{where}: two statements on one line: {lines[start - 1].strip()}"
            )
        table = symtable.symtable(text, where, "exec")
        names = continuing(node) or [
            s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()
        ]
        found.append(Statement(text, node, names, set(global_names(table))))
        start = node.end_lineno or start
    if rest := "\n".join(lines[start:]).strip():
        raise BookError(
            f"{where}: move this comment above a statement, none follows it: {rest}"
        )
    return found


def global_names(table: symtable.SymbolTable) -> Iterator[str]:
    """The global names that a scope, or one inside it, reads."""
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (table.get_type() == "module" or symbol.is_global()):
            yield symbol.get_name()
    for inner in table.get_children():
        yield from global_names(inner)


def sections(source: str, where: str) -> tuple[str, list[Statement], list[Statement]]:
    """Docstring, imports and definitions, of a module or of its first cell."""
    found = statements(source, where)
    if not (found and found[0].is_docstring):
        raise BookError(
            f'{where}: a module starts with """a docstring""", then its imports'
        )
    end = next((i for i, s in enumerate(found) if i and not s.is_import), len(found))
    refuse_imports(found[end:], where)
    return found[0].text.strip(), found[1:end], found[end:]


def refuse_imports(body: list[Statement], where: str) -> None:
    for s in body:
        if s.is_import:
            line = ast.unparse(s.node)
            raise BookError(
                f"{where}: move `{line}` to the module's first cell, where its imports "
                "stand, between the docstring and the definitions"
            )


def formatted(text: str, file: str, root: Path) -> str:
    """The text as ruff sorts and formats it, with the repository's settings."""
    from ruff import find_ruff_bin  # here: the workbook's reader has none, and needs none

    for command in (["check", "--select", "I", "--fix"], ["format"]):
        done = subprocess.run(
            [find_ruff_bin(), *command, "--quiet", "--stdin-filename", file, "-"],
            input=text,
            capture_output=True,
            encoding="utf-8",
            cwd=root,
        )
        if done.returncode:
            raise BookError(f"{file}: ruff {command[0]}: {done.stdout}{done.stderr}")
        text = done.stdout
    return text
