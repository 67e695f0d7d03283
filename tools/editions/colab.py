"""Write every chapter as a notebook of its own, for Colab and for any Jupyter.

It needs nothing beside it: its first cell installs attnlib and writes the files that the
chapter reads, and its text has no Sphinx in it. Results are kept, so that a reader sees
them before running anything, but not those of solutions.

The numbers are those of the site, which is built if it is missing. Links to it are made
only where the book is published, see tools/address.py.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run by its path

from address import Address, address
from bookkit.chapters import Chapter, parser, read_chapters, run
from bookkit.grammar import Cell
from bookkit.normalize import METADATA
from build_book import build_if_missing
from editions.plain import Plain
from editions.setup_cell import FILE, FOLDER, setup_code
from release import versions

GPU = re.compile(r"^\s*(?:import|from) triton\b", re.MULTILINE)
GPU_HINT = """\
> **With a GPU.** In Colab, choose *Runtime → Change runtime type* and a GPU, before you run
> the first cell. The kernels of this chapter are then compiled for it, from compute
> capability 7.5 on. The free T4 has 7.5: no bfloat16, and no tensor cores for Triton. An
> A100 or an L4 has both. Without a GPU they are interpreted, and print the same."""
# An output of a notebook has no place for a text that is read in place of the picture.
LICENSE = "Code: MIT. Text and figures: CC BY 4.0."


def edition(chapter: Chapter, plain: Plain, setup: str) -> NotebookNode:
    """The chapter as a notebook that stands alone."""
    uses_gpu = any(GPU.search(cell.source) for cell in chapter.code_cells)
    first = new_code_cell(setup, id="setup", metadata=folded())
    cells, asked = [first], ""
    for cell in chapter.cells:
        if cell.cell_type == "markdown":
            text = plain.markdown(cell.source, chapter.name, chapter.where(cell))
            text = re.sub(r"\A# +", f"# {chapter.number} ", text)
            cells.append(new_markdown_cell(text, id=cell.id))
            if uses_gpu and text.startswith("# "):
                cells.append(new_markdown_cell(GPU_HINT, id="gpu"))
            continue
        if cell.exercise and cell.exercise != asked:
            asked = cell.exercise
            name = f"your-turn-{asked.replace('.', '-')}"
            cells.append(new_code_cell("# Your turn", id=name))
        cells += code_cells(chapter, cell, plain)
    cells.append(new_markdown_cell(closing(chapter, plain), id="sources"))
    metadata = {**METADATA, "colab": {"toc_visible": True}}
    if uses_gpu:
        metadata["accelerator"] = "GPU"
    return new_notebook(cells=cells, metadata=metadata)


def code_cells(chapter: Chapter, cell: Cell, plain: Plain) -> list[NotebookNode]:
    """A code cell, and the caption of its figure below it."""
    source = plain.code(FILE.sub(rf'"{FOLDER}/\2"', cell.source))
    made = new_code_cell(source, id=cell.id, metadata={} if cell.is_open else folded())
    if not cell.is_open:
        made.source = re.sub(r"\A# (?!@)", "# @title ", source)
    if not cell.exercise:
        made.outputs, made.execution_count = cell.outputs, cell.execution_count
    return plain.captioned(made, chapter, cell)


def folded() -> dict[str, object]:
    """Closed in Jupyter, a form in Colab."""
    return {"cellView": "form", "jupyter": {"source_hidden": True}}


def closing(chapter: Chapter, plain: Plain) -> str:
    """What the chapter cites, where it is from, and its license."""
    captions = [
        cell.metadata.get("mystnb", {}).get("figure", {}).get("caption", "")
        for cell in chapter.cells
    ]
    entries = [
        f"- {entry}" for entry in plain.references("\n".join([chapter.prose, *captions]))
    ]
    book = plain.link("*Attention, derived*", f"{chapter.name}.html")
    end = f"{chapter.called[0].upper()}{chapter.called[1:]} of {book}. {LICENSE}"
    return "\n".join([*(["## References", "", *entries, ""] if entries else []), end])


def write_editions(
    root: Path, folder: Path, published: Address | None, built: Path | None = None
) -> list[Chapter]:
    """Write a notebook for every chapter; what else is in the folder stays.

    The site is in `built`, or where nothing is said in the root.
    """
    version = versions(root)["attnlib/__init__.py"]
    plain = Plain(built or root, published.site if published else None)
    made = []
    for chapter in read_chapters(root):
        setup = setup_code(chapter, version, published)
        notebook = edition(chapter, plain, setup)
        made.append(Chapter(folder / chapter.path.name, notebook))
        made[-1].write()
    return made


def main() -> int:
    options = parser(__doc__)
    options.add_argument("folder", nargs="?", type=Path, help="instead of _build/colab")
    args = options.parse_args()
    folder = args.folder or args.root / "_build" / "colab"
    build_if_missing(args.root)
    made = write_editions(args.root, folder, address())
    print(f"{len(made)} notebooks in {folder}")
    return 0


if __name__ == "__main__":
    run(main)
