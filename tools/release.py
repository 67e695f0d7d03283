"""Say whether a release may be made, write its notes, and build its wheel and sdist.

    python tools release --tag v0.1.0 --notes notes.md
    python tools release --build dist

The first fails unless the tag, the package, CITATION.cff and CHANGELOG.md name one version
and the changelog its date. The second gives the same bytes whenever the files are the same.
"""

import os
import re
from pathlib import Path

from flit_core import buildapi

from bookkit.chapters import BookError, parser, run, write_text

SECTION = re.compile(r"^## \[(.+?)\] - (.+)\n((?:(?!## ).*\n)*)", re.MULTILINE)
DATE = r"20\d\d-[01]\d-[0-3]\d"


def found(root: Path, file: str, pattern: str) -> str:
    """What a pattern captures in a file of the repository."""
    match = re.search(pattern, (root / file).read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise BookError(f"{file}: no version, a line like {pattern}")
    return match[1]


def versions(root: Path) -> dict[str, str]:
    """The version that each file names; that of the package is what counts."""
    return {
        "attnlib/__init__.py": found(root, "attnlib/__init__.py", r'^__version__ = "(.+)"'),
        "CITATION.cff": found(root, "CITATION.cff", r"^version: (\S+)"),
        "CHANGELOG.md": found(root, "CHANGELOG.md", SECTION.pattern),
    }


def notes(root: Path, tag: str) -> str:
    """What the changelog says of the version of a tag, if everything agrees on it."""
    named = {"the tag": tag.removeprefix("v"), **versions(root)}
    if len(set(named.values())) != 1 or not tag.startswith("v"):
        raise BookError(f"{tag}: not one version: {named}")
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    _, date, changes = next(iter(SECTION.findall(text)))
    if not re.fullmatch(DATE, date):
        raise BookError(f"CHANGELOG.md: {tag} needs its date, not {date!r}")
    return changes.strip() + "\n"


def build(root: Path, out: Path) -> None:
    """Wheel and sdist, by the package's own build backend.

    Archives hold the times of files, which differ between checkouts: the one of the
    environment (SOURCE_DATE_EPOCH) or a fixed one takes their place.
    """
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("SOURCE_DATE_EPOCH", "1767225600")  # 2026-01-01
    os.chdir(root)  # where a build backend is to be called
    for make in (buildapi.build_wheel, buildapi.build_sdist):
        print(out / make(str(out)))


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--tag", help="fail unless everything names this version")
    options.add_argument("--notes", type=Path, help="where to write the notes of the tag")
    options.add_argument("--build", type=Path, help="a folder for wheel and sdist")
    args = options.parse_args()
    if args.tag:
        text = notes(args.root, args.tag)
        if args.notes:
            write_text(args.notes, text)
    if args.build:
        build(args.root, args.build)
    return 0


if __name__ == "__main__":
    run(main)
