"""Draw the picture of the home page, and the card that a link to the book shows.

One sentence of chapter 2, and one head whose maps are set by hand there: the arcs are as
wide as its weights, the code in the picture is run to get them, and the tiles are those
of flash attention on the same words. What is not computed stands in home_picture.svg.
Written are book/_static/home.svg and home_narrow.svg; with --card also card.png, which
needs Chromium.
"""

import math
import sys
from functools import partial
from html import escape
from pathlib import Path
from string import Template

import torch
from torch.nn import functional as F

from attnlib import flash_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run by its path

from bookkit.chapters import parser, run, write_text

HERE = Path(__file__).parent
WORDS = ["Anna", "thanked", "Ben", "because", "he", "helped"]
HE, BEN = WORDS.index("he"), WORDS.index("Ben")
TILE = (2, 3)
CODE = """\
scores  = Q @ K.T / sqrt(d_k)
weights = softmax(scores)
output  = weights @ V
assert allclose(output, pytorch)"""
WIDE = {"width": 760, "height": 402, "derive": "0 202", "build": "260 202"}
WIDE |= {"speed": "520 202", "arrow_1": "244 302", "arrow_2": "504 302"}
NARROW = {"width": 360, "height": 842, "derive": "60 194", "build": "60 418"}
NARROW |= {"speed": "60 642", "arrow_1": "180 400) rotate(90"}
NARROW |= {"arrow_2": "180 624) rotate(90"}


def attend() -> torch.Tensor:
    """The weights (6, 6) of the head that chapter 2 sets by hand, by the code shown."""
    seeks, is_a, who = torch.zeros(3, 6, 2)
    seeks[HE, 1] = 8.0  # "he" looks for a man
    is_a[0, 0] = is_a[BEN, 1] = who[0, 0] = who[BEN, 1] = 1.0
    pytorch = F.scaled_dot_product_attention(seeks, is_a, who)
    names = {"Q": seeks, "K": is_a, "V": who, "d_k": 2, "sqrt": math.sqrt}
    names |= {"softmax": partial(torch.softmax, dim=-1), "allclose": torch.allclose}
    exec(CODE, names | {"pytorch": pytorch}, names)
    torch.testing.assert_close(flash_attention(seeks, is_a, who, block_size=TILE), pytorch)
    return names["weights"]


def sentence(weights: torch.Tensor, width: int) -> str:
    """The words, an arc from "he" to each, and the weight of each."""
    size = 26 if width > 500 else 17
    letters = [0.58 * size * len(word) for word in WORDS]
    gap = (width - sum(letters)) / len(WORDS)
    middles = [sum(letters[:i]) + letters[i] / 2 + gap * (i + 0.5) for i in range(6)]
    arcs, words, top = [], [], 140 - size
    for j, (x, word) in enumerate(zip(middles, WORDS, strict=True)):
        weight, away = weights[HE, j].item(), 20 if j == HE else 0  # to itself: a loop
        middle, high = (x + middles[HE]) / 2, 200 / width * abs(x - middles[HE]) + 45
        arcs.append(
            f'<path class="arc" stroke-width="{1 + 11 * weight:.2f}" '
            f'd="M{middles[HE] - away:.1f} {top}Q{middle:.1f} {top - high:.1f} '
            f'{x + away:.1f} {top}"/>'
        )
        if j in (HE, BEN):
            wide = letters[j] + 0.7 * size
            words.append(
                f'<rect class="{"q" if j == HE else "k"}" x="{x - wide / 2:.1f}" '
                f'y="{top}" width="{wide:.1f}" height="{1.45 * size:.1f}" rx="6"/>'
            )
        words.append(
            f'<text class="{"m w" if j == HE else "m"}" style="font-size: {size}px" '
            f'x="{x:.1f}" y="{140 + 0.05 * size:.1f}">{word}</text>'
            f'<text class="{"b" if j == BEN else "n"} m" x="{x:.1f}" y="172">'
            f"{weight:.3f}</text>"
        )
    title = f'<text class="b" x="{gap / 2:.1f}" y="22">Who is “he”?</text>'
    return "\n".join([title, *arcs, *words])


def tiles(weights: torch.Tensor) -> str:
    """The weights as shades, in the tiles of flash attention."""
    return "\n".join(
        f'<rect class="q" x="{44 + 27 * j + 11 * (j // TILE[1])}" '
        f'y="{53 + 18 * i + 5 * (i // TILE[0])}" width="24" height="15" '
        f'fill-opacity="{max(0.06, weights[i, j].item()):.3f}"/>'
        for i in range(6)
        for j in range(6)
    )


def picture(weights: torch.Tensor, places: dict[str, int | str]) -> str:
    lines = enumerate(CODE.splitlines())
    code = [f'<text x="14" y="{68 + 26 * i}">{escape(line)}</text>' for i, line in lines]
    template = Template((HERE / "home_picture.svg").read_text("utf-8"))
    return template.substitute(
        places,
        sentence=sentence(weights, places["width"]),
        code="".join(code),
        tiles=tiles(weights),
    )


def draw_card(wide: str, path: Path) -> None:
    """The sentence under the book's title, 1200 by 630 pixels."""
    from site_browser import launched

    drawing = wide.replace("0 0 760 402", "0 0 760 180").replace('height="402"', "")
    html = (HERE / "home_picture.html").read_text("utf-8")
    with launched() as browser:
        page = browser.new_page(viewport={"width": 1200, "height": 630})
        page.set_content(Template(html).substitute(drawing=drawing))
        page.screenshot(path=path)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--card", action="store_true", help="also card.png")
    args = options.parse_args()
    static, weights = args.root / "book" / "_static", attend()
    wide = picture(weights, WIDE)
    write_text(static / "home.svg", wide)
    write_text(static / "home_narrow.svg", picture(weights, NARROW))
    if args.card:
        draw_card(wide, static / "card.png")
    return 0


if __name__ == "__main__":
    run(main)
