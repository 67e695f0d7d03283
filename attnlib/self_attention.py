# Made from book/02_self_attention.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Self-attention: queries, keys and values of one sequence, by three learned maps.

Derived in chapter 2, "Self-attention" (book/02_self_attention.ipynb).
"""

from jaxtyping import Float
from torch import Tensor, nn

from attnlib.base import BaseAttention
from attnlib.checks import explained, refuse_bad_tokens, require_flag
from attnlib.masks import Mask
from attnlib.scaled_dot_product import ScaledDotProductAttention


class SelfAttention(nn.Module):
    """Every token attends to every token of its own sequence.

    Args:
        d_in: features of a token.
        d_out: features of a query, a key, a value and a context vector.
        dqv_bias: whether the three linear maps have a bias.

    Attributes:
        W_query, W_key, W_value: `nn.Linear(d_in, d_out)` layers, made in this order.

    Raises:
        TypeError: dqv_bias is not a truth value.

    Source: chapter 2, eq-self-query to eq-self-context; Vaswani et al. (2017), section 3.2.
    """

    def __init__(self, d_in: int, d_out: int, dqv_bias: bool = False) -> None:
        super().__init__()
        require_flag("dqv_bias", dqv_bias)
        self.W_query = nn.Linear(d_in, d_out, bias=dqv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=dqv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=dqv_bias)
        self.attention: BaseAttention = ScaledDotProductAttention()

    @explained
    def forward(
        self,
        x: Float[Tensor, "*batch tokens d_in"],
        mask: Mask | None = None,
        return_weights: bool = False,
    ) -> (
        Float[Tensor, "*batch tokens d_out"]
        | tuple[Float[Tensor, "*batch tokens d_out"], Float[Tensor, "*batch tokens tokens"]]
    ):
        """Context vectors of the tokens.

        Args:
            x: tokens, shape (..., n, d_in), usually (batch_size, seq_length, d_in).
            mask: broadcasts to (..., n, n); boolean, True = may attend, or floating, added
                to the scores. `None` allows every pair.
            return_weights: whether to return the attention weights as well.

        Returns:
            Context vectors (..., n, d_out); with `return_weights` a pair of these and
            the attention weights (..., n, n), whose rows sum to 1.

        Raises:
            TypeError: x is not floating point, or its dtype is not that of the weights;
                or the mask has a wrong dtype.
            ValueError: x has fewer than 2 dimensions, not d_in features, or another
                device; or the mask does not broadcast.
        """
        query, key, value = self.W_query(x), self.W_key(x), self.W_value(x)
        if query.is_meta:  # without data, PyTorch takes any
            refuse_bad_tokens("x", x, self.W_query.in_features, self.W_query.weight, dims=2)
        context_vector, attn_weights = self.attention(
            query, key, value, mask, need_weights=return_weights
        )
        return (context_vector, attn_weights) if return_weights else context_vector
