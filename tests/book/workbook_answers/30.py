# delta.unit_length
def unit_length(x):
    square = (x * x).sum(dim=-1, keepdim=True)
    empty = square == 0
    return torch.where(
        empty, x, x / torch.where(empty, torch.ones_like(square), square).sqrt()
    )


# delta.corrections
def corrections(key, value, beta, log_decay, state):
    n = key.shape[-2]
    steps = torch.diag_embed(beta)
    share = torch.diag_embed(torch.exp(torch.cumsum(log_decay, dim=-1)))
    below = torch.ones(n, n, dtype=torch.bool, device=key.device).tril(-1)
    products = torch.einsum("...id,...jd->...ij", key, key) * what_is_left(log_decay)
    system = steps @ torch.where(below, products, 0.0)
    one = torch.eye(n, dtype=key.dtype, device=key.device)
    return torch.linalg.solve(one + system, steps @ (value - share @ key @ state))


# delta.correct_piece
def correct_piece(query, key, value, beta, log_decay, state):
    replaced = corrections(key, value, beta, log_decay, state)
    outputs, after = read_piece(query, key, replaced, log_decay, state)
    return outputs, after


# delta.correct_by_feature
def correct_by_feature(query, key, value, beta, log_decay, state):
    n = key.shape[-2]
    place = torch.arange(n, device=key.device)
    left = torch.stack([what_is_left(log_decay[..., d]) for d in range(key.shape[-1])], -1)
    products = torch.einsum("...ijd,...id,...jd->...ij", left, key, key)
    asked = torch.exp(torch.cumsum(log_decay, dim=-2))
    error = beta[..., None] * (value - (asked * key) @ state)
    system = torch.where(place[:, None] > place, beta[..., None] * products, 0.0)
    one = torch.eye(n, dtype=key.dtype, device=key.device)
    added = torch.linalg.solve(one + system, error)
    outputs = torch.einsum("...ijd,...id,...jd,...je->...ie", left, query, key, added)
    outputs = outputs + (asked * query) @ state
    last = torch.einsum("...jd,...jd,...je->...de", left[..., -1, :, :], key, added)
    return outputs, asked[..., -1, :, None] * state + last


# delta.GatedDeltaAttention
class GatedDeltaAttention:
    def forward(self, x, mask=None, need_weights=True, cache=None, positions=None):
        wide = torch.promote_types(self.v_proj.W.dtype, torch.float32)
        q = self.attention.feature(split_heads(self.q_proj(x), self.num_heads).to(wide))
        k = self.attention.feature(split_heads(self.k_proj(x), self.num_heads).to(wide))
        v = split_heads(self.v_proj(x), self.num_heads)
        beta = 1 / (1 + torch.exp(-self.beta_proj(x).transpose(-1, -2)))
        log_decay = -F.softplus(-self.gate_proj(x)).transpose(-1, -2)
        if mask is not None:
            there = tokens_there(mask, x, len(cache) if cache is not None else 0)
            beta = torch.where(there.squeeze(-2), beta, torch.zeros_like(beta))
            log_decay = torch.where(there.squeeze(-2), log_decay, 0.0)
        heads, after = delta_rule(
            q, k, v.to(wide), beta, log_decay, state_of(cache), piece=self.attention.piece
        )
        if cache is not None:
            cache.keep(after, x.shape[-2])
        return self.out_proj(merge_heads(heads.to(v.dtype))), None
