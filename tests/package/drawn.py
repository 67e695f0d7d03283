"""What the tests of the package share: drawn inputs, attention by the definitions, runs."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnlib import LanguageModel

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def normal(*shape, seed=0, dtype=torch.float64, grad=False):
    """A tensor of normal numbers: the same in float64 and, rounded, in another dtype."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, dtype=torch.float64, generator=generator)
    return drawn.to(dtype).requires_grad_(grad)


def draw(*leading, queries=4, keys=6, d_k=4, d_v=3, kv_heads=None, seed=0, **options):
    """Query, key and value; with `kv_heads` in place of the last leading dimension."""
    shared = leading if kv_heads is None else (*leading[:-1], kv_heads)
    shapes = ((*leading, queries, d_k), (*shared, keys, d_k), (*shared, keys, d_v))
    return [normal(*shape, seed=seed + i, **options) for i, shape in enumerate(shapes)]


def leaves(tensors, dtype=None):
    """Copies that take gradients."""
    return [x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for x in tensors]


def draw_mask(kind, *shape, seed=1, dtype=torch.float64):
    """None, "boolean", "additive", or "holes": additive with −inf.

    Where a mask forbids something, the second query sees nothing.
    """
    if kind is None:
        return None
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.rand(shape, generator=generator) < 0.7
    allowed[..., 1:2, :] = False
    if kind == "boolean":
        return allowed
    numbers = torch.randn(shape, generator=generator).to(dtype)
    return numbers if kind == "additive" else numbers.masked_fill(~allowed, -torch.inf)


def visible(queries, keys, causal=False, window=None):
    """By the words: query i is token i + M − N, and sees itself and window − 1 others."""
    back = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    seen = back >= 0 if causal else torch.ones_like(back) > 0
    return seen if window is None else seen & (back.abs() < window)


def attention(
    query, key, value, mask=None, *, causal=False, window=None, scale=None, sink=None
):
    """Output and log-sum-exp by the definitions, also for heads that share keys.

    They are 0 and −inf for a query that sees nothing.
    """
    group = query.shape[-3] // max(1, key.shape[-3]) if query.dim() > 2 else 1
    if group > 1:
        key, value = (x.repeat_interleave(group, dim=-3) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    seen = visible(*scores.shape[-2:], causal, window)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + mask
    scores = scores.masked_fill(~seen, -torch.inf)
    if sink is not None:
        column = sink[..., None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    empty = (scores == -torch.inf).all(dim=-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)  # no NaN arises, forward or backward
    weights = scores.softmax(dim=-1).masked_fill(empty, 0.0)[..., : key.shape[-2]]
    return weights @ value, scores.logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)


def close(found, expected, atol=1e-12, rtol=0.0):
    """Asserts that tensors, or sequences of them, are the same up to rounding."""
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def refuses(message, error=ValueError):
    """Asserts that what follows is refused, word for word; … stands for any words."""
    words = re.escape(message).replace("…", "(?s:.*)")
    return pytest.raises(error, match=rf"\A{words}\Z")


def each_refused(error, cases, call=lambda case: case()):
    """A test for each message and the case, by default a call, that is refused with it."""

    @pytest.mark.usefixtures("as_shipped")
    @pytest.mark.parametrize("message", cases)
    def test(message):
        with refuses(message, error):
            call(cases[message])

    return test


def small_model(**options):
    """Two blocks with the same numbers each time."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "context_length": 12, "embed_dim": 16, "num_heads": 2}
    return LanguageModel(**{**sizes, "num_layers": 2, **options})


def torch_copy(ours, theirs):
    """The PyTorch namesake of a layer in NumPy with its numbers, in float64."""
    for name, array in ours.parameters().items():
        theirs.get_parameter(name).data = torch.tensor(array, dtype=torch.float64)
    return theirs


def change_tensors(folder, edit):
    """Writes model.safetensors anew, after `edit` has changed the dict of its tensors."""
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = safetensors.load_file(folder / "model.safetensors")
    edit(tensors)
    safetensors.save_file(tensors, folder / "model.safetensors")


def assert_fastest_order(model, along_rows, *more):
    """Matrices lie along their longer side or, unless `along_rows`, always by columns."""
    matrices = [p for name, p in model.named_parameters() if name.endswith(".W")]
    for p in (*matrices, *more):
        rows, columns = p.shape
        by_rows = along_rows and columns > rows
        assert p.stride() == ((columns, 1) if by_rows else (1, rows)), p.shape
    shapes = [p.shape for p in (*matrices, *more)]
    assert {(rows > columns) - (rows < columns) for rows, columns in shapes} == {-1, 0, 1}


def require_triton():
    """Skips the module where there is no Triton, but not in CI."""
    if importlib.util.find_spec("triton") is None:
        if os.environ.get("CI") and sys.platform == "linux":
            pytest.fail("no triton found, but CI has to run the kernels", pytrace=False)
        pytest.skip("no triton found", allow_module_level=True)


def run_compiled(*command):
    """The lines that Python prints in a process that does not interpret, but compiles.

    It can import what is in benchmarks/.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (BENCHMARKS, ROOT)))
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def agree(attend, inputs, mask=None, atol=1e-11, **options):
    """Asserts that an attention and its gradients are those of the definitions in float64.

    It returns the output, or also the log-sum-exp, and leaves its inputs as they are. The
    gradient of a mask that wants one is compared, too.
    """
    given = inputs if mask is None or not mask.requires_grad else [*inputs, mask]
    ours, exact = leaves(given), leaves(given, torch.float64)
    own = wide = mask
    if len(given) > 3:
        own, wide = ours[3], exact[3]
    elif mask is not None and mask.is_floating_point():
        wide = mask.double()
    found = attend(*ours[:3], own, **options)
    expected = attention(*exact[:3], wide, **options)
    found = found if isinstance(found, tuple) else (found,)
    expected = expected[: len(found)]
    assert found[0].dtype == inputs[0].dtype
    close([x.double() for x in found], list(expected), atol=atol, rtol=atol)
    coming = [normal(*x.shape, seed=9) for x in found]
    own = [y.to(x.dtype) for x, y in zip(found, coming, strict=True)]
    found = torch.autograd.grad(found, ours, own, materialize_grads=True)
    expected = torch.autograd.grad(expected, exact, coming, materialize_grads=True)
    for x, y in zip(found, expected, strict=True):
        size = max(1.0, y.abs().max().item()) if y.numel() else 1.0
        close(x.double(), y, atol=atol * size, rtol=atol)
    assert all(map(torch.equal, ours, given)), "an input was written to"


class Largest(TorchDispatchMode):
    """The most numbers of any tensor that an operation has made, and not as a view."""

    numbers = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if not any(returned.alias_info for returned in operation._schema.returns):
            made = [x.numel() for x in tree_leaves(result) if torch.is_tensor(x)]
            self.numbers = max([self.numbers, *made])
        return result
