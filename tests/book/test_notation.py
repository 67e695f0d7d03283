"""Letters have one line of book/notation.md; terms come not before they are explained."""

import re
from pathlib import Path

import pytest

from bookkit.chapters import read_chapters
from bookkit.grammar import EQUATION

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = read_chapters(ROOT)
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda c: c.name)

PARTS = {
    "I": (1, 3),
    "II": (4, 6),
    "III": (7, 9),
    "IV": (10, 12),
    "V": (13, 15),
    "VI": (16, 19),
    "VII": (20, 22),
    "VIII": (23, 25),
}
GREEK = (
    r"\\(?:(?:var)?epsilon|alpha|beta|gamma|delta|zeta|eta|theta|kappa|lambda|mu|nu|xi|pi|"
    r"rho|sigma|tau|phi|chi|psi|omega|ell|Gamma|Theta|Lambda|Pi|Sigma|Phi|Psi|Omega)"
)
LETTER = rf"(?:{GREEK}(?![A-Za-z])|(?<![\\A-Za-z])[A-Za-z])"
GROUP = r"(?:\{(?:[^{}]|\{[^{}]*\})*\}|\\?\w+)"
SYMBOL = re.compile(rf"((?:\\(?:hat|tilde)\s*)?{LETTER}(?:\^[A-Z])?)(?:_({GROUP}))?")
LEFT_OUT = (
    (rf"(_{GROUP})(\^[A-Z])(?![A-Za-z])", r"\2\1"),  # W_i^Q is W^Q_i
    (r"_\\text(\{[^}]*\})", r"_\1"),  # a word below a letter belongs to it
    (r"\\(?:text|operatorname\*?|begin|end|mathbf|mathbb|mathsf)\s*(?:\{[^}]*\}|\w)", " "),
    (r"(?<![A-Za-z\\])dX?(?=\s*(?:\\hat\s*)?[A-Zxybgups]\b)|\\Delta", " "),  # dX: about X
    (rf"(?!\\(?:hat|tilde)|{GREEK}(?![A-Za-z]))\\[A-Za-z]+", " "),  # other commands
)
COUNTS = re.compile(r"(?:[ijkmtach]|\\ell)*")  # a subscript of indices, or none


def symbols(formula):
    """(letter with its accent and capital superscript, subscript) of every symbol."""
    for pattern, instead in LEFT_OUT:
        formula = re.sub(pattern, instead, formula)
    return {
        (a.replace(" ", ""), re.sub(r"[{}\s]", "", b)) for a, b in SYMBOL.findall(formula)
    }


def chapters_of(meaning):
    """The chapters that a line names, as `in chapters 9 and 10: …` or `in chapter 9 and
    appendix C: …`; none if for all."""
    said = re.match(r"in ((?:chapter|appendix|Part)[^:]*):", meaning)
    if not said:
        return set()
    if part := re.fullmatch(r"Part ([IV]+)", said[1]):
        first, last = PARTS[part[1]]
        return set(range(first, last + 1))
    return {int(number) for number in re.findall(r"\d+", said[1])} | set(
        re.findall(r"appendix ([A-Z])", said[1])
    )


def read_notation(text):
    """Line by line: the symbols that it explains, the chapters that it names, itself."""
    for line in text.splitlines():
        if match := re.match(r"\| (\$.+?) \| (.+?) \|", line):
            items = re.findall(r"\$([^$]+)\$", match[1])
            single = [i for i in items if SYMBOL.fullmatch(i.replace(r"\text", ""))]
            yield symbols(", ".join(single)), chapters_of(match[2]), line


LINES = list(read_notation((ROOT / "book" / "notation.md").read_text(encoding="utf-8")))


def lines_for(symbol, number, lines=LINES):
    """What a reader of a chapter finds: the lines that show the symbol, else those that
    show its letter; and those that name the chapter before those that name none."""
    for exactly in (True, False):
        for named in (True, False):
            found = [
                line
                for shown, chapters, line in lines
                if (number in chapters if named else not chapters)
                and (symbol in shown if exactly else symbol[0] in letters(shown))
            ]
            if found:
                return found
    return []


def letters(shown):
    return {letter for letter, below in shown if COUNTS.fullmatch(below)}


def unexplained(text, number, lines=LINES):
    """The symbols of the displayed formulas with no line, or with more than one."""
    shown = set().union(*(symbols(match[1]) for match in EQUATION.finditer(text)))
    counted = {symbol: lines_for(symbol, number, lines) for symbol in sorted(shown)}
    indices = {s for s, found in counted.items() if COUNTS.fullmatch(s[0]) and not found}
    return {
        s: found for s, found in counted.items() if len(found) != 1 and s not in indices
    }


@each_chapter
def test_every_letter_has_one_meaning_in_a_chapter(chapter):
    text = "\n".join(cell.source for cell in chapter.text_cells)
    assert unexplained(text, chapter.number) == {}


PAGE = r"""
| $X$, $x_i$ | tokens | | |
| $d_k$ | features | | |
| $x_t$ | in chapters 2 and 3: another | | |
"""


@pytest.mark.parametrize(
    ("formula", "number", "wrong"),
    [
        (r"X \, x_{ij} + \frac{1}{d_k} \text{word}", 1, {}),
        (r"\hat x_i", 1, {("\\hatx", "i"): 0}),
        (r"W X", 1, {("W", ""): 0}),
        (r"x_i", 2, {}),
    ],
)
def test_the_check_finds_a_letter_that_is_not_there(formula, number, wrong):
    lines = list(read_notation(PAGE))
    found = unexplained(f"$$ {formula} $$", number, lines)
    assert {symbol: len(lines) for symbol, lines in found.items()} == wrong


def test_the_check_finds_a_letter_with_two_meanings():
    twice = list(read_notation(PAGE + "| $x_j$ | places | | |\n"))
    assert len(unexplained("$$ x_m $$", 1, twice)["x", "m"]) == 2


# The words: book/glossary.md says where each is explained.

ORDINARY = {"block", "pass", "position", "program", "state", "value"}


def read_glossary(text):
    """Each term, and the first chapter that its explanation names."""
    for term, said in re.findall(r"^(\w[^\n]*)\n  (.+)$", text, re.MULTILINE):
        if term not in ORDINARY:
            yield term, int(re.search(r"[Cc]hapters? (\d+)", said)[1])


def said_before(term, text):
    """The first sentence with the term, if it neither points to a chapter nor explains."""
    for pattern in (r"<!--.*?-->", r"\$\$.*?\$\$", r"\$[^$]*\$", r"`[^`]*`"):
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    for sentence in re.split(r"(?<=[.:?!])\s|\n", text):
        if re.search(rf"\b{re.escape(term)}(s|es)?\b", sentence, re.IGNORECASE):
            explained = re.search(rf"[Cc]hapter|\*{re.escape(term)}", sentence)
            return [] if explained else [sentence]
    return []


@pytest.mark.parametrize(
    ("term", "chapter"),
    list(read_glossary((ROOT / "book" / "glossary.md").read_text(encoding="utf-8"))),
)
def test_no_term_is_used_before_it_is_explained(term, chapter):
    earlier = [c for c in CHAPTERS if not c.is_appendix and c.number < chapter]
    cells = [cell for chapter in earlier for cell in chapter.text_cells]
    assert said_before(term, "\n".join(c.source for c in cells)) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Many tiles.", ["Many tiles."]),
        ("None here. The *tile* is new. Tiles, then.", []),
        ("First a tile of chapter 2. A tile.", []),
        ("`tile` and $tile$", []),
    ],
)
def test_the_check_finds_a_word_that_comes_too_early(text, wrong):
    assert said_before("tile", text) == wrong
