"""An attention of your own, where near tokens count more: tested, then put into a model.

python examples/your_own_head.py
"""

import torch

from attnlib import (
    BaseAttention,
    LanguageModel,
    ScaledDotProductAttention,
    refuse_bad_inputs,
)
from attnlib.testing import check_attention


class NearAttention(BaseAttention):
    """The scaled dot product, less `slope` for each token between query and key."""

    def __init__(self, slope=0.5, causal=False):
        super().__init__()
        self.slope, self.causal = slope, causal
        self.attention = ScaledDotProductAttention(causal=causal)

    def forward(self, query, key, value, mask=None):
        refuse_bad_inputs(query, key, value, mask)
        queries, keys = query.shape[-2], key.shape[-2]
        place = torch.arange(keys, device=query.device)
        asks = torch.arange(keys - queries, keys, device=query.device)  # the last tokens
        distance = (asks[:, None] - place).abs()
        bias = -self.slope * distance.to(query.dtype)
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
        return self.attention(query, key, value, bias if mask is None else bias + mask)


if __name__ == "__main__":
    check_attention(NearAttention)
    check_attention(lambda: NearAttention(causal=True))
    print("NearAttention keeps the contract")
    torch.manual_seed(0)
    query = key = torch.zeros(1, 5, 4)
    _, weights = NearAttention(slope=1.0)(query, key, torch.rand(1, 5, 2))
    shown = " ".join(f"{weight:.3f}" for weight in weights[0, 2])
    print("weights of the third of five tokens that are all alike:", shown)
    causal = NearAttention(causal=True)
    model = LanguageModel(65, 64, embed_dim=32, num_heads=4, num_layers=2, attention=causal)
    logits = model(torch.randint(65, (2, 64)))
    print("logits of a model of such heads:", tuple(logits.shape))
