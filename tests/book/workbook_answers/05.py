# multi_head.split_heads
def split_heads(x, num_heads):
    return torch.stack(x.chunk(num_heads, dim=-1), dim=-3)


# multi_head.merge_heads
def merge_heads(x):
    return torch.cat(x.unbind(dim=-3), dim=-1)


# multi_head.MultiHeadAttention
class MultiHeadAttention:
    def __init__(self, embed_dim, num_heads, attention=None, bias=True):
        self.attention = make_heads(attention, num_heads)
        widths = {"q": embed_dim, "k": kv_dim, "v": kv_dim, "out": embed_dim}
        for name, width in widths.items():
            setattr(self, f"{name}_proj", Projection(embed_dim, width, bias=bias))

    def forward(self, query, key=None, value=None, mask=None, need_weights=True):
        pairs = ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        heads = [split_heads(p(x), n) for (p, x), n in zip(pairs, counts, strict=True)]
        alike = isinstance(self.attention, BaseAttention)
        attend = apply_attention if alike else attend_each
        mixed, weights = attend(self.attention, *heads, mask, need_weights)
        if alike and weights is not None:
            weights = [weights[..., h, :, :] for h in range(self.num_heads)]
        if not need_weights:
            weights = None
        return self.out_proj(merge_heads(mixed)), weights


# masks.padding_mask
def padding_mask(lengths, max_length=None, device=None):
    device = lengths.device if device is None else device
    words = torch.zeros(len(lengths), max_length, dtype=torch.bool, device=device)
    for row, length in zip(words, lengths.tolist(), strict=True):
        row[:length] = True
    return words.unsqueeze(1).unsqueeze(1)
