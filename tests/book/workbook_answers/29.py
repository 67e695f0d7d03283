# linear.elu_plus_one
def elu_plus_one(x):
    return torch.where(x > 0, x + 1, torch.exp(torch.where(x > 0, torch.zeros_like(x), x)))


# linear.weighted_mean
def weighted_mean(sums):
    values, total = sums.split([sums.shape[-1] - 1, 1], dim=-1)
    empty = total == 0
    return torch.where(empty, torch.zeros_like(values), values / (total + empty))


# linear.what_is_left
def what_is_left(log_decay):
    n = log_decay.shape[-1]
    place = torch.arange(n, device=log_decay.device)
    between = (place[:, None, None] >= place) & (place > place[None, :, None])  # i, j, m
    steps = torch.where(between, log_decay[..., None, None, :], 0.0)
    return torch.where(place[:, None] >= place, steps.sum(dim=-1).exp(), 0.0)


# linear.read_piece
def read_piece(query, key, value, log_decay, state):
    n = query.shape[-2]
    if log_decay is None:
        log_decay = torch.zeros_like(query[..., 0])
    first = torch.cumsum(log_decay, dim=-1)
    whole = torch.cat([torch.zeros_like(log_decay[..., :1]), log_decay], dim=-1)
    left = what_is_left(whole)  # what stands before comes first
    inside = left[..., 1:, 1:]
    outputs = torch.einsum("...ij,...id,...jd,...je->...ie", inside, query, key, value)
    outputs = outputs + torch.einsum(
        "...i,...id,...de->...ie", left[..., 1:, 0], query, state
    )
    last = inside[..., n - 1, :]
    new = torch.einsum("...j,...jd,...je->...de", last, key, value)
    return outputs, torch.exp(first[..., -1])[..., None, None] * state + new


# linear.linear_attention
def linear_attention(query, key, value, log_decay=None, state=None, *, piece=64):
    ends = [*range(piece, query.shape[-2], piece), query.shape[-2]]
    result = torch.zeros(value.shape, dtype=wide, device=value.device)
    state, start = state.to(wide), 0
    with unrounded(value.device):
        for end in ends:
            if end == start:
                break
            parts = [x[..., start:end, :].to(wide) for x in (query, key, value)]
            fades = log_decay is not None
            decays = log_decay[..., start:end].to(wide) if fades else None
            rows, state = read_piece(*parts, decays, state)
            result[..., start:end, :] = rows
            start = end
    return result.to(value.dtype), state


# linear.LinearAttention
class LinearAttention:
    def attend(self, query, key, value, mask):
        products = torch.einsum(
            "...id,...jd->...ij", self.feature(query), self.feature(key)
        )
        if mask is not None and mask.numel():
            products = products * torch.exp(mask - mask.amax(dim=-1, keepdim=True))
        sums = products.sum(dim=-1, keepdim=True)
        weights = torch.where(sums > 0, products / torch.where(sums > 0, sums, 1.0), 0.0)
        return weights @ value, weights

    def attend_without_weights(self, query, key, value, mask):
        keys_only = mask is None or (mask.dtype == torch.bool and mask.shape[-2:-1] == (1,))
        if not keys_only:
            return None
        if query.shape[:-2] != key.shape[:-2]:
            key, value = repeat_shared(query, key, value)
        dtype = torch.promote_types(value.dtype, torch.float32)
        q, k = self.feature(query).to(dtype), self.feature(key).to(dtype)
        if mask is not None:
            k = torch.where(mask.mT, k, torch.zeros_like(k))
        v = torch.cat([value, torch.ones_like(value[..., :1])], dim=-1).to(dtype)
        blind = max(0, q.shape[-2] - k.shape[-2])
        front = k.shape[-2] - q.shape[-2] + blind
        with unrounded(value.device):
            if not self.causal:
                return weighted_mean(q @ (k.mT @ v)).to(value.dtype)
            start = k[..., :front, :].mT @ v[..., :front, :]
        rest = q[..., blind:, :], k[..., front:, :], v[..., front:, :]
        sums, _ = linear_attention(*rest, state=start, piece=self.piece)
        return F.pad(weighted_mean(sums), (0, 0, blind, 0)).to(value.dtype)


# linear.GatedLinearAttention
class GatedLinearAttention:
    def forward(self, x, mask=None, need_weights=True, cache=None, positions=None):
        q = self.attention.feature(split_heads(self.q_proj(x), self.num_heads))
        k = self.attention.feature(split_heads(self.k_proj(x), self.num_heads))
        v = split_heads(self.v_proj(x), self.num_heads)
        log_decay = -F.softplus(-self.gate_proj(x)).transpose(-1, -2)
        wide = torch.promote_types(v.dtype, torch.float32)
        q, k, values = q.to(wide), k.to(wide), v.to(wide)
        if mask is not None:
            there = tokens_there(mask, x, len(cache) if cache is not None else 0)
            x = torch.where(there.reshape(*x.shape[:-1], 1), x, 0.0)
            k = torch.where(there.mT, k, torch.zeros_like(k))
            values = torch.where(there.mT, values, torch.zeros_like(values))
            log_decay = torch.where(there.squeeze(-2), log_decay, 0.0)
        heads, after = self.read(x, q, k, values, log_decay, state_of(cache))
        if cache is not None:
            cache.keep(after, x.shape[-2])
        return self.out_proj(merge_heads(heads.to(v.dtype))), None

    def read(self, x, q, k, v, g, state):
        values = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
        step = self.attention.piece
        sums, after = linear_attention(q, k, values, g, state, piece=step)
        return weighted_mean(sums), after
