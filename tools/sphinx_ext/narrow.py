"""What a narrow screen shows in another way: panels one below the other, lines that wrap.

A plot of several panels is cut where nothing is drawn, and its panels are stacked; what
hangs together stays whole, and scrolls. Of what cells print, sentences wrap, and tables
get smaller type.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sphinx.application import Sphinx

from bookkit.chapters import BookError

PHONE = "(max-width: 40rem)"  # as in book.css
COLUMNS = 45  # of what is printed, on a screen of 390 pixels
NEAR = 0.02  # of the width: other fonts move what is drawn
FIGURE = re.compile(
    r'<figure class="align-default" id="([^"]+)">\s*<a [^>]*>(<img [^>]*?>)'
)
SOURCE = re.compile(r'src="_images/(\w+)\.png"')
OUTPUT = re.compile(
    r'<div class="(output stream)[^"]*"><div class="highlight"><pre>(.*?)</pre>', re.DOTALL
)
# Where plots that a phone would cut can be cut: at these shares of their width.
CUTS: dict[str, tuple[float, ...]] = {
    "fig-three-steps": (0.363, 0.724),  # 1.3
    "fig-pronoun": (0.391, 0.692),  # 2.2
    "fig-causal-time": (0.513,),  # 3.4
    "fig-split": (0.463,),  # 5.2
    "fig-heads": (0.571,),  # 5.3
    "fig-two-back": (0.501,),  # 6.2
    "fig-guided": (0.501,),  # 6.4
    "fig-training": (0.272, 0.692),  # 9.2
    "fig-shrinking-row": (0.386, 0.69),  # 13.1
    "fig-running-softmax": (0.512,),  # 13.2
    "fig-flash-memory": (0.506,),  # 14.6
    "fig-new-row": (0.498,),  # 17.1
    "fig-what-is-kept": (0.51,),  # 18.1
    "fig-pages": (0.497,),  # 19.1
    "fig-page-tables": (0.424, 0.706),  # 19.2
    "fig-three-heads": (0.354, 0.674),  # 20.2
    "fig-guest-sees": (0.331, 0.66),  # 22.1
    "fig-four-collectives": (0.51,),  # 23.1
    "fig-what-is-cut": (0.333, 0.622),  # 25.1
}


def stacked(plot: Image.Image, cuts: Sequence[float]) -> Image.Image:
    """The panels of a plot one below the other, cut where nothing is drawn.

    Raises:
        ValueError: something is drawn all along a cut.
    """
    pixels = np.asarray(plot.convert("RGB"))
    empty = (pixels == pixels[0, 0]).all(axis=(0, 2))
    near, edges = round(NEAR * plot.width), [0]
    for cut in cuts:
        start = round(cut * plot.width) - near
        there = np.flatnonzero(empty[start : start + 2 * near])
        if not len(there):
            raise ValueError(f"something is drawn at {cut} of the width")
        edges.append(start + int(there[np.abs(there - near).argmin()]))
    parts, gap = [], plot.width // 50
    for left, right in pairwise([*edges, plot.width]):
        drawn = (pixels[:, left:right] != pixels[0, 0]).any(axis=2)
        across, down = np.flatnonzero(drawn.any(axis=0)), np.flatnonzero(drawn.any(axis=1))
        box = left + across[0], down[0], left + across[-1] + 1, down[-1] + 1
        parts.append(plot.crop([int(side) for side in box]).convert("RGB"))
    height = sum(part.height + gap for part in parts) - gap
    size = max(part.width for part in parts), height
    made, top = Image.new("RGB", size, tuple(pixels[0, 0].tolist())), 0
    for part in parts:
        made.paste(part, (0, top))
        top += part.height + gap
    return made


def printed(match: re.Match[str]) -> str:
    """What a cell prints, marked if it is too long for a phone: a table, or sentences."""
    lines = unescape(re.sub(r"<[^>]+>", "", match[2])).splitlines()
    if max(map(len, lines), default=0) <= COLUMNS:
        return match[0]
    aligned = [line for line in lines if re.search(r"\S  +\S", line)]
    kind = "printed-table" if len(aligned) > 1 else "printed-lines"
    return match[0].replace(match[1], f"{match[1]} {kind}", 1)


def narrow(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Give a page its stacked plots, and mark what its cells print."""
    if "body" not in context or app.builder.name != "html":
        return
    files = {name: Path(app.srcdir, uri) for uri, name in app.builder.images.items()}
    folder = Path(app.outdir, "_images")
    folder.mkdir(exist_ok=True)

    def figure(match: re.Match[str]) -> str:
        if not (cuts := CUTS.get(match[1])) or not (source := SOURCE.search(match[2])):
            return match[0]
        with Image.open(files[f"{source[1]}.png"]) as plot:
            dpi = plot.info.get("dpi", (150, 150))
            try:
                made = stacked(plot, cuts)
            except ValueError as error:
                raise BookError(f"{page}: {match[1]}: {error}") from None
        made.save(folder / f"{source[1]}_narrow.png", dpi=dpi)
        size = f'width="{round(100 * made.width / dpi[0])}"'
        other = f'<source srcset="_images/{source[1]}_narrow.png" media="{PHONE}" {size}>'
        return match[0].replace(match[2], f"<picture>{other}{match[2]}</picture>")

    context["body"] = OUTPUT.sub(printed, FIGURE.sub(figure, context["body"]))


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the function above."""
    app.connect("html-page-context", narrow, priority=890)
    # A change of this file rebuilds every page.
    return {"version": "1", "env_version": zlib.crc32(Path(__file__).read_bytes())}
