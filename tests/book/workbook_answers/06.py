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

    def biased(self, query, key, mask):
        queries, keys = query.shape[-2], key.shape[-2]
        reach = self.max_distance
        distance = relative_positions(queries, keys, reach, query.device)
        table = self.bias.to(query.dtype)
        bias = torch.stack([numbers[distance + reach] for numbers in table])
        if mask is None:
            return bias.expand(*query.shape[:-1], keys)
        if mask.dtype == torch.bool:
            return torch.where(mask, bias, -torch.inf)
        return bias + mask


# physics_guided.guidance
def guidance(residual, strength, floor):
    size = torch.sqrt(residual**2)
    mean = size.sum(dim=-1, keepdim=True) / size.shape[-1]
    none = mean == 0
    relative = (size / mean.masked_fill(none, 1.0)).masked_fill(none, 1.0)
    return (relative + floor).log() * strength
