# ruff: noqa: E402
"""Small tests of each definition: python check.py 1 apply_mask runs those of `apply_mask`.

Each part stands below a comment with the name of its definition, which it finds imported,
beside math, np and torch. A check of a chapter runs them first.
"""

# masks.apply_mask
scores = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
seen = torch.tensor([[True, False], [True, True]])
hidden = apply_mask(scores, seen)
assert hidden.tolist() == [[1.0, -math.inf], [3.0, 4.0]]
assert scores.tolist() == [[1.0, 2.0], [3.0, 4.0]]
added = apply_mask(scores, torch.tensor([[0.5, -1.0]]))
assert added.tolist() == [[1.5, 1.0], [3.5, 3.0]]

# masks.causal_mask
assert causal_mask(3).tolist() == [[True, False, False], [True, True, False], [True] * 3]
late = causal_mask(2, 4)
assert late.tolist() == [[True, True, True, False], [True] * 4]
early = causal_mask(3, 2)
assert early.tolist() == [[False, False], [True, False], [True, True]]

# scaled_dot_product.masked_softmax
weights = masked_softmax(torch.tensor([[0.0, math.log(3.0)], [-math.inf, 5.0]]))
assert torch.allclose(weights, torch.tensor([[0.25, 0.75], [0.0, 1.0]]))
empty = masked_softmax(torch.full((1, 2), -math.inf))
assert empty.tolist() == [[0.0, 0.0]]
large = masked_softmax(torch.tensor([[1000.0, 1000.0], [0.0, 0.0]]))
assert large.tolist() == [[0.5, 0.5], [0.5, 0.5]]

# scaled_dot_product.ScaledDotProductAttention
attention = ScaledDotProductAttention(scale=1.0)
query, key = torch.tensor([[math.log(3.0), 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
value = torch.tensor([[4.0, 0.0, 0.0], [0.0, 8.0, 0.0]])
output, weights = attention(query, key, value)
assert torch.allclose(weights, torch.tensor([[0.75, 0.25]]))
assert torch.allclose(output, torch.tensor([[3.0, 2.0, 0.0]]))
scaled = ScaledDotProductAttention()(query, key, value)[1]
ratio = (scaled[0, 0] / scaled[0, 1]).item()
assert math.isclose(ratio, 3 ** (1 / math.sqrt(2)), rel_tol=1e-5)
output, weights = attention(query, key, value, torch.zeros(1, 2, dtype=torch.bool))
assert output.tolist() == [[0.0, 0.0, 0.0]]
for scale in (0.0, 0.3):
    weights = ScaledDotProductAttention(scale=scale)(query, key, value)[1]
    assert torch.allclose(weights, (query @ key.mT * scale).softmax(-1))
dropping = ScaledDotProductAttention(dropout=0.5)
output, weights = dropping(query, key.repeat(50, 1), torch.ones(100, 1))
assert torch.allclose(weights.sum(-1), torch.ones(1))
assert abs(output.item() - 1.0) > 1e-3
assert math.isclose(
    dropping.eval()(query, key, torch.ones(2, 1))[0].item(), 1.0, rel_tol=1e-6
)


# self_attention.SelfAttention
layer = SelfAttention(3, 2)
x = torch.randn(4, 3)
output, weights = layer(x, return_weights=True)
assert output.shape == (4, 2)
assert torch.allclose(weights.sum(-1), torch.ones(4))
maps = [p for p in layer.parameters() if p.dim() == 2]
assert [tuple(p.shape) for p in maps] == [(2, 3)] * 3
alone, weights = layer(x[:1], return_weights=True)
assert weights.tolist() == [[1.0]]
shuffled = layer(x.flip(0))
assert torch.allclose(shuffled.flip(0), layer(x), atol=1e-6)
layer = SelfAttention(3, 2, dqv_bias=True)
q, k, v = (f(x) for f in (layer.W_query, layer.W_key, layer.W_value))
expected = (q @ k.mT / math.sqrt(2)).softmax(-1)
output, weights = layer(x, return_weights=True)
assert torch.allclose(weights, expected, atol=1e-6)
assert torch.allclose(output, expected @ v, atol=1e-6)
assert [tuple(p.shape) for p in layer.parameters() if p.dim() == 1] == [(2,)] * 3


# causal_attention.CausalAttention
layer = CausalAttention(3, 2)
x = torch.randn(5, 3)
output, weights = layer(x, return_weights=True)
assert torch.equal(weights, weights.tril())
assert weights[0].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
other = x.clone()
other[3:] += 1.0
assert torch.allclose(layer(other)[:3], output[:3], atol=1e-6)
assert not torch.allclose(layer(other)[3:], output[3:], atol=1e-3)
q, k, v = (f(x) for f in (layer.W_query, layer.W_key, layer.W_value))
scores = (q @ k.mT / math.sqrt(2)).masked_fill(torch.ones(5, 5).triu(1) > 0, -math.inf)
assert torch.allclose(weights, scores.softmax(-1), atol=1e-6)
near = CausalAttention(3, 2, window=2)(x, return_weights=True)[1]
assert torch.equal(near > 0, torch.ones(5, 5).tril().triu(-1) > 0)
dropping = CausalAttention(3, 2, dropout=0.9)
assert not torch.allclose(dropping(x), dropping(x))
assert torch.equal(dropping.eval()(x), dropping(x))


# projection.Projection
layer = Projection(3, 2)
shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
assert shapes == {"W": (3, 2), "b": (2,)}
x = torch.randn(4, 5, 3)
assert torch.allclose(layer(x), x @ layer.W + layer.b, atol=1e-6)
plain = Projection(3, 2, bias=False)
assert torch.allclose(plain(x), x @ plain.W, atol=1e-6)
big = Projection(400, 400).W
assert abs(big.abs().max().item() * math.sqrt(400) - 1) < 0.01
assert abs(big.var().item() * 400 - 1 / 3) < 0.02


# multi_head.split_heads
x = torch.arange(8.0).reshape(2, 4)
assert split_heads(x, 2).tolist() == [[[0.0, 1.0], [4.0, 5.0]], [[2.0, 3.0], [6.0, 7.0]]]
assert split_heads(torch.zeros(3, 5, 6), 2).shape == (3, 2, 5, 3)
assert split_heads(x, 1).shape == (1, 2, 4)

# multi_head.merge_heads
x = torch.arange(8.0).reshape(2, 2, 2)
assert merge_heads(x).tolist() == [[0.0, 1.0, 4.0, 5.0], [2.0, 3.0, 6.0, 7.0]]
assert merge_heads(torch.zeros(3, 2, 5, 4)).shape == (3, 5, 8)
one = torch.arange(6.0).reshape(1, 3, 2)
assert torch.equal(merge_heads(one), one[0])

# multi_head.MultiHeadAttention
torch.manual_seed(1)
layer = MultiHeadAttention(6, 2)
x = torch.randn(4, 5, 6)
output, weights = layer(x)
assert output.shape == (4, 5, 6)
assert torch.allclose(torch.stack([*weights]).sum(-1), torch.ones(2, 4, 5))
q, k, v = (
    p(x).unflatten(-1, (2, 3)).transpose(1, 2)
    for p in (layer.q_proj, layer.k_proj, layer.v_proj)
)
read = (q @ k.mT / math.sqrt(3)).softmax(-1) @ v
assert torch.allclose(output, layer.out_proj(read.transpose(1, 2).flatten(2)), atol=1e-6)
assert torch.allclose(layer(x, need_weights=False)[0], output, atol=1e-6)
key, value = torch.randn(4, 3, 6), torch.randn(4, 3, 6)
k, v = (
    p(y).unflatten(-1, (2, 3)).transpose(1, 2)
    for p, y in ((layer.k_proj, key), (layer.v_proj, value))
)
read = (q @ k.mT / math.sqrt(3)).softmax(-1) @ v
crossed = layer(x, key, value)[0]
assert torch.allclose(crossed, layer.out_proj(read.transpose(1, 2).flatten(2)), atol=1e-6)
assert torch.allclose(layer(x, key)[0], layer(x, key, key)[0])

# masks.padding_mask
mask = padding_mask([1, 3])
assert mask.shape == (2, 1, 1, 3)
assert mask.flatten(1).tolist() == [[True, False, False], [True, True, True]]
wider = padding_mask(torch.tensor([2]), max_length=4)
assert wider.flatten().tolist() == [True, True, False, False]


# distance_bias.relative_positions
assert relative_positions(2, 2, 3).tolist() == [[0, 1], [-1, 0]]
assert relative_positions(2, 3, 3).tolist() == [[-1, 0, 1], [-2, -1, 0]]
far = relative_positions(5, 5, 1)
assert far.min() == -1 and far.max() == 1
assert relative_positions(1, 4, 1).tolist() == [[-1, -1, -1, 0]]

# distance_bias.LearnedBiasAttention
attention = LearnedBiasAttention(2, max_distance=3)
(bias,) = attention.parameters()
assert sorted(bias.shape) == [2, 7]
q, k, v = torch.randn(3, 2, 4, 5)
output, weights = attention(q, k, v)
plain = (q @ k.mT / math.sqrt(5)).softmax(-1)
assert torch.allclose(weights, plain, atol=1e-6)
with torch.no_grad():
    bias.copy_(torch.randn(bias.shape))
weights = attention(q, k, v)[1]
assert not torch.allclose(weights, plain, atol=1e-2)
assert torch.allclose(weights.sum(-1), torch.ones(2, 4))
table = bias if bias.shape[0] == 2 else bias.T
distance = torch.arange(4) - torch.arange(4)[:, None]
expected = q @ k.mT / math.sqrt(5) + table[:, 3 + distance]
assert torch.allclose(weights, expected.softmax(-1), atol=1e-5)

# physics_guided.guidance
residual = torch.tensor([[1.0, 3.0], [5.0, 5.0]])
found = guidance(residual, 2.0, 0.25)
expected = 2.0 * torch.log(torch.tensor([[0.75, 1.75], [1.25, 1.25]]))
assert torch.allclose(found, expected, atol=1e-6)
assert torch.allclose(guidance(10 * residual, 2.0, 0.25), found, atol=1e-6)
assert torch.isfinite(guidance(torch.zeros(3), 1.0, 1e-6)).all()


# layer_norm.LayerNorm
norm = LayerNorm(4, eps=0.0)
x = torch.tensor([[0.0, 0.0, 2.0, 2.0], [1.0, 3.0, 1.0, 3.0]])
expected = torch.tensor([[-1.0, -1.0, 1.0, 1.0], [-1.0, 1.0, -1.0, 1.0]])
assert torch.allclose(norm(x), expected)
norm = LayerNorm(5)
x = torch.randn(3, 5)
expected = torch.nn.functional.layer_norm(x, (5,), eps=1e-5)
assert torch.allclose(norm(x), expected, atol=1e-6)
assert torch.equal(LayerNorm(3)(torch.full((2, 3), 7.0)), torch.zeros(2, 3))
with torch.no_grad():
    for p in norm.parameters():
        p.add_(torch.randn(p.shape))
x = 0.01 * torch.randn(3, norm.gamma.numel())
expected = torch.nn.functional.layer_norm(
    x, norm.gamma.shape, norm.gamma, norm.beta, norm.eps
)
assert torch.allclose(norm(x), expected, atol=1e-6)


# feed_forward.FeedForwardNetwork
layer = FeedForwardNetwork(3)
shapes = sorted(tuple(p.shape) for p in layer.parameters())
assert shapes == [(3,), (3, 12), (12,), (12, 3)]
x = torch.randn(2, 5, 3)
hidden = layer.linear_1(x)
assert torch.allclose(layer(x), layer.linear_2(hidden.clamp(min=0)), atol=1e-6)
smooth = FeedForwardNetwork(3, 7, activation=torch.tanh)
assert torch.allclose(smooth(x), smooth.linear_2(smooth.linear_1(x).tanh()), atol=1e-6)
assert smooth.linear_1(x).shape == (2, 5, 7)


# transformer.TransformerBlock
block = TransformerBlock(6, 2)
x = torch.randn(2, 5, 6)
middle = x + block.attention(block.norm_1(x))[0]
expected = middle + block.feed_forward(block.norm_2(middle))
assert torch.allclose(block(x), expected, atol=1e-6)
after = TransformerBlock(6, 2, norm_first=False)
middle = after.norm_1(x + after.attention(x)[0])
expected = after.norm_2(middle + after.feed_forward(middle))
assert torch.allclose(after(x), expected, atol=1e-6)
with torch.no_grad():
    block.norm_2.gamma.mul_(torch.rand(6))
middle = x + block.attention(block.norm_1(x))[0]
expected = middle + block.feed_forward(block.norm_2(middle))
assert torch.allclose(block(x), expected, atol=1e-6)

# transformer.sinusoidal_positions
table = sinusoidal_positions(3, 4)
assert table.shape == (3, 4)
assert table[0].tolist() == [0.0, 1.0, 0.0, 1.0]
assert torch.allclose(table[1, :2], torch.tensor([math.sin(1.0), math.cos(1.0)]))
slow = torch.tensor([math.sin(0.02), math.cos(0.02)])
assert torch.allclose(table[2, 2:], slow)

# generation.token_probabilities
even = torch.tensor([[0.0, math.log(3.0)]])
assert torch.allclose(token_probabilities(even, 1.0), torch.tensor([[0.25, 0.75]]))
assert torch.allclose(token_probabilities(2 * even, 2.0), torch.tensor([[0.25, 0.75]]))
few = token_probabilities(torch.tensor([0.0, 5.0, math.log(2.0), -1.0, 5.0]), 1.0, top_k=2)
assert torch.allclose(few, torch.tensor([0.0, 0.5, 0.0, 0.0, 0.5]))
tied = token_probabilities(torch.zeros(5), 1.0, top_k=2)  # two, of equal ones too
assert (tied > 0).sum() == 2
huge = torch.tensor([0.0, 3e38])
assert token_probabilities(huge, 0.01).tolist() == [0.0, 1.0]

# generation.write_tokens
torch.manual_seed(2)


class Model:
    """One whose logits nobody looks at."""

    def parameters(self):
        return []

    def last_logits(self, text, cache, padding):
        return torch.zeros(len(text), 7)


ids = torch.tensor([[1, 2], [3, 4]])
script = torch.tensor([[5, 6], [2, 0], [6, 1], [3, 3]])


def draw(logits, text, padding, rows):
    assert logits.shape == (len(text), 7)
    return script[text.shape[1] - 2][rows, None]


given = Model(), ids, 4, draw, None, None
shown = list(write_tokens(*given, lambda text: text[:, -1] > 6, True))
assert torch.equal(torch.stack(shown), script)
shown = list(write_tokens(*given, lambda text: text[:, -1] % 6 == 0, True))
assert torch.stack(shown).tolist() == [[5, 6], [2, 6], [6, 6]]

# transformer.LanguageModel
torch.manual_seed(1)
model = LanguageModel(7, 9, 8, 2, 2).eval()
ids = torch.tensor([[1, 2, 3, 4]])
logits = model(ids)
assert logits.shape == (1, 4, 7)
other = model(torch.tensor([[1, 2, 3, 6]]))
assert torch.allclose(logits[:, :3], other[:, :3], atol=1e-5)
assert not torch.allclose(logits[:, 3], other[:, 3], atol=1e-3)
written = model.generate(ids, 3, temperature=0.0)
assert written.shape == (1, 7)
assert written[0, 4] == logits[0, 3].argmax()
x = model.token_embedding(ids) + model.positions[:4]
for block in model.blocks:
    x = block(x, torch.ones(4, 4, dtype=torch.bool).tril())
expected = model.norm(x) @ model.token_embedding.weight.T
assert torch.allclose(logits, expected, atol=1e-5)


# backprop.attention.softmax
weights = softmax(np.log([[1.0, 3.0], [5.0, 5.0]]))
assert np.allclose(weights, [[0.25, 0.75], [0.5, 0.5]])
far = softmax(np.array([[1000.0, 1000.0], [0.0, 0.0]]))
assert far.tolist() == [[0.5, 0.5], [0.5, 0.5]]
hidden = softmax(np.array([[-np.inf, -np.inf], [-np.inf, 2.0]]))
assert hidden.tolist() == [[0.0, 0.0], [0.0, 1.0]]
moved = softmax(np.array([[0.0 + 1e-30j, 0.0]]))
assert abs(moved[0, 0].imag / 1e-30 - 0.25) < 1e-12

# backprop.attention.softmax_backward
weights, d_weights = np.array([[0.25, 0.75]]), np.array([[4.0, 0.0]])
assert softmax_backward(d_weights, weights).tolist() == [[0.75, -0.75]]
assert softmax_backward(np.ones((1, 2)), weights).tolist() == [[0.0, 0.0]]
two = softmax_backward(
    np.array([[1.0, 0.0], [0.0, 8.0]]), np.array([[1.0, 0.0], [0.5, 0.5]])
)
assert two.tolist() == [[0.0, 0.0], [-2.0, 2.0]]

# backprop.gradient_check.finite_differences
x = np.array([1.0, 2.0])
fourth = finite_differences(lambda x: x**4, x)
assert np.abs(fourth - [4.0, 32.0]).max() < 1e-9
coarse = finite_differences(lambda x: x**3, x, step=0.5)
assert np.abs(coarse - [3.0, 12.0]).max() < 1e-12
assert finite_differences(lambda x: x.sum() * 2, np.zeros((2, 3))).shape == (2, 3)
x.flags.writeable = False
assert np.abs(finite_differences(lambda x: x, x) - 1.0).max() < 1e-9

# backprop.gradient_check.complex_step
x = np.array([0.5, -1.0])
assert np.allclose(complex_step(np.exp, x), np.exp(x), rtol=1e-15, atol=0)
assert np.allclose(complex_step(lambda x: x[0] * x[1] ** 2, x), [1.0, -1.0], rtol=1e-15)
x.flags.writeable = False
assert complex_step(np.sin, x).dtype == np.float64

# backprop.gradient_check.relative_error
assert relative_error(np.array([1.0, 2.0]), np.array([1.0, 4.0])) == 0.5
assert relative_error(np.array([1.0, 4.0]), np.array([1.0, 2.0])) == 0.5
assert relative_error(np.array([0.0]), np.array([1e-9])) == 1e-6
assert relative_error(np.array([[3.0]]), np.array([[3.0]])) == 0.0
assert relative_error(np.array([8.0, 0.0]), np.array([8.0, 2.0])) == 0.25

# backprop.dropout.Dropout
layer = Dropout(0.25, np.random.default_rng(1))
x = np.ones((100, 100))
output = layer.forward(x)
kept = output != 0
assert abs(kept.mean() - 0.75) < 0.02
assert np.allclose(output[kept], 1 / 0.75)
assert np.allclose(layer.backward(3 * x), 3 * output)
assert not np.array_equal(layer.forward(x), output)

# backprop.attention.ScaledDotProductAttention
rng = np.random.default_rng(1)
q, k, v, d = (rng.normal(size=s) for s in ((3, 2), (4, 2), (4, 5), (3, 5)))
layer = ScaledDotProductAttention()
output, weights = layer.forward(q, k, v)
tensors = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
theirs = torch.nn.functional.scaled_dot_product_attention(*tensors)
assert np.allclose(output, theirs.detach().numpy())
for mine, judge in zip(
    layer.backward(d), torch.autograd.grad(theirs, tensors, torch.tensor(d)), strict=True
):
    assert np.allclose(mine, judge.numpy())
seen = np.tril(np.ones((3, 4), bool))
for scale in (0.0, 0.3):
    layer = ScaledDotProductAttention(scale=scale)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *tensors, attn_mask=torch.tensor(seen), scale=scale
    )
    assert np.allclose(layer.forward(q, k, v, seen)[0], theirs.detach().numpy())
    judges = torch.autograd.grad(theirs, tensors, torch.tensor(d))
    for mine, judge in zip(layer.backward(d), judges, strict=True):
        assert np.allclose(mine, judge.numpy())


# backprop.projection.Projection
layer = Projection(3, 2, rng=np.random.default_rng(1))
x, d = np.arange(12.0).reshape(2, 2, 3), np.ones((2, 2, 2))
assert np.allclose(layer.forward(x), x @ layer.W + layer.b)
assert np.allclose(layer.backward(d), d @ layer.W.T)
found = layer.gradients()
assert found["W"].tolist() == [[18.0, 18.0], [22.0, 22.0], [26.0, 26.0]]
assert found["b"].tolist() == [4.0, 4.0]

# backprop.feed_forward.ReLU
layer = ReLU()
x = np.array([[-2.0, 0.0, 3.0]])
assert layer.forward(x).tolist() == [[0.0, 0.0, 3.0]]
assert layer.backward(np.array([[5.0, 6.0, 7.0]])).tolist() == [[0.0, 0.0, 7.0]]
assert x.tolist() == [[-2.0, 0.0, 3.0]]

# backprop.feed_forward.FeedForwardNetwork
layer = FeedForwardNetwork(3, 4, rng=np.random.default_rng(1))
x, d = np.random.default_rng(2).normal(size=(2, 5, 3)), np.ones((2, 5, 3))
hidden = x @ layer.linear_1.W + layer.linear_1.b
assert np.allclose(
    layer.forward(x), np.maximum(hidden, 0) @ layer.linear_2.W + layer.linear_2.b
)
back = (d @ layer.linear_2.W.T) * (hidden > 0)
assert np.allclose(layer.backward(d), back @ layer.linear_1.W.T)

# backprop.layer_norm.LayerNorm
layer = LayerNorm(4)
rng = np.random.default_rng(1)
x, d = rng.normal(size=(3, 4)), rng.normal(size=(3, 4))
tensor = torch.tensor(x, requires_grad=True)
theirs = torch.nn.functional.layer_norm(tensor, (4,), eps=1e-5)
assert np.allclose(layer.forward(x), theirs.detach().numpy())
(judge,) = torch.autograd.grad(theirs, tensor, torch.tensor(d))
assert np.allclose(layer.backward(d), judge.numpy())
assert np.allclose(layer.gradients()["beta"], d.sum(0))
layer.gamma[:], layer.beta[:] = rng.normal(size=(2, 4))
gamma, beta = (torch.tensor(p, requires_grad=True) for p in (layer.gamma, layer.beta))
theirs = torch.nn.functional.layer_norm(tensor, (4,), gamma, beta, 1e-5)
assert np.allclose(layer.forward(x), theirs.detach().numpy())
judges = torch.autograd.grad(theirs, (tensor, gamma, beta), torch.tensor(d))
found = layer.backward(d), layer.gradients()["gamma"], layer.gradients()["beta"]
for mine, judge in zip(found, judges, strict=True):
    assert np.allclose(mine, judge.numpy())

# backprop.embedding.Embedding
layer = Embedding(4, 2, np.random.default_rng(1))
ids = np.array([[1, 3], [1, 0]])
table = next(iter(layer.parameters().values()))
assert np.array_equal(layer.forward(ids), table[ids])
layer.backward(np.arange(8.0).reshape(2, 2, 2))
(found,) = layer.gradients().values()
assert found.tolist() == [[6.0, 7.0], [4.0, 6.0], [0.0, 0.0], [2.0, 3.0]]

# backprop.cross_entropy.CrossEntropy
loss = CrossEntropy()
logits = np.log([[1.0, 3.0], [2.0, 2.0]])
assert np.isclose(loss.forward(logits, np.array([1, 0])), np.log(8 / 3) / 2)
assert np.allclose(loss.backward(), [[0.125, -0.125], [-0.25, 0.25]])
assert np.isfinite(loss.forward(np.array([[0.0, 1000.0]]), np.array([0])))


# backprop.multi_head.split_heads
x = np.arange(8.0).reshape(2, 4)
assert split_heads(x, 2).tolist() == [[[0.0, 1.0], [4.0, 5.0]], [[2.0, 3.0], [6.0, 7.0]]]
assert split_heads(np.zeros((3, 5, 6)), 2).shape == (3, 2, 5, 3)

# backprop.multi_head.merge_heads
x = np.arange(8.0).reshape(2, 2, 2)
assert merge_heads(x).tolist() == [[0.0, 1.0, 4.0, 5.0], [2.0, 3.0, 6.0, 7.0]]
assert merge_heads(np.zeros((3, 2, 5, 4))).shape == (3, 5, 8)

# backprop.multi_head.MultiHeadAttention
from attnlib.backprop import gradient_check

layer = MultiHeadAttention(6, 2, rng=np.random.default_rng(1))
x, y, z = np.random.default_rng(2).normal(size=(3, 2, 4, 6))
output, weights = layer.forward(x)
assert output.shape == (2, 4, 6)
assert np.allclose(np.stack([*weights]).sum(-1), 1.0)
assert np.allclose(layer.forward(x, x, x)[0], output)
assert max(gradient_check(layer, x).values()) < 1e-8
assert max(gradient_check(layer, x, y, z).values()) < 1e-8

# backprop.optimizers.SGD
from attnlib.backprop import Projection

layer = Projection(1, 1, bias=False, rng=np.random.default_rng(1))
start = layer.W.item()
optimizer = SGD(layer, lr=0.1, momentum=0.5)
for _ in range(2):
    layer.forward(np.ones((1, 1)))
    layer.backward(np.full((1, 1), 2.0))
    optimizer.step()
assert np.isclose(layer.W.item(), start - 0.1 * 2 - 0.1 * (2 + 0.5 * 2))

# backprop.optimizers.Adam
from attnlib.backprop import Projection

layer = Projection(1, 1, bias=False, rng=np.random.default_rng(1))
mine = torch.tensor([layer.W.item()], dtype=torch.float64, requires_grad=True)
optimizer, theirs = Adam(layer, lr=0.1), torch.optim.Adam([mine], lr=0.1)
for size in (2.0, -0.5, 3.0):
    layer.forward(np.ones((1, 1)))
    layer.backward(np.full((1, 1), size))
    optimizer.step()
    mine.grad = torch.tensor([size], dtype=torch.float64)
    theirs.step()
assert np.isclose(layer.W.item(), mine.item())

# backprop.transformer.TransformerBlock
from attnlib.backprop import gradient_check

block = TransformerBlock(6, 2, rng=np.random.default_rng(1))
x = np.random.default_rng(2).normal(size=(2, 4, 6))
small = {"step": 1e-4, "tolerance": 1e-6}  # so as to cross no corner of a ReLU
assert max(gradient_check(block, x, **small).values()) < 1e-6
middle = x + block.attention.forward(block.norm_1.forward(x))[0]
expected = middle + block.feed_forward.forward(block.norm_2.forward(middle))
assert np.allclose(block.forward(x), expected)

# backprop.transformer.LanguageModel
from attnlib.backprop import gradient_check

model = LanguageModel(5, 4, 4, 2, 1, rng=np.random.default_rng(1))
ids = np.array([[1, 2, 3]])
logits = model.forward(ids)
assert logits.shape == (1, 3, 5)
assert np.allclose(model.forward(np.array([[1, 2, 4]]))[:, :2], logits[:, :2])
small = {"step": 1e-4, "tolerance": 1e-6}  # so as to cross no corner of a ReLU
assert max(gradient_check(model, ids, **small).values()) < 1e-6


# online_softmax.block_state
scores = torch.tensor([[0.0, math.log(3.0)], [-math.inf, -math.inf]])
state = block_state(scores, torch.tensor([[4.0], [8.0]]))
assert torch.allclose(state.maximum, torch.tensor([math.log(3.0), -math.inf]))
assert torch.allclose(state.total, torch.tensor([4 / 3, 0.0]))
assert torch.allclose(state.output, torch.tensor([[7.0], [0.0]]))
large = block_state(torch.tensor([[1000.0, 1000.0]]), torch.tensor([[4.0], [8.0]]))
assert [x.item() for x in large] == [1000.0, 2.0, 6.0]

# online_softmax.merge_states
from attnlib.online_softmax import SoftmaxState

a = SoftmaxState(torch.tensor([0.0]), torch.tensor([2.0]), torch.tensor([[3.0]]))
b = SoftmaxState(torch.tensor([math.log(2.0)]), torch.tensor([3.0]), torch.tensor([[7.0]]))
both = merge_states(a, b)
assert math.isclose(both.maximum.item(), math.log(2.0), rel_tol=1e-6)
assert math.isclose(both.total.item(), 4.0, rel_tol=1e-6)
assert math.isclose(both.output.item(), 6.0, rel_tol=1e-6)
none = SoftmaxState(torch.tensor([-math.inf]), torch.zeros(1), torch.zeros(1, 1))
assert [x.item() for x in merge_states(none, a)] == [0.0, 2.0, 3.0]
assert [x.item() for x in merge_states(none, none)] == [-math.inf, 0.0, 0.0]

# online_softmax.online_attention
scores, values = torch.randn(3, 7), torch.randn(7, 5)
for size in (1, 3, 7):
    parts = zip(scores.split(size, dim=1), values.split(size), strict=True)
    state = online_attention(parts)
    assert torch.allclose(state.output, scores.softmax(-1) @ values, atol=1e-5)
    assert torch.allclose(state.lse, scores.logsumexp(-1), atol=1e-5)
hidden = online_attention([(torch.full((1, 2), -math.inf), values[:2])])
assert hidden.output.tolist() == [[0.0] * 5]

# online_softmax.merge_outputs
first = torch.tensor([[2.0]]), torch.tensor([0.0])
second = torch.tensor([[6.0]]), torch.tensor([math.log(3.0)])
output, lse = merge_outputs(first, second)
assert math.isclose(output.item(), 5.0, rel_tol=1e-6)
assert math.isclose(lse.item(), math.log(4.0), rel_tol=1e-6)
large = [(x, lse + 1000.0) for x, lse in (first, second)]
assert math.isclose(merge_outputs(*large)[0].item(), 5.0, rel_tol=1e-3)
none = torch.zeros(1, 1), torch.tensor([-math.inf])
assert [x.item() for x in merge_outputs(none, first)] == [2.0, 0.0]
assert [x.item() for x in merge_outputs(none, none)] == [0.0, -math.inf]


# flash.tiles.visible_tiles
def tiles(*given, **more):
    return [(x.start, x.stop, partial) for x, partial in visible_tiles(*given, **more)]


assert tiles(slice(0, 2), 4, 5, False, 3) == [(0, 3, False), (3, 5, False)]
assert tiles(slice(2, 4), 4, 4, True, 2) == [(0, 2, False), (2, 4, True)]
covered = [0] * 6
for start, stop, _ in tiles(slice(3, 5), 6, 6, True, 4, window=2):
    for key in range(start, stop):
        covered[key] += 1
assert covered == [0, 0, 1, 1, 1, 0]

# flash.tiles.TiledAttention
from attnlib.flash import flash_attention

q, k, v = (torch.randn(2, n, 8, dtype=torch.float64) for n in (5, 7, 7))
for causal in (False, True):
    scores = q @ k.mT / math.sqrt(8)
    if causal:
        seen = torch.ones(5, 7, dtype=torch.bool).tril(2)
        scores = scores.masked_fill(~seen, -math.inf)
    found = flash_attention(q, k, v, causal=causal, block_size=(2, 3))
    assert torch.allclose(found, scores.softmax(-1) @ v)
inputs = [x.requires_grad_() for x in (q, k, v)]
plain = ((q @ k.mT / math.sqrt(8)).softmax(-1) @ v).square().sum()
tiled = flash_attention(q, k, v, block_size=(2, 3)).square().sum()
for mine, judge in zip(
    torch.autograd.grad(tiled, inputs), torch.autograd.grad(plain, inputs), strict=True
):
    assert torch.allclose(mine, judge)


# rotary.frequencies
assert len(frequencies(6)) == 3
assert np.allclose(frequencies(4), [1.0, 0.01])
assert np.allclose(frequencies(4, base=100.0), [1.0, 0.1])

# rotary.angles
x = torch.zeros(3, 4)
found = angles(x, 0, (1.0, 0.5))
assert found.tolist() == [[0.0, 0.0], [1.0, 0.5], [2.0, 1.0]]
assert torch.equal(angles(x, 2, (1.0, 0.5)), found + torch.tensor([2.0, 1.0]))
places = torch.tensor([5, 0, 7])
assert angles(x, places, (1.0, 0.5))[:, 0].tolist() == [5.0, 0.0, 7.0]

# rotary.turn
x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
quarter = torch.full((1, 2), math.pi / 2)
halves = turn(x, quarter, interleaved=False)
assert torch.allclose(halves, torch.tensor([[-3.0, -4.0, 1.0, 2.0]]), atol=1e-6)
pairs = turn(x, quarter, interleaved=True)
assert torch.allclose(pairs, torch.tensor([[-2.0, 1.0, -4.0, 3.0]]), atol=1e-6)
assert torch.allclose(turn(x, 0 * quarter, False, 1.5), 1.5 * x)

# rotary.rotate
x = torch.randn(5, 8, dtype=torch.float64)
assert torch.equal(rotate(x)[0], x[0])
assert torch.allclose(rotate(x).norm(dim=-1), x.norm(dim=-1))
near = rotate(x[:1], 3) @ rotate(x[1:2], 1).mT
far = rotate(x[:1], 13) @ rotate(x[1:2], 11).mT
assert torch.allclose(near, far)
assert torch.allclose(rotate(x, 4)[2], rotate(x, torch.full((5,), 6))[2])

# rotary.turns_of
assert np.allclose(turns_of((2 * math.pi, math.pi), 10), [10.0, 5.0])
assert np.allclose(turns_of((1.0,) * 4, 3), 3 / (2 * math.pi))

# rotary.ramp_of_turns
omega = tuple(2 * math.pi * n / 16 for n in (1, 4, 10, 64))
ramp = ramp_of_turns(omega, 16, 2.0, 6.0)
assert np.allclose(ramp, [0.0, 0.5, 1.0, 1.0])

# rotary.ramp_of_pairs
ramp = ramp_of_pairs(16, 10000.0, 64, 1.0, 32.0)
assert len(ramp) == 8
assert ramp[-1] == 0.0
assert min(ramp) == 0.0 and max(ramp) <= 1.0
assert [*ramp] == sorted(ramp, reverse=True)

# rotary.scale_frequencies
plain = scale_frequencies(8, 10000.0, None, 1.0, None, None)
assert np.allclose(plain, [1.0, 0.1, 0.01, 0.001])
linear = scale_frequencies(8, 10000.0, "linear", 4.0, None, None)
assert np.allclose(linear, np.array(plain) / 4)


# cache.KVCache
cache = KVCache(4)
first, second = torch.randn(1, 2, 3), torch.randn(1, 1, 3)
keys, values = cache.append(first, 2 * first)
assert torch.equal(keys, first) and torch.equal(values, 2 * first)
keys, values = cache.append(second, second)
assert torch.equal(keys, torch.cat([first, second], dim=-2))
assert len(cache) == 3
assert keys.data_ptr() == cache.append(second, second)[0].data_ptr()
cache.truncate(1)
assert len(cache) == 1
keys, _ = cache.append(second, second)
assert torch.equal(keys, torch.cat([first[:, :1], second], dim=-2))

# logits.keep_top_p
logits = torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.2, 0.7]]).log()
kept = lambda limit: keep_top_p(logits, limit).isfinite().tolist()  # noqa: E731
assert kept(0.6) == [[False, True, True], [False, False, True]]
assert kept(0.01) == [[False, True, False], [False, False, True]]
assert torch.equal(keep_top_p(logits, 1.0), logits)

# logits.keep_min_p
logits = torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.2, 0.7]]).log()
kept = lambda limit: keep_min_p(logits, limit).isfinite().tolist()  # noqa: E731
assert kept(0.5) == [[False, True, True], [False, False, True]]
assert torch.equal(keep_min_p(logits, 0.0), logits)

# logits.penalize
logits = torch.tensor([[2.0, -1.0, 3.0]])
assert penalize(logits, torch.tensor([[1, 0, 1]]), 2.0).tolist() == [[1.0, -2.0, 3.0]]
assert penalize(logits[0], torch.tensor([2]), 2.0).tolist() == [2.0, -1.0, 1.5]
assert penalize(logits[0], torch.tensor([1, 0, 1]), 2.0, 0.5).tolist() == [0.5, -2.5, 3.0]
assert logits.tolist() == [[2.0, -1.0, 3.0]]

# transformer.padded_places
places, mask = padded_places(torch.tensor([0, 2]), 0, 4)
assert places.tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
seen = mask.expand(2, 1, 4, 4)[:, 0, -1].tolist()
assert seen == [[True] * 4, [False, False, True, True]]
later, _ = padded_places(torch.tensor([0, 2]), 3, 4)
assert later.tolist() == [[3], [1]]


# base.repeat_heads
x = torch.arange(4.0).reshape(2, 2, 1)
assert repeat_heads(x, 2).flatten().tolist() == [0.0, 1.0, 0.0, 1.0, 2.0, 3.0, 2.0, 3.0]
assert repeat_heads(torch.zeros(5, 2, 3, 4), 3).shape == (5, 6, 3, 4)
assert torch.equal(repeat_heads(x, 1), x)

# cache.WindowCache
cache = WindowCache(2)
x = torch.arange(5.0).reshape(1, 5, 1)
for n in range(5):
    keys, values = cache.append(x[:, n : n + 1], -x[:, n : n + 1])
assert sorted(keys.flatten().tolist()) == [3.0, 4.0]
assert torch.equal(values, -keys)

# online_softmax.add_sink
output, lse = add_sink(
    torch.tensor([[8.0]]), torch.tensor([math.log(3.0)]), torch.tensor(0.0)
)
assert math.isclose(output.item(), 6.0, rel_tol=1e-6)
assert math.isclose(lse.item(), math.log(4.0), rel_tol=1e-6)
empty = add_sink(torch.zeros(1, 1), torch.tensor([-math.inf]), torch.tensor(2.0))
assert [x.item() for x in empty] == [0.0, 2.0]

# latent.LatentAttention
torch.manual_seed(1)
layer = LatentAttention(8, 2, 4, 2)
x = torch.randn(1, 5, 8)
output, weights = layer(x)
assert output.shape == (1, 5, 8)
assert [head.shape for head in weights] == [(1, 5, 5), (1, 5, 5)]
assert torch.allclose(weights[1].sum(dim=-1), torch.ones(1, 5))
absorbed, none = layer(x, need_weights=False, absorb=True)
assert none is None and torch.allclose(absorbed, layer(x, absorb=False)[0], atol=1e-5)
other = x.clone()
other[:, 4] += 1
assert torch.allclose(layer(other)[0][:, :4], output[:, :4], atol=1e-5)

# latent.plain_heads
c, r, query = torch.randn(5, 3), torch.randn(5, 2), torch.randn(2, 4, 6)
up_k, up_v = torch.randn(2, 3, 8)
q, k, v = plain_heads(query, c, r, up_k, up_v)
assert torch.equal(q, query)
assert k.shape == (2, 5, 6) and v.shape == (2, 5, 4)
assert torch.allclose(k[1, :, :4], c @ up_k[:, 4:], atol=1e-5)
assert torch.equal(k[0, :, 4:], r)
assert torch.allclose(v[0], c @ up_v[:, :4], atol=1e-5)

# latent.absorbed_heads
from attnlib.latent import plain_heads

c, r, query = torch.randn(5, 3), torch.randn(5, 2), torch.randn(2, 4, 6)
up_k, up_v = torch.randn(2, 3, 8)
q, k, v = absorbed_heads(query, c, r, up_k, up_v)
assert k.shape == (1, 5, 5) and torch.equal(v[0], c)
plain_q, plain_k, _ = plain_heads(query, c, r, up_k, up_v)
assert torch.allclose(q @ k.mT, plain_q @ plain_k.mT, atol=1e-4)


# split.sum_by_halves
assert sum_by_halves(torch.arange(5.0), 0).item() == 10.0
x = torch.randn(7, 3, dtype=torch.float64)
assert torch.allclose(sum_by_halves(x, 0), x.sum(0))
assert torch.allclose(sum_by_halves(x, 1), x.sum(1))

# split.split_state
q, k, v = torch.randn(2, 4), torch.randn(5, 4), torch.randn(5, 3)
state = split_state(q, k, v, None, 0.5)
assert torch.allclose(state.output, (q @ k.mT * 0.5).softmax(-1) @ v, atol=1e-6)
assert torch.allclose(state.maximum, (q @ k.mT * 0.5).amax(-1), atol=1e-6)

# split.merge_splits
q, k, v = torch.randn(2, 4), torch.randn(5, 4), torch.randn(5, 3)
state = merge_splits(q, 3, [(k[:2], v[:2], None), (k[2:], v[2:], None)], 0.5)
scores = q @ k.mT * 0.5
assert torch.allclose(state.output, scores.softmax(-1) @ v, atol=1e-6)
assert torch.allclose(state.maximum + state.total.log(), scores.logsumexp(-1), atol=1e-6)

# split.split_attention
q, k, v = torch.randn(2, 4), torch.randn(5, 4), torch.randn(5, 3)
plain = torch.nn.functional.scaled_dot_product_attention(q, k, v)
for size in (1, 2, 5, 9):
    assert torch.allclose(split_attention(q, k, v, split_size=size), plain, atol=1e-5)
added, sdpa = torch.randn(2, 5), torch.nn.functional.scaled_dot_product_attention
for mask in (added, added > -1):
    found = split_attention(q, k, v, mask, split_size=2)
    assert torch.allclose(found, sdpa(q, k, v, mask), atol=1e-5)

# paged.places
pages = torch.tensor([[7, 2], [4, 5]])
found = places(pages, torch.tensor([0, 3, 5]), 4)
assert found.tolist() == [[28, 31, 9], [16, 19, 21]]
assert places(pages[:1], torch.tensor([4]), 4).tolist() == [[8]]

# paged.PagedCache
cache = PagedCache(4, 2)
one, two = cache.open(), cache.open()
k, v = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
cache.append([one, two], k, v)
assert cache.table([one]).lengths.tolist() == [3]
shared = cache.fork(one)
assert cache.table([shared]).pages.tolist() == cache.table([one]).pages.tolist()
cache.free(two)
more = torch.randn(1, 1, 4)
cache.append([shared], more, more)  # into a page that two hold: it is copied
assert cache.table([shared]).pages.tolist() != cache.table([one]).pages.tolist()
keys, values = cache.view([shared]).append(more, more)
assert torch.equal(keys, torch.cat([k[:1], more, more], 1))
assert cache.table([one]).lengths.tolist() == [3]

# paged.paged_attention
from attnlib import PagedCache

cache = PagedCache(6, 2)
handles = [cache.open(), cache.open()]
k, v = torch.randn(2, 5, 4), torch.randn(2, 5, 4)
cache.append(handles, k, v)
q = torch.randn(2, 1, 4)
plain = (q @ k.mT / 2).softmax(-1) @ v
assert torch.allclose(paged_attention(q, cache, handles), plain, atol=1e-5)
later = torch.randn(1, 1, 4)
cache.append(handles[:1], later, later)
wide = (q[:1] @ torch.cat([k[:1], later], 1).mT / 2).softmax(-1) @ torch.cat(
    [v[:1], later], 1
)
assert torch.allclose(
    paged_attention(q, cache, handles), torch.cat([wide, plain[1:]]), atol=1e-5
)
near = (q[1:] @ k[1:, -2:].mT / 2).softmax(-1) @ v[1:, -2:]
assert torch.allclose(paged_attention(q, cache, handles, window=2)[1:], near, atol=1e-5)
shares = paged_attention(q, cache, handles, window=2, split_size=3)
assert torch.allclose(shares[1:], near, atol=1e-5)
_, lse = paged_attention(q, cache, handles, return_lse=True)
assert torch.allclose(lse[1], (q[1] @ k[1].mT / 2).logsumexp(-1), atol=1e-5)


# gpt2.gelu_tanh
z = torch.tensor([-3.0, 0.0, 1.0])
expected = torch.nn.functional.gelu(z, approximate="tanh")
assert torch.allclose(gelu_tanh(z), expected, atol=1e-6)
assert gelu_tanh(torch.tensor(30.0)) == 30.0

# pretrained.Into
here = {"a": torch.zeros(2, 3), "b": torch.zeros(2, 4)}
into = Into(("a", "b"))
assert into.shape(here) == (2, 7)
whole = torch.arange(14.0).reshape(2, 7)
a, b = into.parts(whole, here)
assert torch.equal(a, whole[:, :3]) and torch.equal(b, whole[:, 3:])
turned = Into(("a",), transposed=True)
assert turned.shape(here) == (3, 2)
assert torch.equal(turned.parts(whole[:, :3].T, here)[0], whole[:, :3])

# gpt2.without_head
from attnlib import GPT2

torch.manual_seed(1)
model = GPT2(7, 5, 8, 2, 2).eval()
ids = torch.tensor([[1, 2, 3]])
before = model(ids)
with without_head(model, 1, 0):
    assert not torch.allclose(model(ids), before, atol=1e-4)
assert torch.equal(model(ids), before)

# gpt2.names_of
names = names_of(2)
assert len(names) == 4 + 2 * 12
assert names["h.1.attn.c_proj.bias"] == "blocks.1.attention.out_proj.b"
qkv = names["h.0.attn.c_attn.weight"].parameters
assert [*qkv] == [f"blocks.0.attention.{x}_proj.W" for x in "qkv"]
assert not names["h.0.attn.c_attn.weight"].transposed
assert all(name.startswith("transformer.") for name in names_of(1, "transformer."))

# gpt2.GPT2
from attnlib.gpt2 import gelu_tanh

model = GPT2(7, 5, 8, 2, 1).eval()
network = model.blocks[0].feed_forward
x = torch.randn(2, 8)
assert torch.allclose(
    network(x), network.linear_2(gelu_tanh(network.linear_1(x))), atol=1e-6
)
assert model(torch.tensor([[1, 2, 3]])).shape == (1, 3, 7)


# backprop.rms_norm.RMSNormLayer
layer = RMSNormLayer(3)
rng = np.random.default_rng(1)
x, d = rng.normal(size=(2, 3)), rng.normal(size=(2, 3))
tensor = torch.tensor(x, requires_grad=True)
theirs = torch.nn.functional.rms_norm(tensor, (3,), eps=1e-6)
assert np.allclose(layer.forward(x), theirs.detach().numpy())
(judge,) = torch.autograd.grad(theirs, tensor, torch.tensor(d))
assert np.allclose(layer.backward(d), judge.numpy())

# rms_norm.RMSNorm
norm = RMSNorm(2, eps=0.0)
assert torch.allclose(norm(torch.tensor([[1.0, 7.0]])), torch.tensor([[0.2, 1.4]]))
x = torch.randn(4, 5)
expected = torch.nn.functional.rms_norm(x, (5,), eps=1e-6)
assert torch.allclose(RMSNorm(5)(x), expected, atol=1e-6)
assert [tuple(p.shape) for p in norm.parameters()] == [(2,)]

# backprop.gated_feed_forward.SiLU
layer = SiLU()
x, d = np.array([-2.0, 0.0, 3.0]), np.array([1.0, 2.0, 3.0])
tensor = torch.tensor(x, requires_grad=True)
theirs = torch.nn.functional.silu(tensor)
assert np.allclose(layer.forward(x), theirs.detach().numpy())
(judge,) = torch.autograd.grad(theirs, tensor, torch.tensor(d))
assert np.allclose(layer.backward(d), judge.numpy())

# backprop.gated_feed_forward.GatedFeedForwardLayer
from attnlib.backprop import gradient_check

layer = GatedFeedForwardLayer(3, 5, rng=np.random.default_rng(1))
x = np.random.default_rng(2).normal(size=(2, 4, 3))
assert layer.forward(x).shape == (2, 4, 3)
assert max(gradient_check(layer, x).values()) < 1e-8
assert np.allclose(layer.forward(np.zeros((1, 3))), 0.0)

# gated_feed_forward.GatedFeedForward
layer = GatedFeedForward(3, 5)
shapes = sorted(tuple(p.shape) for p in layer.parameters())
assert shapes == [(3, 5), (3, 5), (5, 3)]
x = torch.randn(2, 3)
assert torch.equal(layer(torch.zeros(2, 3)), torch.zeros(2, 3))
flat = GatedFeedForward(3, 5, activation=lambda z: z)
assert torch.allclose(flat(2 * x), 4 * flat(x), atol=1e-5)  # two factors, each linear in x
assert not torch.allclose(layer(2 * x), 4 * layer(x), atol=1e-3)

# llama.NormedProjection
layer = NormedProjection(6, 8, False, 4, 1e-6)
output = layer(torch.randn(5, 6))
assert output.shape == (5, 8)
sizes = output.unflatten(-1, (2, 4)).square().mean(-1)
assert torch.allclose(sizes, torch.ones(5, 2), atol=1e-3)

# llama.Llama
from attnlib import LlamaConfig

model = Llama(LlamaConfig(7, 9, 8, 2, 2, 12, num_kv_heads=1)).eval()
ids = torch.tensor([[1, 2, 3, 4]])
logits = model(ids)
assert logits.shape == (1, 4, 7)
other = model(torch.tensor([[1, 2, 3, 6]]))
assert torch.allclose(logits[:, :3], other[:, :3], atol=1e-5)
assert not any(
    "beta" in name or name.endswith(".b") for name, _ in model.named_parameters()
)


# hf.scaled_query
query = torch.randn(2, 4)
assert torch.allclose(scaled_query(query, None), query)
assert torch.allclose(scaled_query(query, 0.5), query)
assert torch.allclose(scaled_query(query, 1.0), 2 * query)

# hf.with_sink
q, sinks = torch.randn(1, 2, 3, 4), torch.tensor([0.5, -1.0])
k, v = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 5)
keys, values, mask = with_sink(k, v, None, sinks, 3)
assert keys.shape == (1, 2, 4, 4) and values.shape == (1, 2, 4, 5)
scores = q @ k.mT / 2
total = scores.exp().sum(-1, keepdim=True) + sinks.exp()[:, None, None]
expected = scores.exp() / total @ v
added = torch.zeros(()) if mask is None else mask
found = torch.nn.functional.scaled_dot_product_attention(q, keys, values, added)
assert torch.allclose(found, expected, atol=1e-5)

# hf.capped_scores
q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
scores = capped_scores(q, k, None, 5.0)
expected = 5 * torch.tanh(q @ k.mT / 2 / 5)
assert torch.allclose(scores, expected, atol=1e-6)
assert capped_scores(100 * q, 100 * k, None, 5.0).abs().max() <= 5

# hf.attend_for_model
from attnlib import ScaledDotProductAttention

q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
module = torch.nn.Module().eval()
module.is_causal, module.num_key_value_groups = True, 2
output, _ = attend_for_model(
    ScaledDotProductAttention(), module, q, k, v, None, scaling=0.5
)
expected = torch.nn.functional.scaled_dot_product_attention(
    q, k, v, is_causal=True, scale=0.5, enable_gqa=True
)
assert torch.allclose(output, expected.transpose(1, 2), atol=1e-5)


# parallel.places.Rule
queries, keys = torch.tensor([[0, 3], [0, 0]]), torch.tensor([[1, 3, 0], [0, 0, 1]])
assert Rule().allowed(queries, keys).tolist() == [[True, True, False]] * 2
causal = Rule(causal=True).allowed(queries, keys)
assert causal.tolist() == [[False, False, False], [True, True, False]]
near = Rule(causal=True, window=2).allowed(queries, keys)
assert near.tolist() == [[False, False, False], [False, True, False]]
never, always = Rule(causal=True).verdict(
    torch.tensor([[0, 0], [1, 0]]), torch.tensor([[2, 0], [3, 0]])
)
assert never.item() and not always.item()

# parallel.places.shard_positions
assert shard_positions(8, 2, 0, "contiguous").tolist() == [0, 1, 2, 3]
assert shard_positions(8, 2, 1, "striped").tolist() == [1, 3, 5, 7]
assert shard_positions(8, 2, 0, "zigzag").tolist() == [0, 1, 6, 7]
every = torch.cat([shard_positions(12, 3, rank) for rank in range(3)])
assert sorted(every.tolist()) == [*range(12)]


# flash_triton.split.choose_splits
assert choose_splits(1, 100, 10) == 10
assert choose_splits(10, 100, 10) == 1
assert choose_splits(1, 1, 10) == 1
assert choose_splits(4, 64, 8) == 2

# speculative.acceptance
p = torch.tensor([[0.5, 0.375, 0.125], [0.2, 0.2, 0.6]])
q = torch.tensor([[0.25, 0.25, 0.5], [0.4, 0.4, 0.2]])
kept = acceptance(p, q, torch.tensor([2, 1]))
assert torch.allclose(kept, torch.tensor([0.25, 0.5]))
assert acceptance(p[0], q[0], torch.tensor(0)).item() == 1.0

# speculative.residual
p, q = torch.tensor([0.5, 0.375, 0.125]), torch.tensor([0.25, 0.25, 0.5])
assert torch.allclose(residual(p, q), torch.tensor([2 / 3, 1 / 3, 0.0]))
both = residual(torch.stack([p, q]), torch.stack([q, q]))
assert torch.allclose(both, torch.stack([torch.tensor([2 / 3, 1 / 3, 0.0]), q]))

# speculative.judge
one = torch.eye(4)
right, wrong = torch.tensor([1, 2, 3]), torch.tensor([1, 0, 3])
p = one[[1, 2, 3, 0]]  # what the model says, in four places
assert judge(p, one[right], right).tolist() == [1, 2, 3, 0]
assert judge(p, one[wrong], wrong).tolist() == [1, 2]
guesses = torch.stack([right, wrong])
both = judge(p.expand(2, 4, 4), one[guesses], guesses)
assert both.tolist() == [[1, 2], [1, 2]]
both = judge(p.expand(2, 4, 4), one[guesses], guesses, over=torch.tensor([False, True]))
assert both.tolist() == [[1, 2, 3, 0], [1, 0, 3, 0]]
nothing = judge(p[:1], p[:0], right[:0])
assert nothing.tolist() == [1]
assert judge(torch.zeros(0, 2, 4), torch.zeros(0, 1, 4), right.new_zeros(0, 1)).numel() == 0

# speculative.following
assert following([1, 2, 3, 9, 1, 2, 3], 2) == [9, 1]
assert following([1, 2, 8, 1, 2, 7, 1, 2], 1) == [7]
assert following([4, 7, 4, 7], 5) == [4, 7, 4, 7, 4]
assert following([1, 2, 3], 2) == []
assert following([5], 2) == []

# speculative.laws
logits = torch.tensor([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0], [1.0, 3.0, 2.0]])
ids, guesses = torch.tensor([0, 0]), torch.tensor([2, 1])
texts = []


def law(row, text):
    texts.append(text.tolist())
    return row.softmax(dim=-1)


found = laws(logits, ids, guesses, law)
assert torch.allclose(found, logits.softmax(dim=-1))
assert texts == [[0, 0], [0, 0, 2], [0, 0, 2, 1]]

# speculative.write_drafted


class Held:
    """A cache that counts."""

    def __init__(self):
        self.length = 0

    def __len__(self):
        return self.length

    def truncate(self, length):
        assert length <= self.length
        self.length = length


class Counts:
    """A model that says one token more than the last; it looks at what it has read."""

    def __call__(self, read, cache, padding, last):
        cache[0].length += read.shape[-1]
        return torch.eye(50)[(read + 1) % 50][..., -last:, :]


def propose(ids, count):
    asked.append(count)
    ahead = ids[..., -1:] + 1 + torch.arange(count)
    return torch.where(ahead % 4 == 0, 49, ahead), None


def judged(logits, ids, guesses, q, over):
    best = logits.argmax(dim=-1)
    right = (best[..., : guesses.shape[-1]] == guesses).long().cumprod(dim=-1).sum(dim=-1)
    right = right.masked_fill(over, guesses.shape[-1])
    return best[..., : int(right.min()) + 1]


def ended(text):
    return torch.isin(text[..., -1], torch.tensor(ends))


asked, held, ends = [], Held(), []
start = torch.tensor([[8, 9], [18, 19]])
options = propose, 5, judged, [held], None, ended
text = write_drafted(Counts(), start, 9, *options)
assert text.tolist() == [list(range(8, 19)), list(range(18, 29))]
assert len(held) == text.shape[-1] - 1 and asked[0] == 5 and max(asked) <= 5
held.length, asked, ends = 0, [], [12, 21]
text = write_drafted(Counts(), start, 9, *options)
assert text.tolist() == [[8, 9, 10, 11, 12], [18, 19, 20, 21, 21]]
held.length, ends = 0, []
assert write_drafted(Counts(), start[0], 1, *options).tolist() == [8, 9, 10]

# quantized.quantize
codes, low, step = quantize(torch.tensor([[0.0, 1.0, 3.0], [5.0, 5.0, 5.0]]), 2, -1)
assert codes.tolist() == [[0, 1, 3], [0, 0, 0]] and codes.dtype == torch.uint8
assert low.tolist() == [[0.0], [5.0]] and step.tolist() == [[1.0], [0.0]]
codes, low, step = quantize(torch.tensor([[0.0, 7.0], [15.0, -8.0]]), 4, -2)
assert codes.tolist() == [[0, 15], [15, 0]] and low.tolist() == [[0.0, -8.0]]
assert step.tolist() == [[1.0, 1.0]]
assert quantize(torch.tensor([0.0, 0.6, 3.0]), 2, -1)[0].tolist() == [0, 1, 3]  # rounded
ends = torch.tensor([-6e4, 6e4], dtype=torch.float16)
assert quantize(ends, 8, -1)[2].isfinite().all()
x = (torch.arange(100) / 7).sin().to(torch.bfloat16)
codes, low, step = quantize(x, 8, -1)
assert low.dtype == step.dtype == x.dtype and step >= (x.amax() - x.amin()).float() / 255
right = ((x.float() - low.float()) / step.float()).round()
assert torch.equal(codes.float(), right)

# quantized.dequantize
codes = torch.tensor([[0, 3], [2, 1]], dtype=torch.uint8)
back = dequantize(codes, torch.tensor([[1.0], [-1.0]]), torch.tensor([[0.5], [2.0]]))
assert back.tolist() == [[1.0, 2.5], [3.0, 1.0]]
low, step = torch.tensor([[-1.0], [0.00787]], dtype=torch.bfloat16)
back = dequantize(torch.tensor([131], dtype=torch.uint8), low, step)
assert back.dtype == torch.bfloat16
assert torch.equal(back, (low.float() + step.float() * 131).to(torch.bfloat16))

# quantized.pack
codes = torch.tensor([[1, 2, 3, 0], [0, 0, 0, 2]], dtype=torch.uint8)
assert pack(codes, 2).tolist() == [[1 + 2 * 4 + 3 * 16], [2 * 64]]
assert pack(codes, 4).tolist() == [[1 + 2 * 16, 3], [0, 2 * 16]]
assert pack(codes, 8).tolist() == codes.tolist()
assert pack(torch.tensor([255, 7], dtype=torch.uint8), 8).tolist() == [255, 7]
assert pack(codes, 2).dtype == torch.uint8
assert pack(codes[:, :3], 4).tolist() == [[1 + 2 * 16, 3], [0, 0]]

# quantized.unpack
packed = torch.tensor([[57, 128]], dtype=torch.uint8)
assert unpack(packed, 2, 8).tolist() == [[1, 2, 3, 0, 0, 0, 0, 2]]
assert unpack(packed, 4, 4).tolist() == [[9, 3, 0, 8]]
assert unpack(packed, 8, 2).tolist() == [[57, 128]]
assert unpack(packed, 2, 5).tolist() == [[1, 2, 3, 0, 0]]

# quantized.QuantizedCache
torch.manual_seed(6)
k, v = torch.randn(2, 11, 8) * torch.arange(1.0, 9.0), torch.randn(2, 11, 4)
cache, seen = QuantizedCache(20, bits=2, group=3), []
for t in range(11):
    seen = cache.append(k[:, t : t + 1], v[:, t : t + 1])
assert len(cache) == 11 and seen[0].shape == k.shape  # six are stored, five in full
assert seen[1].shape == v.shape
assert torch.equal(seen[0][:, 6:], k[:, 6:]) and torch.equal(seen[1][:, 6:], v[:, 6:])
off = (seen[0] - k)[:, :6].unflatten(1, (2, 3)).abs()
groups = k[:, :6].unflatten(1, (2, 3))
span = groups.amax(2, keepdim=True) - groups.amin(2, keepdim=True)
assert (off <= span / 6 + 1e-5).all() and off.max() > 0.01
off, few = (seen[1] - v)[:, :6].abs(), v[:, :6]
span = few.amax(-1, keepdim=True) - few.amin(-1, keepdim=True)
assert (off <= span / 6 + 1e-5).all() and off.max() > 0.01
assert cache.recent[0].shape[-2] == 5
again = QuantizedCache(20, bits=2, group=3)
assert torch.equal(again.append(k, v)[0], k)  # a piece sees itself in full
assert again.recent[0].shape[-2] == 5 and again.stored[0].shape[-3] == 2

# serving.common_beginning
assert common_beginning([1, 2, 3, 4], [1, 2, 4, 4]) == 2
assert common_beginning([1, 2], [1, 2, 3]) == common_beginning([1, 2, 3], [1, 2]) == 2
assert common_beginning([5, 1], [1, 5]) == common_beginning([], [1]) == 0

# serving.Pages
store = Pages(blocks=2, pages=6, page_size=2)
one = store.begin([1, 2, 3, 4, 5], {})
assert store.length(one) == 0 and all(one in cache.tables for cache in store.caches)
for cache in store.caches:
    cache.append(one, *torch.zeros(2, 1, 5, 1))
two = store.begin([1, 2, 3, 4, 5], {one: [1, 2, 3, 4, 5]})
assert two != one and store.length(two) == 4  # two full pages
assert store.length(store.begin([1, 2, 3, 4], {one: [1, 2, 3, 4, 5]})) == 2  # not the last
assert store.length(store.begin([1, 3, 3, 4], {one: [1, 2, 3, 4, 5]})) == 0
assert [store.fit({one: 8, two: n}) for n in (8, 9)] == [True, False]
assert [store.fit({one: n}) for n in (12, 13)] == [True, False]
store = Pages(blocks=2, pages=6, page_size=2)
for text in ([1, 2, 3, 4], [5, 6, 7, 8]):
    number = store.begin(text, {})
    for cache in store.caches:
        cache.append(number, *torch.zeros(2, 1, 4, 1))
    store.kept[number] = text
first, second = store.kept
again = store.begin([1, 2, 3], {})
assert store.length(again) == 2 and [*store.kept] == [second, first]
store.make_room([again], 4)  # two pages, which are unused
assert [*store.kept] == [second, first]
store.make_room([again], 6)  # one more
assert [*store.kept] == [first] and second not in store.caches[1].tables

# serving.Server
from attnlib import LanguageModel

torch.manual_seed(7)
model = LanguageModel(7, 40, embed_dim=8, num_heads=2, num_layers=2).double().eval()
server = Server(model, pages=12, page_size=2, at_once=2, piece=3)
texts = [[1, 2, 3, 4, 5], [1, 2], [6, 5, 4]]
asked = [server.submit(torch.tensor(text), 6, temperature=0.0) for text in texts]
assert server.step() == [] and server.inside == asked[:1]  # three tokens of the first
(pair,) = server.step()[:1]
assert pair[0] is asked[0] and pair[1] == asked[0].written[0]
assert server.inside == asked[:2]  # the rest of the first, and one of the second
server.send_back()
assert server.inside == asked[:1] and [*server.waiting] == asked[1:]
assert asked[1].sequence is None and server.let_in() is asked[1]
while server.waiting or server.inside:
    assert len(server.inside) < 3 and server.step() is not None
for text, request in zip(texts, asked, strict=True):
    alone = model.generate(torch.tensor(text), 6, temperature=0.0)
    assert request.ids == alone.tolist() and request.over == "length"
server = Server(model, pages=5, page_size=2)
asked = [server.submit(torch.tensor(text), 5, temperature=0.0) for text in texts[1:]]
while server.waiting or server.inside:
    server.step()  # one of them has to be sent back
for text, request in zip(texts[1:], asked, strict=True):
    assert request.ids == model.generate(torch.tensor(text), 5, temperature=0.0).tolist()
request = server.submit(torch.tensor([6, 5, 4, 3]), 3, temperature=0.0)


def fails(module, args, result):
    raise KeyboardInterrupt


hook = model.blocks[1].register_forward_hook(fails)
try:
    server.step()
except KeyboardInterrupt:
    hook.remove()
lengths = {cache.lengths[request.sequence] for cache in server.memory.caches}
assert len(lengths) == 1 and server.unread(request) == 4 - lengths.pop()
assert request.ids == [6, 5, 4, 3]
server = Server(model, pages=20, page_size=2)
asked = [server.submit(torch.tensor(text), 3) for text in texts]
server.step()
before = [request.generator.get_state() for request in asked]


def refuse(logits, text):
    raise ValueError


asked[1].choose, choose = refuse, asked[1].choose
try:
    server.step()
except ValueError:
    asked[1].choose = choose
assert [len(request.written) for request in asked] == [1, 1, 1]
after = [request.generator.get_state() for request in asked]
assert torch.equal(torch.stack(before), torch.stack(after))  # nobody has lost a draw

# linear.elu_plus_one
x = torch.tensor([-80.0, -1.0, 0.0, 2.0, 1000.0], requires_grad=True)
found = elu_plus_one(x)
assert torch.allclose(
    found, torch.tensor([1.8049e-35, 0.36788, 1.0, 3.0, 1001.0]), rtol=1e-4, atol=0
)
found.sum().backward()
assert torch.allclose(x.grad[2:], torch.ones(3)) and abs(x.grad[1] - 0.36788) < 1e-4

# linear.weighted_mean
sums = torch.tensor([[6.0, 9.0, 3.0], [0.0, 0.0, 0.0]], requires_grad=True)
found = weighted_mean(sums)
assert found.tolist() == [[2.0, 3.0], [0.0, 0.0]]
found.sum().backward()
assert sums.grad.isfinite().all() and weighted_mean(torch.ones(2, 4, 5)).shape == (2, 4, 4)

# linear.what_is_left
found = what_is_left(torch.log(torch.tensor([0.5, 0.25, 0.5])))
assert torch.allclose(found, torch.tensor([[1.0, 0, 0], [0.25, 1, 0], [0.125, 0.5, 1]]))
gone = torch.tensor([[0.0, -torch.inf, 0.0], [0.0, 0.0, 0.0]])
found = what_is_left(gone)
assert found[0].tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
assert torch.equal(found[1], torch.ones(3, 3).tril())

# linear.read_piece
torch.manual_seed(0)
q, k, v = torch.rand(2, 5, 3), torch.rand(2, 5, 3), torch.rand(2, 5, 2)
g, S = -torch.rand(2, 5), torch.rand(2, 3, 2)
output, state = read_piece(q, k, v, g, S)
slow = S
for i in range(5):
    slow = g[:, i, None, None].exp() * slow + k[:, i, :, None] * v[:, i, None, :]
    row = (q[:, i, None, :] @ slow).squeeze(1)
    assert torch.allclose(output[:, i], row, atol=1e-5), f"token {i}"
assert torch.allclose(state, slow, atol=1e-5)
plain, whole = read_piece(q, k, v, None, S), read_piece(q, k, v, 0 * g, S)
assert torch.allclose(plain[0], whole[0], atol=1e-5)
assert torch.allclose(plain[1], whole[1], atol=1e-5)

# linear.linear_attention
torch.manual_seed(0)
q, k, v = torch.rand(2, 7, 3), torch.rand(2, 7, 3), torch.rand(2, 7, 2)
g = -torch.rand(2, 7)
output, state = linear_attention(q, k, v, g, piece=7)
for piece in (1, 3, 50):
    other, end = linear_attention(q, k, v, g, piece=piece)
    assert torch.allclose(other, output, atol=1e-5) and torch.allclose(
        end, state, atol=1e-5
    )
rest, end = linear_attention(q[:, 4:], k[:, 4:], v[:, 4:], g[:, 4:], linear_attention(
    q[:, :4], k[:, :4], v[:, :4], g[:, :4])[1])  # fmt: skip
assert torch.allclose(rest, output[:, 4:], atol=1e-5) and torch.allclose(
    end, state, atol=1e-5
)
assert torch.allclose(linear_attention(q, k, v)[1], k.mT @ v, atol=1e-5)
empty, same = linear_attention(q[:, :0], k[:, :0], v[:, :0], state=state)
assert empty.shape == (2, 0, 2) and torch.equal(same, state)
one = torch.ones(300, 1, dtype=torch.bfloat16)
with torch.autocast("cpu", dtype=torch.bfloat16):
    output, state = linear_attention(one, one, one, piece=1)
assert output.dtype == torch.bfloat16 and state.dtype == torch.float32 and state == 300

# linear.LinearAttention
from attnlib.linear import elu_plus_one

torch.manual_seed(0)
q, k, v = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 6, 5), torch.randn(2, 3, 6, 2)
kernel = elu_plus_one(q) @ elu_plus_one(k).mT
output, weights = LinearAttention()(q, k, v)
assert torch.allclose(weights, kernel / kernel.sum(-1, keepdim=True))
assert torch.allclose(output, weights @ v, atol=1e-6)
for causal in (False, True):
    heads = LinearAttention(causal=causal, piece=2)
    for queries, keys in ((4, 6), (6, 6), (6, 4)):
        a, b, c = torch.randn(2, 3, queries, 5), torch.randn(2, 3, keys, 5), v[:, :, :keys]
        hidden = torch.arange(keys) < 3
        for mask in (None, hidden[None], torch.randn(queries, keys)):
            whole, _ = heads(a, b, c, mask)
            alone, none = heads(a, b, c, mask, need_weights=False)
            assert none is None and torch.allclose(alone, whole, atol=1e-5), (queries, keys)
    few = k[:, :1], v[:, :1]
    shared, _ = heads(q, *few, need_weights=False, enable_gqa=True)
    expected, _ = heads(q, *(x.expand(2, 3, 6, -1) for x in few))
    assert torch.allclose(shared, expected, atol=1e-5)
assert heads.attend_without_weights(q, k, v, torch.ones(4, 6) > 0) is None
scores = torch.tensor([[0.0, 1.0, -torch.inf, 100.0, 0.0, 0.0]])
_, masked = LinearAttention()(q, k, v, scores)
factor = (scores - 100).exp() * kernel
assert torch.allclose(masked, factor / factor.sum(-1, keepdim=True), atol=1e-6)

# linear.GatedLinearAttention
from attnlib.linear import StateCache, elu_plus_one

torch.manual_seed(0)
layer, x = GatedLinearAttention(6, 2, piece=2), torch.randn(3, 5, 6)
output, none = layer(x)
q, k, v = (p(x).view(3, 5, 2, 3).transpose(1, 2) for p in (
    layer.q_proj, layer.k_proj, layer.v_proj))  # fmt: skip
a = torch.sigmoid(layer.gate_proj(x)).mT
weights = torch.zeros(3, 2, 5, 5)
for i in range(5):
    for j in range(i + 1):
        product = (elu_plus_one(q[:, :, i]) * elu_plus_one(k[:, :, j])).sum(-1)
        weights[..., i, j] = product * a[..., j + 1 : i + 1].prod(-1)
heads = weights / weights.sum(-1, keepdim=True) @ v
expected = layer.out_proj(heads.transpose(1, 2).flatten(2))
assert none is None and torch.allclose(output, expected, atol=1e-5)
cache = StateCache()
with torch.no_grad():
    parts = [layer(part, cache=cache)[0] for part in x.split([2, 1, 2], dim=1)]
assert torch.allclose(torch.cat(parts, dim=1), output, atol=1e-5) and len(cache) == 5
there = torch.tensor([True, False, True, True, False])
masked, _ = layer(x, there.expand(3, 1, 1, 5))
assert torch.allclose(masked[:, there], layer(x[:, there])[0], atol=1e-5)
layer.gate_proj.b.data.fill_(-torch.inf)
assert layer(x, there.expand(3, 1, 1, 5))[0].isfinite().all()

# delta.unit_length
x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, -1e-3]], requires_grad=True)
found = unit_length(x)
assert torch.allclose(found, torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.0, -1.0]]))
found.sum().backward()
assert x.grad[1].tolist() == [1.0, 1.0] and unit_length(torch.ones(2, 3, 4)).shape == (
    2,
    3,
    4,
)

# delta.corrections
torch.manual_seed(0)
k, v, S = torch.randn(2, 5, 3), torch.randn(2, 5, 4), torch.randn(2, 3, 4)
beta, g = torch.rand(2, 5), -torch.rand(2, 5)
g[1, 2] = -torch.inf
found = corrections(k, v, beta, g, S)
assert found.shape == (2, 5, 4)
for i in range(5):
    S = g[:, i, None, None].exp() * S
    u = beta[:, i, None] * (v[:, i] - (k[:, i, None] @ S).squeeze(1))
    S = S + k[:, i, :, None] * u[:, None]
    assert torch.allclose(found[:, i], u, atol=1e-5), f"token {i}"

# delta.correct_piece
torch.manual_seed(0)
q, k = torch.randn(2, 2, 5, 3)
v, S = torch.randn(2, 5, 4), torch.randn(2, 3, 4)
beta, g = torch.rand(2, 5), -torch.rand(2, 5)
output, state = correct_piece(q, k, v, beta, g, S)
for i in range(5):
    S = g[:, i, None, None].exp() * S
    old = (k[:, i, None] @ S).squeeze(1)
    S = S + k[:, i, :, None] * (beta[:, i, None] * (v[:, i] - old))[:, None]
    assert torch.allclose(output[:, i], (q[:, i, None] @ S).squeeze(1), atol=1e-5), i
assert torch.allclose(state, S, atol=1e-5)

# delta.correct_by_feature
torch.manual_seed(0)
q, k = torch.randn(2, 2, 5, 3)
v, S = torch.randn(2, 5, 4), torch.randn(2, 3, 4)
beta, g = torch.rand(2, 5), -torch.rand(2, 5, 3)
g[0, 3, 1], g[1, 1] = -torch.inf, -500.0
output, state = correct_by_feature(q, k, v, beta, g, S)
for i in range(5):
    S = g[:, i, :, None].exp() * S
    old = (k[:, i, None] @ S).squeeze(1)
    S = S + k[:, i, :, None] * (beta[:, i, None] * (v[:, i] - old))[:, None]
    assert torch.allclose(output[:, i], (q[:, i, None] @ S).squeeze(1), atol=1e-5), i
assert torch.allclose(state, S, atol=1e-5)

# delta.GatedDeltaAttention
from attnlib.linear import StateCache

torch.manual_seed(0)
layer, x = GatedDeltaAttention(6, 2, piece=2), torch.randn(3, 5, 6)
output, none = layer(x)
q, k, v = (p(x).view(3, 5, 2, 3).transpose(1, 2) for p in (
    layer.q_proj, layer.k_proj, layer.v_proj))  # fmt: skip
q, k = (y / y.norm(dim=-1, keepdim=True) for y in (q, k))
a, beta = (torch.sigmoid(p(x)).mT[..., None] for p in (layer.gate_proj, layer.beta_proj))
S, rows = torch.zeros(3, 2, 3, 3), []
for i in range(5):
    S = a[:, :, i, :, None] * S
    old = (k[:, :, i, None] @ S).squeeze(-2)
    S = S + k[:, :, i, :, None] * (beta[:, :, i] * (v[:, :, i] - old))[..., None, :]
    rows.append((q[:, :, i, None] @ S).squeeze(-2))
expected = layer.out_proj(torch.stack(rows, dim=1).flatten(2))
assert none is None and torch.allclose(output, expected, atol=1e-5)
cache = StateCache()
with torch.no_grad():
    parts = [layer(part, cache=cache)[0] for part in x.split([2, 1, 2], dim=1)]
assert torch.allclose(torch.cat(parts, dim=1), output, atol=1e-5) and len(cache) == 5
there = torch.tensor([True, False, True, True, False])
masked, _ = layer(x, there.expand(3, 1, 1, 5))
assert torch.allclose(masked[:, there], layer(x[:, there])[0], atol=1e-5)
half = GatedDeltaAttention(6, 2).half()
assert half(x.half())[0].dtype == torch.float16

# sparse.mean_scores
q, k = torch.randn(2, 5, 4), torch.randn(2, 3, 6, 4)
expected = (q[:, :, None, None] * k[:, None]).sum(dim=-1).mean(dim=-1)
assert mean_scores(q, k).shape == (2, 5, 3)
assert torch.allclose(mean_scores(q, k), expected, atol=1e-5)

# sparse.box_scores
q, k = torch.randn(2, 5, 4), torch.randn(2, 3, 6, 4)
found = box_scores(q, k)
assert found.shape == (2, 5, 3)
for i in range(5):
    for b in range(3):
        ends = q[:, i] * k[:, b].amin(dim=1), q[:, i] * k[:, b].amax(dim=1)
        assert torch.allclose(found[:, i, b], torch.maximum(*ends).sum(dim=-1), atol=1e-5)

# sparse.choose_blocks
scores = torch.tensor([[3.0, 1.0, 2.0, 9.0], [0.0, 5.0, 1.0, 9.0]])
mask = torch.zeros(2, 4, 3)
mask[:, 3] = -torch.inf  # hidden whole
mask[0, 1, 2] = -torch.inf  # and in part
assert choose_blocks(scores, mask, 2).sort().values.tolist() == [[0, 1], [1, 2]]
assert choose_blocks(scores, mask, 1).tolist() == [[1], [1]]
assert choose_blocks(scores, mask, 9).shape == (2, 4)
mask[1, 2] += 8.0
assert choose_blocks(scores, mask, 1)[1].tolist() == [2]
mask[0, 0, 0] = -torch.inf
try:
    choose_blocks(scores, mask, 1)
except ValueError:
    pass
else:
    raise AssertionError("a query sees two blocks in part: expected ValueError")

# sparse.attend_chosen
q, k, v = torch.randn(2, 3, 4), torch.randn(2, 5, 2, 4), torch.randn(2, 5, 2, 6)
chosen = torch.tensor([[[0, 3], [4, 1], [2, 3]], [[1, 0], [1, 2], [3, 4]]])
mask = torch.zeros(3, 5, 2)
mask[1, 4, 0] = -torch.inf
mask[2, 3, 1] = 0.5
output = attend_chosen(q, k, v, mask, chosen)
assert output.shape == (2, 3, 6)
for s in range(2):
    for i in range(3):
        blocks = chosen[s, i]
        scores = k[s, blocks].flatten(0, 1) @ q[s, i] + mask[i, blocks].flatten()
        row = scores.softmax(dim=0) @ v[s, blocks].flatten(0, 1)
        assert torch.allclose(output[s, i], row, atol=1e-5), (s, i)

# sparse.index_scores
q, k, w = torch.randn(2, 3, 4, 5), torch.randn(2, 6, 5), torch.randn(2, 3, 4)
found = index_scores(q, k, w)
assert found.shape == (2, 4, 6)
expected = sum(w[:, h, :, None] * (q[:, h] @ k.mT).clamp(min=0) for h in range(3))
assert torch.allclose(found, expected, atol=1e-5)

# sparse.indexer_loss
scores = torch.tensor([[[0.5, 1.0, -torch.inf], [0.1, -2.0, 0.3]]], requires_grad=True)
weights = torch.tensor([[[0.25, 0.75, 0.0], [0.2, 0.3, 0.5]]], requires_grad=True)
found = indexer_loss(scores, weights)
logs = scores.softmax(dim=-1).log()
rows = -(0.25 * logs[0, 0, 0] + 0.75 * logs[0, 0, 1]), -(weights[0, 1] * logs[0, 1]).sum()
assert torch.allclose(found, sum(rows) / 2, atol=1e-5)
found.backward()
assert weights.grad is None, "the weights have a gradient"
assert torch.allclose(scores.grad, (scores.softmax(dim=-1) - weights) / 2, atol=1e-5)

# sparse.three_branches
from attnlib import ScaledDotProductAttention
from attnlib.sparse import ChosenAttention, mean_scores

q, k, v, gates = *torch.randn(3, 2, 20, 4), torch.rand(2, 20, 3)
output = three_branches(q, k, v, gates, block=4, keep=2, window=3)
whole = torch.arange(1, 6) * 4 <= torch.arange(1, 21)[:, None]
means = (x.view(2, 5, 4, 4).mean(dim=2) for x in (k, v))
coarse, _ = ScaledDotProductAttention()(q, *means, whole)
near, _ = ScaledDotProductAttention(causal=True, window=3)(q, k, v)
chosen, _ = ChosenAttention(4, 2, mean_scores, causal=True)(q, k, v)
parts = torch.stack([coarse, chosen, near], dim=-2)
assert torch.allclose(output, (gates[..., None] * parts).sum(dim=-2), atol=1e-5)
try:
    three_branches(q, k, v, gates[:, :1])
except ValueError:
    pass
else:
    raise AssertionError("gates of one token: expected ValueError")
