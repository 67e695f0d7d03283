# backprop.projection.Projection
class Projection:
    def forward(self, input):
        output = np.einsum("...i,io->...o", input, self.W)
        if self.b is not None:
            output += self.b
        self.remember(output, x=input)
        return output

    def backward(self, d_output):
        x = self.recall(d_output)["x"]
        tokens = list(range(d_output.ndim - 1))
        self._gradients = {"W": np.tensordot(x, d_output, axes=(tokens, tokens))}
        if self.b is not None:
            self._gradients |= {"b": d_output.sum(axis=tuple(tokens))}
        return np.einsum("...o,io->...i", d_output, self.W)


# backprop.feed_forward.ReLU
class ReLU:
    def forward(self, input):
        output = np.where(input > 0, input, np.zeros_like(input))
        self.remember(output, kept=output)
        return output

    def backward(self, d_output):
        return np.sign(self.recall(d_output)["kept"]) * d_output


# backprop.layer_norm.LayerNorm
class LayerNorm:
    def forward(self, input):
        wide = input.astype(np.promote_types(input.dtype, np.float32))
        centered = wide - np.mean(wide, axis=-1, keepdims=True)
        squares = np.einsum("...d,...d->...", centered, centered)[..., None]
        spread = np.sqrt(squares / input.shape[-1] + self.eps)
        normed = centered / spread
        output = (self.gamma * normed + self.beta).astype(input.dtype)
        self.remember(output, normed=normed, spread=spread)
        return output

    def backward(self, d_output):
        kept = self.recall(d_output)
        x_hat, d = kept["normed"], d_output.shape[-1]
        rows = d_output.reshape(-1, d)
        d_gamma = np.einsum("td,td->d", rows, x_hat.reshape(-1, d))
        self._gradients = {
            "beta": np.sum(rows, axis=0),
            "gamma": d_gamma.astype(d_output.dtype),
        }
        g = self.gamma * d_output
        sum_g = g.sum(axis=-1, keepdims=True)
        sum_gx = (g * x_hat).sum(axis=-1, keepdims=True)
        d_input = (d * g - sum_g - x_hat * sum_gx) / (d * kept["spread"])
        return d_input.astype(d_output.dtype)


# backprop.feed_forward.FeedForwardNetwork
class FeedForwardNetwork:
    def forward(self, input):
        x = input
        for part in (self.linear_1, self.activation, self.dropout, self.linear_2):
            x = part.forward(x)
        return x

    def backward(self, d_output):
        for part in (self.linear_2, self.dropout, self.activation, self.linear_1):
            d_output = part.backward(d_output)
        return d_output


# backprop.embedding.Embedding
class Embedding:
    def forward(self, ids):
        output = np.take(self.weight, ids, axis=0)
        self.remember(output, words=ids)
        return output

    def backward(self, d_output):
        words = self.recall(d_output)["words"]
        grad_weight = np.zeros_like(self.weight)
        for place in np.ndindex(words.shape):
            grad_weight[words[place]] += d_output[place]
        self._gradients = {"weight": grad_weight}


# backprop.cross_entropy.CrossEntropy
class CrossEntropy:
    def forward(self, logits, targets):
        flat, words = logits.reshape(-1, logits.shape[-1]), targets.ravel()
        highest = flat.max(axis=1, keepdims=True)
        lse = highest + np.log(np.exp(flat - highest).sum(axis=1, keepdims=True))
        log_p = flat - lse
        loss = -log_p[np.arange(len(words)), words].mean()
        self.remember(loss, log_p=log_p, words=words, shape=logits.shape)
        return loss

    def backward(self):
        kept = self.recall()
        one_hot = np.zeros_like(kept["log_p"])
        one_hot[np.arange(len(one_hot)), kept["words"]] = 1
        gradient = (np.exp(kept["log_p"]) - one_hot) / len(one_hot)
        return gradient.reshape(kept["shape"])
