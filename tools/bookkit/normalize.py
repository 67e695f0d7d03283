"""What is kept of an executed chapter, so that running it again gives no diff."""

import re
import unicodedata

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
    """After what it defines, or its heading; others count on from the heading above."""
    defined = [definition(chapter, cell) for cell in chapter.cells]
    ids: list[str] = []
    above = "cell"
    for cell, own in zip(chapter.cells, defined, strict=True):
        taken = ids if own else [*ids, *defined]  # a definition before a heading
        if cell.cell_type == "markdown":
            headings = HEADING.findall(FENCE.sub("", cell.source))
            above = slug(headings[-1]) if headings else above
            own = slug(headings[0]) if headings else ""
        name, count = own, 1
        while not name or name in taken:
            count += 1
            name = f"{own or above}-{count}"
        ids.append(name)
    return ids


def definition(chapter: Chapter, cell: Cell) -> str:
    """The first name that a listing defines; empty for any other cell."""
    if not cell.module:
        return ""
    found = statements(cell.source, chapter.where(cell))
    names = [name for s in found if not s.is_import for name in s.names]
    return slug(names[0] if names else f"{cell.module}-imports")


def slug(text: str) -> str:
    """`Why 1/√d_k` as `why-1-d-k`, `BaseAttention` as `base-attention`."""
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", text)
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")[:58].strip("-") or "cell"
