# flash.tiles.visible_tiles
def visible_tiles(rows, queries, keys, causal, size, window=None):
    edges = [(keys, keys)]
    if causal:
        edges += [(at, end)]
    if window is not None:
        edges += [(at + window, end + window - 1)]
        begin, whole = at - window + 1, end - window
    cut, seen = (min(max(0, min(ends)), keys) for ends in zip(*edges, strict=True))
    begin, whole = (min(max(0, place), keys) for place in (begin, whole))
    if whole >= cut:
        whole = cut = begin
    start = begin
    while start < seen:
        part = next(stop for stop in (whole, cut, seen) if start < stop)
        stop = min(start + size, part)
        yield slice(start, stop), not whole <= start < cut
        start = stop


# flash.tiles.TiledAttention
class TiledAttention:
    def scores(self, rows):
        shift = self.keys - self.queries
        i = torch.arange(rows.start, rows.stop, device=self.q.device)[:, None] + shift
        edges = (self.causal, self.cols, self.window)
        tiles = visible_tiles(rows, self.queries, self.keys, *edges)
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
                if self.causal:
                    s[:, j > i] = -torch.inf
                if self.window is not None:
                    s[:, (j - i).abs() >= self.window] = -torch.inf
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
