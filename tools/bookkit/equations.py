"""Write book/equations.md: every numbered equation, its source, its code, its checks.

In a chapter, an equation is `$$ … $$ (eq-name)` in a markdown cell, and after it stands
`<!-- eq-name | source | attnlib.symbol, attnlib.other -->` (the last field may be empty).
It is checked by a comment, `# checks eq-name, eq-other`, in a code cell that asserts, or in
a file in tests/.
"""

import pydoc
import re
import sys
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run by its path

from bookkit.chapters import BookError, Chapter, parser, read_chapters, run, write_text
from bookkit.grammar import LABEL, Equation, marks_of

HEAD = """\
# Equations

Every numbered equation of the book: its source, the code that computes it, the checks. The
equations of the documents that specify the package are marked in [](sources.md).
"""
HEADING = re.compile(r"^#{1,3} ([^`$<>\n]+?)\s*$", re.MULTILINE)  # plain ones only
Links = dict[str, list[str]]


def entry(equation: Equation, checks: list[str], public: tuple[str, ...]) -> str:
    """The equation on the page: no table, so that it fits a phone."""
    roles = {s: "{py:obj}`~" if s.startswith(public) else "`" for s in equation.symbols}
    code = ", ".join(f"{role}{symbol}`" for symbol, role in roles.items())
    facts = [f"Source: {equation.source}.", *([f"Code: {code}."] if code else [])]
    facts.append(f"Checked in: {', '.join(checks)}.")
    shown = f"{{eq}}`{equation.label}` {' '.join(facts)}"
    return f"{shown}\n\n$$\n{equation.formula}\n$$\n"


def problems(equation: Equation) -> list[str]:
    """What is wrong with an equation and the comment below it."""
    label, found = equation.label, []
    if not re.fullmatch(LABEL, label):
        found.append("a label is eq-name: lower case, digits and hyphens")
    if not equation.source:
        found.append(f"after it, write <!-- {label} | source | symbol -->")
    if equation.about != label:
        found.append(f"the comment after it is about {equation.about}")
    return found + [f"there is no {s}" for s in equation.symbols if not exists(s)]


def exists(symbol: str) -> bool:
    try:
        return symbol.startswith("attnlib.") and pydoc.locate(symbol) is not None
    except pydoc.ErrorDuringImport as error:
        raise BookError(f"{symbol} cannot be imported: {error}") from error


def checked(source: str, where: str, faults: list[str]) -> list[str]:
    """The labels that a piece of code checks, as its comments say."""
    try:
        labels = [label for _, label in marks_of(source)]
    except (tokenize.TokenError, SyntaxError) as error:
        raise BookError(f"{where}: not Python: {error}") from error
    if labels and not re.search(r"^\s*[\w.]*\bassert", source, re.MULTILINE):
        faults.append(f"{where}: checks {', '.join(labels)}, but has no assert")
    return labels


def find_checks(chapters: list[Chapter], root: Path, faults: list[str]) -> Links:
    """For each label, links to the cells and the names of the test files that check it."""
    checks: Links = defaultdict(list)
    home = {e.label: chapter for chapter in chapters for e in chapter.equations}
    for chapter in chapters:
        section = chapter.title
        for cell in chapter.cells:
            if cell.cell_type == "markdown":
                section = ([section, *HEADING.findall(cell.source)])[-1]
                continue
            for label in checked(cell.python, chapter.where(cell), faults):
                text = section if home.get(label) is chapter else chapter.called
                if before := sum(f"`{text} " in link for link in checks[label]):
                    text += f" ({before + 1})"
                target = f"<cell-{chapter.key}-{cell.id}>"
                checks[label].append(f"{{ref}}`{text} {target}`")
    for path in sorted((root / "tests").rglob("*.py")):
        name = path.relative_to(root).as_posix()
        for label in dict.fromkeys(checked(path.read_text(encoding="utf-8"), name, faults)):
            checks[label].append(f"`{name}`")
    return checks


def page(chapters: list[Chapter], root: Path) -> str:
    """The text of book/equations.md; if there are mistakes, all of them are listed."""
    faults: list[str] = []
    for chapter, cell in ((c, cell) for c in chapters for cell in c.text_cells):
        for equation in (e for e in cell.equations if e.label):
            where = f"{chapter.where(cell)}: {equation.label}"
            faults += [f"{where}: {problem}" for problem in problems(equation)]
    checks = find_checks(chapters, root, faults)
    count = Counter(equation.label for c in chapters for equation in c.equations)
    for label, times in count.items():
        if times > 1:
            faults.append(f"{label}: the label of {times} equations")
        if label not in checks:
            faults.append(f"{label}: no check says `# checks {label}`")
    for label in checks.keys() - count:
        faults.append(f"{label}: no equation has it, see {', '.join(checks[label])}")
    if faults:
        raise BookError("\n".join(sorted(faults)))
    api = "\n".join(p.read_text("utf-8") for p in (root / "book").glob("api_*.md"))
    public = tuple(re.findall(r"^\.\. auto\w+:: ([\w.]+)", api, re.MULTILINE))
    parts = [HEAD]
    for chapter in (c for c in chapters if c.equations):
        parts.append(f"## [{chapter.number}. {chapter.title}]({chapter.path.name})\n")
        parts += [entry(e, checks[e.label], public) for e in chapter.equations]
    return "\n".join(parts)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--check", action="store_true", help="only compare, write nothing")
    args = options.parse_args()
    sys.path.insert(0, str(args.root.resolve()))  # where attnlib is
    text = page(read_chapters(args.root), args.root)
    path = args.root / "book" / "equations.md"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        if args.check:
            raise BookError("book/equations.md is out of date; run python tools equations")
        write_text(path, text)
        print("book/equations.md: written")
    return 0


if __name__ == "__main__":
    run(main)
