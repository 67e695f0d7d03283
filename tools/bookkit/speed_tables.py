"""The tables of speed in the book, each from its record in benchmarks/results.

A ratio is a time of attnlib over that of PyTorch: above 1, attnlib is slower.
"""

from collections.abc import Iterable
from typing import Any

PASSES = ("forward", "both")
Record = dict[str, Any]


def table(head: str, rows: Iterable[Iterable[str]], texts: int) -> str:
    """A table in Markdown; after the first columns, with texts, come numbers."""
    titles = head.split(" | ")
    rule = ["---"] * texts + ["--:"] * (len(titles) - texts)
    lines = (f"| {' | '.join(cells)} |" for cells in (titles, rule, *rows))
    return "\n".join(lines).replace(" × ", "\u00a0×\u00a0") + "\n"  # sizes stay in one line


def machines(*records: Record) -> str:
    """The machine that the records come from, or each that does."""
    sentence = (
        "*Float32, medians of runs that take turns, on {cpu}, up to {threads} threads, "
        "{system}, with Python {python} and PyTorch {torch}.*\n"
    )
    machines = [record["machine"] for record in records]
    most = max(machine["threads"] for machine in machines)
    return "\n".join({sentence.format(**{**m, "threads": most}): 0 for m in machines})


def layers(multi_head: Record, layer_norm: Record, model: Record) -> str:
    """MultiHeadAttention, LayerNorm and LanguageModel beside PyTorch's."""
    rows = []
    both = {row["batch"]: row for row in multi_head["rows"] if row["pass"] != "forward"}
    for row in (row for row in multi_head["rows"] if row["pass"] == "forward"):
        size = "{batch} × {tokens} × {width}, {heads} heads".format(**row)
        for how, name in (("weights returned", "ratio"), ("no weights", "ratio_fused")):
            found = [*ratios(row, name), *ratios(both[row["batch"]], name)]
            rows.append([f"`nn.MultiheadAttention`, {how}", size, *found])
    for row in layer_norm["rows"]:
        ratio, size = (
            row["ours_ms"] / row["theirs_ms"],
            "{tokens} × {features}".format(**row),
        )
        rows.append(["`nn.LayerNorm`, on one thread", size, f"{ratio:.2f}", ""])
    for row in model["rows"]:
        size = "{batch} × {tokens} × {width}, {heads} heads".format(**row, **model)
        name = f"`nn.TransformerEncoder` in a language model, {model['layers']} layers"
        rows.append([name, size, *ratios(row, "ratio"), ""])
    return table("beside | size | forward | + backward", rows, texts=2)


def attention(record: Record) -> str:
    """FlashAttention and ScaledDotProductAttention beside PyTorch's function."""
    rows = []
    for row in record["speed"]:
        size = f"{row['heads']} × {row['tokens']}{', causal' if row['causal'] else ''}"
        names = (f"{run}_{ours}_ratio" for ours in ("flash", "plain") for run in PASSES)
        rows.append([size, *(f"{row[name]:.2f}" if name in row else "" for name in names)])
    head = "size | flash, forward | + backward | plain, forward | + backward"
    return table(head, rows, texts=1)


def ratios(row: Record, *names: str) -> list[str]:
    """What a row has under these names, with two digits."""
    return [f"{row[name]:.2f}" for name in names]


def backends(record: Record) -> str:
    """FlashAttention by itself, its tiles and the plain attention, for few tokens too."""
    rows = []
    for row in record["rows"]:
        size = f"{row['queries']} × {row['keys']}{', causal' if row['causal'] else ''}"
        rows.append([size, *ratios(row, "auto", "tiles", "plain")])
    return table("size | auto | tiles | plain", rows, texts=1)


def masks(record: Record) -> str:
    """ScaledDotProductAttention with masks, over itself without one."""
    head = "tokens | causal | booleans, N × M | booleans, M | numbers, N × M"
    kinds = ("causal", "boolean", "padding", "added")
    rows = ([str(row["tokens"]), *ratios(row, *kinds)] for row in record["rows"])
    return table(head, rows, texts=1)


def memory(record: Record) -> str:
    """What attention needs beyond its inputs, where all three were measured."""
    longest = [row for row in record["lengths"] if "plain_mib" in row][-1]
    names = ("flash", "sdpa", "plain")
    mib = {name: round(longest[f"{name} backward_mib"]) for name in names}
    return (
        f"Memory beyond the inputs, forward and backward, for one head of "
        f"{record['features']} at {longest['tokens']} tokens: {mib['flash']} MiB for "
        f"the tiles, {mib['sdpa']} MiB for `F.scaled_dot_product_attention`, "
        f"{mib['plain']} MiB for `ScaledDotProductAttention`, which forms the weights.\n"
    )


def hopper(record: Record) -> str:
    """The forward kernel for 128 features: addresses or descriptors, warps alike or not."""
    counted = ("async", "bulk", "barrier_wait", "barrier")
    seen, rows = {}, []
    for row in record["kernels"]:
        if row["dim"] != 128 or row["persistent"]:
            continue
        by = "descriptors" if row["descriptors"] else "addresses"
        case = (row["capability"], row["warps"], by)
        found = [row.get(name) for name in ("threads", "registers", "shared", *counted)]
        roles = "with roles" if row["specialized"] else "alike"
        cells = [f"{case[0] / 10}", f"{case[1]} {roles}", by]
        if "refused" in row or seen.get(case) == found:
            cells += ["refused" if "refused" in row else "as alike", *[""] * 7]
        else:
            shares = row["register_shares"]
            spilled, kept = row["spill_stores"] + row["spill_loads"], row["shared"] / 1024
            registers = f"{row['registers']}"
            if shares:
                registers += f" ({shares[0]} to {shares[-1]})"
            cells += [f"{row['threads']}", registers, f"{spilled}", f"{kept:.0f}"]
            cells += (f"{row[name]}" for name in counted)
        seen[case] = found
        rows.append(cells)
    head = (
        "GPU | warps | blocks by | threads | registers | spilled | KB | "
        "copies of 16 bytes | of blocks | waits | barriers"
    )
    return table(head, rows, texts=3)
