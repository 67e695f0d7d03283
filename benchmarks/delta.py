"""The delta rule beside linear and softmax attention: whole texts, and training.

Causal heads on a CPU, all in float32: PyTorch's function by `ScaledDotProductAttention`, a
state that fades, and one that is corrected. Then small models without positions that differ
in the attention of their blocks, trained on the same batches of Python's own documentation,
beside one with softmax and rotary positions.

python benchmarks/delta.py                      writes results/delta.json
python benchmarks/delta.py --part texts         measures this part anew
python benchmarks/delta.py --part training --blocks "4 delta"      and these models
"""

import argparse
import json
from functools import partial
from pathlib import Path
from statistics import median

import torch
from linear import HEADS, LENGTHS, SIZE, STEPS, WIDTH, loss_after
from paired import time_in_turn, write_record
from torch import Tensor
from torch.nn import functional as F
from train_text import SYMBOLS

from attnlib import LanguageModel, ScaledDotProductAttention
from attnlib.delta import GatedDeltaAttention, delta_rule
from attnlib.linear import GatedLinearAttention, linear_attention

FOUR = SIZE | {"num_layers": 4}
BLOCKS = {  # the attention of four blocks; "softmax" has rotary positions if all have it
    "4 softmax, rotary": ["softmax"] * 4,
    "4 gated linear": ["gated"] * 4,
    "4 delta": ["delta"] * 4,
    "4 delta, adding": ["adding"] * 4,
    "4 delta without a gate": ["ungated"] * 4,
    "3 delta, 1 softmax": ["delta"] * 3 + ["softmax"],
}


class Adding(GatedDeltaAttention):
    """The same layer, but that nothing is taken away before the value is added."""

    def read(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        beta = torch.sigmoid(self.beta_proj(x)).mT.unsqueeze(-1)
        return linear_attention(q, k, beta * v, g, state)


def token_by_token(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
    S, outputs = torch.zeros(*k.shape[:-2], k.shape[-1], v.shape[-1]), []
    for i in range(q.shape[-2]):
        S = g[..., i, None, None].exp() * S
        old = k[..., i, None, :] @ S
        new = beta[..., i, None, None] * (v[..., i, None, :] - old)
        S = S + k[..., i, :, None] * new
        outputs.append(q[..., i, None, :] @ S)
    return torch.cat(outputs, dim=-2)


@torch.inference_mode()
def texts(rounds: int) -> list[dict]:
    """Milliseconds for all tokens of a text."""
    rows = []
    for n in LENGTHS:
        q, k, v = torch.randn(3, 1, HEADS, n, WIDTH)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        g, beta = F.logsigmoid(torch.randn(1, HEADS, n) + 4), torch.rand(1, HEADS, n)
        softmax = ScaledDotProductAttention(causal=True)
        calls = {
            "softmax": partial(softmax, q, k, v, need_weights=False),
            "gated": partial(linear_attention, q, k, v, g),
            "delta": partial(delta_rule, q, k, v, beta, g),
        }
        if n <= 1024:
            calls["loop"] = partial(token_by_token, q, k, v, beta, g)
        times = time_in_turn(calls, rounds)
        rows.append({"tokens": n} | {name: round(median(times[name]), 2) for name in calls})
        print(rows[-1], flush=True)
    return rows


def model_of(kinds: list[str]) -> LanguageModel:
    torch.manual_seed(0)
    rotary = set(kinds) == {"softmax"}
    positions = "rotary" if rotary else "learned"
    model = LanguageModel(len(SYMBOLS), **FOUR, positions=positions)
    if not rotary:  # then there are none
        model.positions.requires_grad_(False).zero_()
    sizes = FOUR["embed_dim"], FOUR["num_heads"]
    for block, kind in zip(model.blocks, kinds, strict=True):
        if kind == "gated":
            block.attention = GatedLinearAttention(*sizes)
        elif kind != "softmax":
            layer = Adding if kind == "adding" else GatedDeltaAttention
            block.attention = layer(*sizes)
        if kind == "ungated":  # a share of 1
            gate = block.attention.gate_proj.requires_grad_(False)
            gate.W.zero_(), gate.b.fill_(torch.inf)
    return model


def training(steps: int, chosen: list[str], known: dict[str, float]) -> dict:
    """Losses of the chosen models, beside those that are known."""
    for name in chosen:
        known[name] = loss_after(model_of(BLOCKS[name]), steps)
        print(name, known[name], flush=True)
    return {"steps": steps, **FOUR, "loss": [[name, known[name]] for name in BLOCKS]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--part", choices=["texts", "training"])
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=list(BLOCKS))
    options = parser.parse_args()
    torch.manual_seed(0)
    record = {"heads": HEADS, "width": WIDTH}
    if options.part:  # the other part stays
        path = Path(__file__).parent / "results" / "delta.json"
        record = json.loads(path.read_text("utf-8"))
    if options.part != "training":
        record["texts"] = texts(options.rounds)
    if options.part != "texts":
        known = dict(record.get("training", {}).get("loss", []))
        record["training"] = training(options.steps, options.blocks, known)
    write_record("delta", record)


if __name__ == "__main__":
    main()
