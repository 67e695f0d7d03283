"""Write the tables of speed in book/engineers.md from the records in benchmarks/results.

They stand between `<!-- speed -->` and `<!-- /speed -->`. A ratio is a time of attnlib over
that of PyTorch: above 1, attnlib is slower.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from chapters import BookError, parser, run, write_text

BLOCK = re.compile(r"(<!-- speed -->\n).*?(<!-- /speed -->)", re.DOTALL)
Record = dict[str, Any]


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown; the columns after the first two hold numbers."""
    titles = head.split(" | ")
    rule = ["---", "---", *["--:"] * (len(titles) - 2)]
    lines = (f"| {' | '.join(cells)} |" for cells in (titles, rule, *rows))
    return "\n".join(lines) + "\n"


def machine(record: Record) -> str:
    """The machine of a record, in a sentence."""
    where = record["machine"]
    return (
        f"*Float32 on {where['cpu']}, {where['threads']} threads, {where['system']}, "
        f"Python {where['python']}, PyTorch {where['torch']}; "
        f"medians of {record['rounds']} rounds.*\n"
    )


def multi_head(record: Record) -> str:
    """MultiHeadAttention beside PyTorch's, with weights and without."""
    rows = []
    passes = {(row["batch"], row["pass"]): row for row in record["rows"]}
    for forward in (row for row in record["rows"] if row["pass"] == "forward"):
        both = passes[forward["batch"], "forward+backward"]
        size = "{batch} × {tokens}, {width} in {heads} heads".format(**forward)
        for rival, ratio in (
            ("`nn.MultiheadAttention`, weights returned", "ratio"),
            ("`nn.MultiheadAttention`, `need_weights=False`", "ratio_fused"),
        ):
            rows.append([rival, size, f"{forward[ratio]:.2f}", f"{both[ratio]:.2f}"])
    head = "`MultiHeadAttention` beside | batch × tokens, width | forward | and backward"
    return table(head, rows) + "\n" + machine(record)


def layer_norm(record: Record) -> str:
    """LayerNorm beside PyTorch's."""
    rows = [
        ["`nn.LayerNorm`", "{tokens} × {features}".format(**row), f"{ours / theirs:.2f}"]
        for row in record["rows"]
        for ours, theirs in [(row["ours_ms"], row["theirs_ms"])]
    ]
    head = "`LayerNorm` beside | tokens × width | forward"
    return table(head, rows) + "\n" + machine(record)


def attention(record: Record) -> str:
    """FlashAttention and ScaledDotProductAttention beside PyTorch's function."""
    rows = []
    for row in record["speed"]:
        size = f"{row['heads']} × {row['tokens']}{', causal' if row['causal'] else ''}"
        for ours, name in (
            ("flash", "FlashAttention"),
            ("plain", "ScaledDotProductAttention"),
        ):
            if f"forward_{ours}_ratio" in row:
                times = [
                    f"{row[f'{part}_{ours}_ratio']:.2f}" for part in ("forward", "both")
                ]
                rows.append([f"`{name}`", size, *times])
    head = (
        "beside `F.scaled_dot_product_attention` | heads × tokens | forward | and backward"
    )
    return table(head, sorted(rows, key=lambda row: row[0])) + "\n" + machine(record)


def memory(record: Record) -> str:
    """What attention needs beyond its inputs, where all three were measured."""
    longest = [row for row in record["lengths"] if "plain_mib" in row][-1]
    mib = {
        name: round(longest[f"{name} backward_mib"]) for name in ("flash", "sdpa", "plain")
    }
    return (
        f"Memory beyond the inputs, forward and backward, for one head of "
        f"{record['features']} and {longest['tokens']} tokens: {mib['flash']} MiB for "
        f"`FlashAttention`, {mib['sdpa']} MiB for `F.scaled_dot_product_attention`, "
        f"{mib['plain']} MiB for `ScaledDotProductAttention`, which forms the weights.\n"
    )


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--check", action="store_true", help="only compare, write nothing")
    args = options.parse_args()

    def record(name: str) -> Record:
        path = args.root / "benchmarks" / "results" / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8"))

    flash = record("flash")
    parts = [multi_head(record("multi_head")), layer_norm(record("layer_norm"))]
    parts += [attention(flash), memory(flash)]
    path: Path = args.root / "book" / "engineers.md"
    old = path.read_text(encoding="utf-8")
    new, count = BLOCK.subn(lambda m: m[1] + "\n" + "\n".join(parts) + "\n" + m[2], old)
    if count != 1:
        raise BookError("book/engineers.md: expected one <!-- speed --> … <!-- /speed -->")
    if new != old:
        if args.check:
            raise BookError("book/engineers.md is out of date; run tools/speed.py")
        write_text(path, new)
        print("book/engineers.md: written")
    return 0


if __name__ == "__main__":
    run(main)
