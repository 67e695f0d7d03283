"""The modules that the chapters make, and what each imports of the others."""

import ast
import builtins
import re
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from bookkit.chapters import BookError, Chapter
from bookkit.continued import joined, misuse
from bookkit.grammar import Cell
from bookkit.statements import Statement, refuse_imports, sections, statements


@dataclass(eq=False)
class Module:
    """A module and the cells that make it."""

    name: str  # with slashes: backprop/softmax
    chapters: list[Chapter] = field(default_factory=list)  # the one of each cell
    cells: list[Cell] = field(default_factory=list)
    docstring: str = ""  # as written, quotes included
    imports: list[Statement] = field(default_factory=list)
    bodies: list[list[Statement]] = field(default_factory=list)  # what each cell defines
    siblings: list["Module"] = field(default_factory=list)  # made by the same chapter

    @property
    def chapter(self) -> Chapter:
        """The one that begins the module; later ones may add to it."""
        return self.chapters[0]

    @property
    def file(self) -> str:
        return f"attnlib/{self.name}.py"

    @property
    def dotted(self) -> str:
        return f"attnlib.{self.name.replace('/', '.')}"

    @property
    def names(self) -> set[str]:
        return {name for body in self.bodies for s in body for name in s.names}

    @property
    def imported(self) -> set[str]:
        return {name for s in self.imports for name in s.names}

    @property
    def definitions(self) -> list[list[Statement]]:
        """What each cell defines, a class whole where it begins."""
        return [
            [
                joined(s, [more for _, more in self.continuations(s)], self.where(index))
                for s in body
                if not s.continues
            ]
            for index, body in enumerate(self.bodies)
        ]

    def continuations(self, first: Statement) -> list[tuple[int, Statement]]:
        """The cells that continue a class, with what they add."""
        if not isinstance(first.node, ast.ClassDef):
            return []
        found = [(index, s) for index, body in enumerate(self.bodies) for s in body]
        return [(index, s) for index, s in found if s.continues == first.node.name]

    @property
    def automatic(self) -> dict["Module", list[str]]:
        """What it uses of its siblings, which it imports without being told."""
        used = {name for body in self.bodies for s in body for name in s.uses}
        used -= self.names | self.imported
        found = {other: sorted(used & other.names) for other in self.siblings}
        return {other: names for other, names in found.items() if names}

    def where(self, index: int) -> str:
        return self.chapters[index].where(self.cells[index])

    def add(self, chapter: Chapter, cell: Cell) -> None:
        self.chapters.append(chapter)
        self.cells.append(cell)
        source, where = cell.source.partition("\n")[2], self.where(-1)
        if len(self.cells) == 1:
            self.docstring, self.imports, body = sections(source, where)
        else:
            body = statements(source, where)
            refuse_imports(body, where)
        before = [s for earlier in self.bodies for s in earlier]
        for s in (s for s in body if s.continues):
            if fault := misuse(s, len(body) == 1, before):
                raise BookError(f"{where}: class {s.continues} is continued: {fault}")
        self.bodies.append(body)


def read_modules(chapters: list[Chapter]) -> dict[str, Module]:
    """The modules by name, in the order of the book, free of the mistakes refused below."""
    modules: dict[str, Module] = {}
    for chapter in chapters:
        for cell in chapter.cells:
            if name := cell.module:
                modules.setdefault(name, Module(name)).add(chapter, cell)
        refuse_second_definitions([m for m in modules.values() if chapter in m.chapters])
    for module in modules.values():
        made = [m for m in modules.values() if m.chapter is module.chapter]
        module.siblings = [m for m in made if m is not module]
        check_imports(module, modules)
        refuse_unknown_names(module)
    refuse_cycles(modules)
    return modules


def refuse_second_definitions(made: list[Module]) -> None:
    """In a notebook, the second definition of a name would replace the first everywhere."""
    seen: dict[str, str] = {}
    for module in made:
        for index, body in enumerate(module.bodies):
            where = module.where(index)
            for name in (name for s in body for name in s.names):
                if seen.setdefault(name, where) != where:
                    said = f"{where}: {name} is already defined in {seen[name]}"
                    hint = f"a class is continued by `class {name}({name}):`"
                    raise BookError(f"{said}; {hint}" if name[0].isupper() else said)


def check_imports(module: Module, modules: dict[str, Module]) -> None:
    """Imports run downwards, or to an appendix, and name what is there."""
    for s in module.imports:
        line = ast.unparse(s.node)
        if not re.match(r"import attnlib\b|from (attnlib\b|\.)", line):
            continue
        source = modules.get(s.package.removeprefix("attnlib.").replace(".", "/"))
        fault = ""
        if source is None or line.startswith("from ."):
            fault = "write `from attnlib.<module> import …`, a module that a chapter makes"
        elif source.chapter is module.chapter:
            fault = "leave it out, names of the same chapter are imported automatically"
        elif module.chapter.key < source.chapter.key and not source.chapter.is_appendix:
            fault = f"{source.file} comes later, in {source.chapter.called}"
        elif missing := {alias.name for alias in s.node.names} - source.names:
            fault = f"{source.file} does not define {', '.join(sorted(missing))}"
        if fault:
            raise BookError(f"{module.where(0)}: `{line}`: {fault}")


def refuse_unknown_names(module: Module) -> None:
    """A cell may use what a demonstration defined; the module would fail when called."""
    known = {*dir(builtins), "__file__", *module.names, *module.imported}
    known = known.union(*(other.names for other in module.siblings))
    for index, body in enumerate(module.bodies):
        for name in sorted({name for s in body for name in s.uses} - known):
            raise BookError(
                f"{module.where(index)}: {name} is neither defined in {module.file} nor "
                f"imported (imports go to cell {module.cells[0].id})"
            )


def refuse_cycles(modules: dict[str, Module]) -> None:
    needs = {m.file: [other.file for other in m.automatic] for m in modules.values()}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        raise BookError(
            f"modules import each other: {' → '.join(error.args[1])}"
        ) from error
