"""What a costly proof depends on, as one hash, and the record of the proofs that were seen.

A proof is a test that takes long: a chapter run again, its planted mistakes, a page looked
at in a browser, a kernel compiled. Its key is the hash of the files that it depends on: the
Python files, with all that they import of this repository, chapters, pages, data; of the
pins in requirements.txt; and of Python's version and the system. A name imported from
`attnlib` leads to the module that defines it, so that a change of chapter 20 leaves chapter
3 proven; and of a file of tests or tools counts what is used of it. Of code counts what it
does: comments and docstrings are no part of it, nor is the order of functions and classes.

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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bookkit.grammar import only_python

RECORD = "tests/proofs.json"
PINS = "requirements.txt"
MODEL = "requirements-model.txt"  # a trained model, pinned as well
ROOMS = ("tools", "benchmarks", "examples", "tests/*")  # where imports are looked for
PARTED = ("tests/", "tools/")  # of whose files a proof needs what it names
FILE = re.compile(r'"((?:_static|\.\./[\w/]+)/[\w.-]+)"')  # as a chapter names one
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
Need = str | Callable[..., str]


class Proofs:
    """The keys of proofs in one state of the repository."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        rooms = [room for pattern in ROOMS for room in sorted(self.root.glob(pattern))]
        self.rooms = [self.root, *(room for room in rooms if room.is_dir())]
        self.statements, self.part = cache(statements_of), cache(self._part)
        self.digest, self.needed = cache(self._digest), cache(self._needed)

    def key(self, needs: Iterable[str], texts: Iterable[str] = ()) -> str:
        """The hash of files, which patterns from the root name, and of some texts.

        `book/01.ipynb#code` is a chapter's code alone, `#run` its code and outputs;
        `tests/book/test_faults.py#test_some_are_planted_alone` is a test with what it uses;
        `!tools/workkit/trials.py` leaves out a file, with what it alone leads to.

        Raises:
            FileNotFoundError: a pattern finds nothing.
        """
        facts = (
            f"{name}#{part}: {self.digest(name, part)}" for name, part in self.all(needs)
        )
        system = (sys.platform, *platform.python_version_tuple()[:2])
        return hashed("\n".join([*system, *sorted(facts), *texts]))

    def all(self, needs: Iterable[str]) -> set[tuple[str, str]]:
        """All that some files need: each file, with the part of it that counts."""
        pins = [name for name in (PINS, MODEL) if (self.root / name).is_file()]
        named = {need: self.matches(need.removeprefix("!")) for need in (*pins, *needs)}
        left_out = {name for n in named if n[0] == "!" for name, _ in named[n]}
        seen, ahead = set(), [pair for n in named if n[0] != "!" for pair in named[n]]
        while ahead:
            pair = ahead.pop()
            if pair not in seen and pair[0] not in left_out:
                seen.add(pair)
                ahead += self.needed(*pair)
        return seen

    def matches(self, need: str) -> set[tuple[str, str]]:
        pattern, _, part = need.partition("#")
        found = {path for path in self.root.glob(pattern) if path.is_file()}
        if not found:
            raise FileNotFoundError(f"a proof depends on {pattern}, which is not there")
        return {(self.name(path), part) for path in found}

    def name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _digest(self, name: str, part: str) -> str:
        path = self.root / name
        if path.suffix == ".ipynb" and part:
            code = (one.code for one in self.statements(path))
            return hashed("\n".join([*code, *outside_of_code(path, part)]))
        if path.suffix == ".py":
            return hashed("\n".join(one.code for one in self.part(path, part)))
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def _part(self, path: Path, name: str) -> list[Statement]:
        """A file of Python, or of it what a name needs and what is no definition."""
        body = self.statements(path)
        homes: dict[str, set[int]] = defaultdict(set)
        for at, one in enumerate(body):
            for defined in one.defines:
                homes[defined].add(at)
        if name not in homes:  # all of it, or a submodule
            return body
        kept = {at for at, one in enumerate(body) if one.always}
        ahead = [name, *(used for at in kept for used in body[at].uses)]
        while ahead:
            new = homes.pop(ahead.pop(), set()) - kept
            kept |= new
            ahead += (used for at in new for used in body[at].uses)
        return [body[at] for at in sorted(kept)]

    def _needed(self, name: str, part: str) -> set[tuple[str, str]]:
        """What a file of Python or a chapter imports here, and what it reads by name."""
        path = self.root / name
        if path.suffix not in (".py", ".ipynb"):
            return set()
        chapter = path.suffix == ".ipynb"  # whose parts are no names
        body = self.statements(path) if chapter else self.part(path, part)
        taken = {pair for one in body for pair in one.imports}
        found = {(self.find(*pair), pair[1]) for pair in taken}
        if chapter:
            files = FILE.findall("\n".join(sources(path, "code")))
            found |= {(path.parent.joinpath(file).resolve(), None) for file in files}
        there = ((self.name(file), of) for file, of in found if file and file.is_file())
        return {(file, (of or "") if file.startswith(PARTED) else "") for file, of in there}

    def find(self, module: str, name: str | None) -> Path | None:
        """The file that defines a module, or a name of it; None if it is not ours."""
        path = self.module(module)
        if path is None and name is not None:  # of a room, a file
            return self.module(f"{module}.{name}")
        if path is None or name is None or path.name != "__init__.py":
            return path
        for one in self.statements(path):
            if name in one.defines:
                for origin, first in one.imports:
                    if origin != module:
                        return self.find(origin, first)
        return self.module(f"{module}.{name}") or path

    def module(self, dotted: str) -> Path | None:
        parts = dotted.split(".")
        for room in self.rooms:
            for path in (room.joinpath(*parts, "__init__.py"), room.joinpath(*parts)):
                path = path if path.suffix else path.with_name(f"{path.name}.py")
                if path.is_file():
                    return path
        return None


def imports(
    nodes: list[ast.AST], parts: dict[str, set[str]]
) -> Iterator[tuple[str, str | None]]:
    """The modules that code imports, each with a name that it takes of it."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:  # `import package`, of which parts may be used only
                taken = parts.get(alias.name, {None}) if not alias.asname else {None}
                yield from ((alias.name, part) for part in taken)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


@dataclass(frozen=True)
class Statement:
    """A statement of a file: its code, and how it hangs together with the others."""

    code: str
    defines: set[str]
    uses: set[str]  # names, fixtures, and names as texts
    imports: list[tuple[str, str | None]]
    always: bool  # acts on all tests: a mark or fixture for all, a loop, a call


def statements_of(path: Path) -> list[Statement]:
    """The statements of a file of Python or a chapter, without docstrings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join(only_python(source) for source in sources(path, "code"))
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and len(body) > 1 and is_text(body[0]):
            del body[0]  # one that is all there is stays, as a body needs a statement
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) or (node is tree and path.suffix == ".py"):
            node.body = in_any_order(node.body)
    parts = parts_used(tree)
    return [statement(one, parts) for node in tree.body for one in one_by_one(node)]


def in_any_order(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements of a module or class, with its functions and classes last, and sorted.

    Where one stands matters if it is decorated, as a decorator may count its calls, or if
    it or a name that it uses is bound twice, as a default value may be another then. Such a
    one keeps its place. One that is moved before its base can't be imported.
    """
    bound = Counter(name for node in body for name in names_bound(node))

    def moves(node: ast.stmt) -> bool:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.decorator_list:
            return False
        used = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        return all(bound[name] < 2 for name in {node.name, *used})

    stay = [node for node in body if not moves(node)]
    return stay + sorted(filter(moves, body), key=ast.dump)


def names_bound(node: ast.stmt) -> set[str]:
    """What a statement binds, inside of an `if`, a loop or a `try` as well."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    return {name for inner in ast.walk(node) for name in names_defined(inner)}


def parts_used(tree: ast.AST) -> dict[str, set[str]]:
    """For each name of which code uses parts only, as `name.part`: these parts."""
    inside = [*ast.walk(tree)]
    whole = Counter(node.id for node in inside if isinstance(node, ast.Name))
    parts: dict[str, set[str]] = defaultdict(set)
    for node in inside:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            parts[node.value.id].add(node.attr)
            whole[node.value.id] -= 1
    return {name: found for name, found in parts.items() if not whole[name]}


def one_by_one(node: ast.stmt) -> list[ast.stmt]:
    """An import of several names as several; any other statement as it is."""
    if isinstance(node, ast.ImportFrom):
        return [ast.ImportFrom(node.module, [name], node.level) for name in node.names]
    return [node]


def statement(node: ast.stmt, parts: dict[str, set[str]]) -> Statement:
    inside = [*ast.walk(node)]
    defines = names_defined(node)
    uses = {inner.id for inner in inside if isinstance(inner, ast.Name)}
    uses |= {inner.arg for inner in inside if isinstance(inner, ast.arg)}
    uses |= {
        inner.value
        for inner in inside
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str)
    }
    auto = any(isinstance(n, ast.keyword) and n.arg == "autouse" for n in inside)
    always = auto or not defines or any(name.startswith("pytest") for name in defines)
    return Statement(ast.dump(node), defines, uses, [*imports(inside, parts)], always)


def names_defined(node: ast.stmt) -> set[str]:
    """What a statement of a file defines there; not what it writes into, as os.environ."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        inside = (inner for target in targets for inner in ast.walk(target))
        names = (inner for inner in inside if isinstance(inner, ast.Name))
        return {name.id for name in names if isinstance(name.ctx, ast.Store)}
    return {node.name} if hasattr(node, "name") else set()


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
