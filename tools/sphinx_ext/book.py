"""What the book needs of Sphinx beyond Jupyter Book.

- A cell whose first line is ``# attnlib/<module>.py`` is shown as a listing of the
  package, with its file name as the caption, and the class of which it has more methods.
- Every code cell can be linked to: ``{ref}`text <cell-01-cell-id>```, where 01 is the
  number of the chapter and ``cell-id`` the id of the cell in the notebook, or the name of
  what a listing defines.
- A hidden cell that starts with ``# Solution`` is labeled "Show solution". What else is
  folded, and the marks of the equations: tools/sphinx_ext/fold.py.
- Plots keep their printed size; tables scroll inside themselves.
"""

from __future__ import annotations

import re
import sys
import zlib
from pathlib import Path
from typing import Any

from docutils import nodes
from PIL import Image
from sphinx.application import Sphinx

from bookkit.chapters import ROOT, read_chapter
from bookkit.grammar import Cell
from bookkit.normalize import slug
from sphinx_ext.fold import fold


def shape_page(app: Sphinx, doctree: nodes.document) -> None:
    """Apply everything that a page's content needs."""
    path = Path(app.env.doc2path(app.env.docname))
    cells = read_chapter(path).cells if path.suffix == ".ipynb" else []
    for node in list(doctree.findall()):
        if isinstance(node, nodes.table):
            box = nodes.container(classes=["table-scroll"])
            node.parent.replace(node, box)
            box += node
        elif isinstance(node, nodes.image):
            size_plot(app, node)
        elif isinstance(node, nodes.container) and node.get("nb_element") == "cell_code":
            shape_cell(app, node, cells[node["cell_index"]])


def shape_cell(app: Sphinx, shown: nodes.container, cell: Cell) -> None:
    """Give a code cell its label, and its caption if it belongs to the package."""
    title, names = cell.id, set[str]()
    for listing in list(shown.findall(nodes.literal_block))[:1]:
        fold(shown, cell)
        if cell.module:
            title = f"attnlib/{cell.module}.py"
            code = cell.source.partition("\n")[2].lstrip("\n")
            listing.rawsource = code  # Sphinx highlights only where the two agree
            listing.children = [nodes.Text(code)]
            names = set(map(slug, cell.definitions))  # links to them lead here
            shown["classes"].append("package-listing")
            caption = nodes.paragraph("", "", nodes.literal(title, title))
            caption["classes"].append("package-caption")
            if more := re.match(r"class (\w+)\(\1\):\n", code):
                caption += nodes.inline("", f"more of {more[1]}")
            if "hide_mode" not in shown:  # else the line that opens it says so
                listing.parent.insert(0, caption)
        elif cell.exercise:
            shown["classes"].append("solution")
            shown["prompt_show"], shown["prompt_hide"] = "Show solution", "Hide solution"
    docname = app.env.docname
    std: Any = app.env.get_domain("std")
    for name in [cell.id, *sorted(names - {cell.id})]:
        label = f"cell-{Path(docname).name.partition('_')[0]}-{name}"
        if label in std.labels:  # a class after a function of the same name
            continue
        shown["ids"].append(label)
        std.anonlabels[label.lower()] = docname, label
        std.labels[label.lower()] = docname, label, title


def size_plot(app: Sphinx, image: nodes.image) -> None:
    """Show a plot at 100 pixels an inch, so that the type of all plots is equally large."""
    path = Path(app.srcdir, image["uri"].lstrip("/"))
    if path.suffix == ".png" and path.is_file() and "width" not in image:
        with Image.open(path) as picture:
            dpi = picture.info.get("dpi", (150, 150))[0]
            image["width"] = f"{round(100 * picture.width / dpi)}px"


def find_toc(app: Sphinx, config: Any) -> None:
    """Let ``--toc _toc.yml`` mean the file beside ``_config.yml``, not one in book/."""
    config.external_toc_path = str(ROOT / config.external_toc_path)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the functions above."""
    sys.path.insert(0, str(ROOT))  # autodoc documents this tree's attnlib
    app.add_config_value("comments_config", {}, "")  # Jupyter Book sets it in any case
    app.connect("config-inited", find_toc, priority=100)
    # Sphinx copies a changed style or script only when it has some page to write.
    app.connect("env-get-outdated", lambda app, *_: [app.config.root_doc])
    app.connect("doctree-read", shape_page)
    # A change of this file rebuilds every page.
    return {"version": "1", "env_version": zlib.crc32(Path(__file__).read_bytes())}
