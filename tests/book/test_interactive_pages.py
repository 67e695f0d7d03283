"""The figure to touch of chapter 19, in a real browser, against the package's pages."""

import re

import torch

from attnlib import PagedCache

PAGES, ENDS = "#paged-memory", (5, 11, 2, 8)
READ = """figure => {
    const texts = css => [...figure.querySelectorAll(css)].map(e => e.textContent);
    const paths = [..."abcd"].map(n => figure.querySelector("path." + n).getAttribute("d"));
    return {n: texts("td.n").map(Number), tables: texts("td.p"), paths,
        edges: figure.querySelector(".edge").getAttribute("d"), say: texts(".say")[0],
        taken: +figure.dataset.taken, empty: +figure.dataset.empty};
}"""
SET = """(figure, [z, t]) => {
    const form = figure.querySelector("form");
    Object.assign(form.elements.z, {value: z});
    Object.assign(form.elements.t, {value: t});
    form.dispatchEvent(new Event("input"));
}"""


def assert_pages(read, z, steps):
    """What the package does, given the same tokens in turn."""
    cache, token = PagedCache(64 // z, z), torch.zeros(1, 1)
    talks = [cache.open() for _ in ENDS]
    for step in range(steps):
        for talk, end in zip(talks, ENDS, strict=True):
            if step < end:
                cache.append(talk, token, token)
    assert read["n"] == list(cache.lengths.values())
    tables = [[int(page) for page in text.split(",")] for text in read["tables"]]
    assert tables == list(cache.tables.values())
    for talk, path in zip(talks, read["paths"], strict=True):
        drawn = [
            int(x) // 19 + int(y) // 19 * 16 for x, y in re.findall(r"M(\d+) (\d+)", path)
        ]
        table = cache.tables[talk]
        assert drawn == [table[j // z] * z + j % z for j in range(cache.lengths[talk])]
    taken, tokens = cache.pages - len(cache.unused), sum(cache.lengths.values())
    assert (read["taken"], read["empty"]) == (taken, taken * z - tokens)
    numbers = [int(number) for number in re.findall(r"\d+", read["say"])]
    assert numbers == [taken, 64 // z, taken * z - tokens, 16, 64 - tokens]
    assert read["edges"].count("M") == 64 // z - 4


def test_pages_against_the_package(open_page):
    figure = open_page("pages").locator(PAGES)
    assert_pages(figure.evaluate(READ), 4, 11)
    for size in (1, 2, 3, 4):
        for steps in (1, 2, 6, 11):
            figure.evaluate(SET, [size, steps])
            assert_pages(figure.evaluate(READ), 2**size, steps)


def test_pages_by_keyboard(open_page):
    page = open_page("pages")
    page.get_by_label("tokens so far").press("ArrowLeft")
    assert_pages(page.locator(PAGES).evaluate(READ), 4, 10)
    page.get_by_label("page size z").press("ArrowRight")
    assert_pages(page.locator(PAGES).evaluate(READ), 8, 10)
