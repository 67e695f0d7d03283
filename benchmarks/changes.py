"""The mutants of a module, each with one place changed, and how they are planted."""

import ast
import gc
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import NamedTuple

SWAPS = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult},
    **{ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr},
    **{ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.MatMult: ast.Mult},
}
Definition = ast.FunctionDef | ast.ClassDef


class Mutant(NamedTuple):
    """A change, made in `tree` until the next one is asked for."""

    place: dict[str, str]  # the definition, the line as it was, and the change
    circles: list[range]  # the line of the change, and those of the functions around it
    tree: ast.Module


def mutants(source: str) -> Iterator[Mutant]:
    """Each change of a module, one at a time, in the bodies and defaults of functions."""
    tree = ast.parse(source)
    for owner, name, index, node, around in places(tree, []):
        for new in variants(node):
            ast.fix_missing_locations(ast.copy_location(new, node))
            change = f"{first_line(node)} → {first_line(new)}"
            place = {
                "in": ".".join(definition.name for definition in reversed(around)),
                "line": source.splitlines()[node.lineno - 1].strip(),
                "change": change.replace("→ if False:", "→ pass"),
            }
            functions = [n for n in around if isinstance(n, ast.FunctionDef)]
            circles = [range(n.lineno, n.end_lineno + 1) for n in functions]
            before = getattr(owner, name)
            after = new
            if isinstance(before, list):
                after = [*before[:index], new, *before[index + 1 :]]
            setattr(owner, name, after)
            yield Mutant(place, [range(node.lineno, node.lineno + 1), *circles], tree)
            setattr(owner, name, before)


def first_line(node: ast.AST) -> str:
    return ast.unparse(node).partition("\n")[0]


def places(node: ast.AST, around: list) -> Iterator[tuple]:
    """What a node is in, the field and the place there, the node, the definitions around.

    Without annotations, decorators, f-strings, and what Triton compiles.
    """
    decorators = map(ast.unparse, getattr(node, "decorator_list", []))
    if any(decorator.endswith("jit") for decorator in decorators):
        return
    if isinstance(node, Definition):
        around = [node, *around]
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                if any(isinstance(outer, ast.FunctionDef) for outer in around):
                    yield node, name, index, child, around
                yield from places(child, around)


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of a node, each wrong in one way."""
    match node:
        case ast.Compare(left, ops, right):
            for i, op in enumerate(ops):
                yield ast.Compare(left, [*ops[:i], SWAPS[type(op)](), *ops[i + 1 :]], right)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(SWAPS[type(op)](), values)
        case ast.BinOp(left, op, right):
            yield ast.BinOp(left, SWAPS[type(op)](), right)
        case ast.AugAssign(target, op, value):
            yield ast.AugAssign(target, SWAPS[type(op)](), value)
        case ast.UnaryOp(_, operand):
            yield operand
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.If(test, body, orelse):
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value)):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Constant(float(value)):
            yield from (ast.Constant(value + 1), ast.Constant(value / 2 or -1.0))
        case ast.Call(function, arguments, [_, *_] as keywords):
            for i in range(len(keywords)):
                rest = keywords[:i] + keywords[i + 1 :]
                yield ast.Call(function, arguments, rest)
        case ast.Expr(ast.Constant()):  # a docstring
            pass
        case ast.Expr() | ast.Raise() | ast.Assert() | ast.Break() | ast.Continue():
            # Left out; what it names still counts among the variables of its function.
            yield ast.If(ast.Constant(False), [node], [])


def plant(module: ModuleType, tree: ast.Module) -> None:
    """Gives the functions of an imported module the code and defaults of a changed one."""
    originals, changed = functions(module), ModuleType(module.__name__)
    exec(compile(tree, str(module.__file__), "exec"), vars(changed))
    for name, function in functions(changed).items():
        for part in ("__code__", "__defaults__", "__kwdefaults__"):
            setattr(originals[name], part, getattr(function, part))


def functions(module: ModuleType) -> dict[str, FunctionType]:
    """The functions that a module has made, beneath whatever is wrapped around them."""
    gc.unfreeze()  # of what the tests froze, gc would tell nothing
    every = [thing for thing in gc.get_objects() if isinstance(thing, FunctionType)]
    own = (function for function in every if function.__globals__ is vars(module))
    return {f.__qualname__: f for f in own if "<" not in f.__qualname__}
