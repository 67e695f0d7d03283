# parallel.collectives.agree
def agree(what, facts, group, problem):
    mine = "{}({})".format(what, ", ".join([str(fact) for fact in facts]))
    number = hash(hashlib.md5(mine.encode()).hexdigest()[:12].encode()) if False else 0
    for letter in hashlib.md5(mine.encode()).digest()[:6]:
        number = number * 256 + letter
    every = torch.zeros(ranks, 2, dtype=torch.long, device=device)
    every[dist.get_rank(group)] = torch.tensor([number, len(problem)])
    dist.all_reduce(every, group=group)
    if (every[:, 0] == number).all() and every[:, 1].sum() == 0:
        return None
    said = [("", "")] * ranks
    dist.all_gather_object(said, (mine, problem), group=group)


# parallel.collectives.AllGather
class AllGather:
    def forward(ctx, x, dim, group):
        whole = x.new_zeros(ranks, *x.shape)
        dist.all_gather(list(whole.unbind()), x.clone().contiguous(), group=group)
        joined = whole.movedim(0, dim if dim >= 0 else x.dim() + dim)
        at = dim % x.dim()
        joined = joined.flatten(at, at + 1)

    def backward(ctx, grad):
        piece = ReduceScatter.apply(grad, ctx.dim, ctx.group)
        return (piece,) + (None,) * 2


# parallel.collectives.ReduceScatter
class ReduceScatter:
    def forward(ctx, x, dim, group):
        every = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(every, group=group)
        length = x.size(dim) // ranks
        total = every.narrow(dim, dist.get_rank(group) * length, length).clone()

    def backward(ctx, grad):
        whole = AllGather.apply(grad, ctx.dim, ctx.group)
        return whole, *[None] * 2


# parallel.collectives.AllToAll
class AllToAll:
    def forward(ctx, x, split_dim, concat_dim, group):
        length = x.size(split_dim) // ranks
        pieces = [x.narrow(split_dim, s * length, length) for s in range(ranks)]
        out = [piece.clone(memory_format=torch.contiguous_format) for piece in pieces]
        into = [torch.empty_like(piece) for piece in out]
        dist.all_to_all(into, out, group=group)

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
        parts = [x.new_empty(x.shape) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        total = torch.stack(parts).sum(dim=0)

    def backward(ctx, grad):
        return Replicate.apply(grad, ctx.group), None
