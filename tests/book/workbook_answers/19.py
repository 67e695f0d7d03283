# split.sum_by_halves
def sum_by_halves(x, dim):
    terms = list(x.unbind(dim))
    while len(terms) > 1:
        a = len(terms) // 2
        rest = terms[2 * a :]
        terms = [terms[i] + terms[i + a] for i in range(a)] + rest
    return terms[0]


# split.split_state
def split_state(query, key, value, mask, scale):
    rows = []
    for i in range(query.shape[-2]):
        scores = sum_by_halves(query[..., i : i + 1, :] * key, -1) * scale
        rows.append(scores)
    scores = torch.stack(torch.broadcast_tensors(*rows), dim=-2)
    scores = scores if mask is None else apply_mask(scores, mask)
    m = row_maximum(scores)
    p = (scores - finite(m).unsqueeze(-1)).exp()
    l = sum_by_halves(p, p.dim() - 1)  # noqa: E741
    shares = p.div(nonzero(l).unsqueeze(-1))
    mixed = shares.unsqueeze(-1).mul(value.unsqueeze(-3))
    return SoftmaxState(maximum=m, total=l, output=sum_by_halves(mixed, -2))


# split.merge_splits
from functools import reduce


def merge_splits(query, d_v, splits, scale):
    kind = dict(dtype=dtype, device=query.device)
    empty = torch.full(query.shape[:-1], -torch.inf, **kind)
    zero = torch.zeros(*query.shape[:-1], d_v, **kind)
    states = (split_state(query, *share, scale) for share in splits)
    return reduce(merge_states, states, SoftmaxState(empty, torch.zeros_like(empty), zero))


# split.split_attention
def split_attention(query, key, value, mask=None, *, split_size, return_lse=False):
    shares = []
    for start in range(0, keys, split_size):
        few = min(split_size, keys - start)
        k, v = (x.narrow(-2, start, few) for x in (key, value))
        seen = mask.narrow(-1, start, few)
        if few < split_size:
            k, v = (F.pad(x, (0, 0, 0, split_size - few)) for x in (k, v))
            unseen = False if seen.dtype == torch.bool else -torch.inf
            seen = F.pad(seen, (0, split_size - few), value=unseen)
        shares.append((k, v, seen))
    state = merge_splits(query, d_v, shares, scale)
    output = state.output.to(query.dtype)
    return (output, state.lse) if return_lse else output


# paged.places
def places(pages, tokens, page_size):
    row = torch.arange(len(pages), device=pages.device)[:, None]
    page, slot = tokens.div(page_size, rounding_mode="floor"), tokens.remainder(page_size)
    return slot + pages[row, page] * page_size


# paged.PagedCache
class PagedCache:
    def fork(self, sequence):
        pages = self.tables[sequence][:]
        twin = self.open()
        self.tables[twin], self.lengths[twin] = pages, self.lengths[sequence]
        for page in pages:
            self.owners[page] = self.owners[page] + 1
        return twin

    def free(self, sequence):
        for page in self.tables.pop(sequence):
            self.release(page)
        self.lengths.pop(sequence)

    def truncate(self, sequence, length):
        table = self.tables[sequence]
        while (len(table) - 1) * self.page_size >= length and table:
            self.release(table.pop())
        self.lengths[sequence] = length

    def grow(self, sequence, new):
        for _ in range(new):
            place = self.lengths[sequence] % self.page_size
            if place == 0:
                self.tables[sequence].append(self.take())
            elif self.owners[self.tables[sequence][-1]] != 1:
                old = self.tables[sequence].pop()
                page = self.take()
                self.copy(page=old, other=page)
                self.tables[sequence].append(page)
                self.release(old)
            self.lengths[sequence] += 1

    def take(self):
        page = min(self.unused)
        self.unused.remove(page)
        self.owners[page] += 1
        return page

    def release(self, page):
        self.owners[page] -= 1
        if self.owners[page] == 0:
            self.unused.insert(0, page)


# paged.paged_attention
def paged_attention(query, cache, sequences, *, causal=True, split_size=None):
    def read(start, count):
        tokens = torch.stack(
            [row + i for i in range(start, start + count) for row in first.T]
        )
        tokens = tokens.T
        key, value = (gather(rows, table, tokens) for rows in (cache.keys, cache.values))
        return key, value, seen_tokens(tokens, own, table, causal, window)

    if not return_lse and split_size is None:
        found = attend_fused(rows, *read(0, most), causal=False, scale=scale)
        return found.reshape(*query.shape[:-1], d_v)
    state = merge_splits(
        rows, d_v, [read(start, size) for start in range(0, most, size)], scale
    )
    output = state.output.to(query.dtype).reshape(*query.shape[:-1], d_v)
    return (output, state.lse.reshape(query.shape[:-1])) if return_lse else output
