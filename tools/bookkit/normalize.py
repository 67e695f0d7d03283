"""What is kept of an executed chapter, so that running it again gives no diff."""

import re
import subprocess
import unicodedata
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import chain, count
from pathlib import Path

import nbformat
from nbformat import NotebookNode, from_dict

from bookkit.chapters import Chapter
from bookkit.grammar import Cell
from bookkit.statements import statements

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.+)", re.MULTILINE)


def normalize(chapter: Chapter) -> None:
    chapter.notebook.metadata = from_dict(METADATA)
    for cell in chapter.cells:
        cell.source = cell.source.rstrip()
        cell.metadata = cell_metadata(cell.metadata, bool(cell.sentence))
        if cell.cell_type == "code":
            cell.outputs = outputs(cell.outputs)
    for cell, name in zip(chapter.cells, readable_ids(chapter), strict=True):
        cell.id = name


def cell_metadata(old: NotebookNode, closed: bool) -> NotebookNode:
    """Tags, and what shows a figure; a cell hidden on the site is folded in Jupyter too."""
    kept = {key: old[key] for key in ("tags", "mystnb") if old.get(key)}
    if closed or {"hide-cell", "hide-input"}.intersection(kept.get("tags", [])):
        kept["jupyter"] = {"source_hidden": True}
    return from_dict(kept)


def outputs(old: list[NotebookNode]) -> list[NotebookNode]:
    """Streams in one piece each; of the metadata, an image's width and height."""
    new: list[NotebookNode] = []
    for output in old:
        output.pop("transient", None)
        if "metadata" in output:
            output.metadata = from_dict(sizes(output.metadata))
        if output.output_type == "stream" and new and new[-1].get("name") == output.name:
            new[-1].text += output.text
        else:
            new.append(output)
    return new


def sizes(metadata: NotebookNode) -> dict[str, dict[str, int]]:
    given = {kind: value for kind, value in metadata.items() if isinstance(value, dict)}
    kept = {
        kind: {side: value[side] for side in ("width", "height") if side in value}
        for kind, value in given.items()
    }
    return {kind: size for kind, size in kept.items() if size}


def readable_ids(chapter: Chapter) -> list[str]:
    """After what it defines, or its heading; others count on from the heading above.

    A number that it has stays: a cell that is put between others moves none of theirs.
    """
    named = list(zip(chapter.cells, names(chapter), strict=True))
    defined = [name for cell, (name, _) in named if cell.module]
    numbered = {c.id for c, (name, _) in named if re.fullmatch(rf"{name}-\d+", c.id)}
    ids: list[str] = []
    for cell, (name, own) in named:
        taken = ids if cell.module else [*ids, *defined]  # a definition before a heading
        free = (f"{name}-{n}" for n in count(2) if f"{name}-{n}" not in numbered)
        options = chain([name] * own, {cell.id} & numbered, free)
        ids.append(next(option for option in options if option not in taken))
    return ids


def names(chapter: Chapter) -> Iterator[tuple[str, bool]]:
    """What each cell is called after, and whether that is its own or the heading above."""
    above = "cell"
    for cell in chapter.cells:
        own = definition(chapter, cell)
        if cell.cell_type == "markdown":
            headings = list(map(slug, HEADING.findall(FENCE.sub("", cell.source))))
            own, above = (headings[0], headings[-1]) if headings else ("", above)
        yield own or above, bool(own)


def definition(chapter: Chapter, cell: Cell) -> str:
    """The first name that a listing defines; empty for any other cell."""
    if not cell.module:
        return ""
    found = statements(cell.source, chapter.where(cell))
    names = [name for s in found if not s.is_import for name in s.names]
    return slug(names[0] if names else f"{cell.module}-imports")


def number(chapter: Chapter, root: Path) -> None:
    """Execution counts as in the last commit, where a source is; others go on from above.

    They share a count with the next cell that kept its own, if none is left between. So
    counts never go down, and a cell that is put in, or taken out, changes no other's.
    """
    before, cells = committed(chapter, root), chapter.code_cells
    old, new = [cell.source for cell in before], [cell.source.rstrip() for cell in cells]
    counts: list[int | None] = [None] * len(cells)
    for a, b, size in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        counts[b : b + size] = [cell.execution_count for cell in before[a : a + size]]
    above = 0
    for index, cell in enumerate(cells):
        above = counts[index] or min([above + 1, *filter(None, counts[index:])])
        cell.execution_count = above
        for output in (o for o in cell.outputs if "execution_count" in o):
            output.execution_count = above


def committed(chapter: Chapter, root: Path) -> list[Cell]:
    """The chapter's code cells in the last commit; none where Git knows none."""
    command = ["git", "show", f"HEAD:./{chapter.file}"]
    done = subprocess.run(command, cwd=root, capture_output=True, encoding="utf-8")
    if done.returncode:
        return []
    return Chapter(chapter.path, nbformat.reads(done.stdout, as_version=4)).code_cells


def slug(text: str) -> str:
    """`Why 1/√d_k` as `why-1-d-k`, `BaseAttention` as `base-attention`."""
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", text)
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")[:58].strip("-") or "cell"
