# backprop.rms_norm.RMSNormLayer
class RMSNormLayer:
    def forward(self, input):
        x = input.astype(np.float32) if input.dtype == np.float16 else input
        squares = np.einsum("...d,...d->...", x, x)[..., None]
        s = np.sqrt(squares / len(self.gamma) + self.eps)
        output = (self.gamma * (x / s)).astype(input.dtype)
        self.remember(output, x=x, s=s)
        return output

    def backward(self, d_output):
        kept, d = self.recall(d_output), len(self.gamma)
        x, s = kept["x"], kept["s"]
        rows, hats = d_output.reshape(-1, d), (x / s).reshape(-1, d)
        d_gamma = np.einsum("td,td->d", rows, hats)
        self._gradients = {"gamma": d_gamma.astype(d_output.dtype)}
        g = self.gamma * d_output
        d_s = -np.sum(g * x, axis=-1, keepdims=True) / s**2
        return (g / s + d_s * x / (d * s)).astype(d_output.dtype)


# rms_norm.RMSNorm
from torch.nn import functional as F


class RMSNorm:
    def __init__(self, d_model, eps=1e-6):
        self.gamma = nn.Parameter(torch.full((d_model,), 1.0))
        self.eps, self.d_model = eps, d_model

    def forward(self, input):
        x = input if input.dtype == torch.float64 else input.float()
        normed = F.rms_norm(x, input.shape[-1:], eps=self.eps)
        return self.gamma * normed.type_as(input)


# backprop.gated_feed_forward.SiLU
class SiLU:
    def forward(self, input):
        opened = 1 + np.exp(-input)
        output = input / opened
        self.remember(output, opened=opened, silu=output)
        return output

    def backward(self, d_output):
        kept = self.recall(d_output)
        share, f = 1 / kept["opened"], kept["silu"]
        return (f + share * (1 - f)) * d_output


# backprop.gated_feed_forward.GatedFeedForwardLayer
class GatedFeedForwardLayer:
    def forward(self, input):
        u, z = (part.forward(input) for part in (self.up_proj, self.gate_proj))
        f = np.multiply(u, self.activation.forward(z))
        output = self.down_proj.forward(f)
        self.remember(output, u=u, bent=self.activation.forward(z))
        return output

    def backward(self, d_output):
        kept = self.recall(d_output)
        df = self.down_proj.backward(d_output)
        dx = self.up_proj.backward(kept["bent"] * df)
        dz = self.activation.backward(kept["u"] * df)
        return dx + self.gate_proj.backward(dz)


# gated_feed_forward.GatedFeedForward
class GatedFeedForward:
    def __init__(self, d_model, d_ff=None, activation=F.silu, bias=False):
        width = int(d_model * 8 / 3 + 0.5) if d_ff is None else d_ff
        self.activation = activation
        for name in ("gate_proj", "up_proj"):
            setattr(self, name, Projection(d_model, width, bias=bias))
        self.down_proj = Projection(width, d_model, bias=bias)

    def forward(self, input):
        z, u = self.gate_proj(input), self.up_proj(input)
        return self.down_proj(u.mul(self.activation(z)))


# llama.NormedProjection
class NormedProjection:
    def __init__(self, in_features, out_features, bias, d_k, eps):
        self.norm = RMSNorm(eps=eps, d_model=d_k)

    def forward(self, input):
        heads = output.split(self.norm.gamma.numel(), dim=-1)
        return torch.cat([self.norm(head) for head in heads], dim=-1)


# llama.Llama
class Llama:
    def logits(self, x):
        table = self.token_embedding.weight.T if self.head is None else self.head.W
        return x @ table
