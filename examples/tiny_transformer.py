"""Chapters 1 to 9 on one screen, without attnlib: a language model that learns a sentence.

python examples/tiny_transformer.py
"""

import math

import torch
from torch import nn
from torch.nn import functional as F


def attend(query, key, value):  # chapters 1 and 3; each (..., tokens, width)
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(dim=-1) @ value


class Attention(nn.Module):  # chapters 2, 4 and 5
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(d_model, d_model) for _ in range(4)
        )

    def forward(self, x):
        parts = self.query(x), self.key(x), self.value(x)
        split = [part.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for part in parts]
        return self.out(attend(*split).transpose(-3, -2).flatten(-2))


class Block(nn.Module):  # chapters 7, 8 and 9
    def __init__(self, d_model, heads):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention = Attention(d_model, heads)
        self.linear_1 = nn.Linear(d_model, 4 * d_model)
        self.linear_2 = nn.Linear(4 * d_model, d_model)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.linear_2(torch.relu(self.linear_1(self.norm_2(x))))


class Model(nn.Module):  # chapter 9
    def __init__(self, symbols, tokens, d_model, heads, blocks):
        super().__init__()
        self.table = nn.Parameter(torch.randn(symbols, d_model) / math.sqrt(d_model))
        self.positions = nn.Parameter(torch.randn(tokens, d_model) / math.sqrt(d_model))
        self.blocks = nn.Sequential(*(Block(d_model, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(d_model)

    def forward(self, ids):
        x = self.blocks(self.table[ids] + self.positions[: len(ids)])
        return self.norm(x) @ self.table.T


if __name__ == "__main__":
    torch.manual_seed(0)
    text = "the cat sat on the mat and the dog lay on the rug"
    symbols = sorted(set(text))
    ids = torch.tensor([symbols.index(symbol) for symbol in text])
    model = Model(len(symbols), len(ids), d_model=32, heads=4, blocks=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(101):
        loss = F.cross_entropy(model(ids[:-1]), ids[1:])
        if step % 20 == 0:
            print(f"step {step:3}  loss {loss:.3f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    said = ids[:8]  # "the cat "
    while len(said) < len(ids):
        said = torch.cat([said, model(said)[-1:].argmax(dim=-1)])
    print("".join(symbols[i] for i in said))
