"""What stands beside the notebooks of the workbook: programs, pages, settings, tests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from bookkit.chapters import write_text

TESTED = ["attention", "properties", "refusals", "defaults", "bounds", "multi_head"]
TESTED += ["plug_in_heads", "norms", "feed_forward", "online_softmax", "flash"]
TESTED += ["gradient_check", "backprop_attention", "backprop_layers"]
TESTED += ["backprop_multi_head", "backprop_refusals", "backprop_transformer"]
TESTED += ["rotary", "cache"]
CONFTEST = """\
\"\"\"The package's own tests, as the book runs them.\"\"\"

import pytest
from hypothesis import settings

settings.register_profile("attnlib", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("attnlib")


@pytest.fixture
def as_shipped():
    yield
"""
GIVEN_FILES = ["chapters", "continued", "grammar", "modules", "stage", "statements"]
GIVEN_FILES += ["tangle"]


def furnish(
    root: Path, folder: Path, data: dict[str, dict], version: str, site: str | None
) -> None:
    """The programs, the pages and the settings of the folder."""
    write_text(folder / "data" / "site.json", json.dumps({"site": site}) + "\n")
    tools = root / "tools"
    for path in [tools / "bookkit" / f"{name}.py" for name in GIVEN_FILES]:
        write_text(folder / "tools" / "bookkit" / path.name, path.read_text("utf-8"))
    for path in (tools / "workkit").glob("*.py"):
        write_text(folder / "tools" / "workkit" / path.name, path.read_text("utf-8"))
    for path in (root / "attnlib").rglob("*"):
        if path.name in ("__init__.py", "py.typed"):
            write_text(folder / path.relative_to(root), path.read_text("utf-8"))
    shutil.copyfile(root / "LICENSE", folder / "LICENSE")
    for name in ("drawn", *(f"test_{name}" for name in TESTED)):
        text = (root / "tests" / "package" / f"{name}.py").read_text("utf-8")
        write_text(folder / "tests" / f"{name}.py", text)
    write_text(folder / "tests" / "conftest.py", CONFTEST)
    rows = []
    for known in data.values():
        work, tasks = known["blanks"].values(), known["exercises"]
        if work or tasks:
            a, b = (sum(x["minutes"] for x in part) for part in (work, tasks))
            names = ", ".join(f"`{blank['symbol']}`" for blank in work) or "—"
            rows.append(f"| {known['key']} | {known['title']} | {names} | {a} | {b} |")
    values = {"VERSION": version, "ROWS": "\n".join(rows)}
    for path in (root / "book" / "workbook" / "folder").iterdir():
        text = path.read_text("utf-8")
        for word, value in values.items():
            text = text.replace(f"<{word}>", value)
        name = ".vscode/tasks.json" if path.name == "tasks.json" else path.name
        write_text(folder / name, text)
