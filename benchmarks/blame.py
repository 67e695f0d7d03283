"""Mistakes that nobody wrote down, in the workbook: is the right definition blamed?

In each chapter, some of our answers are changed in one place by a program, as in
mutants.py; all else is ours. `check.py NN` then has to fail the definition that was changed
and no other, and to name no known mistake, unless it is this one. What passes may be no
mistake at all; those and the names given stand in the record, to be judged by eye.

    python benchmarks/blame.py            writes results/blame.json, in two hours
    python benchmarks/blame.py 10 13      renews what it says of these chapters
"""

import argparse
import ast
import itertools
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from changes import mutants
from paired import write_record

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "tools")]

from editions.reflow import answers_of  # noqa: E402
from editions.workbook import write_workbook  # noqa: E402
from editions.workbook_record import read_book  # noqa: E402
from workbench import check, write  # noqa: E402
from workkit.package import read_data  # noqa: E402

NAMED = ("These are the numbers of", "Either: ", "or: ")


def changed(answers: dict[str, str], count: int) -> list[tuple[str, dict, str]]:
    """Some changes of a chapter's answers, from each definition in turn.

    Each is the definition's name, the place of the change, and the changed answer.
    """
    draw, each = random.Random(7), []
    for name, answer in answers.items():
        head = answer.partition("\n")[0]
        own = [(name, m.place, f"{head}\n{ast.unparse(m.tree)}\n") for m in mutants(answer)]
        draw.shuffle(own)
        each.append(own)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*each))
    return [one for one in turns if one][:count]


def judged(folder: Path, key: str, name: str) -> dict[str, Any]:
    """What a check says: which definitions fail, and which mistakes are named."""
    said = folder / "grade.json"
    done = check(folder, key, "--json", said)
    if not said.exists():
        return {"verdict": "no answer", "said": (done.stdout + done.stderr)[-600:]}
    (grade,) = json.loads(said.read_text("utf-8"))["chapters"]
    ours = ("definition", "equation")  # the exercises are not written
    missed = [t for t in grade["tests"] if not t["score"] and t["kind"] in ours]
    outputs = {t["name"]: t["output"] for t in missed if t["kind"] == "definition"}
    failed = [n for n, output in outputs.items() if output != "waits"]
    lines = [line for output in outputs.values() for line in output.splitlines()]
    named = [line for line in lines if line.startswith(NAMED)]
    verdict = "right" if failed == [name] else "wrong" if missed else "passed"
    return {"verdict": verdict, "failed": failed, "named": named}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("chapters", nargs="*", help="such as 10")
    parser.add_argument("--count", type=int, default=10, help="mistakes in each chapter")
    args = parser.parse_args()
    path, found = Path(__file__).parent / "results" / "blame.json", {}
    if args.chapters and path.exists():
        found = json.loads(path.read_text("utf-8"))["chapters"]
    book = read_book(ROOT)
    answers = {c.key: answers_of(book.shown(c)) for c in book.chapters}
    with tempfile.TemporaryDirectory() as made:
        clean = Path(made, "clean")
        write_workbook(ROOT, clean, None)
        write(clean, {n: a for own in answers.values() for n, a in own.items()})
        for key in args.chapters or [k for k, known in read_data(clean).items() if known]:
            rows = []
            for name, place, answer in changed(answers[key], args.count):
                folder = shutil.copytree(clean, Path(made, "workbook"))
                write(folder, {name: answer})
                rows.append({"name": name, **place, **judged(folder, key, name)})
                shutil.rmtree(folder)
                print(key, name, place["change"], "|", rows[-1]["verdict"], flush=True)
            if rows:
                found[key] = rows
                write_record("blame", {"chapters": dict(sorted(found.items()))})
    right = sum(r["verdict"] == "right" for rows in found.values() for r in rows)
    print(f"{right} of {sum(map(len, found.values()))} blamed rightly")


if __name__ == "__main__":
    main()
