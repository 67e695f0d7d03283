"""One version everywhere, and a wheel and an sdist that hold what they should."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import attnlib
import release
from bookkit.chapters import BookError
from tiny_book import ROOT, edit

PACKED = ["attnlib", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"]
MODULES = {
    path.relative_to(ROOT).as_posix()
    for path in [*(ROOT / "attnlib").rglob("*.py"), ROOT / "attnlib" / "py.typed"]
}
NAME = f"attnlib-{attnlib.__version__}"


def copy(target: Path) -> Path:
    """What a release needs of the repository."""
    target.mkdir(parents=True)
    for name in [*PACKED, "CITATION.cff"]:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=lambda *_: ["__pycache__"])
        else:
            shutil.copy(source, target)
    return target


@pytest.fixture
def root(tmp_path):
    """The same, on the day of the release."""
    copied = copy(tmp_path / "root")
    edit(copied / "CHANGELOG.md", "Unreleased", "2026-02-03")
    return copied


# ── versions ─────────────────────────────────────────────────────────────────────────


def test_notes_are_those_of_the_version(root):
    edit(
        root / "CHANGELOG.md", "## [0.1.0]", "## [0.1.0] - 2026-02-03\n\nNew.\n\n## [0.0.9]"
    )
    assert release.notes(root, "v0.1.0") == "New.\n"


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("CITATION.cff", "0.1.0", "0.2.0", "CITATION.cff': '0.2.0'"),
        ("CHANGELOG.md", "[0.1.0]", "[0.0.1]", "CHANGELOG.md': '0.0.1'"),
        ("CHANGELOG.md", "2026-02-03", "Unreleased", "needs its date, not 'Unreleased'"),
        ("attnlib/__init__.py", '"0.1.0"', '"0.1.1"', "__init__.py': '0.1.1'"),
        ("attnlib/__init__.py", "__version__", "version", "no version"),
    ],
)
def test_what_disagrees_is_not_released(root, file, old, new, message):
    for tag in ("v0.1.1", "0.1.0"):
        with pytest.raises(BookError, match="not one version"):
            release.notes(root, tag)
    release.notes(root, "v0.1.0")
    edit(root / file, old, new)
    with pytest.raises(BookError, match=message):
        release.notes(root, "v0.1.0")


# ── archives ─────────────────────────────────────────────────────────────────────────


def build(root: Path, out: Path) -> dict[str, bytes]:
    """The archives, built by the tool in a process of its own."""
    command = [sys.executable, ROOT / "tools", "release", "--root", root, "--build", out]
    environment = {k: v for k, v in os.environ.items() if k != "SOURCE_DATE_EPOCH"}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Wheel and sdist of this tree."""
    folder = tmp_path_factory.mktemp("archives")
    build(ROOT, folder)
    return folder


def test_archives_are_reproducible(archives, tmp_path):
    """Another folder, other times, other rights of the files: the same bytes."""
    root = copy(tmp_path / "root")
    for number, path in enumerate(sorted(root.rglob("*.py"))):
        os.utime(path, (1e9 + number, 1e9 + number))
        path.chmod(0o600)
    again = build(root, tmp_path / "dist")
    assert again == {path.name: path.read_bytes() for path in archives.iterdir()}


def test_the_wheel_holds_the_package_and_nothing_else(archives):
    with zipfile.ZipFile(archives / f"{NAME}-py3-none-any.whl") as wheel:
        held = set(wheel.namelist())
        about = wheel.read(f"{NAME}.dist-info/METADATA").decode("utf-8")
    described = {name for name in held if name.startswith(f"{NAME}.dist-info/")}
    assert held - described == MODULES
    assert f"{NAME}.dist-info/licenses/LICENSE" in described
    metadata = Parser().parsestr(about)
    assert metadata["Version"] == attnlib.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra, needed in project["optional-dependencies"].items():
        wanted += [f'{dependency} ; extra == "{extra}"' for dependency in needed]
    assert sorted(metadata.get_all("Requires-Dist")) == sorted(wanted)


def test_the_sdist_holds_the_package_and_what_builds_it(archives):
    with tarfile.open(archives / f"{NAME}.tar.gz") as sdist:
        held = {name.removeprefix(f"{NAME}/") for name in sdist.getnames()}
    assert held == {*MODULES, *PACKED[1:], "PKG-INFO"}
