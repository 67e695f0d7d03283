"""A chapter's code cells in one process, as in a notebook; changed ones in its forks."""

from __future__ import annotations

import ast
import builtins
import linecache
import os
import signal
import symtable
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType

from bookkit.chapters import Chapter
from bookkit.statements import global_names

SECONDS = 120  # of computing, for one fork: what never ends is ended


class Stage:
    """The code cells of a chapter and the namespace that they share."""

    def __init__(self, chapter: Chapter) -> None:
        self.cells = chapter.code_cells
        self.sources = [cell.python for cell in self.cells]
        self.module = ModuleType("__main__")
        self.module.__dict__["__builtins__"] = builtins

    def run(self, name: str, source: str) -> None:
        """Run code under a name; it can be read back, as Triton does with its kernels."""
        lines = source.splitlines(keepends=True)
        linecache.cache[f"<{name}>"] = (len(source), None, lines, f"<{name}>")
        exec(compile(source, f"<{name}>", "exec"), self.module.__dict__)

    def outcome(self, name: str, source: str) -> str:
        """`caught: …` for an AssertionError, `passed`, or the error that ended the code."""
        try:
            self.run(name, source)
        except AssertionError as error:
            return f"caught: {error}"
        except BaseException as error:
            line = traceback.extract_tb(error.__traceback__)[-1].lineno
            return f"{type(error).__name__}, line {line}: {error}"
        return "passed"

    def attempt(self, first: int, target: int, changes: dict[int, str], force: set) -> str:
        """In a fork, runs the cells from `first` on that `target` needs: what it does.

        What has run before `first` may call what only a later cell defines.

        Args:
            first: the next cell that this process would run.
            target: the last cell to run.
            changes: new sources of some cells.
            force: cells that run in any case.
        """
        sources = {**dict(enumerate(self.sources)), **changes}
        modules = {n for n, x in vars(self.module).items() if isinstance(x, ModuleType)}
        called = defaultdict(set)  # a class may have gone on in several cells
        for name, reads in (pair for s in self.sources[:first] for pair in defined(s)):
            called[name] |= reads
        cells, names = {target, *(i for i in force if i < target)}, set()
        while True:
            more = names.union(*(used(sources[i]) for i in cells)) - modules
            more = more.union(*(called[name] for name in more & called.keys())) - modules
            found = cells | {i for i in range(first, target) if more & touched(sources[i])}
            if (found, more) == (cells, names):
                break
            cells, names = found, more

        def work() -> str:
            return [self.outcome(self.cells[i].id, sources[i]) for i in sorted(cells)][-1]

        return in_a_fork(work)

    def attempt_code(self, source: str) -> str:
        """In a fork: what some other code does at this point of the chapter."""
        return in_a_fork(lambda: self.outcome("answer", source))


def used(source: str) -> set[str]:
    """The global names that code reads."""
    return set(global_names(symtable.symtable(source, "", "exec")))


def defined(source: str) -> Iterator[tuple[str, set[str]]]:
    """Each function and class that code defines, and the global names that it reads."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, used(ast.unparse(node))


def touched(source: str) -> set[str]:
    """The global names that code defines, or whose objects it may change."""
    symbols = symtable.symtable(source, "", "exec").get_symbols()
    names = {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}
    for node in ast.walk(ast.parse(source)):
        part = isinstance(node, ast.Attribute | ast.Subscript)
        assigned = part and isinstance(node.ctx, ast.Store)
        called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if assigned or (called and not ast.unparse(node).startswith("print(")):
            names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return names


def in_a_fork(work: Callable[[], str]) -> str:
    """What `work` says, done in a copy of this process."""
    read, write = os.pipe()
    if child := os.fork():
        os.close(write)
        with open(read, encoding="utf-8") as pipe:
            said = pipe.read()
        _, status = os.waitpid(child, 0)
        return said or f"the process ended with status {status}"
    os.close(read)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    with open(write, "w", encoding="utf-8") as pipe:
        pipe.write(work())
    os._exit(0)


class Calls:
    """Notes which functions are called, and methods of which classes, by name."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __enter__(self) -> set[str]:
        sys.setprofile(self.note)
        return self.names

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call":
            self.names.update(code.co_qualname.split("."))
            if code.co_argcount and code.co_varnames[0] in ("self", "cls", "_cls"):
                owner = frame.f_locals.get(code.co_varnames[0])
                self.names.add((owner if isinstance(owner, type) else type(owner)).__name__)


def prepare(chapter: Chapter) -> None:
    """Makes this process like the kernel of a notebook, but one that draws nothing."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ["OMP_NUM_THREADS"] = "1"  # a fork has none of its parent's threads
    from matplotlib import pyplot as plt

    plt.switch_backend("agg")
    plt.show = lambda *_, **__: plt.close("all")
    os.chdir(chapter.path.parent)
    sys.path.insert(0, str(Path("..").resolve()))
