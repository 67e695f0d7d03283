# Made from book/06_heads_to_plug_in.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""An attention with a learned bias on the distance of key and query.

Derived in chapter 6, "Heads to plug in" (book/06_heads_to_plug_in.ipynb).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnlib.checks import require_sizes
from attnlib.masks import Mask, apply_mask
from attnlib.scaled_dot_product import ScaledDotProductAttention


def relative_positions(
    queries: int, keys: int, max_distance: int, device: torch.device | str | None = None
) -> Int[Tensor, "queries keys"]:
    """How far each key stands after each query, clipped to ±max_distance.

    The queries are the last of the keys, as in `causal_mask`, so that the last query and
    the last key have distance 0.

    Source: chapter 6, eq-relative-position.
    """
    i = torch.arange(queries, device=device)[:, None] + (keys - queries)
    j = torch.arange(keys, device=device)
    return (j - i).clamp(-max_distance, max_distance)


class LearnedBiasAttention(ScaledDotProductAttention):
    """Scaled dot-product attention with a learned bias on the distance of key and query.

    Args:
        num_heads: number of heads H; each has a bias of its own.
        max_distance: distances beyond ± this share the bias of the last one.
        dropout: probability in [0, 1] of dropping a weight, in training mode only; the
            returned weights are those before dropout.
        causal: let each query see only keys up to its own position, bottom right.
        window: let each query see only keys less than so many tokens away.

    Attributes:
        bias: parameter of shape (H, 2 · max_distance + 1), 0 at the start; entry (h, r)
            is added to the scores of head h at distance r - max_distance.

    Raises:
        TypeError: window is no integer.
        ValueError: num_heads, max_distance or window below 1, or dropout outside [0, 1].

    Source: chapter 6, eq-learned-bias; Raffel et al. (2020), and Shaw et al. (2018) for
    the largest distance.
    """

    def __init__(
        self,
        num_heads: int,
        max_distance: int = 16,
        dropout: float = 0.0,
        causal: bool = False,
        *,
        window: int | None = None,
    ) -> None:
        super().__init__(dropout, causal, window=window)
        require_sizes(num_heads=num_heads, max_distance=max_distance)
        self.num_heads, self.max_distance = num_heads, max_distance
        self.bias = nn.Parameter(torch.zeros(num_heads, 2 * max_distance + 1))

    def biased(
        self,
        query: Float[Tensor, "*batch heads queries d_k"],
        key: Float[Tensor, "*shared keys d_k"],
        mask: Mask | None,
    ) -> Float[Tensor, "*batch heads queries keys"]:
        """The bias of each pair, with a mask applied to it.

        Raises:
            ValueError: another number of heads.
        """
        if query.dim() < 3 or query.shape[-3] != self.num_heads:
            raise ValueError(
                f"query: expected {self.num_heads} heads, shape (..., heads, tokens, d_k), "
                f"got shape {tuple(query.shape)}"
            )
        queries, keys = query.shape[-2], key.shape[-2]
        distance = relative_positions(queries, keys, self.max_distance, query.device)
        bias = self.bias.to(query.dtype)[:, distance + self.max_distance]
        bias = bias.expand(*query.shape[:-1], keys)
        return bias if mask is None else apply_mask(bias, mask)

    def attend(
        self,
        query: Float[Tensor, "*batch heads queries d_k"],
        key: Float[Tensor, "*batch heads keys d_k"],
        value: Float[Tensor, "*batch heads keys d_v"],
        mask: Float[Tensor, "..."] | None,
    ) -> tuple[
        Float[Tensor, "*batch heads queries d_v"],
        Float[Tensor, "*batch heads queries keys"],
    ]:
        """Output and weights; see `BaseAttention.attend`. Heads are dimension -3."""
        return super().attend(query, key, value, self.biased(query, key, mask))

    def attend_without_weights(
        self,
        query: Float[Tensor, "*batch heads queries d_k"],
        key: Float[Tensor, "*shared keys d_k"],
        value: Float[Tensor, "*shared keys d_v"],
        mask: Mask | None,
    ) -> Float[Tensor, "*batch heads queries d_v"] | None:
        """The output by PyTorch's function, of which the bias is a mask."""
        mask = self.biased(query, key, mask)
        return super().attend_without_weights(query, key, value, mask)
