"""Letters have one line of book/notation.md; terms come not before they are explained."""

import re
from collections.abc import Iterable, Iterator

from bookkit.chapters import Chapter

Symbol = tuple[str, str]  # a letter with accent and capital superscript, a subscript
# The symbols that it explains, the chapters that it names, itself.
Line = tuple[set[Symbol], set[int | str], str]
PARTS = {
    "I": (1, 3),
    "II": (4, 6),
    "III": (7, 9),
    "IV": (10, 12),
    "V": (13, 15),
    "VI": (16, 19),
    "VII": (20, 22),
    "VIII": (23, 25),
    "IX": (26, 28),
    "X": (29, 31),
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


def symbols(formula: str) -> set[Symbol]:
    for pattern, instead in LEFT_OUT:
        formula = re.sub(pattern, instead, formula)
    return {
        (a.replace(" ", ""), re.sub(r"[{}\s]", "", b)) for a, b in SYMBOL.findall(formula)
    }


def chapters_of(meaning: str) -> set[int | str]:
    """The chapters that a line names, as `in chapter 9 and appendix C: …`; none if all."""
    said = re.match(r"in ((?:chapter|appendix|Part)[^:]*):", meaning)
    if not said:
        return set()
    if part := re.fullmatch(r"Part ([IVX]+)", said[1]):
        first, last = PARTS[part[1]]
        return set(range(first, last + 1))
    return {int(number) for number in re.findall(r"\d+", said[1])} | set(
        re.findall(r"appendix ([A-Z])", said[1])
    )


def read_notation(text: str) -> Iterator[Line]:
    """Line by line: the symbols that it explains, the chapters that it names, itself."""
    for line in text.splitlines():
        if match := re.match(r"\| (\$.+?) \| (.+?) \|", line):
            items = re.findall(r"\$([^$]+)\$", match[1])
            single = [i for i in items if SYMBOL.fullmatch(i.replace(r"\text", ""))]
            yield symbols(", ".join(single)), chapters_of(match[2]), line


def lines_for(symbol: Symbol, number: int | str, lines: list[Line]) -> list[str]:
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


def letters(shown: set[Symbol]) -> set[str]:
    return {letter for letter, below in shown if COUNTS.fullmatch(below)}


def unexplained(
    formulas: Iterable[str], number: int | str, lines: list[Line]
) -> dict[Symbol, list[str]]:
    """The symbols of a chapter's formulas that have no line, or more than one."""
    shown = set().union(*map(symbols, formulas))
    counted = {symbol: lines_for(symbol, number, lines) for symbol in sorted(shown)}
    indices = {s for s, found in counted.items() if COUNTS.fullmatch(s[0]) and not found}
    return {
        s: found for s, found in counted.items() if len(found) != 1 and s not in indices
    }


def formulas_of(chapter: Chapter) -> list[str]:
    return [e.formula for cell in chapter.text_cells for e in cell.equations]


# The words: book/glossary.md says where each is explained.

ORDINARY = {"block", "pass", "position", "program", "state", "value"}
UNREAD = re.compile(r"<!--.*?-->|\$\$.*?\$\$|\$[^$]*\$|`[^`]*`", re.DOTALL)


def read_glossary(text: str) -> Iterator[tuple[str, int]]:
    """Each term, and the first chapter that its explanation names."""
    for term, said in re.findall(r"^(\w[^\n]*)\n  (.+)$", text, re.MULTILINE):
        if term not in ORDINARY:
            yield term, int(re.search(r"[Cc]hapters? (\d+)", said)[1])


def first_said(term: str, text: str) -> str:
    """The first sentence with the term, if there is one."""
    word = re.compile(rf"\b{re.escape(term)}(s|es)?\b", re.IGNORECASE)
    sentences = re.split(r"(?<=[.:?!])\s|\n", UNREAD.sub("", text))
    return next(filter(word.search, sentences), "")


def said_early(
    chapters: list[Chapter], glossary: Iterable[tuple[str, int]]
) -> Iterator[tuple[Chapter, str, str]]:
    """Where a term first comes before its chapter, neither explained nor with a pointer."""
    for term, home in glossary:
        earlier = (c for c in chapters if not c.is_appendix and c.number < home)
        said = ((c, term, first_said(term, c.prose)) for c in earlier)
        first = next((found for found in said if found[2]), None)
        if first and not re.search(rf"[Cc]hapter|\*{re.escape(term)}", first[2]):
            yield first
