"""The figures to touch of chapters 10 to 12, against the package and PyTorch."""

import numpy as np
import pytest
import torch

from attnlib.backprop import LayerNorm, ScaledDotProductAttention
from touch import close, numbers, points, tensor

# Chapter 10: attention as a graph, backward


@pytest.mark.parametrize("d_output", [[1, 0], [0, 1], [1, 1]])
def test_each_loss_has_the_gradients_of_the_package(open_figure, d_output):
    figure = open_figure("backward_graph")
    figure.root.locator(f"[value='{str(d_output).replace(' ', '')}']").check()
    read = figure.read(cells="tbody td@innerText")
    q, k, v, dO = (
        np.array(rows, float) for rows in ([read.query], read.keys, read.values, [d_output])
    )
    layer = ScaledDotProductAttention()
    _, P = layer.forward(q, k, v)
    dQ, dK, dV = layer.backward(dO)
    dP = dO @ v.T
    dS = P * (dP - (dP * P).sum())
    gradients = {"dO": dO, "dV": dV, "dP": dP, "dS": dS, "dQK": dS / np.sqrt(q.size)}
    gradients |= {"dQ": dQ, "dK": dK}
    for name, cell in zip(gradients, read.cells, strict=True):
        close(read.gradients[name], gradients[name], 1e-12)
        close(cell, gradients[name], 6e-4)


def test_steps_reveal_one_gradient_after_the_other(open_figure):
    figure = open_figure("backward_graph")
    figure.press("start over")
    for step in range(7):
        read = figure.read(seen="tbody td@visible", now=".back.now")
        assert read.seen == [k <= step for k in range(7)] and len(read.now) == 1
        figure.root.get_by_role("button", name="next step").press("Enter")


# Chapter 11: what two of three paths take from a gradient


def assert_paths(figure, g):
    """Numbers, bars and words are those of the package's layer norm, with ε = 0."""
    read = figure.read(cells="tbody td", bars="rect@y,height")
    norm, x, g = LayerNorm(3, eps=0.0), np.array(read.token, float), np.array(g)
    x_hat, dx = norm.forward(x), norm.backward(g)
    left, mean = x.std() * dx, np.full(3, g.mean())
    along = g - mean - left
    close(np.cross(along, x_hat), np.zeros(3), 1e-8)
    close(np.cross(dx, [1, 1, -2]), np.zeros(3), 1e-8)  # the caption
    rows = np.array([g, -mean, -along, left, dx])
    close(read.cells, np.column_stack([rows, rows.sum(axis=1), rows @ x_hat]), 0.0051)
    assert read.cells[18:20] == read.cells[23:25] == ["0.00", "0.00"]
    ground = np.array([[48.0], [140], [232], [340]])
    tops, heights = ground - 20 * np.maximum(rows[:4], 0), 20 * abs(rows[:4])
    close(read.bars, np.stack([tops, heights], axis=-1), 0.06)
    one, hat = read.cells[3:5]
    said = f"Along (1, 1, 1): {one} comes, 0.00 is left. "
    said += f"Along x\u0302: {hat} comes, 0.00 is left."
    assert read.say == said + " Nothing else comes: dx is 0." * np.allclose(dx, 0)
    return read.cells[15:]


def test_paths_leave_what_the_package_says(open_figure):
    figure, first = open_figure("three_paths"), np.array([1.0, 0, 0])
    x_hat = np.sqrt(3 / 2) * np.array([-1.0, 1, 0])
    (caption,) = figure.read(caption="figcaption").caption
    assert "(\u22121.22, 1.22, 0.00), s = 1.63" in caption
    left = assert_paths(figure, first)
    for name, g in (  # neither changes what is left
        ("add 1 to all", first + 1),
        ("add 1 to all", first + 1),  # beyond the sliders: refused
        ("take 1 from all", first),
        ("add x\u0302", first + x_hat),
        ("take x\u0302", first),
    ):
        assert assert_paths(figure.press(name), g) == left
    for g in ([1.5, -0.5, 0.5], [-2.3, 2.3, -2.3]):  # at first (1, 1, 1) / 2 and x̂ only
        for k in range(3):
            figure.fill(f"g {k + 1}", g[k])
        assert_paths(figure, g)
    assert_paths(figure.keys("ArrowLeft", at="g 2"), [-2.3, 2.2, -2.3])
    assert assert_paths(figure.press("reset"), first) == left


# Chapter 12: two optimizers walking


def walk(curvatures, start, make, **options):
    """The start and forty places, by PyTorch's optimizer."""
    theta, places = tensor(start).requires_grad_(), [start]
    optimizer = make([theta], **options)
    for _ in range(40):
        theta.grad = tensor(curvatures) * theta.detach()
        optimizer.step()
        places.append(theta.tolist())
    return np.array(places)


def assert_walk(figure, eta, mu, rate, steps):
    read = figure.read(
        w_one=".w.one@d", w_two=".w.two@d", c_one=".c.one@d", c_two=".c.two@d"
    )
    valley = read.curvatures, read.start
    one = walk(*valley, torch.optim.SGD, lr=eta, momentum=mu)
    two = walk(*valley, torch.optim.Adam, lr=rate)
    assert np.allclose(read.sgd, one, rtol=1e-9, atol=1e-12)
    assert np.allclose(read.adam, two, rtol=1e-9, atol=1e-12)
    for path, drawn, curve, name in (
        (one, read.w_one, read.c_one, "SGD is"),
        (two, read.w_two, read.c_two, "Adam"),
    ):
        path = path[: steps + 1]
        far = np.linalg.norm(path, axis=1)
        place = np.clip(path * [44, -44] + [200, 120], -2000, 2000)
        close(points(drawn), place, 0.06)
        height = np.clip(38 - 30 * np.log10(far + 1e-12), -50, 300)
        close(points(curve)[:, 1], height, 0.06)
        told = read.say.partition(f"{name} ")[2]
        if steps and far[-1] >= 0.005:
            close(numbers(told)[:1], far[-1:], 0.0051)
        elif steps:
            assert told.startswith("less than ")
    assert ("flies off" in read.say) == (15 * eta > 2 * (1 + mu))


def test_walkers_walk_like_pytorch_s(open_figure):
    figure = open_figure("optimizers")
    assert_walk(figure, 0.13, 0.0, 0.3, 40)
    assert_walk(figure.press("momentum at its best"), 0.19, 0.48, 0.3, 40)
    figure.fill("learning rate of SGD", 0.25).fill("learning rate of Adam", 0.8)
    assert_walk(figure, 0.25, 0.48, 0.8, 40)  # beyond the edge
    assert_walk(figure.fill("momentum of SGD", 0.9), 0.25, 0.9, 0.8, 40)
    for button, steps in (("start over", 0), ("step", 1), ("step", 2)):
        assert_walk(figure.press(button), 0.25, 0.9, 0.8, steps)
    assert_walk(figure.keys("ArrowRight", at="steps"), 0.25, 0.9, 0.8, 3)
    assert_walk(figure.press("reset"), 0.13, 0.0, 0.3, 40)
