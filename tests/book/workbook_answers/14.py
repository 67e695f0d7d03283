# flash.tiles.visible_tiles
def visible_tiles(rows, queries, keys, causal, size):
    if not causal:
        for start in range(0, keys, size):
            yield slice(start, min(start + size, keys)), False
        return
    all_see = min(max(rows.start + keys - queries, 0), keys)
    one_sees = min(max(rows.stop + keys - queries, 0), keys)
    start = 0
    while start < one_sees:
        stop = min(start + size, all_see if start < all_see else one_sees)
        yield slice(start, stop), start >= all_see
        start = stop


# flash.tiles.TiledAttention
class TiledAttention:
    def scores(self, rows):
        shift = self.keys - self.queries
        i = torch.arange(rows.start, rows.stop, device=self.q.device)[:, None] + shift
        tiles = visible_tiles(rows, self.queries, self.keys, self.causal, self.cols)
        for cols, partial in tiles:
            shape = (len(self.q), rows.stop - rows.start, cols.stop - cols.start)
            s = self.buffer[: math.prod(shape)].view(shape)
            torch.bmm(self.q[:, rows], self.k[:, cols].mT, out=s)
            s *= self.scale * LOG2E
            if self.mask is not None:
                part = mask_tile(self.mask, rows, cols)
                apply_mask_(s.view(*self.leading, *shape[1:]), part)
            if partial:
                j = torch.arange(cols.start, cols.stop, device=s.device)
                s[:, j > i] = -torch.inf
            yield cols, s

    def forward(self):
        u = self.v.new_zeros(len(self.q), self.queries, self.v.shape[-1])
        top = u.new_full((*u.shape[:2], 1), torch.finfo(u.dtype).min)
        total = torch.zeros_like(top)
        for rows in row_blocks(self.queries, self.rows):
            for cols, s in self.scores(rows):
                raised = torch.maximum(top[:, rows], s.amax(dim=-1, keepdim=True))
                factor = torch.exp2(top[:, rows] - raised)
                s.sub_(raised).exp2_()
                total[:, rows] *= factor
                total[:, rows] += s.sum(dim=-1, keepdim=True)
                u[:, rows] *= factor
                u[:, rows] += torch.einsum("bij,bjd->bid", s, self.v[:, cols])
                top[:, rows] = raised
        empty = total == 0
        total[empty] = 1.0
        u /= total
        lse = torch.where(empty, -torch.inf, (top + total.log2()) / LOG2E)
        rows = [self.unflat(x[..., 0], x.dtype) for x in (lse, top, total)]
        return self.unflat(u, self.dtype), *rows

    def backward(self, output, tops, totals, grad_output, grad_lse, grad_mask):
        output, grad_output = self.flat(output, 2), self.flat(grad_output, 2)
        tops, totals = self.flat(tops, 1)[..., None], self.flat(totals, 1)[..., None]
        delta = (grad_output * output).sum(-1) - self.flat(grad_lse, 1)
        delta = delta[..., None]
        gq, gk, gv = (torch.zeros_like(x) for x in (self.q, self.k, self.v))
        for rows in row_blocks(self.queries, self.rows):
            go = grad_output[:, rows]
            for cols, s in self.scores(rows):
                p = torch.exp2(s - tops[:, rows]) / totals[:, rows]
                gv[:, cols] += torch.einsum("bij,bid->bjd", p, go)
                gs = torch.einsum("bid,bjd->bij", go, self.v[:, cols])
                gs = p * (gs - delta[:, rows])
                if grad_mask is not None:
                    part = mask_tile(grad_mask, rows, cols)
                    part += self.unflat(gs, part.dtype).sum_to_size(part.shape)
                gs = self.scale * gs
                gq[:, rows] += torch.einsum("bij,bjd->bid", gs, self.k[:, cols])
                gk[:, cols] += torch.einsum("bij,bid->bjd", gs, self.q[:, rows])
        return [self.unflat(x, self.dtype) for x in (gq, gk, gv)]
