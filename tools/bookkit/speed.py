"""Write the tables of speed in book/engineers.md from the records in benchmarks/results.

They stand between `<!-- speed -->` and `<!-- /speed -->`.
"""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run by its path

from bookkit import speed_tables
from bookkit.chapters import BookError, parser, run, write_text
from bookkit.speed_tables import Record

BLOCK = re.compile(r"(<!-- speed -->\n).*?(<!-- /speed -->)", re.DOTALL)


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
        f"What `FlashAttention` chooses by itself (auto), for {choice['heads']} heads, "
        "forward alone, over the same function; sizes are queries × keys, and what the "
        "call itself checks is counted in:\n",
        speed_tables.backends(choice),
        "What a mask costs `ScaledDotProductAttention`, over the same call without one, "
        f"for {masked['heads']} heads, forward alone:\n",
        speed_tables.masks(masked),
        speed_tables.memory(flash),
        speed_tables.machines(multi_head, norm, flash, choice, model, masked),
    ]
    path: Path = args.root / "book" / "engineers.md"
    old = path.read_text(encoding="utf-8")
    new, count = BLOCK.subn(lambda m: m[1] + "\n" + "\n".join(parts) + "\n" + m[2], old)
    if count != 1:
        raise BookError("book/engineers.md: expected one <!-- speed --> … <!-- /speed -->")
    if new != old:
        if args.check:
            raise BookError("book/engineers.md is out of date; run python tools speed")
        write_text(path, new)
        print("book/engineers.md: written")
    return 0


if __name__ == "__main__":
    run(main)
