"""Write the tables of speed into pages of the book, from the records in benchmarks/results.

Those of book/engineers.md stand between `<!-- speed -->` and `<!-- /speed -->`, those of
many devices between `<!-- devices -->` and `<!-- /devices -->`. What is compiled for Hopper
stands between `<!-- hopper -->` and `<!-- /hopper -->`, in a text cell of whichever chapter
has these lines.
"""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run by its path

from bookkit import device_tables, speed_tables
from bookkit.chapters import BookError, parser, read_chapters, run, write_text
from bookkit.speed_tables import Record


def filled(old: str, name: str, text: str) -> tuple[str, int]:
    """A page with this text between its two marks, and how often it has them."""
    block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    return block.subn(lambda m: f"{m[1]}\n{text}\n{m[2]}", old)


def pages(root: Path, tables: dict[str, str]) -> dict[Path, str]:
    """Every page that has a table, as it should be."""
    path, found = root / "book" / "engineers.md", {}
    found[path] = path.read_text(encoding="utf-8")
    for name in ("speed", "devices"):
        found[path], count = filled(found[path], name, tables[name])
        if count != 1:
            raise BookError(
                f"book/engineers.md: expected one <!-- {name} --> … <!-- /{name} -->"
            )
    for chapter in read_chapters(root):
        for cell in chapter.text_cells:
            cell.source, count = filled(cell.source, "hopper", tables["hopper"])
            if count:
                found[chapter.path] = chapter.text
    return found


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--check", action="store_true", help="only compare, write nothing")
    args = options.parse_args()

    def record(name: str) -> Record:
        path = args.root / "benchmarks" / "results" / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8"))

    flash, multi_head, norm = map(record, ("flash", "multi_head", "layer_norm"))
    choice, model, masked = map(record, ("backends", "language_model", "masks"))
    parts = [
        "`MultiHeadAttention`, `LayerNorm` and `LanguageModel`, over PyTorch's; sizes are "
        "(batch ×) tokens × width:\n",
        speed_tables.layers(multi_head, norm, model),
        "The tiles of `FlashAttention` (flash) and `ScaledDotProductAttention` (plain), "
        f"with heads of {flash['features']}, over `F.scaled_dot_product_attention`; sizes "
        "are heads × tokens:\n",
        speed_tables.attention(flash),
        "What the tiles can't do without, over the same function: the two products of each "
        "tile, by the library that PyTorch takes them from; then with the powers and sums "
        "between them:\n",
        speed_tables.limit(flash),
        f"What `FlashAttention` chooses by itself (auto), for {choice['heads']} heads, "
        "forward alone, over the same function; sizes are queries × keys, and what the "
        "call itself checks is counted in. A bare module does nothing but call that "
        "function:\n",
        speed_tables.backends(choice),
        "What a mask costs `ScaledDotProductAttention`, over the same call without one, "
        f"for {masked['heads']} heads, forward alone:\n",
        speed_tables.masks(masked),
        speed_tables.memory(flash),
        speed_tables.machines(multi_head, norm, flash, choice, model, masked),
    ]
    tables = {
        "speed": "\n".join(parts),
        "devices": device_tables.devices(record("ring"), record("shard")),
        "hopper": speed_tables.hopper(record("flash_hopper")),
    }
    for path, new in pages(args.root, tables).items():
        if new == path.read_text(encoding="utf-8"):
            continue
        if args.check:
            raise BookError(f"book/{path.name} is out of date; run python tools speed")
        write_text(path, new)
        print(f"book/{path.name}: written")
    return 0


if __name__ == "__main__":
    run(main)
