"""Proofs that take long run where what they depend on has changed, and a few others.

    @pytest.mark.costly("figure/{name}", "book/_static/{name}.html")

says of a test whose proof it is part of and what that depends on, besides what the test
uses of its own file and all that these import; both are formatted with its parameters. A
function among them is called with the parameters by name and gives text. Each notebook is
the proof `notebook/NN_name`.

A test runs if the key of its proof is not in `tests/proofs.json`, see
`tools/bookkit/proofs.py`, or if its proof is among those drawn by the keys of all, one of
forty. `--everything` runs all and trusts no record, with `--shard 2/5` a fifth of them; in
CI it fails for a test that is skipped, which would run nowhere. `--prove` runs only what is
not in the record, and writes there what passes; `--subjects "notebook/*"` runs these proofs
and no others.
"""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

from bookkit.proofs import Proofs, hashed, read_record, write_record

ROOT = Path(__file__).resolve().parent.parent
ONE_OF = 40  # proofs on record that run all the same
KEYS = pytest.StashKey[dict[str, str]]()


def pytest_addoption(parser):
    group = parser.getgroup("costly proofs")
    group.addoption("--everything", action="store_true", help="trust no record of proofs")
    group.addoption("--prove", action="store_true", help="what is not on record, for it")
    group.addoption("--shard", metavar="I/N", type=shard, help="one of N parts of all")
    group.addoption("--subjects", metavar="PATTERN", help="these proofs, and no others")


def shard(text):
    part, count = map(int, text.split("/"))
    if not 1 <= part <= count:
        raise ValueError(text)
    return part, count


def pytest_configure(config):
    if config.getoption("numprocesses", None):
        config.option.testrunuid = config.option.testrunuid or uuid.uuid4().hex
    line = "costly(subject, *needs): takes long; runs where what it needs has changed"
    config.addinivalue_line("markers", line)
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if config.getoption("--prove") and not whole:
        raise pytest.UsageError("--prove takes no files; --subjects chooses proofs")
    config.pluginmanager.register(Record(config), "record of proofs")


def described(item):
    """The subject of a test's proof and what it needs, or None."""
    if item.path.suffix == ".ipynb":
        return f"notebook/{item.path.stem}", [f"book/{item.path.name}#run"], []
    if (mark := item.get_closest_marker("costly")) is None:
        return None
    given = item.callspec.params if hasattr(item, "callspec") else {}
    needs = [need.format(**given) for need in mark.args[1:] if isinstance(need, str)]
    texts = [need(**given) for need in mark.args[1:] if callable(need)]
    own = item.path.relative_to(ROOT)
    frames = [ROOT / folder / "conftest.py" for folder in own.parents]
    texts += [path.read_text(encoding="utf-8") for path in frames if path.exists()]
    name = getattr(item, "originalname", "")
    return mark.args[0].format(**given), [f"{own.as_posix()}#{name}", *needs], texts


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Chooses the proofs; all their tests are here, before any option leaves some out.

    They come first, as they take long.
    """
    proofs, parts, homes = Proofs(ROOT), {}, {}
    for item in items:
        item.proof = None
        if found := described(item):
            item.proof, needs, texts = found
            needed, told = parts.setdefault(item.proof, (set(), set()))
            needed.update(needs)
            told.update(texts)
            if homes.setdefault(item.proof, item.path) != item.path:
                raise pytest.UsageError(f"{item.proof}: a proof stands in one file")
    keys = {s: proofs.key(sorted(n), sorted(t)) for s, (n, t) in parts.items()}
    config.stash[KEYS] = keys
    chosen = choose(config, keys)
    count = Counter(item.proof for item in items)
    for item in items:
        if item.proof:
            facts = (item.proof, keys[item.proof], count[item.proof])
            item.user_properties.append(("proof", facts))
    going = [item for item in items if goes(config, item, chosen)]
    kept = {*going}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = sorted(going, key=lambda item: item.proof is None)
    if (groups := groups_of(config)) and hasattr(config, "workerinput"):
        known = {item.nodeid: item.proof for item in items if item.proof}
        own = groups.with_suffix(f".{config.workerinput['workerid']}")
        own.write_text(json.dumps(known), encoding="utf-8")
        own.replace(groups)  # whole, and the same from each worker


def groups_of(config):
    """Where workers tell who shares out their tests which proofs these belong to."""
    uid = getattr(config, "workerinput", {}).get("testrunuid", config.option.testrunuid)
    return Path(tempfile.gettempdir(), f"proofs-{uid}.json") if uid else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A proof stays together, and what is left of a file."""
    from xdist.scheduler import LoadScopeScheduling

    class InProofs(LoadScopeScheduling):
        proofs = None

        def _split_scope(self, nodeid):
            if self.proofs is None:
                self.proofs = json.loads(groups_of(config).read_text(encoding="utf-8"))
            return self.proofs.get(nodeid, nodeid.partition("::")[0])

    return InProofs(config, log)


def choose(config, keys):
    """The proofs that run."""
    if pattern := config.getoption("--subjects"):
        return {subject for subject in keys if fnmatch(subject, pattern)}
    if config.getoption("--everything"):
        return {*keys}
    record = read_record(ROOT)
    missing = {subject for subject, key in keys.items() if record.get(subject) != key}
    if config.getoption("--prove"):
        return missing
    return missing | drawn(keys)


def drawn(keys):
    """A few, by the keys of all: another change, and others are drawn."""
    seed = hashed(repr(sorted(keys.items())))
    return {s for s in keys if int(hashed(seed + s), 16) % ONE_OF == 0}


def goes(config, item, chosen):
    """Whether a test runs."""
    if shard := config.getoption("--shard"):
        part, count = shard
        if int(hashed(item.proof or item.path.name), 16) % count != part - 1:
            return False
    if item.proof is None:
        return not config.getoption("--prove")
    return item.proof in chosen


class Record:
    """Hears which tests pass, where they are shared out too, and writes what is proven."""

    def __init__(self, config):
        self.config, self.proving = config, config.getoption("--prove")
        self.passed, self.seconds = Counter(), Counter()
        self.keys, self.failed, self.proven, self.nowhere = {}, set(), {}, set()
        self.strict = config.getoption("--everything") and bool(os.environ.get("CI"))

    def pytest_runtest_logreport(self, report):
        if report.skipped:
            self.nowhere.add(f"{report.nodeid} runs nowhere: {report.longrepr[2]}")
        if (proof := dict(report.user_properties).get("proof")) is None:
            return
        subject, key, count = proof
        self.seconds[subject] += report.duration
        if report.failed:
            self.failed.add(subject)
        if report.when == "teardown":
            return
        self.passed[subject] += report.passed  # the setup of a test, and its call
        if self.passed[subject] == 2 * count:
            self.proven[subject] = key
            if self.proving and not hasattr(self.config, "workerinput"):
                write_record(ROOT, read_record(ROOT) | self.proven)  # also if interrupted
                seconds = self.seconds[subject]
                print(f"\nproven: {subject}, {seconds:.0f} s ", end="", flush=True)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.keys = getattr(node, "workeroutput", {}).get("keys", self.keys)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        """A worker tells its keys, whoever collected the tests writes."""
        own = self.config.stash.get(KEYS, {})
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["keys"] = own
            return
        if groups := groups_of(self.config):
            groups.unlink(missing_ok=True)
        self.keys = own or self.keys
        if self.strict and self.nowhere and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.proving:
            record = read_record(ROOT) | self.proven
            known = self.keys or record  # of a run that was interrupted nothing is known
            kept = known.keys() - self.failed
            write_record(ROOT, {s: key for s, key in record.items() if s in kept})

    def pytest_terminal_summary(self, terminalreporter):
        for line in sorted(self.nowhere) if self.strict else ():
            terminalreporter.write_line(line, red=True)
        record, seen = read_record(ROOT), self.seconds
        if self.keys:
            known = sum(record.get(s) == key for s, key in self.keys.items())
            told = f"{len(self.keys)} costly proofs: {len(seen)} ran, {known} are on record"
            terminalreporter.write_line(told)
        for subject, seconds in seen.most_common(10):
            terminalreporter.write_line(f"{seconds:8.1f} s {subject}")
