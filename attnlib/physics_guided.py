# Made from book/06_heads_to_plug_in.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""An attention that looks where a differential equation is violated.

Derived in chapter 6, "Heads to plug in" (book/06_heads_to_plug_in.ipynb).
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnlib.checks import broadcasts
from attnlib.scaled_dot_product import ScaledDotProductAttention


def guidance(
    residual: Float[Tensor, "*batch keys"], strength: float, floor: float
) -> Float[Tensor, "*batch keys"]:
    """The bias on the scores of keys whose equation is violated by `residual`.

    Args:
        residual: of the differential equation at each key; sign and unit do not matter.
        strength: γ; 0 means no guidance.
        floor: ε > 0; a key without residual counts as if it had ε times the mean.

    Returns:
        γ ln(ρ + ε) of the same shape, ρ being the size of the residual over its mean.

    Source: chapter 6, eq-guidance.
    """
    size = residual.abs()
    mean = size.mean(dim=-1, keepdim=True)
    relative = torch.where(mean > 0, size / mean, 1.0)
    return strength * torch.log(relative + floor)


class PhysicsGuidedAttention(ScaledDotProductAttention):
    """Attention that prefers keys at which a differential equation is violated.

    The residual reaches the head by `guide`, which is called whenever the residual has
    been computed anew; until then, and after `guide(None)`, the head is not guided. The
    residual is in the state dict; it keeps at least the digits of float32 when the module
    is converted to fewer.

    Args:
        strength: γ ≥ 0, the exponent of the residual in the weights; 0 means no guidance.
        floor: ε > 0; a key without residual counts as if it had ε times the mean.
        dropout: probability in [0, 1] of dropping a weight, in training mode only; the
            returned weights are those before dropout.
        causal: let each query see only keys up to its own position, bottom right.
        scale: factor on the scores; `None` means 1/√d_k.
        window: let each query see only keys less than so many tokens away.

    Raises:
        TypeError: window is no integer.
        ValueError: strength < 0, floor ≤ 0, window below 1, or dropout outside [0, 1].

    Source: chapter 6, eq-guided-weights, eq-guidance; Anagnostopoulos et al. (2024) for
    residuals as weights.
    """

    def __init__(
        self,
        strength: float = 1.0,
        floor: float = 0.01,
        dropout: float = 0.0,
        causal: bool = False,
        scale: float | None = None,
        *,
        window: int | None = None,
    ) -> None:
        super().__init__(dropout, causal, scale, window=window)
        if not strength >= 0:
            raise ValueError(f"strength: expected a number of at least 0, got {strength}")
        if not floor > 0:
            raise ValueError(f"floor: expected a number above 0, got {floor}")
        self.strength, self.floor = strength, floor
        self.residual: Tensor | None
        self.register_buffer("residual", None)

    def guide(self, residual: Float[Tensor, "*batch keys"] | None) -> None:
        """Sets the residual at the keys, for all calls from now on.

        Args:
            residual: last dimension the keys; the others broadcast to the leading
                dimensions of the key. It is detached: no gradient flows into it. `None`
                ends the guidance.

        Raises:
            TypeError: not a floating-point tensor.
            ValueError: a number that is not finite.
        """
        if residual is not None:
            if not (isinstance(residual, Tensor) and residual.is_floating_point()):
                raise TypeError(
                    f"residual: expected a floating-point tensor, got {residual!r}"
                )
            if not residual.isfinite().all():
                raise ValueError("residual: expected finite numbers, got NaN or infinity")
            wide = torch.promote_types(residual.dtype, torch.float32)
            residual = residual.detach().to(wide)
        self.residual = residual

    def attend(
        self,
        query: Float[Tensor, "*batch queries d_k"],
        key: Float[Tensor, "*batch keys d_k"],
        value: Float[Tensor, "*batch keys d_v"],
        mask: Float[Tensor, "..."] | None,
    ) -> tuple[Float[Tensor, "*batch queries d_v"], Float[Tensor, "*batch queries keys"]]:
        """Output and weights; see `BaseAttention.attend`.

        Raises:
            ValueError: the residual is not that of as many keys.
        """
        if self.residual is not None:
            shape, keys = tuple(self.residual.shape), tuple(key.shape[:-1])
            if shape[-1:] != keys[-1:] or not broadcasts(shape, keys):
                raise ValueError(
                    f"residual: expected one number for each of {keys[-1]} keys, in a "
                    f"shape that broadcasts to {keys}, got {shape}"
                )
            bias = guidance(self.residual, self.strength, self.floor).to(query)
            mask = bias.unsqueeze(-2) if mask is None else bias.unsqueeze(-2) + mask
        return super().attend(query, key, value, mask)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Converts the residual, too, but to float32 at least: float16 may not hold it."""
        before = self.residual
        super()._apply(fn, recurse)
        if before is not None and self.residual.dtype.itemsize < before.dtype.itemsize:
            wide = torch.promote_types(self.residual.dtype, torch.float32)
            self.residual = before.to(self.residual.device, wide)
        return self

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        """Takes the residual as it was saved, whatever its size; none, if none was."""
        saved = state_dict.get(f"{prefix}residual")
        self.residual = None if saved is None else torch.empty_like(saved)
        super()._load_from_state_dict(state_dict, prefix, *args)
