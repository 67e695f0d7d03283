"""What the parts of a trained model add to its stream, and the gradient at each depth.

python benchmarks/real_stream.py     writes results/real_stream.json
"""

import argparse

import torch
from paired import write_record
from smollm2 import english, smollm2
from torch import Tensor
from torch.nn import functional as F

from attnlib import Llama


def of_tokens(values: Tensor) -> dict[str, float]:
    """Of a number for each token: the first token's, and the median of the others."""
    found = {"first": values[0], "median": values[1:].median()}
    return {name: float(f"{value.item():.4g}") for name, value in found.items()}


def root_mean_square(tokens: Tensor) -> Tensor:
    """The size of each token (n, d) -> (n,)."""
    return tokens.square().mean(dim=-1).sqrt()


def sizes(x: Tensor, change: Tensor) -> dict[str, dict[str, float]]:
    """A stream before a part (n, d), and what the part adds to it.

    Returns:
        stream: root mean square of a token.
        feature: the largest feature of a token.
        share: what of the square of its length this one feature has.
        written: root mean square of what is added.
        added: the same, relative to that of the token.
        alignment: cosine of the angle between the two.
        growth: root mean square after it, relative to that before.
    """
    size, written, square = root_mean_square(x), root_mean_square(change), x.square()
    found = {
        "stream": size,
        "feature": x.abs().amax(dim=-1),
        "share": square.amax(dim=-1) / square.sum(dim=-1),
        "written": written,
        "added": written / size,
        "alignment": F.cosine_similarity(x, change, dim=-1),
        "growth": root_mean_square(x + change) / size,
    }
    return {name: of_tokens(values) for name, values in found.items()}


def largest(x: Tensor) -> dict[str, object]:
    """The largest feature of a stream (n, d): of the first token, and of all others."""
    features = x.abs().argmax(dim=-1)
    counts = features[1:].bincount()
    return {
        "first": features[0].item(),
        "others": counts.argmax().item(),  # the one that is the largest of most tokens
        "of_tokens": round(counts.max().item() / (len(x) - 1), 3),
    }


def walk(model: Llama, ids: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Logits, the stream before each part and at the end, and what each part adds."""
    streams, added = [], []

    def note_stream(norm, args):
        streams.append(args[0])

    def note_added(part, args, result):
        added.append(result[0] if isinstance(result, tuple) else result)

    held = [model.norm.register_forward_pre_hook(note_stream)]
    for block in model.blocks:
        for norm, part in (
            (block.norm_1, block.attention),
            (block.norm_2, block.feed_forward),
        ):
            held.append(norm.register_forward_pre_hook(note_stream))
            held.append(part.register_forward_hook(note_added))
    logits = model(ids)
    for hook in held:
        hook.remove()
    return logits, streams, added


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    model, tokenizer, name = smollm2()
    ids, said = english(tokenizer, options.tokens)
    logits, streams, added = walk(model, ids)
    gradients = torch.autograd.grad(F.cross_entropy(logits[:-1], ids[1:]), streams)
    gradients = [gradient.norm(dim=-1)[:-1] for gradient in gradients]  # the last has none
    streams = [x.detach() for x in streams]
    parts = []
    for x, change, after in zip(streams[:-1], added, streams[1:], strict=True):
        torch.testing.assert_close(x + change.detach(), after)
        parts.append(sizes(x, change.detach()))
        print(len(parts), parts[-1])
    all_sizes = [root_mean_square(x) for x in streams]
    by_size = [of_tokens(g * s[:-1]) for g, s in zip(gradients, all_sizes, strict=True)]
    record = {
        "parts": parts,  # attention and feed-forward network in turn
        "end": of_tokens(all_sizes[-1]),
        "grown": of_tokens(all_sizes[-1] / all_sizes[0]),
        "largest": [largest(x) for x in streams],
        "gradients": [of_tokens(gradient) for gradient in gradients],
        "gradients_by_size": by_size,  # each times the size of its token
    }
    print({name: values for name, values in record.items() if name != "parts"})
    write_record("real_stream", {"model": name, **said, **record})


if __name__ == "__main__":
    main()
