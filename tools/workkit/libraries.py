"""What only some chapters need: which of it is not here."""

from __future__ import annotations

import ast
import multiprocessing
from importlib.util import find_spec
from typing import Any

from bookkit.grammar import only_python
from workkit.closure import is_import
from workkit.earlier import called

SOME = ("safetensors", "tokenizers", "transformers")
GET = "python -m pip install -r requirements.txt"
FORK = "a system that can copy a process"


def absent(known: dict[str, Any]) -> list[str]:
    """The libraries that the cells of a chapter import and that are not here, and FORK."""
    trees = [ast.parse(only_python(cell["source"])) for cell in known["cells"]]
    imports = [n for tree in trees for n in ast.walk(tree) if is_import(n)]
    names = {n.module or "" for n in imports if isinstance(n, ast.ImportFrom)}
    names |= {a.name for n in imports if isinstance(n, ast.Import) for a in n.names}
    wanted = {name.partition(".")[0] for name in names}
    lacking = [name for name in SOME if name in wanted and find_spec(name) is None]
    forks = "fork" in multiprocessing.get_all_start_methods()
    return lacking if forks or "torch.distributed" not in names else [*lacking, FORK]


def asked(key: str, names: list[str]) -> str:
    """One line for the reader."""
    if FORK in names:
        where = "Linux, macOS or WSL"
        return f"The checks of {called(key)} start copies of a process: run them on {where}"
    *most, last = names
    list_, is_ = (f"{', '.join(most)} and {last}", "are") if most else (last, "is")
    where = called(key)
    needs = f"{where[0].upper()}{where[1:]} needs {list_}, which {is_} not installed"
    return f"{needs}: {GET}"


def unchecked(key: str, known: dict[str, Any], states: dict[str, str], names: list) -> dict:
    """What a check says that could not be made: everything waits, and nothing is kept."""
    blanks = {
        name: {"state": "waits", "for": names} if state == "written" else {"state": state}
        for name, state in states.items()
    }
    left = {"kind": "unwritten", "came": f"waits for {names[0]}"}
    exercises = {exercise["number"]: left for exercise in known["exercises"]}
    equations = dict.fromkeys(known["equations"], False)
    said = [asked(key, names)]
    made = {"chapter": key, "blanks": blanks, "equations": equations, "said": said}
    return made | {"exercises": exercises, "ended": "", "seconds": 0.0}
