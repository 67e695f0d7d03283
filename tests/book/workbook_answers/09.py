# transformer.TransformerBlock
class TransformerBlock:
    def __init__(
        self,
        embed_dim,
        num_heads,
        d_ff=None,
        attention=None,
        dropout=0.0,
        norm_first=True,
        activation=torch.relu,
        **heads,
    ):
        self.norm_first = norm_first
        one = ScaledDotProductAttention(dropout) if attention is None else attention
        self.attention = MultiHeadAttention(embed_dim, num_heads, one, **heads)
        self.norm_1 = LayerNorm(embed_dim)
        self.feed_forward = FeedForwardNetwork(
            embed_dim, d_ff, dropout=dropout, activation=activation
        )
        self.norm_2 = LayerNorm(embed_dim)

    def forward(self, x, mask=None, return_weights=False):
        before = (self.norm_1, self.norm_2) if self.norm_first else (nn.Identity(),) * 2
        after = (nn.Identity(),) * 2 if self.norm_first else (self.norm_1, self.norm_2)
        tokens = before[0](x)
        mixed, weights = self.attention(tokens, tokens, tokens, mask, return_weights)
        x = after[0](self.drop(mixed) + x)
        x = after[1](self.drop(self.feed_forward(before[1](x))) + x)
        if return_weights:
            return x, weights
        return x


# generation.token_probabilities
def token_probabilities(logits, temperature, top_k=None, top_p=None, min_p=None):
    order = logits.argsort(dim=-1, descending=True)[..., :top_k]
    few = logits.gather(-1, order)
    chance = ((few - few[..., :1]) / temperature).softmax(dim=-1)
    if top_p is not None:
        chance = chance * (chance.cumsum(dim=-1) - chance < top_p)
    if min_p is not None:
        chance = chance * (chance >= min_p * chance[..., :1])
    chance = chance / chance.sum(dim=-1, keepdim=True)
    return torch.zeros_like(logits).scatter(-1, order, chance)


# generation.write_tokens
def write_tokens(model, ids, length, draw, cache, padding, ended, own):
    rows = torch.arange(len(ids)) if ids.dim() == 2 else ...
    closed = torch.zeros(ids.shape[:-1], dtype=torch.bool)
    for _ in range(length):
        with torch.no_grad():
            token = draw(model.last_logits(ids, cache, padding), ids, padding, rows)
        token = token.squeeze(-1).to(ids.dtype).where(~closed, ids[..., -1])
        yield token.clone()
        ids = torch.cat([ids, token.unsqueeze(-1)], dim=-1)
        closed = closed | ended(ids)
        if closed.numel() and closed.all():
            return


# transformer.sinusoidal_positions
import math


def sinusoidal_positions(tokens, embed_dim):
    table = torch.empty(tokens, embed_dim, dtype=torch.float64)
    for i in range(embed_dim // 2):
        omega = math.exp(-2 * i / embed_dim * math.log(10000))
        angle = omega * torch.arange(tokens, dtype=torch.float64)
        table[:, 2 * i], table[:, 2 * i + 1] = angle.sin(), angle.cos()
    return table.to(torch.get_default_dtype())


# transformer.LanguageModel
class LanguageModel:
    def forward(self, ids, return_weights=False):
        places = torch.arange(ids.shape[-1], device=ids.device)
        x = self.positions[places] + F.embedding(ids, self.token_embedding.weight)
        x = F.dropout(x, p=self.dropout, training=self.training)
        kept = []
        for block in self.blocks:
            if return_weights:
                x, of_block = block(x, None, True)
                kept += [of_block]
            else:
                x = block(x)
        shown = self.logits(self.norm(x))
        if not return_weights:
            return shown
        return shown, kept

    def logits(self, x):
        return x @ self.token_embedding.weight.mT
