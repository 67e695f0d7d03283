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
    def read(self, x, q, k, v, g, state):
        beta = 1 / (1 + torch.exp(-self.beta_proj(x).transpose(-1, -2)))
        step = self.attention.piece
        return delta_rule(q, k, v, beta, g, state, piece=step)
