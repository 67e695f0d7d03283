# base.repeat_heads
def repeat_heads(x, times):
    copies = x.unsqueeze(-3).expand(*x.shape[:-2], times, *x.shape[-2:])
    return copies.flatten(-4, -3)


# cache.WindowCache
class WindowCache:
    def append(self, key, value):
        w, new, room = self.window, key.shape[-2], self.places
        oldest = max(self.first, self.length - w + (1 if new else 0))
        before = [t % room for t in range(oldest, self.length)]
        keys = torch.cat([self.keys[..., before, :], key], dim=-2)
        values = torch.cat([self.values[..., before, :], value], dim=-2)
        for number in range(new):
            place = (self.length + number) % room
            self.keys.select(-2, place).copy_(key.select(-2, number))
            self.values.select(-2, place).copy_(value.select(-2, number))
        self.length += new
        if self.length - self.first > room:
            self.first = self.length - room
        return keys, values


# online_softmax.add_sink
def add_sink(output, lse, sink):
    total = torch.logaddexp(lse, sink.to(lse.dtype))
    share = torch.where(lse == -torch.inf, 0.0, torch.exp(lse - total))
    return (share[..., None] * output).to(output.dtype), total


# latent.plain_heads
def plain_heads(query, c, r, up_k, up_v):
    h = query.shape[-3]
    keys = torch.einsum("...mc,chd->...hmd", c, blocks_of(up_k, h))
    values = torch.einsum("...mc,chd->...hmd", c, blocks_of(up_v, h))
    turned = torch.stack([r] * h, dim=-3)
    return query, torch.cat([keys, turned], dim=-1), values


# latent.absorbed_heads
def absorbed_heads(query, c, r, up_k, up_v):
    h, d_q = query.shape[-3], query.shape[-1] - r.shape[-1]
    still, turned = query.split([d_q, r.shape[-1]], dim=-1)
    matrices = up_k.T.unflatten(0, (h, d_q))
    keys = torch.cat([c, r], dim=-1)
    return (
        torch.cat([still @ matrices, turned], dim=-1),
        keys[..., None, :, :],
        c[..., None, :, :],
    )


# latent.LatentAttention
class LatentAttention:
    def forward(
        self, x, mask=None, need_weights=True, cache=None, positions=None, absorb=None
    ):
        h, d_k = self.num_heads, self.embed_dim // self.num_heads
        at = positions
        if at is None:
            at = len(cache) if cache is not None else 0
        each = at if isinstance(at, int) or at.dim() < 2 else at[:, None]
        still = self.q_proj(x).unflatten(-1, (h, d_k)).transpose(-3, -2)
        turned = self.q_rotary_proj(x).unflatten(-1, (h, -1)).transpose(-3, -2)
        query = torch.cat([still, self.rotary(turned, each)], dim=-1)
        kept = self.down_proj(x), self.rotary(self.k_rotary_proj(x), at)
        if cache is not None:
            one_head = [rows[..., None, :, :] for rows in kept]
            kept = [rows[..., 0, :, :] for rows in cache.append(*one_head)]
        if absorb is None:
            n, m = x.shape[-2], kept[0].shape[-2]
            absorb = (m - n) * d_k * self.d_latent > n * m * (self.d_latent - d_k)
        matrices = self.k_up_proj.W, self.v_up_proj.W
        if absorb:
            heads = absorbed_heads(query, *kept, *matrices)
            mixed, p = self.attention(*heads, mask, need_weights, enable_gqa=True)
            mixed = mixed @ matrices[1].unflatten(-1, (h, d_k)).transpose(0, 1)
        else:
            heads = plain_heads(query, *kept, *matrices)
            mixed, p = self.attention(*heads, mask, need_weights)
        each = [p[..., a, :, :] for a in range(h)] if need_weights else None
        return self.out_proj(mixed.transpose(-3, -2).flatten(-2)), each
