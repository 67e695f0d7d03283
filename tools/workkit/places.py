"""Where an error came: the lines of a statement, or of the reader's own code."""

from __future__ import annotations

import ast
import linecache
import textwrap
import traceback
from collections.abc import Iterable
from pathlib import Path


def place_of(error: BaseException, cells: Iterable[str] = ()) -> str:
    """The last line that was running in the reader's cells, or in the package."""
    return place_in(traceback.extract_tb(error.__traceback__), cells)


def place_in(frames: list[traceback.FrameSummary], cells: Iterable[str] = ()) -> str:
    """The same, of the lines that were running."""
    frames = frames[::-1]
    for frame in frames:
        if (name := frame.filename.strip("<>")) in cells:
            return f"in line {frame.lineno} of your {name}: {frame.line}"
    for frame in frames:
        if "attnlib" in Path(frame.filename).parts[-3:]:
            file = frame.filename[frame.filename.rindex("attnlib") :]
            return f"in line {frame.lineno} of {file}: {frame.line}"
    return ""


def raised_in(node: ast.stmt, error: BaseException, file: str) -> str:
    """The lines of the statement that raised, within a larger one."""
    inner: list[ast.stmt] = [node]
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == file and frame.lineno:
            here = [n for n in inside(node) if n.lineno <= frame.lineno <= last_of(n)]
            inner = here or inner
    first, last = inner[-1].lineno, last_of(inner[-1])
    return textwrap.dedent("".join(linecache.getlines(file)[first - 1 : last])).strip()


def inside(node: ast.AST) -> list[ast.stmt]:
    """The statement and those within it, the innermost last."""
    return [n for n in ast.walk(node) if isinstance(n, ast.stmt)]


def last_of(node: ast.stmt) -> int:
    """The last line of a statement, or of its head where it has others within."""
    body = getattr(node, "body", None)
    if isinstance(body, list) and body:
        return max(node.lineno, body[0].lineno - 1)
    return node.end_lineno or node.lineno
