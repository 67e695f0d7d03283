# Made from book/30_delta_rule.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""The delta rule as a kernel in Triton, forward only: a state that stays in registers.

Derived in chapter 30, "Write, erase, write again" (book/30_delta_rule.ipynb).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from attnlib.delta import refuse_bad_steps
from attnlib.flash_triton.attention import refusal
from attnlib.flash_triton.blocks import (
    Matrix,
    heads_of,
    load_block,
    matrix_of,
    store_block,
    tl,
    triton,
)
from attnlib.flash_triton.launch import capability_of, interpreted, launch, padded
from attnlib.linear import require_beside


@triton.jit
def solve_rows(lower, right):
    """U of (I + L) U = right, row after row; L has 16, with 0 on and above its diagonal.

    Source: chapter 30, eq-correction-sum.
    """
    at = tl.arange(0, 16)[:, None]
    solved = right
    for i in range(1, 16):
        factors = tl.sum(tl.where(at == i, lower, 0.0), 0)  # row i of L
        earlier = tl.sum(factors[:, None] * solved, 0)
        solved = tl.where(at == i, solved - earlier[None, :], solved)
    return solved


@triton.jit
def delta_piece(S, q, k, v, beta, g):
    """What 16 tokens get from some columns of the state, and these columns after them.

    Source: chapter 30, eq-correction-system, eq-correction-state.
    """
    at = tl.arange(0, 16)
    earlier = at[:, None] > at[None, :]
    steps = tl.where(earlier, g[:, None], 0.0)
    left = tl.where(at[:, None] >= at[None, :], tl.exp(tl.cumsum(steps, 0)), 0.0)
    before = tl.exp(tl.cumsum(g, 0))[:, None]
    error = v - before * tl.dot(k, S, input_precision="tf32x3")
    products = tl.dot(k, tl.trans(k), input_precision="tf32x3")
    lower = tl.where(earlier, beta[:, None] * left * products, 0.0)
    added = solve_rows(lower, beta[:, None] * error)
    weights = left * tl.dot(q, tl.trans(k), input_precision="tf32x3")
    output = before * tl.dot(q, S, input_precision="tf32x3")
    output = tl.dot(weights, added, output, input_precision="tf32x3")
    last = tl.sum(tl.where(at[:, None] == 15, left, 0.0), 0)[:, None]
    S = tl.exp(tl.sum(g, 0)) * S
    return output, tl.dot(tl.trans(k * last), added, S, input_precision="tf32x3")


@triton.jit
def columns_of(matrix, first):
    """A matrix from this column on.

    Source: chapter 30.
    """
    pointer = matrix.pointer + tl.cast(first, tl.int64) * matrix.column
    return Matrix(pointer, matrix.row, matrix.column, matrix.rows, matrix.width - first)


@triton.jit
def delta_kernel(
    query, key, value, beta, log_decay, state, output, end, heads, tokens,
    D_K: tl.constexpr, D_V: tl.constexpr, PADDED_K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """All tokens of one head, for a block of columns of values and state.

    Source: chapter 30, eq-gated-delta.
    """
    blocks = tl.cdiv(D_V, COLUMNS)
    index, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * COLUMNS
    query = matrix_of(query, index, heads, tokens, D_K)
    key = matrix_of(key, index, heads, tokens, D_K)
    value = columns_of(matrix_of(value, index, heads, tokens, D_V), first)
    output = columns_of(matrix_of(output, index, heads, tokens, D_V), first)
    state = columns_of(matrix_of(state, index, heads, D_K, D_V), first)
    end = columns_of(matrix_of(end, index, heads, D_K, D_V), first)
    S = load_block(state, 0, PADDED_K, COLUMNS, True)
    row, at = tl.cast(index, tl.int64) * tokens, tl.arange(0, 16)
    for start in range(0, tokens, 16):
        there = start + at < tokens  # beyond them nothing is written, and nothing fades
        b = tl.load(beta + row + start + at, mask=there, other=0.0)
        g = tl.load(log_decay + row + start + at, mask=there, other=0.0)
        q = load_block(query, start, 16, PADDED_K, True).to(tl.float32)
        k = load_block(key, start, 16, PADDED_K, True).to(tl.float32)
        v = load_block(value, start, 16, COLUMNS, True).to(tl.float32)
        rows, S = delta_piece(S, q, k, v, b, g)
        store_block(output, rows, start, 16, COLUMNS)
    store_block(end, S, 0, PADDED_K, COLUMNS)


def run_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Output and last state of tensors (1, heads, n, …); those of (1, heads, n) in order.

    Source: chapter 30.
    """
    _, heads, tokens, d_k = query.shape
    d_v = value.shape[-1]
    output, end = torch.empty_like(value), torch.empty_like(state)
    columns = min(32, padded(d_v))
    launch(
        delta_kernel, heads * -(-d_v // columns), query.device,
        query=heads_of(query), key=heads_of(key), value=heads_of(value), beta=beta,
        log_decay=log_decay, state=heads_of(state), output=heads_of(output),
        end=heads_of(end), heads=heads, tokens=tokens,
        D_K=d_k, D_V=d_v, PADDED_K=padded(d_k), COLUMNS=columns, num_warps=8,
    )  # fmt: skip
    return output, end


def delta_rule_triton(
    query: Float[Tensor, "*batch tokens features"],
    key: Float[Tensor, "*batch tokens features"],
    value: Float[Tensor, "*batch tokens d_v"],
    beta: Float[Tensor, "*batch tokens"],
    log_decay: Float[Tensor, "*batch tokens"] | None = None,
    state: Float[Tensor, "*batch features d_v"] | None = None,
) -> tuple[Float[Tensor, "*batch tokens d_v"], Float[Tensor, "*batch features d_v"]]:
    """`delta_rule` on a GPU, forward only: one kernel, in pieces of 16 tokens.

    Whatever the dtype of the tensors is, each product is three on tensor cores, the sum of
    which is near that of float32. Arguments and results are as `delta_rule` has them, for
    queries, keys and values of float16, bfloat16 or float32; keys have at most 64
    features.

    Raises:
        RuntimeError: no Triton or no GPU that these kernels can use.
        TypeError, ValueError: see `delta_rule`; or a tensor that requires a gradient.

    Source: chapter 30, eq-correction-system.
    """
    refuse_bad_steps(query, key, value, beta, state)
    if log_decay is None:
        log_decay = torch.zeros_like(beta)
    require_beside(query, "log_decay", log_decay, beta.shape)
    given = {"query": query, "key": key, "value": value, "beta": beta}
    given |= {"log_decay": log_decay, "state": state}
    for name, tensor in given.items():
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            advice = "use torch.no_grad(), or delta_rule, which has one"
            raise ValueError(f"{name}: expected no gradient to be recorded; {advice}")
    if error := refusal(query, value, None):
        raise error
    if key.shape[-1] > 64:  # more would not stay in registers
        got = f"got shape {tuple(key.shape)}"
        raise ValueError(f"key: expected at most 64 features, {got}; delta_rule takes all")
    if not interpreted() and capability_of(query) < 80:
        raise RuntimeError("query: expected a GPU of compute capability 8.0 or higher")
    leading, (d_k, d_v) = query.shape[:-2], (key.shape[-1], value.shape[-1])
    heads = leading.numel()
    if state is None:
        state = value.new_zeros(*leading, d_k, d_v, dtype=torch.float32)
    steps = (x.float().reshape(-1) for x in (beta, log_decay))
    rows = (x.reshape(1, heads, *x.shape[-2:]) for x in (query, key, value))
    begun = state.float().reshape(1, heads, d_k, d_v)
    output, end = run_delta(*rows, *steps, begun)
    return output.reshape(value.shape), end.reshape(*leading, d_k, d_v)
