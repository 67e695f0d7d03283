"""The tables of many devices in the book, from their records in benchmarks/results."""

from bookkit.speed_tables import Record, table

MIB = 2**20


def ring(record: Record) -> str:
    """Two ranks in a ring beside one rank with the whole text, and the rule for them."""
    rows = []
    for row in record["times"]:
        passes = (row[f"whole{name}"] / row[f"ring{name}"] for name in ("", "_both"))
        size = f"{2 * row['tokens']}, {row['order']}"
        rows.append([size, *(f"{times:.2f}" for times in passes)])
    return table("tokens, order | forward | + backward", rows, texts=1)


def memory(record: Record) -> str:
    """MiB of a rank above its inputs, for texts of several lengths."""
    found = {(row["tokens"], row["ranks"]): row["bytes"] for row in record["memory"]}
    lengths, ranks = (sorted({key[i] for key in found}) for i in (0, 1))
    rows = ([str(n), *(f"{found[n, p] / MIB:.1f}" for p in ranks)] for n in lengths)
    return table(f"tokens | {' | '.join(_ranks(p) for p in ranks)}", rows, texts=1)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def exchange(record: Record) -> str:
    """What heads and a ring send, and how long that takes with nothing computed beside."""
    rows = []
    for row in record["rows"]:
        size = f"{row['ranks']} ranks, {row['tokens']} tokens"
        heads = f"{row['heads']} heads, {row['kv_heads']} of keys"
        sent = (f"{row[f'{name}_bytes'] / MIB:.2f}" for name in ("heads", "ring"))
        took = (f"{row[f'{name}_ms']:.1f}" for name in ("asking", "ring"))
        rows.append([f"{size}, {heads}", *sent, *took])
    head = "ranks, tokens of the text | heads, MiB | ring, MiB | heads, ms | ring, ms"
    return table(head, rows, texts=1)


def devices(rings: Record, shards: Record) -> str:
    """The whole section."""
    machine = rings["machine"]
    return "\n".join(
        [
            f"Ring attention on two ranks, causal, with {rings['heads']} heads of "
            f"{rings['features']} and {rings['kv_heads']} of keys: how many times as fast "
            "as one rank with the whole text. By the number of pairs it is 2, and 4/3 for "
            "shards one after the other, where one rank waits:\n",
            ring(rings),
            "What a rank needs beyond its inputs, forward and backward, of one head, in "
            "MiB:\n",
            memory(rings),
            "What a rank sends forward, and how long that takes with nothing computed, "
            "questions included: by heads each exchange asks whether all ranks want the "
            "same, a ring asks once. The ring's messages can travel while it computes, "
            "those of the heads can't:\n",
            exchange(shards),
            f"*Float32, the least of several runs, on {machine['cpu']}, ranks that are "
            f"processes with one thread each on {machine['cores']} cores, "
            "messages by gloo, which crosses no network here. Chapter 24 extends the times "
            "to more ranks by a model, and says how far it is off.*\n",
        ]
    )
