# sparse.mean_scores
def mean_scores(query, blocks):
    return (query.unsqueeze(-3) @ blocks.mT).mean(dim=-1).mT


# sparse.box_scores
def box_scores(query, blocks):
    low, high = blocks.min(dim=-2).values, blocks.max(dim=-2).values
    middle, half = (high + low) / 2, (high - low) / 2
    return query @ middle.mT + query.abs() @ half.mT


# sparse.choose_blocks
def choose_blocks(scores, mask, keep):
    hidden = mask == -torch.inf
    some, everything = hidden.any(dim=-1), hidden.all(dim=-1)
    partly = some & ~everything
    keep = min(keep, scores.shape[-1])
    if (partly.sum(dim=-1) > keep).any():
        number = partly.sum(dim=-1).max().item()
        raise ValueError(f"keep: expected at least {number}, got {keep}")
    rank = torch.where(partly, torch.inf, scores + mask.max(dim=-1).values)
    return rank.argsort(dim=-1, descending=True)[..., :keep]


# sparse.attend_chosen
def attend_chosen(query, keys, values, mask, chosen):
    every = mask.expand(*chosen.shape[:-1], *keys.shape[-3:-1])
    index = chosen[..., None].expand(*chosen.shape, every.shape[-1])
    added = torch.gather(every, -2, index).flatten(-2)
    scores = torch.einsum("...id,...ijd->...ij", query, take_blocks(keys, chosen)) + added
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return torch.einsum("...ij,...ijd->...id", weights, take_blocks(values, chosen))


# sparse.index_scores
def index_scores(query, key, weight):
    products = torch.einsum("...hid,...jd->...hij", query, key).clamp(min=0)
    return torch.einsum("...hi,...hij->...ij", weight, products)


# sparse.indexer_loss
def indexer_loss(scores, weights):
    target = weights.detach()
    logs = scores - torch.logsumexp(scores, dim=-1, keepdim=True)
    terms = torch.where(target > 0, target * logs.masked_fill(target == 0, 0.0), 0.0)
    return -terms.sum() / scores[..., 0].numel()


# sparse.three_branches
def three_branches(query, key, value, gates, block=16, keep=16, window=64):
    tokens = query.shape[-2]
    if gates.shape != (*query.shape[:-1], 3):
        raise ValueError(f"gates: expected {(*query.shape[:-1], 3)}, got {gates.shape}")
    ended = tokens // block * block
    ends = torch.arange(block - 1, ended, block, device=query.device)
    means = [
        x[..., :ended, :].unflatten(-2, (-1, block)).mean(dim=-2) for x in (key, value)
    ]
    seen = ends <= torch.arange(tokens, device=query.device)[:, None]
    rows = [
        ScaledDotProductAttention()(query, *means, seen)[0],
        ChosenAttention(block, keep, mean_scores, causal=True)(query, key, value)[0],
        ScaledDotProductAttention(causal=True, window=window)(query, key, value)[0],
    ]
    return torch.einsum("...ib,...ibd->...id", gates, torch.stack(rows, dim=-2))
