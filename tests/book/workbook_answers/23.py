# parallel.collectives.agree
def agree(what, facts, group, problem):
    own = torch.tensor([code, len(problem)], device=device)
    most, least = own.clone(), own.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    if most[0] == least[0] and most[1] == 0:
        return
    said = [("", "")] * ranks
    dist.all_gather_object(said, (mine, problem), group=group)
    found = {r: its for r, (_, its) in enumerate(said) if its}
    if len(found) == ranks and len(set(found.values())) == 1:
        raise ValueError(f"{what}: {found[0]}")
    if found:
        told = [f"rank {r}: {its}" for r, its in found.items()]
        raise ValueError(f"{what}: " + "; ".join(told))
    told = [f"rank {r} has {said[r][0]}" for r in range(ranks)]
    raise ValueError(f"{what}: the ranks disagree: " + "; ".join(told))


# parallel.collectives.AllGather
class AllGather:
    def forward(ctx, x, dim, group):
        whole = x.new_zeros(ranks, *x.shape)
        dist.all_gather(list(whole.unbind()), x.clone().contiguous(), group=group)
        sent("all_gather", whole.nbytes - x.nbytes, ranks - 1)
        at = dim % x.dim()
        return whole.movedim(0, at).flatten(at, at + 1)

    def backward(ctx, grad):
        piece = ReduceScatter.apply(grad, ctx.dim, ctx.group)
        return (piece,) + (None,) * 2


# parallel.collectives.ReduceScatter
class ReduceScatter:
    def forward(ctx, x, dim, group):
        every = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(every, group=group)
        length = x.size(dim) // ranks
        piece = every.narrow(dim, dist.get_rank(group) * length, length).clone()
        sent("reduce_scatter", x.nbytes - piece.nbytes, ranks - 1)
        return piece

    def backward(ctx, grad):
        whole = AllGather.apply(grad, ctx.dim, ctx.group)
        return whole, *[None] * 2


# parallel.collectives.AllToAll
class AllToAll:
    def forward(ctx, x, split_dim, concat_dim, group):
        length = x.size(split_dim) // ranks
        pieces = [x.narrow(split_dim, s * length, length) for s in range(ranks)]
        pieces = [piece.clone(memory_format=torch.contiguous_format) for piece in pieces]
        came, mine = [torch.empty_like(piece) for piece in pieces], dist.get_rank(group)
        for r in range(ranks):  # each in turn hands out what it has
            whole = [torch.empty_like(p) for p in pieces] if r != mine else pieces
            for s, piece in enumerate(whole):
                dist.broadcast(piece, dist.get_global_rank(group, r), group=group)
                if s == mine:
                    came[r] = piece
        sent("all_to_all", x.nbytes - pieces[0].nbytes, ranks - 1)
        return torch.cat(came, dim=concat_dim)

    def backward(ctx, grad):
        split_dim, concat_dim = ctx.dims
        return AllToAll.apply(grad, split_dim, concat_dim, ctx.group), *[None] * 3


# parallel.collectives.Replicate
class Replicate:
    def forward(ctx, x, group):
        return torch.empty_like(x).copy_(x)

    def backward(ctx, grad):
        total = AddUp.apply(grad, ctx.group)
        return total, None


# parallel.collectives.AddUp
class AddUp:
    def forward(ctx, x, group):
        ranks = dist.get_world_size(group)
        parts = [x.new_empty(x.shape) for _ in range(ranks)]
        dist.all_gather(parts, x.contiguous(), group=group)
        sent("all_reduce", 2 * (x.nbytes - x.nbytes // ranks), 2 * ranks - 2)
        return torch.stack(parts).sum(dim=0)

    def backward(ctx, grad):
        return Replicate.apply(grad, ctx.group), None
