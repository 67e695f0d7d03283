"""The figures to touch of chapters 26 and 27, in a browser, against the package."""

import torch

from attnlib.quantized import dequantize, quantize
from attnlib.speculative import acceptance, residual
from touch import close, numbers

# Chapter 26: guesses that are kept and refused

WORDS = ["late", "full", "blue"]
P = torch.tensor([4.0, 3.0, 1.0], dtype=torch.float64) / 8
FAR = torch.tensor([2.0, 2.0, 4.0], dtype=torch.float64) / 8


def drawn(law, luck):
    below = torch.cumsum(law, dim=0)
    return int((luck >= below[:-1]).sum())


def assert_judged(figure, far, luck):
    """Numbers, bars, words and sentence are those of `acceptance` and `residual`."""
    read = figure.read(
        **{"offered": ".q", "kept": ".k", "left": ".l", "came": ".draws"},
        **{"both": ".c@width", "missing": ".m@width", "over": ".o@width"},
    )
    q = P + far * (FAR - P)
    alpha = acceptance(P.expand(3, 3), q.expand(3, 3), torch.arange(3))
    close(numbers(read.offered), q, 5.1e-4)
    close(numbers(read.kept), alpha, 5.1e-3)
    shared = torch.minimum(P, q)
    close(read.both, 100 * shared / 0.75, 0.01)
    close(read.missing, 100 * (P - shared) / 0.75, 0.01)
    close(read.over, 100 * (q - shared) / 0.75, 0.01)
    if far:
        close(numbers(read.left), residual(P, q), 5.1e-3)
    came = []
    for i in range(24):
        guess = drawn(q, luck[i])
        came.append(WORDS[guess])
        if luck[24 + i] >= alpha[guess]:
            came[-1] += "→" + WORDS[drawn(residual(P, q), luck[48 + i])]
    assert read.came == [", ".join(came)]
    kept = sum("→" not in word for word in came)
    if far:
        close(numbers(read.say), [shared.sum(), 24, kept], 5.1e-4)
    else:
        assert kept == 24 and "every guess is kept" in read.say
    return read


def test_a_draft_near_and_far(open_figure):
    figure = open_figure("draft_judged")
    luck = torch.tensor(figure.read().uniforms, dtype=torch.float64)
    assert_judged(figure, 1.0, luck)
    for far in (0.0, 0.05, 0.5, 1.5):
        assert_judged(figure.fill("How far the draft is from the model", far), far, luck)


# Chapter 27: a group in few bits


def assert_stored(figure, bits, top):
    """Marks, codes and what comes back are those of `quantize` and `dequantize`."""
    read = figure.read(
        **{"number": ".n", "code": ".c", "back": ".y", "off": ".d"},
        **{"dots": ".dot@cx", "marks": ".mark@d", "moves": ".moves@d"},
    )
    x = torch.tensor(read.numbers, dtype=torch.float64)
    x[x.argmax()] = top
    codes, low, step = quantize(x, bits, -1)
    back = dequantize(codes, low, step)
    close(read.number, x, 0.051)
    assert numbers(read.code) == codes.tolist()
    close(read.back, back, 5.1e-3)
    close(read.off, back - x, 5.1e-3)
    close(read.dots, 48 + 33 * x, 0.051)
    marks = low + step * torch.arange(2**bits)
    assert numbers(read.marks)[1::3] == [30] * 2**bits
    close(numbers(read.marks)[::3], 48 + 33 * marks, 0.051)
    close(numbers(read.moves)[::4], 48 + 33 * x, 0.051)
    close(numbers(read.moves)[2::4], 48 + 33 * back, 0.051)
    worst = (back - x).abs().max()
    said = [2**bits, step.item(), step.item() / 2, worst.item()]
    close(read.say, said, 5.1e-4)


def test_a_group_in_few_bits(open_figure):
    figure = open_figure("few_bits")
    assert_stored(figure, 2, 2.0)
    for bits in (1, 3, 4, 8):
        for top in (2.1, 4.7, 8.0):  # where no number lies between two marks
            assert_stored(figure.set(bits=bits, top=top), bits, top)
