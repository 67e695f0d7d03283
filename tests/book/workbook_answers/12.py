# backprop.multi_head.split_heads
def split_heads(x, num_heads):
    return np.stack(np.split(x, num_heads, axis=-1), axis=-3)


# backprop.multi_head.merge_heads
def merge_heads(x):
    return np.concatenate([x[..., h, :, :] for h in range(x.shape[-3])], axis=-1)


# backprop.multi_head.MultiHeadAttention
class MultiHeadAttention:
    def forward(self, query, key=None, value=None, mask=None):
        left_out = [name for name, x in (("key", key), ("value", value)) if x is None]
        key = query if key is None else key
        value = key if value is None else value
        for name, x in (("query", query), ("key", key), ("value", value)):
            refuse_bad_tokens(name, x, len(self.q_proj.W), self.q_proj.W, dims=2)
        if mask is not None and np.ndim(mask) not in (2, 4):
            expected = "expected 2 dimensions (queries, keys) or 4 (batch, heads, …)"
            raise ValueError(f"mask: {expected}, got shape {np.shape(mask)}")
        q = split_heads(self.q_proj.forward(query), self.num_heads)
        k = split_heads(self.k_proj.forward(key), self.num_heads)
        v = split_heads(self.v_proj.forward(value), self.num_heads)
        mixed, weights = self.attention.forward(q, k, v, mask)
        output = self.out_proj.forward(merge_heads(mixed))
        self.remember(output, left_out=left_out)
        if isinstance(weights, np.ndarray):
            weights = [weights[..., h, :, :] for h in range(self.num_heads)]
        return output, weights

    def backward(self, d_output):
        left_out = self.recall(d_output)["left_out"]
        d_mixed = split_heads(self.out_proj.backward(d_output), self.num_heads)
        d_q, d_k, d_v = self.attention.backward(d_mixed)
        found = {
            "query": self.q_proj.backward(merge_heads(d_q)),
            "key": self.k_proj.backward(merge_heads(d_k)),
            "value": self.v_proj.backward(merge_heads(d_v)),
        }
        for name, other in (("value", "key"), ("key", "query")):
            if name in left_out:
                found[other] = found[other] + found.pop(name)
        return found["query"], found.get("key"), found.get("value")


# backprop.optimizers.SGD
class SGD:
    def step(self):
        gradients = self.layer.gradients()
        for name, parameter in self.layer.parameters().items():
            new = self.momentum * self.velocities[name] + gradients[name]
            self.velocities[name] = new
            np.subtract(parameter, self.lr * new, out=parameter)


# backprop.optimizers.Adam
class Adam:
    def step(self):
        gradients = self.layer.gradients()
        self.steps = self.steps + 1
        b1, b2 = self.betas
        lr = self.lr / (1 - b1**self.steps)
        for name, parameter in self.layer.parameters().items():
            g = gradients[name]
            self.means[name] = b1 * self.means[name] + (1 - b1) * g
            self.squares[name] = b2 * self.squares[name] + (1 - b2) * g * g
            root = np.sqrt(self.squares[name]) / np.sqrt(1 - b2**self.steps)
            parameter[...] = parameter - lr * self.means[name] / (root + self.eps)


# backprop.transformer.TransformerBlock
class TransformerBlock:
    def forward(self, x, mask=None):
        tokens = self.norm_1.forward(x)
        mixed = self.attention.forward(tokens, None, None, mask)[0]
        y = self.dropout_1.forward(mixed) + x
        hidden = self.feed_forward.forward(self.norm_2.forward(y))
        output = self.dropout_2.forward(hidden) + y
        self.remember(output)
        return output

    def backward(self, d_output):
        self.recall(d_output)
        d_y = d_output
        for part in (self.dropout_2, self.feed_forward, self.norm_2):
            d_y = part.backward(d_y)
        d_y = d_output + d_y
        d_x = self.attention.backward(self.dropout_1.backward(d_y))[0]
        return self.norm_1.backward(d_x) + d_y


# backprop.transformer.LanguageModel
class LanguageModel:
    def forward(self, ids):
        x = self.token_embedding.forward(ids) + self.positions[np.arange(ids.shape[-1])]
        x = self.dropout.forward(x)
        for block in self.blocks:
            x = block.forward(x)
        x = self.norm.forward(x)
        logits = np.einsum("...d,vd->...v", x, self.token_embedding.weight)
        self.remember(logits, normed=x)
        return logits

    def backward(self, d_output):
        x = self.recall(d_output)["normed"]
        weight = self.token_embedding.weight
        tokens = list(range(x.ndim - 1))
        d_table = np.tensordot(d_output, x, axes=(tokens, tokens))
        d_x = self.norm.backward(np.einsum("...v,vd->...d", d_output, weight))
        for block in self.blocks[::-1]:
            d_x = block.backward(d_x)
        d_x = self.dropout.backward(d_x)
        d_positions = np.zeros_like(self.positions)
        for sentence in d_x.reshape(-1, *d_x.shape[-2:]):
            d_positions[: len(sentence)] += sentence
        self._gradients = {"positions": d_positions}
        self.token_embedding.backward(d_x)
        self.token_embedding._gradients["weight"] += d_table
