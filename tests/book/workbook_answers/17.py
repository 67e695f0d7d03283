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
