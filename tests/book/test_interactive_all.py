"""Every figure to touch, in a real browser: what all of them keep to."""

import re

import numpy as np
import pytest

from touch import NUMBER, ROOT, costly, numbers

STATIC = ROOT / "book" / "_static"
FILES = {path.stem: path.read_text(encoding="utf-8") for path in STATIC.glob("*.html")}
FIGURES = sorted(name for name, text in FILES.items() if "<figure" in text)
pytestmark = [
    pytest.mark.parametrize("name", FIGURES),
    costly("figure/{name}", "book/_static/book.css"),
]

# Most bytes of a figure that brings the numbers of a trained model; 15,000 for others.
LARGE = {"all_heads": 400_000}

# Texts, and where everything is drawn; of what only a script can move, nothing.
PICTURE = """figure => {
    const names = ["d", "x", "y", "x1", "y1", "x2", "y2", "cx", "cy", "r", "width",
        "height", "transform", "stroke-width", "opacity", "visibility", "aria-pressed"];
    const all = [...figure.querySelectorAll(":not(style, script, .ctl, .ctl *)")];
    const words = node => node.nodeType === Node.TEXT_NODE ? node.data.trim() : "";
    const look = e => [e.tagName, [...e.classList].sort().join(" "), e.style?.cssText,
        ...names.map(name => e.getAttribute(name) ?? "")].join("|").replaceAll(" ", "");
    const texts = all.map(e => [...e.childNodes].map(words).join(""));
    return {texts, looks: all.map(look), data: {...figure.dataset}};
}"""
STATE = """figure => figure.innerHTML
    + [...figure.querySelectorAll("input")].map(input => input.value + input.checked)"""
AGAIN = f"""figure => {{
    for (const script of document.scripts) (0, eval)(script.textContent);
    return ({STATE})(figure);
}}"""
# Every button pressed, every slider and handle moved to its right end, one after the other.
USE = """const use = (figure, look) => {
    const key = {key: "ArrowRight", shiftKey: true, bubbles: true};
    return [...figure.querySelectorAll("input, button, svg [role=slider]")].map(control => {
        if (control.type === "range") {
            control.value = control.max;
            control.dispatchEvent(new Event("input", {bubbles: true}));
        } else if (control.role === "slider")
            for (let k = 0; k < 6; k++)
                control.dispatchEvent(new KeyboardEvent("keydown", key));
        else control.click();
        return look(figure);
    });
};"""
PROBLEMS = """figure => {
    const found = [], all = css => figure.querySelectorAll(css);
    if (document.documentElement.scrollWidth > innerWidth) found.push("too wide");
    for (const e of all("text, p, span, i, sub, button, output, td, th")) {
        if (!e.textContent.trim() || !e.getClientRects().length) continue;
        if (/-\\d|\u22120(\\.0+)?(?![.\\d])/.test(e.textContent))
            found.push(`no minus: ${e.textContent}`);
        const svg = e.closest("svg"), wide = svg && svg.getBoundingClientRect().width;
        const scale = svg ? wide / svg.viewBox.baseVal.width : 1;
        const size = parseFloat(getComputedStyle(e).fontSize) * scale;
        // the columns of the grid of words are as wide as words
        if (size < (e.closest(".grid") ? 10 : 12)) found.push(`small: ${e.textContent}`);
    }
    const box = e => e.getBoundingClientRect();
    for (const e of all("button, label, input:not(label *)"))
        if (box(e).height < 36) found.push(`low: ${e.textContent}`);
    for (const e of all("svg [role=slider]"))
        if (box(e).width < 44) found.push(`thin: ${e.ariaLabel}`);
    return found;
}"""
# What some browsers do at Enter on a choice.
SENT = """forms => forms.map(form => {
    const event = new Event("submit", {cancelable: true, bubbles: true});
    return form.dispatchEvent(event);
})"""
NAMELESS = r"- (?:slider|button|checkbox|radio|img|group)(?: \[.*\])?(?::.*)?$"


def near(one, two):
    """The same text, but for numbers that differ by rounding."""
    if NUMBER.sub("#", one) != NUMBER.sub("#", two):
        return False
    return np.allclose(numbers(one), numbers(two), rtol=0, atol=0.051)


def test_at_first_the_script_changes_nothing_and_all_have_names(open_page, name):
    """So what the other tests say of a figure that lives holds without scripts, too."""
    still, live = (
        open_page(name, scripts=scripts).locator("figure") for scripts in (False, True)
    )
    lives = [figure.evaluate("e => e.matches('.live')") for figure in (still, live)]
    assert lives == [False, True]
    assert still.locator(":is(button, input):enabled").locator("visible=true").count() == 0
    one, two = still.evaluate(PICTURE), live.evaluate(PICTURE)
    assert one["texts"] == two["texts"]
    for first, second in zip(one["looks"], two["looks"], strict=True):
        assert near(first, second), (first, second)
    for key, value in one["data"].items():
        assert near(value, two["data"][key]), key

    tree, own = live.aria_snapshot(), live.get_attribute("id")
    assert re.findall(NAMELESS, tree, re.MULTILINE) == []
    assert re.search(r"- (?:slider|button) ", tree)
    drawings = "svg:not([role=img], [role=group], [aria-hidden=true])"
    assert live.locator(drawings).count() == 0  # so that each of the others has a name
    assert live.locator("[aria-live=polite]").count() == 1
    ids = live.locator("[id]").evaluate_all("all => all.map(e => e.id)")
    assert all(found.startswith(f"{own}-") for found in ids)
    assert not any(live.locator("form").evaluate_all(SENT))


def used(figure, look):
    """What `look` finds after each use of a control."""
    return figure.evaluate(f"figure => {{ {USE} return use(figure, {look}); }}")


def test_it_fits_whatever_is_done_to_it(open_page, name):
    assert len(FILES[name].encode()) < LARGE.get(name, 15_000)
    page = open_page(name)
    figure = page.locator("figure").element_handle()
    for width in (300, 360, 390, 560, 660, 760, 1440):
        page.set_viewport_size({"width": width, "height": 700})
        problems = [figure.evaluate(PROBLEMS), *used(figure, PROBLEMS)]
        assert not any(problems), f"{width} px: {problems}"


def test_two_copies_and_a_second_run(open_page, name):
    """Each copy is its own, and a script that runs again finds nothing left to do."""
    alone = open_page(name).locator("figure")
    page = open_page(name, copies=2)
    first, second = (page.locator("figure").nth(k) for k in (0, 1))
    before = second.evaluate(STATE)
    assert first.evaluate(STATE) == before
    states = used(first, AGAIN)
    assert any(state != before for state in states)
    assert states == used(alone, STATE)
    assert second.evaluate(STATE) == before
