# cache.KVCache
class KVCache:
    @property
    def nbytes(self):
        if self.keys is None:
            return 0
        return self.keys.nbytes + self.values.nbytes

    def append(self, key, value):
        if not self.length:
            self.keys = room_for(key, self.capacity, self.keys)
            self.values = room_for(value, self.capacity, self.values)
        new = key.shape[-2]
        self.keys.narrow(-2, self.length, new).copy_(key)
        self.values.narrow(-2, self.length, new).copy_(value)
        self.length += new
        return self.keys.narrow(-2, 0, self.length), self.values.narrow(-2, 0, self.length)


# transformer.padded_places
def padded_places(padding, start, end):
    first = padding.view(-1, 1)
    new = torch.arange(start, end, device=padding.device)
    keys = torch.arange(end, device=padding.device) >= first
    return torch.relu(new - first), keys.unsqueeze(1).unsqueeze(1)


# logits.keep_top_p
def keep_top_p(logits, mass):
    chance = logits.softmax(dim=-1)
    ahead = chance[..., None, :] > chance[..., None]  # comes before each
    later = torch.ones_like(ahead).triu(diagonal=1)  # of a tie, the last comes first
    ahead = ahead | ((chance[..., None, :] == chance[..., None]) & later)
    before = (ahead * chance[..., None, :]).sum(dim=-1)
    return logits.masked_fill((before >= mass) & (mass < 1), float("-inf"))


# logits.keep_min_p
def keep_min_p(logits, least):
    chance = logits.softmax(dim=-1)
    low = chance < least * chance.max(dim=-1, keepdim=True).values
    return logits.masked_fill(low, float("-inf"))


# logits.penalize
def penalize(logits, ids, factor=1.0, difference=0.0, padding=None):
    logits = logits.clone()
    for row in range(len(ids)) if ids.dim() == 2 else [...]:
        first = 0 if padding is None or row is ... else int(padding[row])
        for word in set(ids[row][first:].tolist()):
            old = logits[row][word].item()
            new = old / factor if old > 0 else old * factor
            logits[row][word] = new - difference
    return logits
