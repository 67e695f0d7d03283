"""The conversation on the home page, in a browser, against README.

That the program prints it shows `tests/package/test_chat.py`.
"""

import itertools
import json
import re

import pytest

from touch import ROOT, Figure, costly

COMMAND = ".venv/bin/python examples/chat.py --temperature 0"
FILE = ROOT / "book" / "_static" / "chat.html"
# What can't be seen yet, and a figure without what changes at the press of a button.
REST = """() => [...CSS.highlights.get("untyped")].map(String).join("")"""
MARKUP = """figure => figure.innerHTML.replace(/<p class="say".*?<.p>/, "")"""


def recorded(**_):
    """The conversation, command and all, as README has it."""
    readme = (ROOT / "README.md").read_text("utf-8")
    (block,) = re.findall(rf"```\n({re.escape(COMMAND)}.*?)\n```", readme, re.DOTALL)
    return block


@pytest.fixture
def said():
    return recorded()


@pytest.fixture
def chat(open_figure):
    """Opens the figure where nothing moves unasked; its clock goes by `after` alone."""

    def show(**options):
        figure = open_figure("chat", reduced_motion="reduce", **options)
        stop_clock(figure.page)
        return figure

    return show


def stop_clock(page):
    page.clock.install(time=0)
    page.clock.pause_at(1000)


def after(figure, milliseconds):
    figure.page.clock.run_for(milliseconds)
    return figure


def rest(figure):
    return figure.page.evaluate(REST)


def text(figure):
    return figure.read(text="pre").text[0]


def heard(figure):
    """What a screen reader finds, but for the sentence that tells what is done."""
    return re.sub(".*paragraph:.*", "", figure.root.aria_snapshot())


def looks(figure):
    return figure.root.locator("pre").screenshot()


def test_it_stands_there_without_scripts_and_where_nothing_shall_move(
    open_figure, chat, said
):
    bare, still = open_figure("chat", scripts=False), after(chat(), 60_000)
    assert text(bare) == text(still) == said
    assert bare.root.locator("button").locator("visible=true").count() == 0
    assert rest(still) == "" and looks(bare) == looks(still)


@costly("settings/chat", recorded)
@pytest.mark.parametrize("width", [760, 360])
def test_it_types_itself_letter_by_letter_and_token_by_token(chat, said, width):
    """All of it is there for whoever listens, and has its place, from the start."""
    figure = chat(width=width)
    whole, markup = looks(figure), figure.evaluate(MARKUP)
    read = figure.read(parts="kbd, samp", tokens="samp@data-tokens")
    tokens, shown = iter(read.tokens), []
    for part, answered in zip(read.parts, itertools.cycle([False, True])):
        start = said.index(part, len(shown[-1]) if shown else 0)
        lengths = json.loads(next(tokens)) if answered else [1] * len(part)
        ends = [start + end for end in itertools.accumulate(lengths)]
        assert ends[-1] == start + len(part)
        shown += [said[:end] for end in ends]

    place = figure.root.bounding_box()
    before = heard(figure)
    figure.press("type it again")
    assert looks(figure) != whole
    assert rest(figure) == said.removeprefix(COMMAND)
    found = []
    while left := rest(after(figure, 45)):
        assert said.endswith(left)
        found.append(said.removesuffix(left))
        if len(found) % 50 == 0:
            assert figure.root.bounding_box() == place
            assert looks(figure) != whole
            assert figure.evaluate(MARKUP) == markup
            assert heard(figure) == before
    assert list(dict.fromkeys([*found, said])) == [COMMAND, *shown]
    assert looks(figure) == whole and figure.root.bounding_box() == place


def test_it_can_be_stopped_and_begun_anew_by_keys(chat, said):
    figure = chat()
    figure.keys("Tab", "Enter")
    early = rest(after(figure, 2000))
    assert 0 < len(early) < len(rest(figure.keys("Space")))
    assert figure.read().say.startswith("Typed again")
    assert rest(after(figure, 2000)) == early
    figure.page.emulate_media(media="print")
    paper = looks(figure)
    assert rest(figure.keys("Tab", "Enter")) == ""
    assert rest(after(figure, 60_000)) == ""
    assert looks(figure) == paper  # which has all of it, whatever is on the screen
    assert figure.read().say == chat().read().say


def test_it_begins_where_it_is_seen(open_page, said):
    page = open_page("chat")
    stop_clock(page)
    far = '<div style="height: 3000px"></div>'
    library = FILE.with_name("touch.html").read_text("utf-8")
    page.set_content(f"{far}{library}{FILE.read_text('utf-8')}{far}")
    figure = Figure(page)
    assert rest(after(figure, 60_000)) == said.removeprefix(COMMAND)
    figure.root.scroll_into_view_if_needed()
    for _ in range(100):  # the browser tells it with one of its next pictures
        page.wait_for_timeout(20)
        if rest(after(figure, 60_000)) == "":
            return
    raise AssertionError("it never began")


def test_where_text_can_t_be_hidden_it_stands_there(open_page, said):
    """A browser older than the highlights that a page may set."""
    page = open_page("chat")
    page.evaluate("delete CSS.highlights")
    library = FILE.with_name("touch.html").read_text("utf-8")
    page.set_content(library + FILE.read_text("utf-8"))
    figure = Figure(page)
    assert text(figure) == said and figure.root.evaluate("e => e.matches('.live')")
    assert figure.root.locator("button").locator("visible=true").count() == 0
