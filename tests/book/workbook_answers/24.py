# parallel.places.Rule
class Rule(NamedTuple):
    def allowed(self, queries, keys):
        reach = float("inf") if self.window is None else self.window
        i, d = queries.unsqueeze(2).unbind()
        j, e = keys.unsqueeze(1).unbind()
        far = j - i if self.causal else (j - i).abs()
        hidden = (d != e) | ((i - j).abs() >= reach)
        return ~(hidden | (far > 0)) if self.causal else ~hidden


# parallel.places.shard_positions
def shard_positions(tokens, ranks, rank, order="zigzag"):
    c = tokens // ranks
    if order == "striped":
        return rank + ranks * torch.arange(c)
    if order == "contiguous" or ranks == 1:
        return torch.arange(rank * c, rank * c + c)
    early = torch.arange(c // 2) + rank * (c // 2)
    return torch.cat((early, tokens - 1 - early.flip(0)))


# parallel.places.hops_needed
def hops_needed(rule, queries, keys, pieces=8):
    for hops in range(ranks - 1, 0, -1):
        for r in range(ranks):
            if rule.allowed(queries[r], keys[r - hops]).any():
                return hops
    return 0


# parallel.ring.RingFunction
class RingFunction(Function):
    @staticmethod
    def forward(ctx, query, key, value, mask, plan):
        here = [key, value]
        for step in range(plan.hops):
            waiting = post_shift(here, 1, plan.group)
            for rows, cols, seen, _ in plan.tiles(step, mask):
                o, level = attend(*here, rows, cols, seen)
                both = torch.logaddexp(lse[..., rows], level)
                base = both.masked_fill(both == -torch.inf, 0.0)
                old = (lse[..., rows] - base).exp().unsqueeze(-1)
                output[..., rows, :] *= old
                output[..., rows, :] += (level - base).exp().unsqueeze(-1) * o
                lse[..., rows] = both
            here = waiting()
        for rows, cols, seen, _ in plan.tiles(plan.hops, mask):
            before = output[..., rows, :], lse[..., rows]
            o, level = merge_outputs(attend(*here, rows, cols, seen), before)
            output[..., rows, :] = o
            lse[..., rows] = level
        ctx.plan = plan
        ctx.save_for_backward(query, key, value, mask, output, lse)
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output, grad_lse):
        kinds = [torch.zeros_like(x, dtype=wide) for x in (key, value)]
        here, sums = (key, value), kinds
        for step in range(plan.hops + 1):
            if step:
                here = post_shift(here, 1, plan.group)()
                sums = post_shift(sums, 1, plan.group)()
            grad_k, grad_v = (x.clone() for x in sums)
            for tile in plan.tiles(step, mask):
                rows, cols = tile[:2]
                d_q, d_k, d_v = gradients(*here, *tile)
                grad_q[..., rows, :] = grad_q[..., rows, :] + d_q
                grad_k[..., cols, :].add_(d_k)
                grad_v[..., cols, :].add_(d_v)
            sums = grad_k, grad_v
        if plan.hops > 0:
            grad_k, grad_v = post_shift(sums, -plan.hops, plan.group)()
        grads = (x.to(query.dtype) for x in (grad_q, grad_k, grad_v))
        return *grads, grad_mask, None
