"""What the looks of a page depend on."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BOOK = ROOT / "book"
# What stands around every page; of the pages, where each stands.
FRAME = ("book/_static/*.css", "book/_static/*.js", "book/_templates/*", "_config.yml")
FRAME += ("_toc.yml", "tools/sphinx_ext/*.py", "tools/site_browser.py")


def source_of(page: str, **_: str) -> str:
    """What a page is made from: its text, the pictures and figures that this names.

    A page of the package shows docstrings.
    """
    found = [path for path in BOOK.glob(f"{page}.*") if path.suffix in (".md", ".ipynb")]
    names = {name for path in found for name in re.findall(r"_static/[\w.-]+", text(path))}
    found += [BOOK / name for name in names if (BOOK / name).is_file()]
    if page.startswith("api"):
        found += (ROOT / "attnlib").rglob("*.py")
    return "\n".join(map(text, sorted(found)))


def text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", errors="replace")
