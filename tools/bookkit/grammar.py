"""How a chapter is written: names, captions, labels, equations, solutions."""

import re

CHAPTER = re.compile(r"\d\d_|[A-Z]_")  # how the name of a chapter starts, or an appendix's
LABEL = r"eq-[a-z0-9-]*[a-z0-9]"
# $$ … $$ (label), and what stands below: <!-- label | source | symbols -->
EQUATION = re.compile(r"\$\$(.+?)\$\$(?:[ \t]*\(([^()\n]+)\))?", re.DOTALL)
COMMENT = re.compile(r"\s*<!--([^|>]*)\|([^|>]*)\|([^|>]*)-->")

# The first lines of cells, which say what a cell is; the site folds those with a sentence.
CAPTION = re.compile(r"# attnlib/((?:[a-z][a-z0-9_]*/)*[a-z][a-z0-9_]*)\.py(?:: +(.+))?\s*")
CHECKS = re.compile(rf"# (checks|illustrates) ({LABEL}(?:, {LABEL})*)(?:: +(.+))?")
SOLUTION = re.compile(r"# Solution (\w+\.\d+)")
CLOSED = {"hide-cell", "hide-input", "remove-cell", "remove-input"}  # tags

DEFINITION = re.compile(r"^(?:class|def) (\w+)", re.MULTILINE)


def folded(source: str) -> bool:
    """Whether a cell says what is in it, so that the site and Jupyter can fold it."""
    first = source.partition("\n")[0]
    match = CAPTION.fullmatch(first) or CHECKS.fullmatch(first)
    return bool(match and match[match.re.groups])


def only_python(source: str) -> str:
    """The source of a cell without what only IPython understands."""
    return re.sub(r"^[%!].*", "pass", source, flags=re.MULTILINE)
