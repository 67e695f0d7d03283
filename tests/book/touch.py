"""What the tests of figures to touch share: a figure in the browser, read as numbers."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

# What "css" says, or its attribute, style or property in "css@name", of several a list
# in "css@x,y"; "css@visible" is whether it can be seen.
READ = """(figure, wanted) => {
    const visible = e => e.getClientRects().length > 0
        && getComputedStyle(e).visibility === "visible";
    const get = (e, name) => name === "visible" ? visible(e)
        : e.getAttribute(name) ?? e.style[name] ?? e[name];
    const read = css => {
        const [where, names] = css.split("@");
        return [...figure.querySelectorAll(where)].map(e => !names ? e.textContent
            : !names.includes(",") ? get(e, names)
            : names.split(",").map(name => get(e, name)));
    };
    for (const name in wanted) wanted[name] = read(wanted[name]);
    const say = figure.querySelector(".say").textContent;
    return {data: Object.entries(figure.dataset), shown: {say, ...wanted}};
}"""
SET = """(figure, wanted) => {
    for (const [name, value] of wanted) {
        const form = [...figure.querySelectorAll("form")].find(f => name in f.elements);
        form.elements[name][typeof value === "boolean" ? "checked" : "value"] = value;
        for (const type of ["input", "change"]) form.dispatchEvent(new Event(type));
    }
}"""
NUMBER = re.compile(r"-?(?:\d*\.?\d+(?:e-?\d+)?|∞)")
BOX = re.compile(r"M(\S+) (\S+?)h(\S+?)v(\S+?)[hH]\S+?z")


def numbers(shown):
    """All numbers of a text, of a path, or of a list of such, one after the other."""
    if isinstance(shown, str):
        found = NUMBER.findall(shown.replace("\u2212", "-"))
        return [float(number.replace("∞", "inf")) for number in found]
    if isinstance(shown, list):
        return [number for each in shown for number in numbers(each)]
    return [float(shown)]


def points(paths):
    """The corners of paths of straight lines, or the ends of lines."""
    return np.array(numbers(paths)).reshape(-1, 2)


def boxes(paths):
    """What paths of boxes draw, and nothing else: left, top, width and height of each."""
    path = "".join(paths)
    assert not BOX.sub("", path), path
    return [[float(x) for x in box] for box in BOX.findall(path)]


def close(found, expected, atol):
    """As many numbers, in the same order, each as near as that."""
    found = numbers(found) if isinstance(found, list | str) else found
    found, expected = (np.ravel(np.asarray(x, float)) for x in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol, equal_nan=False)


def tensor(rows):
    return torch.tensor(rows, dtype=torch.float64)


def kept(text):
    """What a figure keeps; it writes null for minus infinity, which JSON has not."""
    try:
        return json.loads(text.replace("null", "-Infinity"))
    except ValueError:
        return text


def costly(subject, *more):
    """The mark of what is tried anew when the figure of this name, or more, differs."""
    name = subject.partition("/")[2]
    files = f"book/_static/{name}.html", "book/_static/touch.html", *more
    return pytest.mark.costly(subject, *files)


class Figure:
    """A figure on its page: what it shows, and what a reader does to it."""

    def __init__(self, page):
        self.page, self.root = page, page.locator("figure").first
        self.evaluate = self.root.element_handle().evaluate  # much faster than a locator's

    def read(self, **wanted):
        """What it keeps, the sentence, and of each selector what its elements show."""
        found = self.evaluate(READ, wanted)
        data = {name: kept(value) for name, value in found["data"]}
        return SimpleNamespace(**data | found["shown"])

    # What a reader does gives the figure back: `assert_right(figure.press("reset"))`.

    def set(self, **wanted):
        """Move sliders, choose and check, by the names in the figure's forms."""
        self.evaluate(SET, list(wanted.items()))
        return self

    def click(self, css):
        """At once, whatever may cover it: for those who walk over all settings."""
        self.evaluate("(figure, css) => figure.querySelector(css).click()", css)
        return self

    def press(self, name, times=1):
        for _ in range(times):
            self.root.get_by_role("button", name=name, exact=True).click()
        return self

    def control(self, label):
        controls = self.root.locator("input, [role=slider]")
        return self.root.get_by_label(label).and_(controls)

    def fill(self, label, value):
        self.control(label).fill(str(value))
        return self

    def keys(self, *keys, at=None):
        """Press keys at the control of that name, or else where the focus is."""
        if at:
            self.control(at).focus()
        for key in keys:
            self.page.keyboard.press(key)
        return self

    def place(self, css, *at):
        """Where a point of a drawing is on the page, or the middle of an element."""
        drawing = self.root.locator(css).first
        box = drawing.bounding_box()
        x, y = box["width"] / 2, box["height"] / 2
        if at:
            scale = box["width"] / drawing.evaluate("e => e.viewBox.baseVal.width")
            x, y = at[0] * scale, at[1] * scale
        return box["x"] + x, box["y"] + y

    def drag(self, *places):
        """With the mouse, from the first place over the others."""
        self.page.mouse.move(*places[0])
        self.page.mouse.down()
        for place in places[1:]:
            self.page.mouse.move(*place, steps=3)
        self.page.mouse.up()
        return self
