"""Right answers that are written in another way than ours, and how they are entered."""

import ast
from pathlib import Path

WRITTEN = Path(__file__).resolve().parents[1] / "book" / "workbook_answers"


def other_answers(key: str, blanks: dict[str, str]) -> dict[str, str]:
    """The answers of a chapter; `blanks` holds the untouched cell of each definition.

    Its file names a definition in a comment, and below it has the functions that the
    reader writes, without what the blank says already: their bodies go in its place.
    """
    found: dict[str, str] = {}
    for part in f"\n{(WRITTEN / f'{key}.py').read_text('utf-8')}".split("\n# ")[1:]:
        name, _, source = part.partition("\n")
        if name in blanks:
            found[name] = entered(blanks[name], source, name.rpartition(".")[2])
        else:  # another comment
            raise ValueError(f"{key}.py: no blank has the name {name}")
    return found


def entered(blank: str, source: str, symbol: str) -> str:
    """A blank, filled in; what stands above the definition stands above it there, too."""
    lines, nodes = source.split("\n"), ast.parse(source).body
    (node,) = (n for n in nodes if getattr(n, "name", "") == symbol)
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    head, _, text = blank.partition("\n")
    for function in functions_of(node):
        body = lines[function.body[0].lineno - 1 : function.body[-1].end_lineno]
        text = filled(text, function.name, body)
    return "\n".join([head, *lines[: first - 1], text])


def filled(text: str, name: str, body: list[str]) -> str:
    """The source of a blank, with this body from its first `# Yours` on."""
    lines = text.split("\n")
    (there,) = (f for f in functions_of(ast.parse(text).body[0]) if f.name == name)
    start = next(
        i for i in range(there.lineno - 1, there.end_lineno) if "# Yours: " in lines[i]
    )
    end = there.end_lineno
    return "\n".join([*lines[:start], *body, *lines[end:]])


def functions_of(node: ast.AST) -> list[ast.FunctionDef]:
    parts = node.body if isinstance(node, ast.ClassDef) else [node]
    return [n for n in parts if isinstance(n, ast.FunctionDef)]
