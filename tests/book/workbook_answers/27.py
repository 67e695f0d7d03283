# quantized.quantize
def quantize(x, bits, dim):
    most, full = 2**bits - 1, x if x.itemsize > 2 else x.float()
    low = full.min(dim=dim, keepdim=True).values
    step = (full.max(dim=dim, keepdim=True).values - low) / most
    if x.itemsize == 2:
        step = step + step * torch.finfo(x.dtype).eps
    low, step = low.to(x.dtype), step.to(x.dtype)
    safe = step.masked_fill(step == 0, 1).to(full.dtype)
    return torch.clamp(torch.round((full - low) / safe), 0, most).byte(), low, step


# quantized.dequantize
def dequantize(codes, low, step):
    full = low.float() if low.itemsize == 2 else low
    numbers = torch.addcmul(
        full.expand(codes.shape), codes.to(full.dtype), step.to(full.dtype)
    )
    return numbers.to(low.dtype)


# quantized.pack
def pack(codes, bits):
    packed, each = 0, 8 // bits
    more = -codes.shape[-1] % each
    codes = torch.cat([codes, codes.new_zeros(*codes.shape[:-1], more)], dim=-1)
    for number in range(each):
        packed = packed + codes[..., number::each].long() * 2 ** (bits * number)
    return packed.to(torch.uint8)


# quantized.unpack
def unpack(packed, bits, d):
    parts = [packed.long() // 2**shift % 2**bits for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).to(torch.uint8).flatten(-2)[..., :d]


# quantized.QuantizedCache
class QuantizedCache:
    def append(self, key, value):
        refuse_bad_append(
            key, value, self.recent if self.length else None, self.capacity - self.length
        )
        if self.length:
            key = torch.cat([self.recent[0], key], dim=-2)
            value = torch.cat([self.recent[1], value], dim=-2)
        else:
            key, value = key.clone(), value.clone()
        keys, values = self.read(key, value)
        self.length = keys.shape[-2]
        while key.shape[-2] >= 2 * self.group:
            self.store(key[..., : self.group, :], value[..., : self.group, :])
            key, value = key[..., self.group :, :], value[..., self.group :, :]
        self.recent = key.clone(), value.clone()
        return keys, values

    def store(self, key, value):
        k, v = (x.unflatten(-2, (-1, self.group)) for x in (key, value))
        parts = [*quantize(k, self.bits, -2), *quantize(v, self.bits, -1)]
        parts[0], parts[3] = pack(parts[0], self.bits), pack(parts[3], self.bits)
        if self.stored:
            parts = [
                torch.cat([a, b], dim=-3) for a, b in zip(self.stored, parts, strict=True)
            ]
        self.stored = tuple(parts)

    def read(self, key, value):
        if not self.stored:
            return key, value
        k, k_low, k_step, v, v_low, v_step = self.stored
        keys = dequantize(unpack(k, self.bits, key.shape[-1]), k_low, k_step).flatten(
            -3, -2
        )
        values = dequantize(unpack(v, self.bits, value.shape[-1]), v_low, v_step).flatten(
            -3, -2
        )
        return torch.cat([keys, key], dim=-2), torch.cat([values, value], dim=-2)
