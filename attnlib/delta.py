# Made from book/30_delta_rule.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""The delta rule: a state in which a token replaces what stood at its key.

Derived in chapter 30, "Write, erase, write again" (book/30_delta_rule.ipynb).
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from attnlib.checks import require_count
from attnlib.linear import (
    GatedLinearAttention,
    read_piece,
    refuse_bad_features,
    require_beside,
    unrounded,
    what_is_left,
)
from attnlib.projection import Projection


def unit_length(x: Float[Tensor, "*batch d_k"]) -> Float[Tensor, "*batch d_k"]:
    """Rows of length 1; one of zeros stays as it is.

    Source: chapter 30, eq-delta-left.
    """
    largest = x.detach().abs().amax(dim=-1, keepdim=True)
    x = x / largest.masked_fill(largest == 0, 1.0)  # or squares might be 0, or too large
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.masked_fill(length == 0, 1.0)


def corrections(
    key: Float[Tensor, "*batch tokens features"],
    value: Float[Tensor, "*batch tokens d_v"],
    beta: Float[Tensor, "*batch tokens"],
    log_decay: Float[Tensor, "*batch tokens"],
    state: Float[Tensor, "*batch features d_v"],
) -> Float[Tensor, "*batch tokens d_v"]:
    """What each token of a piece adds to the state at its key.

    Source: chapter 30, eq-correction, eq-correction-system.
    """
    beta, left = beta.unsqueeze(-1), what_is_left(log_decay)
    before = log_decay.cumsum(dim=-1).exp().unsqueeze(-1)
    error = value - before * (key @ state)  # of what stands before the piece
    lower = beta * (left * (key @ key.mT)).tril(-1)  # what earlier tokens of it add
    return torch.linalg.solve_triangular(
        lower, beta * error, upper=False, unitriangular=True
    )


def correct_piece(
    query: Float[Tensor, "*batch tokens features"],
    key: Float[Tensor, "*batch tokens features"],
    value: Float[Tensor, "*batch tokens d_v"],
    beta: Float[Tensor, "*batch tokens"],
    log_decay: Float[Tensor, "*batch tokens"],
    state: Float[Tensor, "*batch features d_v"],
) -> tuple[Float[Tensor, "*batch tokens d_v"], Float[Tensor, "*batch features d_v"]]:
    """What the tokens of a piece get, and the state after it.

    Source: chapter 30, eq-correction-state; chapter 29, eq-piece-output, eq-piece-state.
    """
    added = corrections(key, value, beta, log_decay, state)
    return read_piece(query, key, added, log_decay, state)


def read_in_pieces(
    read: Callable[..., tuple[Tensor, Tensor]],
    tensors: tuple[Tensor, ...],
    state: Tensor | None,
    piece: int,
) -> tuple[Tensor, Tensor]:
    """Outputs of all pieces, one after the other, and the state after the last.

    Source: chapter 30; chapter 29, eq-piece-state.
    """
    _, key, value, beta, _ = tensors
    wide = torch.promote_types(value.dtype, torch.float32)
    if state is None:
        state = value.new_zeros(*key.shape[:-2], key.shape[-1], value.shape[-1], dtype=wide)
    outputs, state = [value[..., :0, :].to(wide)], state.to(wide)
    tokens, n = beta.dim() - 1, beta.shape[-1]  # where the tokens are counted
    with unrounded(value.device):
        for start in range(0, n, piece):
            size = min(piece, n - start)
            part = (x.narrow(tokens, start, size).to(wide) for x in tensors)
            output, state = read(*part, state)
            outputs.append(output)
    return torch.cat(outputs, dim=-2).to(value.dtype), state


def delta_rule(
    query: Float[Tensor, "*batch tokens features"],
    key: Float[Tensor, "*batch tokens features"],
    value: Float[Tensor, "*batch tokens d_v"],
    beta: Float[Tensor, "*batch tokens"],
    log_decay: Float[Tensor, "*batch tokens"] | None = None,
    state: Float[Tensor, "*batch features d_v"] | None = None,
    *,
    piece: int = 64,
) -> tuple[Float[Tensor, "*batch tokens d_v"], Float[Tensor, "*batch features d_v"]]:
    """Brings the state nearer to each token's value at its key, and asks it with the query.

    The state fades first; then beta times the difference between the value and what the
    state gives for the key is added at the key. What stood there does not grow by it where
    beta times the square of the key's length is 0 to 2; keys of length 1 are usual.

    Args:
        query, key: shape (..., n, D).
        value: shape (..., n, d_v).
        beta: shape (..., n): how much of the difference is made up for; all of it where
            beta is 1 and the key of length 1, and nothing is written where it is 0.
        log_decay: shape (..., n): the logarithm of what token i leaves of the state
            before it, at most 0; -∞ begins anew. `None` leaves all of it.
        state: of the tokens before these, (..., D, d_v); `None` if there are none.
        piece: tokens that are read at once, by matrices; 1 reads one after the other,
            slowly. `torch.compile` makes code for each piece, which takes long for many.

    Returns:
        Outputs (..., n, d_v), in the dtype of the value, and the state after the last
        token, (..., D, d_v), in float32 at least.

    Raises:
        TypeError: piece is no whole number, the dtypes differ, or one is no floating dtype.
        ValueError: piece below 1, or shapes or devices that do not fit.

    Source: chapter 30, eq-gated-delta, eq-correction-state; Yang et al. (2025).
    """
    refuse_bad_steps(query, key, value, beta, state)
    if log_decay is None:
        log_decay = torch.zeros_like(beta)
    require_beside(query, "log_decay", log_decay, beta.shape)
    require_count("piece", piece)
    tensors = query, key, value, beta, log_decay
    return read_in_pieces(correct_piece, tensors, state, piece)


def refuse_bad_steps(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, state: Tensor | None
) -> None:
    """Refuses what would be broadcast, rounded, or read in another order.

    Raises:
        TypeError, ValueError: see `delta_rule`.

    Source: chapter 30; the contract, appendix A.
    """
    refuse_bad_features(query, key, value, None, state)
    require_beside(query, "beta", beta, query.shape[:-1])


class GatedDeltaAttention(GatedLinearAttention):
    """Causal attention by a state of which each token replaces a part; many heads.

    It stands in a block in place of `MultiHeadAttention`: `block.attention = layer`.
    Queries and keys are brought to length 1, and nothing is divided. Masks, caches and
    errors are those of `GatedLinearAttention`.

    Args:
        embed_dim: features of a token; divisible by num_heads.
        num_heads: number of heads.
        piece: tokens that are read at once.

    Attributes:
        beta_proj: a `Projection` from a token to a number for each head, whose logistic
            function says how much of the difference is made up for; at first about half.

    Source: chapter 30, eq-gated-delta; Yang et al. (2025), of whose layer it is the rule.
    """

    def __init__(self, embed_dim: int, num_heads: int, piece: int = 64) -> None:
        super().__init__(embed_dim, num_heads, unit_length, piece)
        self.beta_proj = Projection(embed_dim, num_heads)

    def read(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What the heads get, (..., heads, n, d_v), and their state after the tokens x."""
        beta = torch.sigmoid(self.beta_proj(x)).mT  # (..., heads, n)
        return delta_rule(q, k, v, beta, g, state, piece=self.attention.piece)


def correct_by_feature(
    query: Float[Tensor, "*batch tokens features"],
    key: Float[Tensor, "*batch tokens features"],
    value: Float[Tensor, "*batch tokens d_v"],
    beta: Float[Tensor, "*batch tokens"],
    log_decay: Float[Tensor, "*batch tokens features"],
    state: Float[Tensor, "*batch features d_v"],
) -> tuple[Float[Tensor, "*batch tokens d_v"], Float[Tensor, "*batch features d_v"]]:
    """As `correct_piece`, where each feature has a decay of its own.

    Source: chapter 30, eq-feature-decay, eq-feature-products.
    """
    q, k = (x.mT.unsqueeze(-1) for x in (query, key))  # heads of one feature
    products = (what_is_left(log_decay.mT) * (k @ k.mT)).sum(dim=-3)
    error = value - (log_decay.cumsum(dim=-2).exp() * key) @ state
    beta = beta.unsqueeze(-1)
    added = torch.linalg.solve_triangular(
        beta * products.tril(-1), beta * error, upper=False, unitriangular=True
    )
    added = added.unsqueeze(-3).expand(*k.shape[:-1], -1)  # the same for all features
    outputs, rows = read_piece(q, k, added, log_decay.mT, state.unsqueeze(-2))
    return outputs.sum(dim=-3), rows.squeeze(-2)


def delta_rule_by_feature(
    query: Float[Tensor, "*batch tokens features"],
    key: Float[Tensor, "*batch tokens features"],
    value: Float[Tensor, "*batch tokens d_v"],
    beta: Float[Tensor, "*batch tokens"],
    log_decay: Float[Tensor, "*batch tokens features"],
    state: Float[Tensor, "*batch features d_v"] | None = None,
    *,
    piece: int = 16,
) -> tuple[Float[Tensor, "*batch tokens d_v"], Float[Tensor, "*batch features d_v"]]:
    """`delta_rule` where a share of each feature's row of the state is left.

    Args:
        log_decay: shape (..., n, D).
        piece: a piece needs piece · D numbers for each head, times the larger of piece
            and d_v.

    All else, and what it returns and raises, is as `delta_rule` has it.

    Source: chapter 30, eq-feature-decay; Kimi Team (2025).
    """
    refuse_bad_steps(query, key, value, beta, state)
    require_beside(query, "log_decay", log_decay, key.shape)
    require_count("piece", piece)
    tensors = query, key, value, beta, log_decay
    return read_in_pieces(correct_by_feature, tensors, state, piece)
