# backprop.attention.softmax
def softmax(scores):
    highest = np.max(scores.real, axis=-1, keepdims=True, initial=-np.inf)
    shift = np.where(np.isneginf(highest), np.zeros_like(highest), highest)
    exponentials = np.exp(scores - shift)
    total = exponentials.sum(axis=-1)[..., None]
    return np.divide(exponentials, total, out=np.zeros_like(exponentials), where=total != 0)


# backprop.attention.softmax_backward
def softmax_backward(d_weights, weights):
    product = weights * d_weights
    return product - weights * product.sum(axis=-1, keepdims=True)


# backprop.gradient_check.finite_differences
def finite_differences(function, array, step=1e-3):
    gradient = np.empty(array.size)
    for place in range(array.size):

        def moved(steps, place=place):
            copy = array.copy().ravel()
            copy[place] += steps * step
            return np.sum(function(copy.reshape(array.shape)))

        near, far = moved(1) - moved(-1), moved(2) - moved(-2)
        gradient[place] = (8 * near - far) / (12 * step)
    return gradient.reshape(array.shape)


# backprop.gradient_check.complex_step
def complex_step(function, array, step=1e-30):
    gradient = []
    for place in range(array.size):
        direction = np.zeros(array.size)
        direction[place] = step
        moved = array + 1j * direction.reshape(array.shape)
        gradient.append(np.imag(np.sum(function(moved))) / step)
    return np.array(gradient, dtype=array.dtype).reshape(array.shape)


# backprop.gradient_check.relative_error
def relative_error(found, expected):
    def largest(array):
        return max(map(abs, array.ravel().tolist()), default=0.0)

    size = max(largest(found), largest(expected), 1e-3)
    return largest(np.subtract(found, expected)) / size


# backprop.dropout.Dropout
class Dropout:
    def __init__(self, probability, rng=None):
        self.rng = rng or np.random.default_rng()
        self.probability = probability

    def forward(self, input):
        if not self.training or self.probability == 0:
            self.remember(input, factors=None)
            return input
        dropped = self.rng.random(input.shape) < self.probability
        kept = 0.0 if self.probability == 1 else 1 / (1 - self.probability)
        factors = np.where(dropped, 0.0, kept).astype(input.real.dtype)
        output = factors * input
        self.remember(output, factors=factors)
        return output

    def backward(self, d_output):
        factors = self.recall(d_output)["factors"]
        if factors is None:
            return d_output
        return factors * d_output


# backprop.attention.ScaledDotProductAttention
class ScaledDotProductAttention:
    def forward(self, query, key, value, mask=None):
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = float(scale) * np.einsum("...id,...jd->...ij", query, key)
        if self.causal:
            i, j = np.arange(query.shape[-2])[:, None], np.arange(key.shape[-2])
            future = j > i + key.shape[-2] - query.shape[-2]
            scores = np.where(future, scores.dtype.type(-np.inf), scores)
        if mask is not None and mask.dtype == bool:
            scores = np.where(mask, scores, scores.dtype.type(-np.inf))
        elif mask is not None:
            scores = scores + mask
        p = softmax(scores)
        mixed = self.dropout.forward(p)
        output = np.einsum("...ij,...jd->...id", mixed, value)
        self.remember(output, q=query, k=key, v=value, p=p, mixed=mixed, s=float(scale))
        return output, p

    def backward(self, d_output):
        c = self.recall(d_output)
        d_p = np.einsum("...id,...jd->...ij", d_output, c["v"])
        d_s = softmax_backward(self.dropout.backward(d_p), c["p"])
        d_query = c["s"] * np.einsum("...ij,...jd->...id", d_s, c["k"])
        d_key = c["s"] * np.einsum("...ij,...id->...jd", d_s, c["q"])
        return d_query, d_key, np.einsum("...ij,...id->...jd", c["mixed"], d_output)
