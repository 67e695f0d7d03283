# Made from book/03_causal_attention.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Causal self-attention: every token sees itself and the tokens before it.

Derived in chapter 3, "Causal attention" (book/03_causal_attention.ipynb).
"""

from attnlib.scaled_dot_product import ScaledDotProductAttention
from attnlib.self_attention import SelfAttention


class CausalAttention(SelfAttention):
    """Self-attention in which no token sees a later one, with dropout on the weights.

    Args:
        d_in: features of a token.
        d_out: features of a query, a key, a value and a context vector.
        dropout: probability in [0, 1] of dropping a weight, in training mode only. The
            weights that `forward` returns are those before dropout; each row sums to 1.
        dqv_bias: whether the three linear maps have a bias.
        window: let each token see only itself and the window - 1 before it; `None` means
            all that came before.

    Attributes:
        W_query, W_key, W_value: `nn.Linear(d_in, d_out)` layers, made in this order.

    Raises:
        TypeError: `dropout` is a truth value, `dqv_bias` is none, `window` no integer, or
            one of them is given by its position, where `SelfAttention` has the bias.
        ValueError: `dropout` lies outside [0, 1], or `window` is below 1.

    Source: chapter 3, eq-causal-attention, eq-dropout; Vaswani et al. (2017), section
    3.2.3.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        dropout: float = 0.0,
        dqv_bias: bool = False,
        window: int | None = None,
    ) -> None:
        super().__init__(d_in, d_out, dqv_bias)
        self.attention = ScaledDotProductAttention(dropout, causal=True, window=window)
