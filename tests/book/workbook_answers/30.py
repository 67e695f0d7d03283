# delta.unit_length
def unit_length(x):
    if x.shape[-1] == 0:
        return x
    largest = x.abs().max(dim=-1, keepdim=True).values
    scaled = x / torch.where(largest == 0, 1.0, largest)
    square = (scaled * scaled).sum(dim=-1, keepdim=True)
    return scaled / torch.where(square == 0, 1.0, square).sqrt()


# delta.corrections
def corrections(key, value, beta, log_decay, state):
    n = key.shape[-2]
    share = torch.exp(torch.cumsum(log_decay, dim=-1))
    below = torch.ones(n, n, dtype=torch.bool, device=key.device).tril(-1)
    products = torch.einsum("...id,...jd->...ij", key, key) * what_is_left(log_decay)
    system = beta[..., None] * torch.where(below, products, 0.0)
    one = torch.eye(n, dtype=key.dtype, device=key.device)
    asked = share[..., None] * torch.einsum("...id,...de->...ie", key, state)
    return torch.linalg.solve(one + system, beta[..., None] * (value - asked))


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
