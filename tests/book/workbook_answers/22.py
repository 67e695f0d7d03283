# hf.scaled_query
def scaled_query(query, scaling):
    if scaling is None:
        return query
    d_k = torch.tensor(float(query.size(-1)), dtype=query.dtype, device=query.device)
    return torch.einsum("...,->...", query, scaling * d_k.sqrt())


# hf.with_sink
def with_sink(key, value, mask, sinks, queries):
    b, h, m = key.size(0), sinks.numel(), key.size(2)
    rows = key.new_empty(b, h, queries, m + 1)
    for head, score in enumerate(sinks):
        there = as_added(mask, key)
        if there.dim() > 2 and there.size(-3) > 1:
            there = there[..., head, :, :]
        elif there.dim() > 2:
            there = there.squeeze(-3)
        rows[:, head, :, :m] = there
        rows[:, head, :, m] = score
    empty = [x.new_zeros(b, x.size(1), 1, x.size(3)) for x in (key, value)]
    return torch.cat([key, empty[0]], 2), torch.cat([value, empty[1]], 2), rows


# hf.capped_scores
def capped_scores(query, key, mask, cap):
    b, n, d_k = query.size(0), query.size(2), query.size(3)
    groups = query.reshape(b, key.size(1), -1, n, d_k)
    scores = torch.einsum("bgtnd,bgmd->bgtnm", groups, key) * (d_k**-0.5 / cap)
    powers = torch.exp(-2 * scores.abs())
    bent = scores.sign() * (1 - powers) / (1 + powers) * cap
    bent = bent.flatten(1, 2)
    if mask is None:
        return bent
    if mask.dtype is torch.bool:
        return torch.where(mask, bent, -math.inf)
    return bent + mask


# hf.attend_for_model
def attend_for_model(
    attention, module, query, key, value, attention_mask, scaling, dropout, **options
):
    mask = attention_mask
    whole = mask is None and (not causal or queries == 1)
    causal = mask is None and not whole
    if causal:
        key, value = key.narrow(-2, 0, queries), value.narrow(-2, 0, queries)
    if mask is None:
        refuse_lost_window(known["sliding_window"], key.shape[-2])
    key, value, mask = without_empty_places(key, value, mask)
    if causal:
        mask = torch.ones(queries, queries, dtype=torch.bool, device=query.device).tril()
    query = scaled_query(query, scaling)
    for name in IN_THE_MASK:
        if known[name] is not None:
            only = dict.fromkeys(IN_THE_MASK) | {name: known[name]}
            query, key, value, mask = into_mask(only, query, key, value, mask)
    chosen = set_for_call(attention, False, dropout, module.training)
    need_weights = bool(known["output_attentions"])
    output, weights = chosen(
        query, key, value, mask, need_weights=need_weights, enable_gqa=True
    )
    if need_weights and weights is None:
        kind = type(attention).__name__
        raise ValueError(
            f"output_attentions: expected False, since {kind} never forms the weights"
        )
    if weights is not None:
        weights = weights[..., :-1] if known["s_aux"] is not None else weights
        weights = F.pad(weights, (0, held - weights.shape[-1]))
    return output.movedim(1, 2).contiguous(), weights
