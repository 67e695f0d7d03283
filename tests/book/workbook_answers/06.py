# distance_bias.relative_positions
def clipped(distance, most):
    return max(-most, min(most, distance))


def relative_positions(queries, keys, max_distance, device=None):
    last = keys - queries
    rows = [
        [clipped(j - i - last, max_distance) for j in range(keys)] for i in range(queries)
    ]
    return torch.tensor(rows, dtype=torch.long, device=device).reshape(queries, keys)


# distance_bias.LearnedBiasAttention
class LearnedBiasAttention:
    def __init__(self, num_heads, max_distance=16, dropout=0.0, causal=False):
        self.bias = nn.Parameter(torch.empty(num_heads, 1 + max_distance * 2))
        nn.init.zeros_(self.bias)
        self.max_distance = max_distance
        self.num_heads = num_heads

    def forward(self, query, key, value, mask=None, need_weights=True):
        if mask is None:
            added = bias
        elif mask.dtype == torch.bool:
            added = torch.where(mask, bias, -torch.inf)
        else:
            added = bias + mask
        return super().forward(query, key, value, added, need_weights)


# physics_guided.guidance
def guidance(residual, strength, floor):
    size = torch.sqrt(residual**2)
    mean = size.sum(dim=-1, keepdim=True) / size.shape[-1]
    none = mean == 0
    relative = (size / mean.masked_fill(none, 1.0)).masked_fill(none, 1.0)
    return (relative + floor).log() * strength
