"""What only some chapters need: which of it is not here."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

from workkit.closure import imported
from workkit.earlier import called
from workkit.ranks import starts_processes

SOME = ("safetensors", "tokenizers", "transformers")
GET = "python -m pip install -r requirements.txt"
FORK = "a system that can copy a process"


def absent(known: dict[str, Any]) -> list[str]:
    """The libraries that the cells of a chapter import and that are not here, and FORK."""
    wanted = {name.partition(".")[0] for name in imported(known["cells"])}
    lacking = [name for name in SOME if name in wanted and find_spec(name) is None]
    copied = sys.platform == "linux" or not starts_processes(known["cells"])
    return lacking if copied else [*lacking, FORK]


def asked(key: str, names: list[str]) -> str:
    """One line for the reader."""
    if FORK in names:
        where = "they run on Linux, or on Windows in WSL"
        return f"The checks of {called(key)} start copies of a process: {where}"
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
