"""The figures to touch of chapters 8, 11 and 12, in a real browser, against the package."""

import json
import re

import numpy as np
import pytest
import torch

from attnlib import FeedForwardNetwork
from attnlib.backprop import SGD, Adam, Layer, LayerNorm

KINKS, PATHS, WALKERS = "#kinks", "#three-paths", "#two-walkers"


def number(text):
    return float(text.replace("\u2212", "-"))


def points(page, selector):
    """The corners of a path, in the units of the drawing."""
    found = re.findall(r"-?[\d.]+", page.locator(selector).first.get_attribute("d"))
    return np.array(found, float).reshape(-1, 2)


# Chapter 8: kinks


def network_of(page):
    """The package's network with the numbers that the figure keeps."""
    kept = json.loads(page.locator(KINKS).first.get_attribute("data-network"))
    w, kink, v = (torch.tensor(kept[name]).double() for name in ("w", "kink", "v"))
    network = FeedForwardNetwork(1, d_ff=3).double()
    with torch.no_grad():
        network.linear_1.W.copy_(w[None])
        network.linear_1.b.copy_(-w * kink)
        network.linear_2.W.copy_(v[:, None])
        network.linear_2.b.zero_()
    return network, w, kink, v


def assert_kinks(page):
    network, w, kink, v = network_of(page)

    def y(x):
        with torch.no_grad():
            return network(torch.as_tensor(x).double()[:, None])[:, 0]

    corners = points(page, f"{KINKS} .chain")
    x = (corners[:, 0] - 120) / 60
    assert np.allclose((150 - corners[:, 1]) / 50, y(x), atol=2e-3)
    bent = sorted({float(k) for k, a, b in zip(kink, w, v, strict=True) if a * b != 0})
    assert np.allclose(x, [-2, *bent, 4], atol=2e-3)
    for k in range(3):
        at = page.locator(f"{KINKS} .h{k + 1}").get_attribute("transform")
        place = [float(n) for n in re.findall(r"-?[\d.]+", at)]
        height = float(150 - 50 * y(kink[k : k + 1])[0])
        want = [120 + 60 * kink[k], min(286, max(14, height))]  # in view
        assert np.allclose(place, want, atol=0.06)
    cells = page.locator(f"{KINKS} tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].slice(1).map(c => c.textContent))"
    )
    for k, (w_k, v_k, at, change) in enumerate(cells):
        assert (number(w_k), number(v_k)) == pytest.approx((float(w[k]), float(v[k])))
        assert at == "none" if w[k] == 0 else number(at) == pytest.approx(float(kink[k]))
        assert number(change) == pytest.approx(float(abs(w[k]) * v[k]), abs=0.006)
    said = page.locator(f"{KINKS} .say").inner_text()
    slopes = [number(s) for s in re.findall(r"[\u2212\d.]*\d\.\d+", said)]
    ends = torch.tensor([-2, *bent, 4]).double()
    assert np.allclose(slopes, (y(ends).diff() / ends.diff()).numpy(), atol=0.0051)
    met = int(np.isclose(y([0.0, 1.0, 2.0]), [0, 1, 0]).sum())
    assert ("All three rings are met." if met == 3 else f"{met} of 3 rings") in said


def test_kinks_are_those_of_the_network(open_page):
    page = open_page("kinks")
    assert_kinks(page)
    page.locator(f"{KINKS} .h2").focus()
    for key in ("ArrowRight", "ArrowUp", "ArrowLeft", "ArrowRight"):
        page.keyboard.press(key)
        assert_kinks(page)
    assert network_of(page)[2].tolist() == [0, 1.5, 2]
    for name, value in (("v 3", "1.5"), ("w 3", "-2"), ("w 1", "0"), ("v 2", "0.75")):
        page.get_by_label(name).fill(value)
        assert_kinks(page)
    handle = page.locator(f"{KINKS} .h1 .ring").bounding_box()
    page.mouse.move(handle["x"] + handle["width"] / 2, handle["y"] + handle["height"] / 2)
    page.mouse.down()
    page.mouse.move(0, 0)
    page.mouse.up()
    assert network_of(page)[2][0] == -1.75
    assert_kinks(page)
    page.get_by_role("button", name="reset").click()
    assert network_of(page)[2].tolist() == [0, 1, 2]
    assert_kinks(page)


def test_kinks_for_those_who_cannot_see_them(open_page):
    page = open_page("kinks")
    for k in (1, 2, 3):
        handle = page.get_by_role("slider", name=f"kink {k}")
        assert handle.get_attribute("tabindex") == "0"
        assert handle.get_attribute("aria-valuetext").startswith("kink at ")
    assert page.locator(f"{KINKS} [aria-live=polite]").count() == 1


# Chapter 11: what two of three paths take from a gradient


def assert_paths(page, g):
    """Numbers, bars and words are those of the package's layer norm, with ε = 0."""
    figure, g, norm = page.locator(PATHS).first, np.array(g), LayerNorm(3, eps=0.0)
    x = np.array(json.loads(figure.get_attribute("data-token")), float)
    x_hat, dx = norm.forward(x), norm.backward(g)
    left, mean = x.std() * dx, np.full(3, g.mean())
    along = g - mean - left
    assert np.allclose(np.cross(along, x_hat), 0)
    assert np.allclose(np.cross(dx, [1, 1, -2]), 0)  # the caption
    rows = np.array([g, -mean, -along, left, dx])
    table = np.column_stack([rows, rows.sum(axis=1), rows @ x_hat])
    cells = figure.locator("tbody td").all_inner_texts()
    assert np.allclose([number(cell) for cell in cells], table.ravel(), atol=0.0051)
    assert cells[18:20] == cells[23:25] == ["0.00", "0.00"]
    bars = figure.locator("rect").evaluate_all(
        "all => all.map(e => ['y', 'height'].map(n => +e.getAttribute(n)))"
    )
    top, height = np.array(bars).reshape(4, 3, 2).transpose(2, 0, 1)
    ground = np.array([[48.0], [140], [232], [340]])
    assert np.allclose(height, 20 * abs(rows[:4]), atol=0.06)
    assert np.allclose(top, ground - 20 * np.maximum(rows[:4], 0), atol=0.06)
    one, hat = cells[3:5]
    said = f"Along (1, 1, 1): {one} comes, 0.00 is left. "
    said += f"Along x\u0302: {hat} comes, 0.00 is left."
    nothing = " Nothing else comes: dx is 0." if np.allclose(dx, 0) else ""
    assert figure.locator(".say").inner_text() == said + nothing
    return cells[15:]


def test_paths_leave_what_the_package_says(open_page):
    page, first = open_page("three_paths"), np.array([1.0, 0, 0])
    x_hat = np.sqrt(3 / 2) * np.array([-1.0, 1, 0])
    caption = page.locator(f"{PATHS} figcaption").inner_text()
    assert "(\u22121.22, 1.22, 0.00), s = 1.63" in caption
    left = assert_paths(page, first)
    for name, g in (  # neither changes what is left
        ("add 1 to all", first + 1),
        ("add 1 to all", first + 1),  # beyond the sliders: refused
        ("take 1 from all", first),
        ("add x\u0302", first + x_hat),
        ("take x\u0302", first),
    ):
        page.get_by_role("button", name=name).click()
        assert assert_paths(page, g) == left
    for k, value in ((1, -2.3), (2, 2.3), (3, -2.3)):
        page.get_by_label(f"g {k}").fill(str(value))
    assert_paths(page, [-2.3, 2.3, -2.3])
    page.get_by_label("g 2").focus()
    page.keyboard.press("ArrowLeft")
    assert_paths(page, [-2.3, 2.2, -2.3])
    for k, value in ((1, 1.5), (2, -0.5), (3, 0.5)):  # (1, 1, 1) / 2 and x̂ only
        page.get_by_label(f"g {k}").fill(str(value))
    assert_paths(page, [1.5, -0.5, 0.5])
    page.get_by_role("button", name="reset").click()
    assert assert_paths(page, first) == left


# Chapter 12: two optimizers walking


class Valley(Layer):
    def __init__(self, curvatures, start):
        self._curvatures, self.theta = np.array(curvatures), np.array(start, float)

    def backward(self):
        self._gradients = {"theta": self._curvatures * self.theta}


def walk(page, make):
    kept = page.locator(WALKERS).first.evaluate("figure => ({...figure.dataset})")
    valley = Valley(json.loads(kept["curvatures"]), json.loads(kept["start"]))
    optimizer, places = make(valley), [valley.theta.copy()]
    for _ in range(40):
        valley.backward()
        optimizer.step()
        places.append(valley.theta.copy())
    return np.array(places)


def assert_walk(page, eta, mu, rate, steps):
    paths = {
        "one": walk(page, lambda valley: SGD(valley, lr=eta, momentum=mu)),
        "two": walk(page, lambda valley: Adam(valley, lr=rate)),
    }
    kept = page.locator(WALKERS).first.evaluate("figure => ({...figure.dataset})")
    for name, path in zip(("sgd", "adam"), paths.values(), strict=True):
        assert np.allclose(json.loads(kept[name]), path, rtol=1e-9, atol=1e-12)
    far = {name: np.linalg.norm(path, axis=1) for name, path in paths.items()}
    for name, path in paths.items():
        drawn = path[: steps + 1] * [44, -44] + [200, 120]
        drawn = np.clip(drawn, -2000, 2000)
        assert np.allclose(points(page, f"{WALKERS} .w.{name}"), drawn, atol=0.06)
        height = np.clip(38 - 30 * np.log10(far[name][: steps + 1] + 1e-12), -50, 300)
        assert np.allclose(points(page, f"{WALKERS} .c.{name}")[:, 1], height, atol=0.06)
    said = page.locator(f"{WALKERS} .say").inner_text()
    if steps:
        for name, optimizer in (("one", "SGD is "), ("two", "Adam ")):
            distance = far[name][steps]
            if distance >= 0.005:
                told = re.search(rf"{optimizer}([\d.]+\d)", said)[1]
                assert float(told) == pytest.approx(distance, abs=0.0051)
            else:
                assert f"{optimizer}less than " in said
    assert ("flies off" in said) == (15 * eta > 2 * (1 + mu))


def test_walkers_walk_like_the_package(open_page):
    page = open_page("optimizers")
    assert_walk(page, 0.13, 0.0, 0.3, 40)
    page.get_by_role("button", name="momentum at its best").click()
    assert_walk(page, 0.19, 0.48, 0.3, 40)
    page.get_by_label("learning rate of SGD").fill("0.25")
    page.get_by_label("learning rate of Adam").fill("0.8")
    assert_walk(page, 0.25, 0.48, 0.8, 40)  # beyond the edge
    page.get_by_label("momentum of SGD").fill("0.9")
    assert_walk(page, 0.25, 0.9, 0.8, 40)
    page.get_by_role("button", name="start over").click()
    assert_walk(page, 0.25, 0.9, 0.8, 0)
    for steps in (1, 2):
        page.get_by_role("button", name="step", exact=True).click()
        assert_walk(page, 0.25, 0.9, 0.8, steps)
    page.get_by_label("steps", exact=True).focus()
    page.keyboard.press("ArrowRight")
    assert_walk(page, 0.25, 0.9, 0.8, 3)
    page.get_by_role("button", name="reset").click()
    assert_walk(page, 0.13, 0.0, 0.3, 40)
