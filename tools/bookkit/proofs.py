"""What a costly proof depends on, as one hash, and the record of the proofs that were seen.

A proof is a test that takes long: a chapter run again, its planted mistakes, a page looked
at in a browser, a kernel compiled. Its key is the hash of the files that it depends on: the
Python files, with all that they import of this repository, chapters, pages, data; of the
pins in requirements.txt; and of Python's version and the system. A name imported from
`attnlib` leads to the module that defines it, so that a change of chapter 20 leaves chapter
3 proven. Of code counts what it does: comments and docstrings are no part of it.

`tests/proofs.json` holds the keys that were proven. Content alone decides: no clock, no
commit.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from bookkit.grammar import only_python

RECORD = "tests/proofs.json"
PINS = "requirements.txt"
ROOMS = ("tools", "benchmarks", "examples", "tests/*")  # where imports are looked for
FILE = re.compile(r'"((?:_static|\.\./[\w/]+)/[\w.-]+)"')  # as a chapter names one
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
Need = str | Callable[..., str]


class Proofs:
    """The keys of proofs in one state of the repository."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        rooms = [room for pattern in ROOMS for room in sorted(self.root.glob(pattern))]
        self.rooms = [self.root, *(room for room in rooms if room.is_dir())]
        self.tree, self.code = cache(tree_of), cache(self._code)
        self.digest, self.needed = cache(self._digest), cache(self._needed)

    def key(self, needs: Iterable[str], texts: Iterable[str] = ()) -> str:
        """The hash of files, which patterns from the root name, and of some texts.

        `book/01.ipynb#code` is a chapter's code alone, `#run` its code and outputs.

        Raises:
            FileNotFoundError: a pattern finds nothing.
        """
        seen = self.files(needs)
        facts = [f"{name}#{part}: {self.digest(name, part)}" for name, part in seen.items()]
        system = (sys.platform, *platform.python_version_tuple()[:2])
        return hashed("\n".join([*system, *sorted(facts), *texts]))

    def files(self, needs: Iterable[str]) -> dict[str, str]:
        """All that some files need, with the part of each that counts."""
        given = {PINS: ""}
        for need in needs:
            pattern, _, part = need.partition("#")
            found = sorted(path for path in self.root.glob(pattern) if path.is_file())
            if not found:
                raise FileNotFoundError(f"a proof depends on {pattern}, which is not there")
            given |= {self.name(path): part for path in found}
        seen, ahead = dict(given), [self.root / name for name in given]
        while ahead:
            for path in self.needed(ahead.pop()):
                if self.name(path) not in seen:
                    seen[self.name(path)] = ""
                    ahead.append(path)
        return seen

    def name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _digest(self, name: str, part: str = "") -> str:
        path = self.root / name
        if path.suffix == ".ipynb" and part:
            return hashed("\n".join([self.code(path), *outside_of_code(path, part)]))
        if path.suffix == ".py":
            return hashed(self.code(path))
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def _code(self, path: Path) -> str:
        """What a file computes, in one form: without comments and docstrings.

        A docstring that is all there is stays, as a body needs a statement.
        """
        tree = self.tree(path)
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and len(body) > 1 and is_text(body[0]):
                del body[0]
        return ast.dump(tree)

    def _needed(self, path: Path) -> set[Path]:
        """What a file of Python or a chapter imports here, and what it reads by name."""
        if path.suffix not in (".py", ".ipynb"):
            return set()
        found = {self.find(*pair) for pair in imports(self.tree(path))}
        if path.suffix == ".ipynb":
            cells = "\n".join(sources(path, "code"))
            found |= {path.parent.joinpath(name).resolve() for name in FILE.findall(cells)}
        return {there for there in found if there and there.is_file()}

    def find(self, module: str, name: str | None) -> Path | None:
        """The file that defines a module, or a name of it; None if it is not ours."""
        path = self.module(module)
        if path is None or name is None or path.name != "__init__.py":
            return path
        body = self.tree(path).body
        for node in (node for node in body if isinstance(node, ast.ImportFrom)):
            for alias in node.names:
                if name == (alias.asname or alias.name) and node.module != module:
                    return self.find(node.module or "", alias.name)
        return self.module(f"{module}.{name}") or path

    def module(self, dotted: str) -> Path | None:
        parts = dotted.split(".")
        for room in self.rooms:
            for path in (room.joinpath(*parts, "__init__.py"), room.joinpath(*parts)):
                path = path if path.suffix else path.with_name(f"{path.name}.py")
                if path.is_file():
                    return path
        return None


def imports(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """The modules that code imports, each with a name that it takes of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def tree_of(path: Path) -> ast.Module:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join(only_python(source) for source in sources(path, "code"))
    return ast.parse(text)


def is_text(node: ast.stmt) -> bool:
    value = getattr(node, "value", None) if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def sources(path: Path, kind: str) -> list[str]:
    """The cells of one kind, code or markdown, of a notebook."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


def outside_of_code(path: Path, part: str) -> Iterator[str]:
    """The marks of a chapter's checks and equations; of `#run` its outputs, too."""
    for text in sources(path, "code"):
        yield from re.findall(r"^#.*", text, re.MULTILINE)
    for text in sources(path, "markdown"):
        yield from COMMENT.findall(text)
    if part == "run":
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            yield json.dumps([cell.get("outputs"), cell["metadata"]], sort_keys=True)


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def read_record(root: Path) -> dict[str, str]:
    """Subjects and the keys with which they were proven."""
    path = root / RECORD
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_record(root: Path, record: dict[str, str]) -> None:
    text = json.dumps(dict(sorted(record.items())), indent=0, ensure_ascii=False)
    path = root / RECORD
    new = path.with_suffix(".new")
    new.write_text(text + "\n", encoding="utf-8", newline="\n")
    new.replace(path)  # whole, for who reads it meanwhile
