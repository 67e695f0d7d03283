# Made from book/29_linear_attention.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Linear attention: a state of one size in place of the keys and values of all tokens.

Derived in chapter 29, "A state in place of a cache" (book/29_linear_attention.ipynb).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from attnlib.base import BaseAttention, repeat_shared
from attnlib.cache import require_rows
from attnlib.checks import explained, refuse_bad_inputs, require_count, require_flag
from attnlib.masks import Mask
from attnlib.multi_head import head_sizes, merge_heads, split_heads
from attnlib.projection import Projection

Feature = Callable[[Tensor], Tensor]


def elu_plus_one(x: Float[Tensor, "*batch d_k"]) -> Float[Tensor, "*batch d_k"]:
    """Features that are never negative: x + 1 above 0, and the exponential of x below.

    Source: chapter 29, eq-elu-feature; Katharopoulos et al. (2020), eq. 7.
    """
    return torch.relu(x) + x.clamp(max=0).exp()  # x + 1, or 0 + e^x


class LinearAttention(BaseAttention):
    """Attention whose weights are products of features: a state can replace the keys.

    Args:
        feature: the feature map, from (..., d_k) to (..., D). The weight of a key is the
            product of its features and those of the query, which must never be negative,
            divided by the sum over all keys.
        causal: let each query see only keys up to its own position, aligned bottom right;
            composes with any mask.
        piece: tokens that are read at once where no weights are asked for.

    Without weights, and with no mask or a boolean one that is the same for all queries,
    the work grows with the number of tokens and not with its square.

    Raises:
        TypeError: feature can't be called, causal is no truth value, or piece no whole
            number.
        ValueError: piece below 1.

    Source: chapter 29, eq-kernel-attention, eq-linear-output; Katharopoulos et al. (2020).
    """

    neutral: ClassVar[dict[str, Any]] = BaseAttention.neutral | {"feature": None}

    def __init__(
        self, feature: Feature = elu_plus_one, causal: bool = False, piece: int = 64
    ) -> None:
        super().__init__()
        if not callable(feature):
            raise TypeError(f"feature: expected a function of a tensor, got {feature!r}")
        self.feature, self.causal = feature, require_flag("causal", causal)
        self.piece = require_count("piece", piece)

    def attend(
        self,
        query: Float[Tensor, "*batch queries d_k"],
        key: Float[Tensor, "*batch keys d_k"],
        value: Float[Tensor, "*batch keys d_v"],
        mask: Float[Tensor, "..."] | None,
    ) -> tuple[Float[Tensor, "*batch queries d_v"], Float[Tensor, "*batch queries keys"]]:
        """Output (..., N, d_v), weights (..., N, M); see `BaseAttention.attend`."""
        kernel = self.feature(query) @ self.feature(key).mT
        if mask is not None:  # a factor e^mask, up to one for the whole row
            kernel = kernel * torch.softmax(mask, dim=-1)
        total = kernel.sum(dim=-1, keepdim=True)
        weights = kernel / total.masked_fill(total == 0, 1.0)
        return weights @ value, weights

    def attend_without_weights(
        self,
        query: Float[Tensor, "*batch queries d_k"],
        key: Float[Tensor, "*shared keys d_k"],
        value: Float[Tensor, "*shared keys d_v"],
        mask: Mask | None,
    ) -> Float[Tensor, "*batch queries d_v"] | None:
        """The output by a state, unless the mask differs from query to query."""
        padding = mask is not None and mask.dtype == torch.bool and mask.dim() > 1
        if mask is not None and not (padding and mask.shape[-2] == 1):
            return None
        if key.shape[:-2] != query.shape[:-2]:
            key, value = repeat_shared(query, key, value)
        wide = torch.promote_types(value.dtype, torch.float32)
        q, k = self.feature(query).to(wide), self.feature(key).to(wide)
        if mask is not None:
            k = k.masked_fill(~mask.mT, 0.0)  # features 0 have no weight
        v = F.pad(value.to(wide), (0, 1), value=1.0)  # beside the values, for the total
        if self.causal and q.shape[-2] > k.shape[-2]:  # the first queries see nothing
            k, v = (F.pad(x, (0, 0, q.shape[-2] - x.shape[-2], 0)) for x in (k, v))
        known = k.shape[-2] - q.shape[-2] if self.causal else k.shape[-2]  # all see these
        with unrounded(value.device):
            state = k[..., :known, :].mT @ v[..., :known, :]
            if not self.causal:
                return weighted_mean(q @ state).to(value.dtype)
        new = k[..., known:, :], v[..., known:, :]
        sums, _ = linear_attention(q, *new, state=state, piece=self.piece)
        return weighted_mean(sums).to(value.dtype)


def weighted_mean(
    sums: Float[Tensor, "*batch tokens d_v_and_1"],
) -> Float[Tensor, "*batch tokens d_v"]:
    """Sums of weighted values, divided by the sum of the weights, which comes last.

    Source: chapter 29, eq-linear-output.
    """
    total = sums[..., -1:]
    return sums[..., :-1] / total.masked_fill(total == 0, 1.0)  # 0/0 is 0 here


def what_is_left(
    log_decay: Float[Tensor, "*batch tokens"],
) -> Float[Tensor, "*batch tokens tokens"]:
    """How much of token j is left at token i, (..., n, n); 0 if j comes later than i.

    Source: chapter 29, eq-decay-left.
    """
    n = log_decay.shape[-1]
    steps = log_decay.unsqueeze(-1).expand(*log_decay.shape, n).tril(-1)  # row i > column j
    return steps.cumsum(dim=-2).exp().tril()


def read_piece(
    query: Float[Tensor, "*batch tokens features"],
    key: Float[Tensor, "*batch tokens features"],
    value: Float[Tensor, "*batch tokens d_v"],
    log_decay: Float[Tensor, "*batch tokens"] | None,
    state: Float[Tensor, "*batch features d_v"],
) -> tuple[Float[Tensor, "*batch tokens d_v"], Float[Tensor, "*batch features d_v"]]:
    """What the tokens of a piece get, and the state after it.

    Source: chapter 29, eq-piece-output, eq-piece-state.
    """
    products = query @ key.mT
    if log_decay is None:  # nothing fades
        return products.tril() @ value + query @ state, state + key.mT @ value
    left = what_is_left(log_decay)  # of the tokens of the piece
    before = log_decay.cumsum(dim=-1).exp().unsqueeze(-1)  # of what stands before it
    output = (left * products) @ value + before * (query @ state)
    at_the_end = left[..., -1, :].unsqueeze(-1)
    state = before[..., -1:, :] * state + (at_the_end * key).mT @ value
    return output, state


def linear_attention(
    query: Float[Tensor, "*batch tokens features"],
    key: Float[Tensor, "*batch tokens features"],
    value: Float[Tensor, "*batch tokens d_v"],
    log_decay: Float[Tensor, "*batch tokens"] | None = None,
    state: Float[Tensor, "*batch features d_v"] | None = None,
    *,
    piece: int = 64,
) -> tuple[Float[Tensor, "*batch tokens d_v"], Float[Tensor, "*batch features d_v"]]:
    """Reads each token into a state, which decays before, and asks it with the query.

    Nothing is divided by the sum of the weights: see `LinearAttention`.

    Args:
        query, key: features (..., n, D), as a feature map has made them.
        value: shape (..., n, d_v).
        log_decay: shape (..., n): the logarithm of what token i leaves of the state
            before it, at most 0; -∞ begins anew. `None` leaves all of it.
        state: of the tokens before these, (..., D, d_v); `None` if there are none.
        piece: tokens that are read at once, by matrices; 1 reads one after the other.
            `torch.compile` makes code for each piece, which takes long for many.

    Returns:
        Outputs (..., n, d_v), in the dtype of the value, and the state after the last
        token, (..., D, d_v), in float32 at least.

    Raises:
        TypeError: piece is no whole number, the dtypes differ, or one is no floating dtype.
        ValueError: piece below 1, or shapes or devices that do not fit.

    Source: chapter 29, eq-decayed-state, eq-piece-output, eq-piece-state.
    """
    require_count("piece", piece)
    refuse_bad_features(query, key, value, log_decay, state)
    wide = torch.promote_types(value.dtype, torch.float32)  # small steps of a large sum
    if state is None:
        state = value.new_zeros(*key.shape[:-2], key.shape[-1], value.shape[-1], dtype=wide)
    outputs, state = [value[..., :0, :].to(wide)], state.to(wide)
    with unrounded(value.device):
        for start in range(0, query.shape[-2], piece):
            part = slice(start, start + piece)
            q, k, v = (x[..., part, :].to(wide) for x in (query, key, value))
            g = None if log_decay is None else log_decay[..., part].to(wide)
            output, state = read_piece(q, k, v, g, state)
            outputs.append(output)
    return torch.cat(outputs, dim=-2).to(value.dtype), state


def refuse_bad_features(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
) -> None:
    """Refuses what would be broadcast, rounded, or read in another order.

    Raises:
        TypeError: query, key and value are no tensors of one floating-point dtype, or a
            decay or a state would be rounded.
        ValueError: a shape or a device is not what `linear_attention` says.

    Source: chapter 29; the contract, appendix A.
    """
    refuse_bad_inputs(query, key, value, None)
    *batch, n, features = query.shape
    require_beside(query, "key", key, (*batch, n, features))
    if log_decay is not None:
        require_beside(query, "log_decay", log_decay, (*batch, n))
    if state is not None:
        require_beside(query, "state", state, (*batch, features, value.shape[-1]))


def require_beside(
    query: Tensor, name: str, tensor: Tensor, shape: tuple[int, ...]
) -> None:
    """Refuses a tensor that does not fit beside the query.

    Raises:
        TypeError: no tensor of a floating-point dtype up to the one that is computed in.
        ValueError: another shape, or another device.

    Source: chapter 29; the contract, appendix A.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.shape != shape:
        got = f"got {tuple(tensor.shape)}"
        raise ValueError(f"{name}: expected shape {tuple(shape)} beside query, {got}")
    wide = torch.promote_types(query.dtype, torch.float32)
    exact = tensor.is_floating_point() and torch.promote_types(tensor.dtype, wide) == wide
    if not exact:
        wanted = f"a floating-point dtype up to {wide} beside query"
        raise TypeError(f"{name}: expected {wanted}, got {tensor.dtype}")
    if tensor.device != query.device:
        wanted = f"device {query.device} as query"
        raise ValueError(f"{name}: expected {wanted}, got {tensor.device}")


def unrounded(device: torch.device) -> AbstractContextManager:
    """Without autocast, which would round a state to 16 bits.

    Source: chapter 29; the contract, appendix A.
    """
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if known else nullcontext()


class StateCache:
    """What `GatedLinearAttention` keeps of the tokens that it has read: one state a head.

    It stands in the place of a `KVCache`, and does not grow. Keys can't be had from it, nor
    can it be brought back to fewer tokens, but to none. Like other caches, it takes no
    state with a gradient.

    Attributes:
        state: shape (batch, heads, D, d_v + 1), or D rows of d_v in a layer that does not
            divide; `None` before the first token.
        capacity: the most tokens; no text reaches it.
        nbytes: the bytes of the state.

    Source: chapter 29, eq-linear-state, eq-decayed-state.
    """

    capacity = 2**62

    def __init__(self) -> None:
        self.state: Tensor | None = None
        self.length = 0

    def __len__(self) -> int:
        return self.length

    def keep(self, state: Float[Tensor, "*batch features d_v"], tokens: int) -> None:
        """Holds the state after so many tokens more.

        Raises:
            ValueError: the state has a gradient. Nothing is then changed.
        """
        if state.requires_grad and torch.is_grad_enabled():
            advice = (
                "since a cache outlives the call; call the model within torch.no_grad()"
            )
            raise ValueError(f"x: expected no gradient, {advice}")
        with torch.inference_mode(False):  # or it could be read in that mode only
            self.state = state.clone()
        self.length += tokens

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Refuses: heads that ask for keys would not get them.

        Raises:
            TypeError: always.
        """
        raise TypeError("cache: expected one that holds keys, got a StateCache")

    def truncate(self, length: int) -> None:
        """Forgets all tokens, or none.

        Raises:
            TypeError, ValueError: length is neither 0 nor len(cache).
        """
        require_count("length", length, least=0, most=self.length)
        if length not in (0, self.length):
            why = "since a state does not tell its tokens apart"
            raise ValueError(f"length: expected 0 or {self.length}, {why}, got {length}")
        if length == 0:
            self.state, self.length = None, 0

    def select(self, rows: Int[Tensor, " chosen"]) -> None:
        """Keeps these sequences of the batch, in this order; see `KVCache.select`."""
        require_rows(rows, self.state)
        if self.state is not None:
            with torch.inference_mode(False):
                self.state = self.state[rows]

    @property
    def nbytes(self) -> int:
        return 0 if self.state is None else self.state.nbytes


def state_of(cache: StateCache | None) -> Tensor | None:
    """The state in a cache, if there is one.

    Raises:
        TypeError: another cache.

    Source: chapter 29.
    """
    if cache is None:
        return None
    if not isinstance(cache, StateCache):
        raise TypeError(f"cache: expected a StateCache, got {type(cache).__name__}")
    return cache.state


def tokens_there(
    mask: Mask, x: Float[Tensor, "*batch tokens embed_dim"], before: int
) -> Bool[Tensor, "..."]:
    """Which of the new tokens are there, (..., 1, n), out of a mask for all.

    Raises:
        TypeError: the mask is not boolean.
        ValueError: a mask of other tokens, or one that differs from query to query.

    Source: chapter 29.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError("mask: expected a boolean tensor, True where a token is there")
    tokens = before + x.shape[-2]
    wanted = [*x.shape[:-2], 1, 1, tokens] if x.dim() > 2 else [1, tokens]
    if list(mask.shape) != wanted:
        got = f"got {tuple(mask.shape)}"
        raise ValueError(f"mask: expected the same for all queries, {tuple(wanted)}, {got}")
    return mask[..., before:]


class GatedLinearAttention(nn.Module):
    """Causal linear attention of many heads; each token says how much of the state stays.

    It stands in a block in place of `MultiHeadAttention`: `block.attention = layer`.

    Args:
        embed_dim: features of a token; divisible by num_heads.
        num_heads: number of heads.
        feature: the feature map, see `LinearAttention`.
        piece: tokens that are read at once.

    Attributes:
        q_proj, k_proj, v_proj, out_proj: `Projection` layers.
        gate_proj: from a token to a number for each head, whose logistic function is the
            share of the state that stays. At first its biases are 1 to 6: of a token, half
            is left after 2 tokens in the first head, and after 280 in the last.
        attention: the heads without their gates: has the feature map and the piece, and
            tells a model that they are causal and see all tokens.

    Raises:
        TypeError: a size is no whole number.
        ValueError: a size below 1, or embed_dim not divisible by num_heads.

    Source: chapter 29, eq-decayed-state, eq-gate.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        feature: Feature = elu_plus_one,
        piece: int = 64,
    ) -> None:
        super().__init__()
        head_sizes(embed_dim, num_heads, None, None)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.q_proj, self.k_proj = (Projection(embed_dim, embed_dim) for _ in range(2))
        self.v_proj, self.out_proj = (Projection(embed_dim, embed_dim) for _ in range(2))
        self.gate_proj = Projection(embed_dim, num_heads)
        with torch.no_grad():
            self.gate_proj.b.copy_(torch.linspace(1, 6, num_heads))
        self.attention = LinearAttention(feature, causal=True, piece=piece)

    @explained
    def forward(
        self,
        x: Float[Tensor, "*batch tokens embed_dim"],
        mask: Mask | None = None,
        need_weights: bool = True,
        cache: StateCache | None = None,
        positions: None = None,
    ) -> tuple[Float[Tensor, "*batch tokens embed_dim"], None]:
        """Attends from each token to itself and those before; there are no weights.

        Args:
            x: tokens (..., n, embed_dim).
            mask: which tokens are there, boolean, (batch, 1, 1, M), or (1, M) without a
                batch; M counts those in the cache, too. `None` means all.
            need_weights: as `MultiHeadAttention` has it; changes nothing.
            cache: a `StateCache` with the tokens before these; it gets these.
            positions: none; what a `LanguageModel` with rotary positions says is refused.

        Raises:
            TypeError: a tensor of the wrong dtype; another cache.
            ValueError: wrong shapes, a mask that differs from query to query, positions, or
                a gradient beside a cache.
        """
        if positions is not None:
            raise ValueError("positions: expected None, since nothing turns here")
        each = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (split_heads(proj(x), self.num_heads) for proj in each)
        log_decay = F.logsigmoid(self.gate_proj(x)).mT  # (..., heads, n)
        dtype, wide = v.dtype, torch.promote_types(v.dtype, torch.float32)
        q, k = (self.attention.feature(y).to(wide) for y in (q, k))
        if mask is not None:  # whatever stands where no token is, it does nothing
            gone = ~tokens_there(mask, x, 0 if cache is None else len(cache))
            x = x.masked_fill(gone.reshape(*x.shape[:-1], 1), 0.0)
            k, v = (y.masked_fill(gone.mT, 0.0) for y in (k, v))
            log_decay = log_decay.masked_fill(gone.squeeze(-2), 0.0)
        output, state = self.read(x, q, k, v.to(wide), log_decay, state_of(cache))
        if cache is not None:
            cache.keep(state, x.shape[-2])
        return self.out_proj(merge_heads(output.to(dtype))), None

    def read(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What the heads get, (..., heads, n, d_v), and their state after the tokens x."""
        v, piece = F.pad(v, (0, 1), value=1.0), self.attention.piece
        sums, state = linear_attention(q, k, v, g, state, piece=piece)
        return weighted_mean(sums), state
