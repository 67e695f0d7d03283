"""Make the modules of attnlib/ from the exported cells of the chapters.

A code cell is exported when its first line is a caption, `# attnlib/<module>.py`. The first
exported cell of a module starts with the module's docstring and all its imports; cells of
later chapters may add definitions. A later cell may continue a class: it holds nothing but
`class X(X):` with further methods, which join the others in the module. Names that another
module of the same chapter defines are imported automatically: in the notebook, the cells
share a namespace. Without an option, the modules that changed are written. With --update,
the module wins over its chapter, and is then written anew.
"""

import difflib
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run by its path

from bookkit.chapters import BookError, parser, read_chapters, run, write_text
from bookkit.continued import members
from bookkit.modules import Module, read_modules
from bookkit.statements import Statement, formatted, sections

Layout = Callable[[str, str, Path], str]
DERIVED = re.compile(
    r'\s+Derived\s+in\s+(?:chapter|appendix)\s+\w+,.*?\.ipynb\)\.\s*(?="""$)', re.DOTALL
)
MADE = "# Made from {} by tools/bookkit; see CONTRIBUTING.md.\n"
REMEDY = """
If the chapter is right, run: make chapters
If the module is right, run:  python tools tangle --update"""


def assembled(module: Module, root: Path, layout: Layout = formatted) -> str:
    """The module's text: docstring, imports, definitions."""
    places = [f'{c.called}, "{c.title}" ({c.file})' for c in dict.fromkeys(module.chapters)]
    source = f"Derived in {', and in '.join(places)}."
    source = textwrap.fill(source, 92, break_on_hyphens=False)
    docstring = f'{module.docstring[:-3].rstrip()}\n\n{source}\n"""'
    imports = [s.text for s in module.imports]
    for other, names in module.automatic.items():
        imports.append(f"from {other.dotted} import {', '.join(names)}")
    bodies = ["\n".join(s.text for s in body) for body in module.definitions]
    parts = [docstring, "\n".join(imports), *bodies]
    text = MADE.format(module.chapter.file) + "\n\n\n".join(filter(None, parts))
    return layout(text, module.file, root)


def portions(module: Module, text: str) -> list[str]:
    """What each cell of the module should hold, below its caption, to give this text.

    A definition is matched to its cell by name, and so is a method of a class that several
    cells make. A new one joins the cell of the one before it; but if the cell that comes
    next has lost all of its own, it is one renamed.
    """
    text = text.removeprefix(MADE.format(module.chapter.file))
    docstring, imports, definitions = sections(text, module.file)
    owner = {key: i for i, body in enumerate(module.bodies) for s in body for key in s.keys}
    found = [next((owner[k] for k in s.keys if k in owner), None) for s in definitions]
    continued = {i for s in definitions for i, _ in module.continuations(s)}
    owned = {*owner.values()} - continued
    parts: list[list[str]] = [[] for _ in module.cells]
    for statement, at in zip(definitions, placed(found, owned, len(parts)), strict=True):
        for cell, part in shares(module, statement, at):
            parts[cell].append(part)
    bodies = ["\n".join(part).strip("\n") for part in parts]
    automatic = {other.dotted for other in module.siblings}
    own = [s.text.strip("\n") for s in imports if s.package not in automatic]
    docstring = DERIVED.sub("", docstring)
    if "\n" in docstring:
        docstring = docstring[:-3].rstrip() + '\n"""'
    bodies[0] = "\n".join([docstring, "", *own, "", "", bodies[0]]).rstrip()
    return bodies


def placed(found: list[int | None], owned: set[int], end: int) -> Iterator[int]:
    """The cell of each definition, where those that the book knows have been found."""
    at = 0
    for index, cell in enumerate(found):
        ahead = next((c for c in found[index:] if c is not None), end)
        below = min((c for c in owned if c > at), default=end)
        renamed = below < ahead and below not in found
        at = cell if cell is not None else below if renamed else at
        yield at


def shares(module: Module, whole: Statement, first: int) -> Iterator[tuple[int, str]]:
    """The cells that make a definition, each with its part: one, or several of a class."""
    more = module.continuations(whole)
    if not more:
        yield first, whole.text
        return
    name, (head, parts) = whole.node.name, members(whole.text)
    makers = [(first, s) for s in module.bodies[first] if name in s.names] + more
    made = [[n for m in members(s.text)[1] for n in m.names] for _, s in makers]
    owner = {n: index for index, names in enumerate(made) for n in names}
    found = [next((owner[n] for n in part.names if n in owner), None) for part in parts]
    places = list(placed(found, {*owner.values()}, len(makers)))
    for index, (cell, _) in enumerate(makers):
        texts = [p.text for p, at in zip(parts, places, strict=True) if at == index]
        if texts:
            yield cell, "\n".join([f"class {name}({name}):" if index else head, *texts])


def complaint(module: Module, text: str, root: Path) -> str:
    """How the module on disk differs from its chapter; empty where it does not."""
    path = root / module.file
    if not path.exists():
        return f"{module.file} is missing, {module.chapter.file} makes it{REMEDY}"
    found = path.read_text(encoding="utf-8")
    if found == text:
        return ""
    try:
        ours, theirs = portions(module, text), portions(module, found)
        cells = [c.id for i, c in enumerate(module.cells) if ours[i] != theirs[i]]
        place = f"cell {', '.join(cells)}" if cells else "layout only"
    except BookError as error:
        place = str(error)
    lines = text.splitlines(), found.splitlines()
    diff = difflib.unified_diff(*lines, module.chapter.file, module.file, n=1, lineterm="")
    shown = "\n".join(islice(diff, 20))
    return f"{module.file} differs from {module.chapter.file}: {place}\n{shown}{REMEDY}"


def strays(made: list[str], root: Path) -> list[str]:
    paths = sorted((root / "attnlib").rglob("*.py"))
    files = [p.relative_to(root).as_posix() for p in paths if p.name != "__init__.py"]
    return [f"{file}: no chapter makes it, delete it" for file in files if file not in made]


def carry_back(module: Module, text: str, root: Path) -> bool:
    """Bring the module's edits to its cells; true where one changed."""
    path = root / module.file
    if not path.exists():
        return False
    edited = formatted(path.read_text(encoding="utf-8"), module.file, root)
    before, after = portions(module, text), portions(module, edited)
    for index, cell in enumerate(module.cells):
        if before[index] != after[index]:
            source = cell.source.partition("\n")[0] + "\n" + after[index]
            cell.source = formatted(source, module.file, root).rstrip()
            note = "" if after[index] else ", empty now: delete it"
            print(f"{module.where(index)}: updated{note}; execute the chapter again")
    return before != after


def main() -> int:
    options = parser(__doc__)
    which = options.add_mutually_exclusive_group()
    which.add_argument("--check", action="store_true", help="only compare, write nothing")
    which.add_argument("--update", action="store_true", help="carry edits to the cells")
    args = options.parse_args()
    root, chapters = args.root, read_chapters(args.root)
    texts = {m: assembled(m, root) for m in read_modules(chapters).values()}
    if args.update:
        changed = {
            c for m, text in texts.items() if carry_back(m, text, root) for c in m.chapters
        }
        texts = {m: assembled(m, root) for m in read_modules(chapters).values()}
        for chapter in changed:
            chapter.write()
    if not args.check:
        for module, text in texts.items():
            if complaint(module, text, root):
                write_text(root / module.file, text)
                print(f"{module.file}: written")
    problems = [found for m, text in texts.items() if (found := complaint(m, text, root))]
    problems += strays([m.file for m in texts], root)
    print("\n\n".join(problems) or f"attnlib: {len(texts)} modules as in their chapters")
    return 1 if problems else 0


if __name__ == "__main__":
    run(main)
