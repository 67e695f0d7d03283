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
        columns = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads}
        for name, count in columns.items():
            setattr(self, f"{name}_proj", Projection(embed_dim, count * d_k, bias=bias))
        self.out_proj = Projection(num_heads * d_k, embed_dim, bias=bias)
        self.rotary = require_rotary(rotary)

    def forward(self, query, key=None, value=None, mask=None, need_weights=True):
        if key is None:
            key = query
        if value is None:
            value = key
        if mask is not None:
            refuse_ambiguous_mask(mask, query)
        pairs = ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = (split_heads(p(x), n) for (p, x), n in zip(pairs, counts, strict=True))
        if parts or self.rotary is not None:
            q, k, v, mask = place_heads(self, q, k, v, mask, key is query, **parts)
        options = {"need_weights": need_weights, "enable_gqa": True}
        mixed, weights = self.attention(q, k, v, mask, **options)
        if torch.is_tensor(weights):
            weights = [weights[..., h, :, :] for h in range(self.num_heads)]
        return self.out_proj(merge_heads(mixed)), weights


# masks.padding_mask
def padding_mask(lengths, max_length=None, device=None):
    device = lengths.device if device is None else device
    words = torch.zeros(len(lengths), max_length, dtype=torch.bool, device=device)
    for row, length in zip(words, lengths.tolist(), strict=True):
        row[:length] = True
    return words.unsqueeze(1).unsqueeze(1)
