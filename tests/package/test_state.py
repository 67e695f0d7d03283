"""The contract of a state: who keeps it, and mistakes that `check_state` notices."""

import inspect
import re

import pytest
import torch

from attnlib import linear
from attnlib.delta import delta_rule, delta_rule_by_feature
from attnlib.testing import check_state


def by_feature(log_decay=None, **tokens):
    """A decay of each feature: powers of two of that of the token, exact in any dtype."""
    key = tokens["key"]
    each = torch.zeros_like(key)
    if log_decay is not None:
        each = log_decay[..., None] * 2.0 ** torch.arange(-5, 3).to(key.dtype)
    return delta_rule_by_feature(log_decay=each, **tokens)


@pytest.mark.parametrize(
    ("read", "steps"),
    [(linear.linear_attention, ()), (delta_rule, ["beta"]), (by_feature, ["beta"])],
)
def test_the_contract_is_kept(read, steps, as_shipped):
    check_state(read, steps)


PARTS = linear.what_is_left, linear.read_piece, linear.linear_attention
SOURCE = "\n".join(inspect.getsource(part) for part in PARTS)
FLAWS = [
    ("before[..., -1:, :] * state", "state", "in pieces of 1: outputs differ"),
    ("(at_the_end * key)", "key", "in pieces of 1: state differ"),
    ("before * (query @ state)", "query @ state", "in pieces of 1: outputs differ"),
    ("state.to(wide)", "0 * state.to(wide)", "in two calls, cut after 1: outputs differ"),
    ("state.to(wide)", "state.to(wide).mul_(2).div_(2.5)", "in two calls"),
    ("state.to(wide)", "state.to(wide).detach()", "the gradient differs"),
    (".exp().tril()", ".exp().tril(-1)", "in pieces of 1: outputs differ"),
    (".exp().tril()", ".exp()", "in pieces of 1: outputs differ"),
    (".tril(-1)  #", "  #", "in pieces of 1: outputs differ"),
    (
        "wide = torch.promote_types(value.dtype, torch.float32)",
        "wide = value.dtype",
        "of torch.float16, state have torch.float16",
    ),
    ('require_count("piece", piece)', "piece = piece or 64", "piece, 0: accepted"),
    ("refuse_bad_features(", "print(", "state, "),
]


@pytest.mark.parametrize(("right", "wrong", "said"), FLAWS)
def test_a_flaw_is_noticed(right, wrong, said, as_shipped):
    assert SOURCE.count(right) == 1
    room = dict(vars(linear))
    exec(SOURCE.replace(right, wrong), room)
    with pytest.raises(AssertionError, match=re.escape(said)):
        check_state(room["linear_attention"])
