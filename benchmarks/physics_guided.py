"""Relative errors of the network of chapter 6, with and without physical guidance.

Runs the chapter's own cells, those tagged `burgers`, for five seeds each way.

    python benchmarks/physics_guided.py    writes results/physics_guided.json
"""

import argparse
import copy
import math
import time
from pathlib import Path
from typing import Any

import nbformat
import torch
from paired import write_record
from torch import nn

from attnlib import MultiHeadAttention, PhysicsGuidedAttention

ROOT = Path(__file__).resolve().parent.parent


def chapter_code() -> dict[str, Any]:
    """What the tagged cells of the chapter define."""
    notebook = nbformat.read(ROOT / "book" / "06_heads_to_plug_in.ipynb", as_version=4)
    names: dict[str, Any] = {"math": math, "torch": torch, "nn": nn}
    names |= {"MultiHeadAttention": MultiHeadAttention}
    names |= {"PhysicsGuidedAttention": PhysicsGuidedAttention}
    for cell in notebook.cells:
        if "burgers" in cell.metadata.get("tags", []):
            exec(cell.source, names)
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    code = chapter_code()
    found: dict[str, list[float]] = {"not guided": [], "guided": [], "moved": []}
    for seed in range(options.seeds):
        for name in ("not guided", "guided"):
            start = time.perf_counter()
            u = code["solve"](name == "guided", seed, options.steps)
            error = code["relative_error"](u)
            found[name].append(error)
            if name == "guided":
                before = copy.deepcopy(u)
                code["renew"](u)
                found["moved"].append(code["relative_error"](u, before))
            seconds = time.perf_counter() - start
            print(f"seed {seed}, {name}: {error:.2e}, {seconds:.0f} s", flush=True)
    record = {
        "seeds": options.seeds,
        "steps": options.steps,
        **found,
    }
    write_record("physics_guided", record)


if __name__ == "__main__":
    main()
