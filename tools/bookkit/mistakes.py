"""The mistakes kept beside the chapters, in book/faults/NN_name.toml.

An [[equation]] has a label, the mistake in a sentence, and changes of the chapter's code:
pairs of an old text, found once, and a new one. An [[exercise]] has a number, a kind, the
mistake, and an answer: code that ends by calling the exercise's check.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from bookkit.chapters import BookError, Chapter

KINDS = ("misunderstanding", "shortcut")


@dataclass
class Fault:
    """A mistake: of an equation, with changes, or in an exercise, with an answer."""

    subject: str  # eq-softmax, or 1.2
    mistake: str
    changes: list[list[str]] = field(default_factory=list)
    kind: str = "equation"
    answer: str = ""

    def __str__(self) -> str:
        return f"{self.subject}: {self.mistake}"


def wanted(chapter: Chapter) -> set[tuple[str, str]]:
    """Subject and kind of what a chapter keeps a mistake for, at least one of each."""
    asked = re.findall(r"^### Exercise (\w+\.\d+):", chapter.prose, re.MULTILINE)
    found = {(number, kind) for number in asked for kind in KINDS}
    return found | {(equation.label, "equation") for equation in chapter.equations}


def read_faults(root: Path, chapter: Chapter) -> list[Fault]:
    """The mistakes kept for a chapter; none if it has no file."""
    path = root / "book" / "faults" / f"{chapter.name}.toml"
    if not path.exists():
        return []
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        faults = [
            Fault(t.pop("label"), t.pop("mistake"), t.pop("changes"))
            for t in tables.get("equation", [])
        ]
        faults += [
            Fault(t.pop("number"), t.pop("mistake"), [], t.pop("kind"), t.pop("answer"))
            for t in tables.get("exercise", [])
        ]
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise BookError(f"book/faults/{path.name}: {error}") from error
    odd = {key for entries in tables.values() for t in entries for key in t}
    odd |= tables.keys() - {"equation", "exercise"}
    odd |= {fault.kind for fault in faults} - {"equation", *KINDS}
    if odd:
        raise BookError(f"book/faults/{path.name}: what is {', '.join(sorted(odd))}?")
    return faults
