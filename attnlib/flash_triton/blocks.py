# Made from book/15_flash_on_gpu.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Blocks of rows in a kernel: where they lie, by strides, and what hangs over.

Derived in chapter 15, "Flash attention on a GPU" (book/15_flash_on_gpu.ipynb).
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton here: the kernels below are then functions nobody calls
    triton = tl = SimpleNamespace(jit=lambda kernel: kernel, constexpr=lambda value: value)


class Heads(NamedTuple):
    """A matrix for every (batch, head) pair, as a kernel takes it.

    Args:
        pointer: the tensor; in the kernel, the address of its first entry.
        batch, head, row, column: its strides.

    Source: chapter 15, eq-strides.
    """

    pointer: Any
    batch: Any
    head: Any
    row: Any
    column: Any


def heads_of(tensor: Tensor) -> Heads:
    """A 4-D tensor with its strides.

    Source: chapter 15, eq-strides.
    """
    return Heads(tensor, *tensor.stride())


class Matrix(NamedTuple):
    """One of these matrices: address of its first entry, two strides, and its size.

    Source: chapter 15, eq-strides.
    """

    pointer: Any
    row: Any
    column: Any
    rows: Any
    width: Any


@triton.jit
def matrix_of(heads, index, count, rows, width):
    """The matrix of one (batch, head) pair; `index` counts the pairs, `count` the heads.

    Source: chapter 15, eq-strides.
    """
    batch = tl.cast(index // count, tl.int64)  # 64 bits: a tensor may pass 2³¹ entries
    head = tl.cast(index % count, tl.int64)
    pointer = heads.pointer + batch * heads.batch + head * heads.head
    return Matrix(pointer, heads.row, heads.column, rows, width)


@triton.jit
def place_of(program, blocks, together):
    """Which (batch, head) pair a program serves, and which of the pair's blocks is its own.

    Programs begin in the order of their numbers. Some pairs go together: first come the
    first blocks of all of them, then the second blocks, and so on.

    Args:
        program: its number.
        blocks: how many each pair has.
        together: how many pairs, 1 for one after the other.

    Source: chapter 15, eq-grid.
    """
    pairs = tl.num_programs(0) // blocks
    first = program // (together * blocks) * together
    size = tl.minimum(together, pairs - first)  # the last ones may be fewer
    place = program - first * blocks
    return first + place % size, place // size


@triton.jit
def block_pointers(matrix, start, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Addresses of rows start … start + ROWS, (ROWS, PADDED), and which are inside.

    Source: chapter 15, eq-strides.
    """
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, PADDED)[None, :]
    # All in 64 bits: strides may be large. Offsets of 32 bits from the block's first entry
    # would take more registers, as they are the same in every round, so that the compiler
    # forms them before the loop and keeps them.
    down = tl.cast(start + rows, tl.int64) * matrix.row
    across = tl.cast(columns, tl.int64) * matrix.column
    pointers = matrix.pointer + down + across
    inside = (start + rows < matrix.rows) & (columns < matrix.width)
    return pointers, inside


@triton.jit
def load_block(
    matrix, start, ROWS: tl.constexpr, PADDED: tl.constexpr, CHECK: tl.constexpr
):
    """Rows start … start + ROWS of a matrix, filled up with zeros.

    Args:
        matrix: a Matrix.
        start: the first row.
        ROWS: rows of the block.
        PADDED: columns of the block, at least those of the matrix.
        CHECK: whether the block may reach below the last row.

    Returns:
        Block of shape (ROWS, PADDED).

    Source: chapter 15, eq-strides.
    """
    pointers, inside = block_pointers(matrix, start, ROWS, PADDED)
    if CHECK or matrix.width < PADDED:
        block = tl.load(pointers, mask=inside, other=0.0)
    else:  # nothing to check: the fastest loads
        block = tl.load(pointers)
    return block


@triton.jit
def store_block(matrix, block, start, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Writes a block to rows start … of a matrix, rounded to the matrix's dtype.

    Source: chapter 15, eq-strides.
    """
    pointers, inside = block_pointers(matrix, start, ROWS, PADDED)
    tl.store(pointers, block.to(matrix.pointer.dtype.element_ty), mask=inside)


@triton.jit
def add_block(matrix, block, start, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Adds a block to rows start … of a matrix that has all of them, entry by entry.

    Other programs may add to the same rows, in any order: each addition is whole (atomic).
    "relaxed" says that nobody reads a sum before the kernel has ended.

    Source: chapter 15, eq-strides.
    """
    pointers, inside = block_pointers(matrix, start, ROWS, PADDED)
    if matrix.width < PADDED:
        tl.atomic_add(pointers, block, mask=inside, sem="relaxed")
    else:  # without a mask, which takes registers where there are none left
        tl.atomic_add(pointers, block, sem="relaxed")
