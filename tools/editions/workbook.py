"""Write the workbook: the chapters with the package's definitions left to the reader.

    python tools workbook FOLDER       makes the folder, or renews it and keeps every answer
    python tools workbook --zip OUT.zip

A definition that the chapter derives is left out; `blanks.py` says which, `reflow.py` where
it is to be written. The checks, and what the kept mistakes compute in them, lie in `data/`,
the programs in `tools/`; our answers lie nowhere. The text is that of the notebooks for
Colab, with the numbers of the site, which is built if it is missing.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

from nbformat.v4 import new_notebook

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run by its path

from address import address
from bookkit.chapters import BookError, Chapter, parser, read_chapters, run, write_text
from bookkit.modules import read_modules
from bookkit.normalize import METADATA
from build_book import build_if_missing
from editions.blanks import count, read_blanks
from editions.offline_zip import pack
from editions.plain import Plain
from editions.reflow import reflow
from editions.setup_cell import needed_files
from editions.workbook_data import describe, package_of
from editions.workbook_folder import furnish
from editions.workbook_page import cells_of
from editions.workbook_record import read_record
from release import versions
from workkit.package import blanks_of, texts_of, write_package
from workkit.store import Store, homes_of

FOLDER = "attnlib-workbook"


def write_workbook(root: Path, folder: Path, built: Path | None) -> dict[str, dict]:
    """Makes the folder, or renews it; `built` holds the site, whose numbers it takes."""
    published = address()
    plain = Plain(built, published.site if published else None) if built else None
    chapters, blanks = read_chapters(root), read_blanks(root)
    modules = read_modules(chapters)
    data, notebooks = {}, {}
    for chapter in chapters:
        shown = reflow(chapter, modules, blanks)
        known = describe(chapter, shown, plain)
        known["package"] = package_of(chapter, modules, blanks)
        known["mistakes"] = read_record(root, chapter)["mistakes"]
        data[chapter.key] = known
        made = new_notebook(cells=cells_of(chapter, shown, known, plain), metadata=METADATA)
        notebooks[chapter.path.name] = Chapter(folder / "book" / chapter.path.name, made)
        for path in needed_files(chapter):
            there = folder / path.resolve().relative_to(root.resolve())
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, there)
    if unknown := blanks.keys() - {
        name for known in data.values() for name in known["blanks"]
    }:
        raise BookError(f"blanks.toml: no chapter defines {', '.join(sorted(unknown))}")
    for known in data.values():
        text = json.dumps(known, ensure_ascii=False)
        write_text(folder / "data" / "chapters" / f"{known['file'][:-6]}.json", text + "\n")
    version = versions(root)["attnlib/__init__.py"]
    furnish(root, folder, data, version, published.site if published else None)
    store = Store(folder, blanks_of(data))
    with store.changing():
        store.collect(
            homes_of(data)
        )  # from the old notebooks, before new ones replace them
        for name, notebook in notebooks.items():
            renew(folder, name, notebook)
        store.collect(homes_of(data))  # puts the answers into the new ones
    write_package(folder, texts_of(data, store.answers)[0])
    return data


def renew(folder: Path, name: str, notebook: Chapter) -> None:
    """Writes a notebook anew; one that the reader changed is kept in yours/before/."""
    old, pristine = folder / "book" / name, folder / "data" / "notebooks" / name
    if old.exists() and (
        not pristine.exists() or old.read_bytes() != pristine.read_bytes()
    ):
        kept = folder / "yours" / "before"
        kept.mkdir(parents=True, exist_ok=True)
        number = len(list(kept.glob(f"*{name}")))
        shutil.copyfile(old, kept / f"{number:02d}-{name}")
    notebook.write()
    pristine.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(old, pristine)


def write_zip(root: Path, out: Path, built: Path) -> dict[str, dict]:
    """A new workbook, packed; unpacked over an old one it replaces no answer."""
    with tempfile.TemporaryDirectory() as made:
        data = write_workbook(root, Path(made, FOLDER), built)
        shutil.rmtree(Path(made, FOLDER, "yours"))
        pack(out, Path(made))
    return data


def main() -> int:
    options = parser(__doc__)
    options.add_argument("folder", nargs="?", type=Path, help="new, or an old workbook")
    options.add_argument("--zip", type=Path, metavar="OUT.zip", help="pack a new one")
    args = options.parse_args()
    if not args.folder and not args.zip:
        options.error("name a folder, or --zip OUT.zip")
    build_if_missing(args.root)
    data = write_workbook(args.root, args.folder, args.root) if args.folder else {}
    if args.zip:
        data = write_zip(args.root, args.zip, args.root)
    blanks = [b for known in data.values() for b in known["blanks"].values()]
    hours = round(sum(blank["minutes"] for blank in blanks) / 60)
    print(f"{len(data)} notebooks, {count_of(blanks)} to write, about {hours} hours")
    return 0


def count_of(blanks: list) -> str:
    return f"{len(blanks)} definitions, {count(sum(b['lines'] for b in blanks))},"


if __name__ == "__main__":
    run(main)
