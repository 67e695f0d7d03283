"""Write book/workbook/NN_name.json: what each kept mistake computes in the checks.

A mistake of `book/faults/` can be made by a reader of the workbook if it changes a
definition that the reader writes, or answers an exercise. It is entered as the answer, the
checks run as for a reader, and the digits of every assertion that fails are kept: by them,
and by nothing else, the workbook knows the mistake again. One that the reader would not be
told of all the same has `"named": false`; more than one of ten are an error.

`python tools workbook_mistakes 01`; it takes a few seconds for each mistake, on Linux.
--only eq-softmax, or 1.2, enters the mistakes of one equation or exercise and leaves the
other lines as they are. --check 4 enters four of a chapter, or as many as there are, and
only sees whether they are named; --stale enters none, and says what is to be done.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run by its path

from bookkit.chapters import BookError, Chapter, parser, read_chapters, run
from bookkit.execute import select
from bookkit.mistakes import Fault, read_faults
from editions.workbook_record import (
    checks_of,
    entered,
    owed,
    read_record,
    seal,
    write_record,
)
from workkit.naming import named, signature

if TYPE_CHECKING:  # it loads PyTorch
    from editions.workbook_bench import Bench


def renewed(bench: Bench, chapter: Chapter, only: str | None) -> dict[str, Any]:
    """The record of a chapter, with new lines for all mistakes, or those of one subject."""
    faults, record = read_faults(bench.root, chapter), read_record(bench.root, chapter)
    old = [m for m in record["mistakes"] if only not in (None, m["subject"])]
    answered = [f for f in faults if f.answer and only in (None, f.subject)]
    digits = bench.try_answers(chapter.key, [(f.subject, f.answer) for f in answered])
    new = [line(f, [], said) for f, said in zip(answered, digits, strict=True)]
    silent = [made for made in new if made["signature"][0][1] == "passed"]
    runs = []
    for fault, mine in can_be_entered(bench, chapter):
        if only in (None, fault.subject):
            notes = noted(bench, chapter, fault, mine)
            runs.append((line(fault, sorted(mine), signature(notes)), notes))
    new += [made for made, _ in runs]
    if not new:
        raise BookError(f"{chapter.name}: in {only}, a reader can make no mistake")
    silent += [made for made, notes in runs if made["mistake"] not in named([made], notes)]
    for made in silent:
        made["named"] = False
        print(f"not named: {made['subject']}: {made['mistake']}", file=sys.stderr)
    lines = {(m["subject"], m["mistake"]): m for m in [*old, *new]}
    order = [(f.subject, f.mistake) for f in faults]
    checks = record["checks"] if only else checks_of(bench.root, chapter)
    return {"checks": checks, "mistakes": [lines[name] for name in order if name in lines]}


def line(fault: Fault, blanks: list[str], digits: list) -> dict[str, Any]:
    """What is kept of a mistake."""
    made = {"subject": fault.subject, "mistake": fault.mistake}
    made |= {"blanks": blanks, "signature": digits}
    return made | {"seal": seal(fault, made)}


def can_be_entered(bench: Bench, chapter: Chapter) -> list[tuple[Fault, dict[str, str]]]:
    """The mistakes of a chapter's equations, each with what a reader writes then."""
    ours = {name: bench.ours[name] for name in bench.data[chapter.key]["blanks"]}
    return entered(read_faults(bench.root, chapter), ours)


def noted(bench: Bench, chapter: Chapter, fault: Fault, mine: dict) -> list[dict]:
    """What the checks note of a mistake."""
    notes = bench.try_out(chapter.key, mine)
    if notes is None:
        raise BookError(f"{chapter.name}: the run of {fault} ended before its end")
    return notes


def check(bench: Bench, chapter: Chapter, most: int) -> None:
    """Enters so many mistakes, at even distances: all but the silent ones are named."""
    known, tried = bench.data[chapter.key], can_be_entered(bench, chapter)
    silent = {m["mistake"] for m in known["mistakes"] if "named" in m}
    for fault, mine in tried[:: max(1, -(-len(tried) // most))]:
        said = named(known["mistakes"], noted(bench, chapter, fault, mine))
        if fault.mistake not in {*said, *silent}:
            raise BookError(f"{chapter.name}: named is {said or 'nothing'}, not {fault}")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("chapters", nargs="+", help="such as 01")
    options.add_argument("--only", metavar="SUBJECT", help="such as eq-softmax, or 1.2")
    options.add_argument("--stale", action="store_true", help="say what is to be done")
    options.add_argument("--check", type=int, metavar="COUNT", help="see whether named")
    args = options.parse_args()
    root = args.root.resolve()
    chapters = select(read_chapters(root), args.chapters, root)
    if args.stale:
        said = [text for chapter in chapters for text in owed(root, chapter)]
        print("\n".join(dict.fromkeys(said)))
        return int(bool(said))
    os.environ["OMP_NUM_THREADS"] = "1"  # before NumPy is loaded: as for a reader
    import torch
    from matplotlib import pyplot  # noqa: F401

    from editions.workbook_bench import Bench

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        bench = Bench(root, Path(made))
        for chapter in chapters:
            if args.check:
                check(bench, chapter, args.check)
                continue
            record = renewed(bench, chapter, args.only)
            count = len(record["mistakes"])
            silent = sum("named" in made for made in record["mistakes"])
            print(f"{chapter.key}: {count - silent} of {count} named", flush=True)
            if silent > count / 10:
                raise BookError(f"{chapter.name}: fewer than nine of ten are named")
            write_record(root, chapter, record)
    return 0


if __name__ == "__main__":
    run(main)
