"""Write book/equations.md: every numbered equation, its source, its code, its checks.

In a chapter, an equation is `$$ … $$ (eq-name)` in a markdown cell, and after it stands
`<!-- eq-name | source | attnlib.symbol, attnlib.other -->` (the last field may be empty).
It is checked by a comment, `# checks eq-name, eq-other`, in a code cell that asserts, or in
a file in tests/.
"""

import io
import pydoc
import re
import sys
import tokenize
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run by its path

from bookkit.chapters import BookError, Chapter, parser, read_chapters, run, write_text
from bookkit.grammar import CHECKS, COMMENT, EQUATION, LABEL, only_python

HEAD = """\
# Equations

Every numbered equation of the book: its source, the code that computes it, the checks. The
equations of the documents that specify the package are marked in [](sources.md).
"""
Links = dict[str, list[str]]


@dataclass
class Equation:
    label: str
    formula: str
    source: str
    symbols: list[str]

    def entry(self, checks: list[str], public: tuple[str, ...]) -> str:
        """The equation on the page: no table, so that it fits a phone."""
        roles = {s: "{py:obj}`~" if s.startswith(public) else "`" for s in self.symbols}
        code = ", ".join(f"{role}{symbol}`" for symbol, role in roles.items())
        facts = [f"Source: {self.source}.", *([f"Code: {code}."] if code else [])]
        facts.append(f"Checked in {', '.join(checks)}.")
        return f"{{eq}}`{self.label}` {' '.join(facts)}\n\n$$\n{self.formula}\n$$\n"


def equations(chapter: Chapter, faults: list[str]) -> list[Equation]:
    """The labeled equations of a chapter, each with the comment that follows it."""
    found = []
    for cell in chapter.text_cells:
        for match in (m for m in EQUATION.finditer(cell.source) if m[2]):
            formula, label = re.sub(r"\s*(?<!\\)[.,;]?\s*$", "", match[1]).strip(), match[2]
            fault = f"{chapter.where(cell)}: {label}: "
            if not re.fullmatch(LABEL, label):
                faults.append(f"{fault}a label is eq-name: lower case, digits and hyphens")
            comment = COMMENT.match(cell.source, match.end())
            name, source, symbols = comment.groups() if comment else (label, "", "")
            if not source.strip():
                faults.append(f"{fault}after it, write <!-- {label} | source | symbol -->")
            if name.strip() != label:
                faults.append(f"{fault}the comment after it is about {name.strip()}")
            wanted = [symbol.strip() for symbol in symbols.split(",") if symbol.strip()]
            faults += [f"{fault}there is no {s}" for s in wanted if not exists(s)]
            found.append(Equation(label, formula, source.strip(), wanted))
    return found


def exists(symbol: str) -> bool:
    try:
        return symbol.startswith("attnlib.") and pydoc.locate(symbol) is not None
    except pydoc.ErrorDuringImport as error:
        raise BookError(f"{symbol} cannot be imported: {error}") from error


def checked(source: str, where: str, faults: list[str]) -> list[str]:
    """The labels that a piece of code checks, as its comments say."""
    if not CHECKS.search(source):
        return []
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(only_python(source)).readline))
    except (tokenize.TokenError, SyntaxError) as error:
        raise BookError(f"{where}: not Python: {error}") from error
    comments = [CHECKS.match(t.string) for t in tokens if t.type == tokenize.COMMENT]
    labels = [label for match in comments if match for label in match[2].split(", ")]
    names = [t.string for t in tokens if t.type == tokenize.NAME]
    if labels and not any(name.startswith("assert") for name in names):
        faults.append(f"{where}: checks {', '.join(labels)}, but has no assert")
    return labels


def find_checks(chapters: list[Chapter], root: Path, faults: list[str]) -> Links:
    """For each label, links to the cells and the names of the test files that check it."""
    checks: Links = defaultdict(list)
    for chapter in chapters:
        for cell in chapter.code_cells:
            for label in checked(cell.source, chapter.where(cell), faults):
                text, target = chapter.called, f"<cell-{chapter.key}-"
                if before := sum(target in link for link in checks[label]):
                    text += f" ({before + 1})"
                checks[label].append(f"{{ref}}`{text} {target}{cell.id}>`")
    for path in sorted((root / "tests").rglob("*.py")):
        name = path.relative_to(root).as_posix()
        for label in dict.fromkeys(checked(path.read_text(encoding="utf-8"), name, faults)):
            checks[label].append(f"`{name}`")
    return checks


def page(chapters: list[Chapter], root: Path) -> str:
    """The text of book/equations.md; if there are mistakes, all of them are listed."""
    faults: list[str] = []
    found = {chapter: equations(chapter, faults) for chapter in chapters}
    checks = find_checks(chapters, root, faults)
    count = Counter(equation.label for made in found.values() for equation in made)
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
    for chapter, made in ((c, made) for c, made in found.items() if made):
        parts.append(f"## [{chapter.number}. {chapter.title}]({chapter.path.name})\n")
        parts += [equation.entry(checks[equation.label], public) for equation in made]
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
