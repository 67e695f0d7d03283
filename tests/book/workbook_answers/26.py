# speculative.acceptance
def acceptance(p, q, guess):
    rows = guess.unsqueeze(-1)
    wanted, offered = torch.take_along_dim(p, rows, -1), torch.take_along_dim(q, rows, -1)
    return torch.minimum(torch.ones_like(wanted), wanted / offered).squeeze(-1)


# speculative.residual
def residual(p, q):
    left = torch.relu(p - q)
    equal = (left == 0).all(dim=-1, keepdim=True)
    return torch.where(equal, p, left) / torch.where(equal, p, left).sum(-1, keepdim=True)


# speculative.judge
def judge(p, q, guesses, generator=None, over=None):
    k = guesses.shape[-1]
    luck = uniform(guesses, generator, p.dtype)
    refused = luck >= acceptance(p[..., :-1, :], q, guesses)
    if over is not None:
        refused = refused & ~over.unsqueeze(-1)
    m = 0
    while m < k and not refused[..., m].any():
        m += 1
    if m < k:
        drawn = draw_token(residual(p[..., m, :], q[..., m, :]), generator)[..., 0]
        drawn = drawn.where(refused[..., m], guesses[..., m])
    else:
        drawn = draw_token(p[..., -1, :], generator)[..., 0]
    kept = guesses[..., :m].unbind(dim=-1)
    return torch.stack([*kept, drawn.to(guesses.dtype)], dim=-1)


# speculative.following
def following(text, count, longest=3):
    text = list(text)
    end = len(text)
    for size in reversed(range(1, longest + 1)):
        last = text[max(0, end - size) :]
        starts = [s for s in range(end - size) if text[s : s + size] == last]
        if starts:
            back = end - size - starts[-1]
            for _ in range(count):
                text.append(text[-back])
            return text[end:]
    return []


# speculative.laws
def laws(logits, ids, guesses, law):
    whole, n = torch.cat([ids, guesses], dim=-1), ids.shape[-1]
    rows = enumerate(logits.unbind(dim=-2))
    return torch.stack([law(row, whole[..., : n + i]) for i, row in rows], dim=-2)


# speculative.write_drafted
def write_drafted(model, ids, length, propose, ahead, judged, cache, padding, ended):
    goal = ids.shape[-1] + length
    closed = torch.zeros(ids.shape[:-1], dtype=torch.bool)
    while (n := ids.shape[-1]) < goal:
        guesses, q = ids[..., :0], None
        if goal - n > 1:
            guesses, q = propose(ids, min(ahead, goal - n - 1))
        everything = torch.cat([ids, guesses], dim=-1)
        new = everything[..., len(cache[0]) :]
        rows = 1 + guesses.shape[-1]
        logits = model(new, cache=cache, padding=padding, last=rows)
        for token in judged(logits, ids, guesses, q, closed).unbind(dim=-1):
            token = token.where(~closed, ids[..., -1])
            ids = torch.cat([ids, token.unsqueeze(-1)], dim=-1)
            closed = closed | ended(ids)
            if closed.numel() and closed.all():
                goal = 0
                break
        for kept in cache:
            kept.truncate(ids.shape[-1] - 1)
    return ids
