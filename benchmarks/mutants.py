"""Faults planted in the package by a program: which of them does no test notice?

Each module is changed in one place at a time: a comparison, a sign, a number, a default,
a condition, a keyword or a statement left out. pytest collects the tests once. For each
change, a fork of this process runs the tests that come by the line, those that come by its
function, and the quick ones that come by none, which may read signatures, until one fails.

Why no test can tell a survivor from the original, or none needs to, stands in
mutants_equivalent.toml, which tests/tools/test_mutants.py compares with the record.

python benchmarks/mutants.py              writes results/mutants.json, in an hour or two
python benchmarks/mutants.py projection   renews what it says of this module
"""

import argparse
import ast
import itertools
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import coverage
import pytest
import torch
from changes import Mutant, mutants, plant
from hypothesis import Phase, settings
from paired import write_record

HERE = Path(__file__).resolve().parent
LEFT_OUT = {
    "of each module": "what runs when it is imported, annotations, f-strings",
    "flash_triton": "its kernels take long in Triton's interpreter",
    "testing": "is a test itself, of chosen examples; tried on planted mistakes",
}
ENOUGH = 20  # seconds of tests for a mutant: the slowest are spared to those that survive
NOT_PLANTED = 2  # status of a process: a mutant that is nowhere is not noticed
Lines = dict[str, list[str]]  # by the number of a line, the tests that come by


def fork(call: Callable[[], bool]) -> int:
    """A process that makes a call, prints nothing, and ends with status 0 if it is true."""
    if child := os.fork():
        return child
    good = False
    try:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        good = call()
    finally:
        os._exit(0 if good else 1)


class Trial:
    """A plugin of pytest's, which runs the tests that were collected in its own way."""

    def __init__(self, root: Path, modules: list[str], jobs: int, sample: int) -> None:
        self.root, self.modules = root, modules
        self.jobs, self.sample = jobs, sample
        self.seconds: dict[str, float] = {}
        self.elsewhere: set[str] = set()
        self.failed = False
        self.record: dict[str, dict[str, Any]] = {}

    def pytest_configure(self) -> None:
        """Hypothesis may stop at the first example that fails, and keep none."""
        short = {"database": None, "phases": [Phase.explicit, Phase.generate]}
        settings.register_profile("mutants", settings.default, **short)
        settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """In place of pytest's own."""
        self.items = {item.nodeid: item for item in session.items}
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder, "found.json")
            os.waitpid(fork(lambda: self.watch(found)), 0)
            self.seconds, lines = json.loads(found.read_text(encoding="utf-8"))
        near = {test for own in lines.values() for tests in own.values() for test in tests}
        self.elsewhere = {test for test, s in self.seconds.items() if s < 0.1} - near
        print(f"{len(self.seconds)} of {len(self.items)} tests pass", flush=True)
        for name in self.modules:
            self.record[name] = self.try_module(name, lines.get(name, {}))
        return True

    def passed(self, tests: list[str]) -> Iterator[str]:
        """The tests up to one that fails; one that computes too long ends the process."""
        for name, after in zip(tests, [*tests[1:], None], strict=True):
            self.failed = False
            signal.setitimer(signal.ITIMER_PROF, 10 + 5 * self.seconds.get(name, 60))
            item, following = self.items[name], self.items.get(after)
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                return
            yield name

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Hears of the setup, the call and the teardown of a test."""
        self.failed |= report.failed

    def watch(self, found: Path) -> bool:
        """Writes how long each test computes that passes; and which come by each line."""
        package = self.root / "attnlib"
        watch = coverage.Coverage(data_file=None, source=[str(package)], config_file=False)
        watch.start()
        for name in self.items:
            watch.switch_context(name)
            start = sum(os.times()[:4])  # with the processes that it waits for
            if [*self.passed([name])]:
                self.seconds[name] = sum(os.times()[:4]) - start
        watch.stop()
        lines: dict[str, dict[int, list[str]]] = {}
        for path in watch.get_data().measured_files():
            name = ".".join(Path(path).relative_to(package).with_suffix("").parts)
            by_line = watch.get_data().contexts_by_lineno(path).items()
            lines[name] = {n: [t for t in own if t in self.seconds] for n, own in by_line}
        found.write_text(json.dumps([self.seconds, lines]), encoding="utf-8")
        return True

    def nearest(self, mutant: Mutant, lines: Lines) -> list[str]:
        """The tests to run: from circle to circle, in each the quick ones first."""
        circles = [
            {test for line in circle for test in lines.get(str(line), [])}
            for circle in mutant.circles
        ]
        order: dict[str, None] = {}
        for circle in circles:
            order |= dict.fromkeys(sorted(circle, key=self.seconds.__getitem__))
        total = itertools.accumulate(self.seconds[test] for test in order)
        near = [test for test, s in zip(order, total, strict=True) if s < ENOUGH]
        return near + sorted(self.elsewhere)

    def survives(self, name: str, mutant: Mutant, tests: list[str]) -> bool:
        """Whether all these tests pass with the mutant planted, in this process."""
        try:
            plant(import_module(f"attnlib.{name}"), mutant.tree)
        except KeyError:
            os._exit(NOT_PLANTED)
        return len([*self.passed(tests)]) == len(tests)

    def try_module(self, name: str, lines: Lines) -> dict[str, Any]:
        """How many mutants of a module there are, and which of them survive."""
        path = self.root / "attnlib" / f"{name.replace('.', '/')}.py"
        count, survivors, running = 0, {}, {}

        def wait() -> None:
            child, status = os.wait()
            number, place = running.pop(child)
            if os.waitstatus_to_exitcode(status) == NOT_PLANTED:
                raise RuntimeError(f"{name}: not planted: {place}")
            if status == 0:
                survivors[number] = place
                print(f"{name}:", ": ".join(place.values()), flush=True)

        planted = mutants(path.read_text(encoding="utf-8"))
        for count, mutant in enumerate(itertools.islice(planted, 0, None, self.sample), 1):
            tests = self.nearest(mutant, lines)
            child = fork(lambda m=mutant, t=tests: self.survives(name, m, t))
            running[child] = count, mutant.place
            while len(running) >= self.jobs:
                wait()
        while running:
            wait()
        noticed = count - len(survivors)
        print(f"{name}: {noticed} of {count} mutants noticed", flush=True)
        places = [place for _, place in sorted(survivors.items())]
        return {"mutants": count, "noticed": noticed, "survivors": places}


def imports_package(file: Path) -> bool:
    body = ast.parse(file.read_text(encoding="utf-8")).body
    names = [n.module or "" for n in body if isinstance(n, ast.ImportFrom)]
    names += [a.name for n in body if isinstance(n, ast.Import) for a in n.names]
    return any(name.partition(".")[0] == "attnlib" for name in names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", help="such as backprop.base")
    parser.add_argument("--root", type=Path, default=HERE.parent, help="of the package")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--show", action="store_true", help="record nothing")
    parser.add_argument("--sample", type=int, default=1, help="only every so many-th")
    args = parser.parse_args()
    if args.sample > 1 and not args.show:
        parser.error("--sample: expected --show beside it; a record is of all mutants")
    root, package = args.root.resolve(), args.root.resolve() / "attnlib"
    files = sorted(f for f in package.rglob("*.py") if f.name != "__init__.py")
    every = [".".join(f.relative_to(package).with_suffix("").parts) for f in files]
    names = args.modules or [n for n in every if n.partition(".")[0] not in LEFT_OUT]
    tests = sorted((root / "tests").rglob("test_*.py"))
    tests = [str(file) for file in tests if imports_package(file)]
    os.chdir(root)
    torch.set_num_threads(1)  # a fork would wait for ever for threads that it has not
    sys.path.insert(0, str(root))
    trial = Trial(root, names, args.jobs, args.sample)
    plain = ["-o", "addopts=", "-p", "no:nbval", "-p", "no:cacheprovider", "-qs"]
    if pytest.main([*plain, "-m", "not site", *tests], [trial]):
        return 1
    if not args.show:
        record, found = HERE / "results" / "mutants.json", trial.record
        if args.modules:
            old = json.loads(record.read_text(encoding="utf-8"))["modules"]
            found = {name: old[name] for name in every if name in old} | found
        write_record("mutants", {"left_out": LEFT_OUT, "modules": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
