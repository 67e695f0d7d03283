# Made from book/A_contract.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""The conformance suites: is the contract of an attention, cache or state kept?

Derived in appendix A, "The contract" (book/A_contract.ipynb).
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from attnlib.base import BaseAttention
from attnlib.checks import CacheLike
from attnlib.multi_head import MultiHeadAttention

Reading = Callable[..., tuple[Tensor, Tensor]]


def random_inputs(
    leading: tuple[int, ...] = (), queries: int = 4, keys: int = 6, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Query (..., N, 8), key (..., M, 8) and value (..., M, 5), float64, default device.

    Args:
        leading: the leading dimensions.
        queries: number of queries N.
        keys: number of keys M.
        seed: of the generator.

    Source: the contract, appendix A.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = ((*leading, queries, 8), (*leading, keys, 8), (*leading, keys, 5))
    drawn = (
        torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator)
        for shape in shapes
    )
    return tuple(tensor.to(torch.get_default_device()) for tensor in drawn)


def check_shapes(attention: BaseAttention, leading: tuple[int, ...]) -> None:
    """Shapes and dtype of the output; inputs unchanged; strides irrelevant."""
    inputs = random_inputs(leading)
    copies = [x.clone() for x in inputs]
    output, weights = attention(*inputs)
    assert output.shape == (*leading, 4, 5), f"output has shape {tuple(output.shape)}"
    assert output.dtype == inputs[0].dtype, f"output has dtype {output.dtype}"
    if weights is not None:
        assert weights.shape == (*leading, 4, 6), (
            f"weights have shape {tuple(weights.shape)}"
        )
    unchanged = all(torch.equal(x, copy) for x, copy in zip(inputs, copies, strict=True))
    assert unchanged, "forward wrote to its inputs"
    assert_close(attention(*inputs)[0], output, "a second call gave another output")
    strided = [x.mT.contiguous().mT for x in inputs]  # same numbers, other strides
    assert_close(attention(*strided)[0], output, "the output depends on the strides")


def check_shared(attention: BaseAttention, leading: tuple[int, ...]) -> None:
    """Heads that share keys and values, or get them as views, attend as with copies."""
    wrong = "keys and values that heads share are misread"
    for group in range(2, leading[-1] + 1) if leading else ():
        if leading[-1] % group:
            continue
        query, *both = random_inputs(leading)
        few = [x[..., : leading[-1] // group, :, :] for x in both]
        views = [x.unsqueeze(-3).expand(*x.shape[:-2], group, *x.shape[-2:]) for x in few]
        copies = [x.reshape_as(whole) for x, whole in zip(views, both, strict=True)]
        expected, _ = attention(query, *copies)
        for options in ({}, {"need_weights": False}):
            output, _ = attention(query, *few, enable_gqa=True, **options)
            assert_close(output, expected, wrong)
        if group == leading[-1]:
            output, _ = attention(
                query, *(x.expand_as(c) for x, c in zip(few, copies, strict=True))
            )
            assert_close(output, expected, wrong)


def assert_close(actual: Tensor, expected: Tensor, message: str) -> None:
    """Equal to float64 round-off, or AssertionError with `message`."""
    assert torch.allclose(actual, expected, rtol=1e-9, atol=1e-9), message


def check_weights(attention: BaseAttention, leading: tuple[int, ...]) -> None:
    """Weights are non-negative, sum to 1 and made the output, a mean of values."""
    query, key, value = random_inputs(
        leading, queries=5, keys=7
    )  # causal: all see some key
    output, weights = attention(query, key, value)
    low, high = value.amin(dim=-2, keepdim=True), value.amax(dim=-2, keepdim=True)
    inside = (output >= low - 1e-9) & (output <= high + 1e-9)
    assert inside.all(), "the output leaves the range of the values"
    if weights is not None:
        assert (weights >= 0).all(), "a weight is negative"
        sums = weights.sum(dim=-1)
        assert_close(sums, torch.ones_like(sums), "the weights of a row do not sum to 1")
        assert_close(weights @ value, output, "output is not weights @ value")
        _, training = attention.train()(query, key, value)
        assert_close(training, weights, "weights in training are not those before dropout")
        attention.eval()


def check_masks(attention: BaseAttention, leading: tuple[int, ...]) -> None:
    """True = may attend; adding 0 and -inf does the same; masks broadcast."""
    query, key, value = random_inputs(leading)
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[:, 2] = False
    output, weights = attention(query, key, value, mask)
    other_key, other_value = key.clone(), value.clone()
    other_key[..., 2, :] += 3.0
    other_value[..., 2, :] -= 3.0
    changed, _ = attention(query, other_key, other_value, mask)
    assert_close(changed, output, "a key that the mask forbids changed the output")
    if weights is not None:
        assert (weights[..., 2] == 0).all(), "a forbidden key has a weight"
    additive = torch.zeros(4, 6, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    same = attention(query, key, value, additive)[0]
    assert_close(
        same, output, "an additive mask of 0 and -inf differs from the boolean one"
    )
    same = attention(query, key, value, mask[:1])[0]
    assert_close(same, output, "a mask of shape (1, keys) does not broadcast over queries")


def check_mask_values(attention: BaseAttention, leading: tuple[int, ...]) -> None:
    """Masks multiply weights, each slice its own: by 1 or 0, or by their exponential."""
    query, key, _ = random_inputs(leading)
    value = torch.eye(6, dtype=query.dtype).expand(*leading, 6, 6)  # output = weights
    weights, _ = attention(query, key, value)
    everything = torch.ones(4, 6, dtype=torch.bool)
    one, each = (random_inputs(d, seed=1)[0][..., :6] for d in ((), leading))
    some = each > each.amin(dim=-1, keepdim=True)  # forbids each query one key
    for mask, factor, message in (
        (everything, everything, "a mask that allows every pair changed the output"),
        (one, one.exp(), "an additive mask does not multiply weights by its exponential"),
        (some, some, "a boolean mask (..., N, M) does not act pair by pair"),
        (each, each.exp(), "an additive mask (..., N, M) does not act pair by pair"),
    ):
        output, _ = attention(query, key, value, mask)
        product = weights * factor
        assert_close(output * product.sum(dim=-1, keepdim=True), product, message)


def check_alone(attention: BaseAttention, leading: tuple[int, ...]) -> None:
    """Without `need_weights` there are none, and the output is the same."""
    query, key, value = random_inputs(leading, queries=5, keys=7)
    some = torch.ones(5, 7, dtype=torch.bool).tril(-1)  # nothing for the first query
    for mask in (None, some):
        output, _ = attention(query, key, value, mask)
        alone, none = attention(query, key, value, mask, need_weights=False)
        assert_close(alone, output, "without need_weights the output differs")
        assert none is None, "without need_weights there are weights"


def check_empty_rows(attention: BaseAttention, leading: tuple[int, ...]) -> None:
    """A query that may attend to nothing gets output, weights and gradients 0."""
    inputs = [x.requires_grad_() for x in random_inputs(leading)]
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[1] = False
    additive = torch.zeros(4, 6, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    for kind, blocked in (("boolean", mask), ("additive", additive)):
        output, weights = attention(*inputs, blocked)
        what = f"a query that may attend to nothing ({kind} mask)"
        assert (output[..., 1, :] == 0).all(), f"{what}: the output is not 0"
        if weights is not None:
            assert (weights[..., 1, :] == 0).all(), f"{what}: the weights are not 0"
        gradients = torch.autograd.grad(output.sum(), inputs, materialize_grads=True)
        assert all(g.isfinite().all() for g in gradients), (
            f"{what}: a gradient is not finite"
        )
        assert (gradients[0][..., 1, :] == 0).all(), f"{what}: its gradient is not 0"
    output, _ = attention(inputs[0], inputs[1][..., :0, :], inputs[2][..., :0, :])
    assert (output == 0).all(), "with no keys at all the output is not 0"


def check_causal(attention: BaseAttention, leading: tuple[int, ...]) -> None:
    """If `attention.causal`: no query sees past its position, aligned bottom right."""
    for queries, keys in ((5, 5), (3, 6), (6, 3)) if attention.causal else ():
        query, key, value = random_inputs(leading, queries, keys)
        output, _ = attention(query, key, value)
        for i in range(queries):
            visible = max(0, i + 1 + keys - queries)  # keys that query i may see
            future_key, future_value = key.clone(), value.clone()
            future_key[..., visible:, :] += 3.0
            future_value[..., visible:, :] -= 3.0
            changed, _ = attention(query, future_key, future_value)
            where = f"query {i} of {queries} with {keys} keys"
            assert_close(changed[..., i, :], output[..., i, :], f"{where} sees the future")
            if visible:
                past_value = value.clone()
                past_value[..., visible - 1, :] += 3.0
                changed, _ = attention(query, key, past_value)
                blind = torch.allclose(changed[..., i, :], output[..., i, :])
                assert not blind, f"{where} does not see its own position: not bottom right"
            else:
                assert (output[..., i, :] == 0).all(), f"{where} sees nothing but is not 0"


def check_window(attention: BaseAttention, leading: tuple[int, ...]) -> None:
    """If `attention.window`: queries see the keys less than so many tokens away, no others.

    The queries are the last tokens; if `attention.causal`, none sees a later one. The time
    grows with the window's square: test a small one.
    """
    w = attention.window
    for queries, keys in ((w + 3, w + 3), (3, w + 4), (w + 4, 3)) if w else ():
        query, key, _ = random_inputs(leading, queries, keys)
        value = torch.eye(keys, dtype=query.dtype).expand(*leading, keys, keys)
        output, _ = attention(query, key, value)  # = weights
        for i in range(queries):
            p = i + keys - queries  # which token query i is
            last = p if attention.causal else p + w - 1
            where = f"query {i} of {queries} with {keys} keys and a window of {w}"
            for j in range(keys):
                sees = bool((output[..., i, j] != 0).any())
                wrong = f"{where} {'sees' if sees else 'does not see'} key {j}"
                assert sees == (p - w < j <= last), wrong


def check_numbers(attention: BaseAttention, leading: tuple[int, ...]) -> None:
    """Finite for large scores; gradients equal to finite differences."""
    query, key, value = random_inputs(leading)
    output, _ = attention(1e3 * query, 10 * key, value)
    assert output.isfinite().all(), "large scores overflow"
    inputs = [x.requires_grad_() for x in random_inputs(leading, queries=2, keys=3)]
    for mask, where in ((None, ""), (torch.eye(2, 3) == 0, " under a mask")):
        right = torch.autograd.gradcheck(
            lambda *x, m=mask: attention(*x, m)[0],
            inputs,
            raise_exception=False,
            fast_mode=True,  # in one random direction: a tenth of the time
        )
        assert right, f"the gradient differs from finite differences{where}"


def check_dtype(
    attention: BaseAttention, leading: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Input of a dtype makes a finite output of that dtype."""
    inputs = [x.to(dtype) for x in random_inputs(leading)]
    output, _ = attention.to(dtype)(*inputs)
    assert output.dtype == dtype, f"{dtype} in, {output.dtype} out"
    assert output.isfinite().all(), f"not finite in {dtype}"
    large, low = torch.full_like(inputs[0], 4.0), torch.full_like(inputs[1], -4.0)
    least = torch.full((4, 6), torch.finfo(dtype).min, dtype=dtype)
    for query, key, mask, what in (
        (50 * large, -50 * low, None, "scores beyond 65504"),
        (large, low, least, "a mask of the least numbers"),
    ):
        for options in ({}, {"need_weights": False}):
            output, _ = attention(query, key, inputs[2], mask, **options)
            assert output.isfinite().all(), f"not finite in {dtype}: {what}"


WAYS = ({}, {"need_weights": False})  # to call it


def check_scale(attention: BaseAttention, leading: tuple[int, ...]) -> None:
    """If it has a `scale`: one below 0 turns the scores around; a tensor has a gradient."""
    if not hasattr(attention, "scale"):
        return
    query, key, value = random_inputs(leading)
    for options in WAYS:
        attention.scale = 0.5
        expected, _ = attention(-query, key, value, **options)
        attention.scale = -0.5
        output, _ = attention(query, key, value, **options)
        assert_close(output, expected, "a scale below 0 gives another output")
        attention.scale = torch.tensor(-0.5, dtype=query.dtype, requires_grad=True)
        output, _ = attention(query, key, value, **options)
        assert_close(output, expected, "a tensor as scale gives another output")
        assert output.requires_grad, "a tensor as scale gets no gradient"


def check_nothing(attention: BaseAttention, leading: tuple[int, ...]) -> None:
    """No queries, or an empty batch, give an empty output."""
    query, key, value = random_inputs(leading)
    for options in WAYS:
        output, _ = attention(query[..., :0, :], key, value, **options)
        assert output.shape == (*leading, 0, 5), "no queries: a wrong shape"
        if len(leading) > 1:
            output, _ = attention(query[:0], key[:0], value[:0], **options)
            assert output.shape == (0, *leading[1:], 4, 5), "an empty batch: a wrong shape"


def check_transforms(attention: BaseAttention, leading: tuple[int, ...]) -> None:
    """Where `torch.vmap` can take it, output and gradient are those of a loop."""
    batch = random_inputs((3, *leading))
    mask = torch.ones(4, 6, dtype=torch.bool).tril(1)
    one = [x[2].requires_grad_() for x in batch]
    for options in WAYS:

        def call(*inputs: Tensor, options: dict = options) -> Tensor:
            return attention(*inputs, mask, **options)[0]

        try:
            many = [x.detach().requires_grad_() for x in batch]
            output = torch.vmap(call)(*many)
        except RuntimeError:  # PyTorch says that there is no rule for a batch
            return
        assert_close(output[2], call(*one), "under torch.vmap the output differs")
        try:
            gradients = torch.autograd.grad(output.square().sum(), many)
        except RuntimeError as error:
            raise AssertionError("under torch.vmap there is no gradient") from error
        expected = torch.autograd.grad(call(*one).square().sum(), one)
        for got, wanted in zip(gradients, expected, strict=True):
            assert_close(got[2], wanted, "under torch.vmap the gradient differs")


def check_hooks(attention: BaseAttention, leading: tuple[int, ...]) -> None:
    """A layer calls it as a module, with weights and without, so that hooks see it."""
    if len(leading) != 2:
        return
    layer = MultiHeadAttention(8 * leading[1], leading[1], attention, num_kv_heads=1)
    x = random_inputs(leading[:1])[0].repeat(1, 1, leading[1])
    calls: list[nn.Module] = []
    handle = attention.register_forward_hook(lambda module, *_: calls.append(module))
    for options in WAYS:
        layer.double()(x, **options)
    handle.remove()
    assert calls == [attention] * 2, "a layer calls it, and its hooks do not see it"


def check_refusals(attention: BaseAttention, leading: tuple[int, ...]) -> None:
    """Bad input raises an error whose message begins with the argument's name."""
    query, key, value = random_inputs(leading)
    mask = torch.ones(4, 6, dtype=torch.bool)
    cases = [
        (TypeError, "query", (query.long(), key, value)),
        (TypeError, "key", (query, key.float(), value)),
        (TypeError, "value", (query, key, value.float())),
        (ValueError, "query", (query.flatten()[:8], key, value)),
        (ValueError, "key", (query, key[..., :7], value)),
        (ValueError, "key", (query, key[None], value)),
        (ValueError, "value", (query, key, value[..., :5, :])),
        (TypeError, "mask", (query, key, value, mask.long())),
        (TypeError, "mask", (query, key, value, mask.float())),
        (ValueError, "mask", (query, key, value, mask[:, :5])),
    ]
    for expected, name, arguments in cases:
        try:
            attention(*arguments)
        except expected as error:
            message = str(error)
            assert message.startswith(name), f"the error does not name {name}: {message}"
        except Exception as error:
            kind = f"{type(error).__name__}; expected {expected.__name__}"
            raise AssertionError(f"a bad {name} raised {kind}") from error
        else:
            raise AssertionError(f"a bad {name} was accepted; expected {expected.__name__}")


def check_attention(
    factory: Callable[[], BaseAttention],
    leading: Iterable[tuple[int, ...]] = ((), (3,), (2, 2)),
    dtypes: Iterable[torch.dtype] = (torch.float32, torch.float16, torch.bfloat16),
) -> None:
    """Puts an attention through the whole contract of `BaseAttention`.

    Args:
        factory: called without arguments, makes the attention to test: a class, or
            `lambda: MyAttention(...)`.
        leading: the leading dimensions to try; an attention made for 4 heads, say, is
            tested with `leading=[(2, 4)]`.
        dtypes: what to try besides float64, in which all else is tested.

    Raises:
        AssertionError: names the clause that is broken.

    Source: the contract, appendix A.
    """
    clauses = (
        check_shapes,
        check_shared,
        check_weights,
        check_masks,
        check_mask_values,
        check_empty_rows,
        check_alone,
        check_causal,
        check_window,
        check_numbers,
        check_scale,
        check_nothing,
        check_transforms,
        check_hooks,
        *(partial(check_dtype, dtype=dtype) for dtype in dtypes),
        check_refusals,
    )
    attention = factory()
    assert isinstance(attention, BaseAttention), "the factory does not make a BaseAttention"
    for dimensions in leading:
        for clause in clauses:
            clause(factory().double().eval(), dimensions)


def random_pieces(
    leading: tuple[int, ...], sizes: tuple[int, ...], seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Keys (..., size, 8) and values (..., size, 5) in float64, for pieces of these sizes.

    Source: the contract, appendix A.
    """
    _, key, value = random_inputs(leading, keys=sum(sizes), seed=seed)
    pieces = zip(key.split(sizes, dim=-2), value.split(sizes, dim=-2), strict=True)
    return [(k.clone(), v.clone()) for k, v in pieces]


def assert_holds(
    cache: CacheLike,
    returned: tuple[Tensor, Tensor],
    pieces: list[tuple[Tensor, Tensor]],
    when: str,
) -> None:
    """What was returned is these pieces, to the bit, and `len` counts them.

    Source: the contract, appendix A.
    """
    for name, found, parts in zip(
        ("keys", "values"), returned, zip(*pieces, strict=True), strict=True
    ):
        expected = torch.cat(parts, dim=-2)
        shapes = f"{tuple(found.shape)}, not {tuple(expected.shape)}"
        assert found.shape == expected.shape, f"{when}, the {name} have shape {shapes}"
        assert found.dtype == expected.dtype, f"{when}, the {name} have dtype {found.dtype}"
        assert torch.equal(found, expected), f"{when}, the {name} are not what was appended"
    tokens = sum(key.shape[-2] for key, _ in pieces)
    assert len(cache) == tokens, f"{when}, len is {len(cache)}, not {tokens}"


def check_order(
    factory: Callable[[int], CacheLike],
    leading: tuple[int, ...],
    dtype: torch.dtype = torch.float64,
) -> None:
    """All pieces come back, in order, in their dtype, up to the capacity itself."""
    pieces = [
        (k.to(dtype), v.to(dtype)) for k, v in random_pieces(leading, (4, 1, 0, 2, 1))
    ]
    copies = [(k.clone(), v.clone()) for k, v in pieces]
    cache, other = factory(8), factory(8)
    assert len(cache) == 0, f"a new cache has len {len(cache)}"
    assert cache.capacity == 8, f"capacity is {cache.capacity}, not 8"
    returned = []
    for number, piece in enumerate(pieces):
        returned.append(cache.append(*piece))
        assert_holds(cache, returned[-1], copies[: number + 1], f"after piece {number}")
        for x, copy in zip(piece, copies[number], strict=True):
            assert torch.equal(x, copy), "append wrote to its inputs"
    last = tuple(x[..., :0, :].clone() for x in pieces[0])
    for x in (x for piece in pieces for x in piece):
        x.fill_(7.0)  # what the caller does with its own is not the cache's business
    when = "after the inputs were changed from outside"
    assert_holds(cache, cache.append(*last), copies, when)
    for number, (keys, values) in enumerate(returned):
        when = f"after later appends, what append {number} returned"
        expected = [torch.cat(x, dim=-2) for x in zip(*copies[: number + 1], strict=True)]
        same = torch.equal(keys, expected[0]) and torch.equal(values, expected[1])
        assert same, f"{when} has changed"
    assert len(other) == 0, "a cache shares what it holds with another one"


def check_truncate(factory: Callable[[int], CacheLike], leading: tuple[int, ...]) -> None:
    """Truncated, a cache goes on as if the rest had never been there; at 0, as if new."""
    first, second, third = random_pieces(leading, (3, 3, 2))
    cache = factory(6)
    cache.append(*first)
    cache.append(*second)
    cache.truncate(6)
    assert len(cache) == 6, "truncate to the length that it has changed it"
    cache.truncate(4)
    assert len(cache) == 4, f"after truncate(4), len is {len(cache)}"
    kept = tuple(x[..., :1, :] for x in second)
    returned = cache.append(*third)
    assert_holds(cache, returned, [first, kept, third], "after truncate and append")
    for length in (7, -1):
        refused(lambda n=length: cache.truncate(n), ValueError, "length", f"{length}")
    assert len(cache) == 6, "a truncate that was refused changed the length"
    cache.truncate(0)
    assert len(cache) == 0, "after truncate(0), something is left"
    wider = random_pieces((*leading, 2), (6,), seed=1)
    assert_holds(cache, cache.append(*wider[0]), wider, "after truncate(0)")


def refused(
    call: Callable[[], object], expected: type[Exception], name: str, what: str
) -> None:
    """The call raises this error, and its message begins with the argument's name.

    Source: the contract, appendix A.
    """
    try:
        call()
    except expected as error:
        message = str(error)
        assert message.startswith(name), f"the error does not name {name}: {message}"
    except Exception as error:
        kind = f"{type(error).__name__}; expected {expected.__name__}"
        raise AssertionError(f"{name}, {what}: raised {kind}") from error
    else:
        raise AssertionError(f"{name}, {what}: accepted; expected {expected.__name__}")


def check_cache_refusals(
    factory: Callable[[int], CacheLike], leading: tuple[int, ...]
) -> None:
    """Bad input, and a token too many, are refused by name, and leave the cache alone."""
    for capacity, expected in (
        (0, ValueError),
        (-1, ValueError),
        (2.5, TypeError),
        (True, TypeError),
    ):
        refused(lambda c=capacity: factory(c), expected, "capacity", f"{capacity}")
    (key, value), one = random_pieces(leading, (3, 1))
    k, v = one
    cases = {
        "one token too many": (ValueError, "key", random_pieces(leading, (2,))[0]),
        "another batch": (ValueError, "key", (k[None], v[None])),
        "keys of another width": (ValueError, "key", (k[..., :7], v)),
        "values of another width": (ValueError, "value", (k, v[..., :4])),
        "more values than keys": (ValueError, "value", (k, value)),
        "keys of another dtype": (TypeError, "key", (k.float(), v.float())),
        "values of another dtype": (TypeError, "value", (k, v.float())),
        "integers": (TypeError, "key", (k.long(), v)),
        "another device": (ValueError, "key", (k.to("meta"), v.to("meta"))),
    }
    if leading:
        half = tuple(x[:1].repeat(leading[0] + 1, *[1] * (x.dim() - 1)) for x in one)
        cases["a sequence more"] = (ValueError, "key", half)
    if len(leading) > 1:
        cases["another number of heads"] = (ValueError, "key", (k[:, :1], v[:, :1]))
    cache = factory(4)
    cache.append(key, value)
    for what, (expected, name, arguments) in cases.items():
        refused(lambda a=arguments: cache.append(*a), expected, name, what)
        assert len(cache) == 3, f"{what}: refused, but the length has changed"
    returned = cache.append(*one)
    assert_holds(cache, returned, [(key, value), one], "after refusals")
    refused(lambda: cache.append(*one), ValueError, "key", "a full cache")
    leaf = k.clone().requires_grad_()
    new = factory(4)
    refused(lambda: new.append(leaf, v), ValueError, "key", "a gradient that would be lost")


def check_window_kept(
    factory: Callable[[int], CacheLike],
    window: int,
    leading: tuple[int, ...],
    dtype: torch.dtype = torch.float64,
) -> None:
    """Each append returns what its new tokens see: the last window - 1 old ones, and they.

    Source: the contract, appendix A; chapter 18.
    """
    sizes = (1, window, 1, 1, 0, 2, window + 2, 1, 2 * window + 1, 1, 1)
    pieces = [(k.to(dtype), v.to(dtype)) for k, v in random_pieces(leading, sizes)]
    whole = [torch.cat(x, dim=-2) for x in zip(*pieces, strict=True)]
    cache, seen, returned = factory(sum(sizes)), 0, []
    for number, piece in enumerate(pieces):
        when = f"with a window of {window}, append {number}"
        start = max(0, seen - window + min(1, sizes[number]))
        seen += sizes[number]
        returned.append((*cache.append(*piece), start, seen))
        assert len(cache) == seen, (
            f"{when}: len is {len(cache)}, not the {seen} tokens read"
        )
        for name, found, all_of_them in zip(
            ("keys", "values"), returned[-1][:2], whole, strict=True
        ):
            expected = all_of_them[..., start:seen, :]
            shapes = f"{tuple(found.shape)}, not {tuple(expected.shape)}"
            assert found.shape == expected.shape, f"{when}: {name} of shape {shapes}"
            assert torch.equal(found, expected), f"{when}: other {name} than the last ones"
    for number, (keys, values, start, end) in enumerate(returned):
        kept = torch.equal(keys, whole[0][..., start:end, :])
        kept &= torch.equal(values, whole[1][..., start:end, :])
        assert kept, f"after later appends, what append {number} returned has changed"
    token = tuple(x[..., :1, :] for x in pieces[0])
    refused(lambda: cache.append(*token), ValueError, "key", "a full cache")
    refused(lambda: cache.truncate(seen - 2), ValueError, "length", "what it has forgotten")
    last = tuple(x[..., -1:, :] for x in whole)
    cache.truncate(seen - 1)
    keys, _ = cache.append(*last)
    expected = whole[0][..., seen - window : seen, :]
    assert torch.equal(keys, expected), "after one token was taken back, keys differ"
    cache.truncate(seen - 1)
    refused(
        lambda: cache.truncate(seen - 2), ValueError, "length", "one more is taken back"
    )
    cache.truncate(0)
    keys, _ = cache.append(*token)
    assert torch.equal(keys, token[0]), "after truncate(0), something is left"


def check_cache(
    factory: Callable[[int], CacheLike],
    leading: Iterable[tuple[int, ...]] = ((), (3,), (2, 4)),
    dtypes: Iterable[torch.dtype] = (torch.float32, torch.float16, torch.bfloat16),
    window: int | None = None,
) -> None:
    """Puts a cache through what attention relies on; see `KVCache`.

    Args:
        factory: called with a capacity, makes the cache to test: a class, or
            `lambda capacity: MyCache(capacity, ...)`.
        leading: the leading dimensions to try, usually (batch, heads).
        dtypes: what to try besides float64.
        window: how many tokens the cache keeps, for one that forgets the others, and what
            it keeps is then tried instead; `None` for one that keeps all.

    Raises:
        AssertionError: names what is broken.

    Source: the contract, appendix A; chapters 17 and 18.
    """
    assert isinstance(factory(1), CacheLike), "the factory does not make a CacheLike"
    for dimensions in leading:
        for dtype in (torch.float64, *dtypes):
            if window is None:
                check_order(factory, dimensions, dtype)
            else:
                check_window_kept(factory, window, dimensions, dtype)
        if window is None:
            check_truncate(factory, dimensions)
            check_cache_refusals(factory, dimensions)


def random_tokens(
    leading: tuple[int, ...], steps: Iterable[str] = (), seed: int = 0
) -> dict[str, Tensor]:
    """Seven tokens in float64: what `linear_attention` takes, and steps of 0 to 1.

    Source: the contract, appendix A.
    """
    query, key, value = random_inputs(leading, 7, 7, seed)
    key = key / key.norm(dim=-1, keepdim=True)  # so that nothing grows without end
    decays, _, others = random_inputs(leading, 7, 7, seed + 1)
    tokens = {"query": query, "key": key, "value": value}
    tokens["log_decay"] = -decays[..., 0].abs()
    return tokens | {name: others[..., i].sigmoid() for i, name in enumerate(steps)}


def part_of(tokens: dict[str, Tensor], start: int, end: int) -> dict[str, Tensor]:
    """The tokens from start to end.

    Source: the contract, appendix A.
    """
    counted = tokens["log_decay"].dim() - 1
    return {name: x.narrow(counted, start, end - start) for name, x in tokens.items()}


def assert_same_reading(
    found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], when: str
) -> None:
    """Outputs and state are equal to round-off.

    Source: the contract, appendix A.
    """
    for name, x, y in zip(("outputs", "state"), found, expected, strict=True):
        assert x.shape == y.shape, f"{when}: {name} of shape {tuple(x.shape)}"
        assert_close(x, y, f"{when}: {name} differ")


def check_cuts(read: Reading, tokens: dict[str, Tensor]) -> None:
    """However a text is cut, outputs and state are the same; nothing given is changed."""
    whole = read(**tokens, piece=7)
    for piece in (1, 2, 3, 64):
        assert_same_reading(read(**tokens, piece=piece), whole, f"in pieces of {piece}")
    nothing = torch.zeros_like(whole[1])
    assert_same_reading(read(**tokens, state=nothing), whole, "with a state of zeros")
    for cut in range(8):
        first, second = part_of(tokens, 0, cut), part_of(tokens, cut, 7)
        before, state = read(**first)
        given = {name: x.clone() for name, x in {**second, "state": state}.items()}
        after, end = read(**second, state=state)
        found = torch.cat((before, after), dim=-2), end
        assert_same_reading(found, whole, f"in two calls, cut after {cut}")
        for name, x in {**second, "state": state}.items():
            assert torch.equal(x, given[name]), f"{name} was written to"


def check_later(read: Reading, tokens: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Each token sees itself, and none that is later."""
    output, _ = read(**tokens)
    for i in range(7):
        counted = tokens["log_decay"].dim() - 1
        kept, others = part_of(tokens, 0, i + 1), part_of(other, i + 1, 7)
        changed = {name: torch.cat((x, others[name]), counted) for name, x in kept.items()}
        found = read(**changed)[0][..., : i + 1, :]
        assert_close(found, output[..., : i + 1, :], f"token {i} or one before sees later")
        value = tokens["value"].clone()
        value[..., i, :] += 3.0
        found = read(**tokens | {"value": value})[0][..., i, :]
        blind = torch.allclose(found, output[..., i, :])
        assert not blind, f"token {i} does not see itself"


def check_new_text(read: Reading, tokens: dict[str, Tensor]) -> None:
    """A log decay of -inf begins anew; without decays nothing fades."""
    for start in range(7):
        decays = tokens["log_decay"].clone()
        decays[..., start] = -torch.inf
        output, state = read(**tokens | {"log_decay": decays})
        alone = read(**part_of(tokens, start, 7))
        found = output[..., start:, :], state
        assert_same_reading(found, alone, f"token {start} has a log decay of -inf")
    still = read(**tokens | {"log_decay": torch.zeros_like(tokens["log_decay"])})
    assert_same_reading(read(**tokens | {"log_decay": None}), still, "without decays")


def check_state_numbers(
    read: Reading, tokens: dict[str, Tensor], dtypes: Iterable[torch.dtype]
) -> None:
    """Gradients equal finite differences; a state is kept in float32 at least."""
    state = read(**tokens)[1].detach()
    inputs = {**tokens, "state": state}
    right = torch.autograd.gradcheck(
        lambda *x: read(**dict(zip(inputs, x, strict=True)), piece=3),
        [x.clone().requires_grad_() for x in inputs.values()],
        raise_exception=False,
        fast_mode=True,  # in one random direction: a tenth of the time
    )
    assert right, "the gradient differs from finite differences"
    for dtype in dtypes:
        short = {name: x.to(dtype) for name, x in tokens.items()}
        exact = read(**{name: x.double() for name, x in short.items()})
        wide = torch.promote_types(dtype, torch.float32)
        for name, x, y, kind in zip(
            ("outputs", "state"), read(**short), exact, (dtype, wide), strict=True
        ):
            assert x.dtype == kind, f"of {dtype}, {name} have {x.dtype}, not {kind}"
            near = 16 * torch.finfo(kind).eps
            close = torch.allclose(x.double(), y, rtol=near, atol=near)
            assert close, f"of {dtype}, {name} are further from float64 than rounding"


def check_state_refusals(read: Reading, tokens: dict[str, Tensor]) -> None:
    """What would be broadcast, transposed or rounded is refused by name."""
    state = read(**tokens)[1]
    cases = [
        ("state", state.mT, ValueError),
        ("state", state[..., :1], ValueError),
        ("state", state[None], ValueError),
        ("state", state.long(), TypeError),
        ("piece", 0, ValueError),
        ("piece", 2.5, TypeError),
        ("piece", True, TypeError),
    ]
    one = part_of(tokens, 0, 1)  # token, where there are seven keys
    cases += [(name, one[name], ValueError) for name in list(one)[2:]]
    for name, given, expected in cases:
        what = tuple(given.shape) if isinstance(given, Tensor) else given
        refused(lambda x={**tokens, name: given}: read(**x), expected, name, f"{what}")


def check_state(
    read: Reading,
    steps: Iterable[str] = (),
    leading: Iterable[tuple[int, ...]] = ((), (3,), (2, 4)),
    dtypes: Iterable[torch.dtype] = (torch.float32, torch.float16, torch.bfloat16),
) -> None:
    """Puts a function that reads tokens into a state through what a model relies on.

    Args:
        read: takes `query`, `key`, `value`, `log_decay`, `state` and `piece` by name and
            returns outputs and state, as `linear_attention` does.
        steps: names of what else it takes, a number of 0 to 1 for each token, as `beta`
            of `delta_rule`.
        leading: the leading dimensions to try, usually (batch, heads).
        dtypes: what to try besides float64.

    Raises:
        AssertionError: names what is broken.

    Source: the contract, appendix A; chapters 29 and 30.
    """
    for dimensions in leading:
        tokens, other = (random_tokens(dimensions, steps, seed) for seed in (0, 2))
        check_cuts(read, tokens)
        check_later(read, tokens, other)
        check_new_text(read, tokens)
        check_state_numbers(read, tokens, dtypes)
        check_state_refusals(read, tokens)
