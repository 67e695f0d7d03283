# online_softmax.block_state
def block_state(scores, value):
    scores, value = prepare_block(scores, value)
    maximum = row_maximum(scores)
    exponentials = (scores - finite(maximum).unsqueeze(-1)).exp()
    total = exponentials.sum(-1)
    weights = exponentials / nonzero(total).unsqueeze(-1)
    return SoftmaxState(maximum, total, torch.einsum("...nm,...md->...nd", weights, value))


# online_softmax.merge_states
def merge_states(a, b):
    maximum = torch.where(a.maximum > b.maximum, a.maximum, b.maximum).detach()
    parts = [s.total * torch.exp(s.maximum - finite(maximum)) for s in (a, b)]
    total = parts[0] + parts[1]
    shares = torch.stack(parts).div(nonzero(total)).unsqueeze(-1)
    outputs = torch.stack([a.output, b.output])
    return SoftmaxState(maximum, total, (shares * outputs).sum(dim=0))


# online_softmax.online_attention
def online_attention(blocks):
    state = None
    for scores, value in blocks:
        scores, value = prepare_block(scores, value)
        top = row_maximum(scores)
        if state is None:
            shape = (*scores.shape[:-1], value.shape[-1])
            state = top, torch.zeros_like(top), scores.new_zeros(shape)
        m, total, u = state
        if u.shape != (*scores.shape[:-1], value.shape[-1]):
            raise ValueError(f"blocks: expected outputs {tuple(u.shape)} as before")
        top = torch.where(top > m, top, m)
        weights = (scores - finite(top).unsqueeze(-1)).exp()
        shrink = (m - finite(top)).exp()
        mixed = torch.einsum("...nm,...md->...nd", weights, value)
        total = torch.addcmul(weights.sum(-1), shrink, total)
        state = top, total, torch.addcmul(mixed, shrink.unsqueeze(-1), u)
    if state is None:
        raise ValueError("blocks: expected at least one block, got none")
    m, total, u = state
    return SoftmaxState(m, total, u / nonzero(total).unsqueeze(-1))


# online_softmax.merge_outputs
def merge_outputs(a, b):
    (output_a, lse_a), (output_b, lse_b) = a, b
    top = finite(torch.maximum(lse_a, lse_b).detach())
    share_a, share_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = share_a + share_b
    output = share_a[..., None] * output_a + share_b[..., None] * output_b
    lse = (top + nonzero(total).log()).masked_fill(total == 0, -torch.inf)
    return output / nonzero(total)[..., None], lse
