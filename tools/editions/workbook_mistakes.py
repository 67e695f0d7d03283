"""Write book/workbook/NN_name.json: what each kept mistake computes in the checks.

A mistake of `book/faults/` can be made by a reader of the workbook if it changes a
definition that the reader writes, or answers an exercise. It is entered as the answer, the
checks run as for a reader, and the digits of every assertion that fails are kept: by them,
and by nothing else, the workbook knows the mistake again. --check only compares. It is an
error if fewer than nine of ten are named.

`python tools workbook_mistakes 01`; it takes about a minute for a chapter, on Linux.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run by its path

from bookkit.chapters import BookError, Chapter, parser, read_chapters, run, write_text
from bookkit.execute import select
from bookkit.mistakes import read_faults
from editions.workbook_bench import Bench
from workkit.known import signature
from workkit.naming import judge


def mistakes_of(bench: Bench, chapter: Chapter) -> list[dict[str, Any]]:
    """Each mistake that a reader can make, with the digits of what it makes fail."""
    faults = read_faults(bench.root, chapter)
    tried = [f for f in faults if f.kind != "equation"]
    answers = [(f.subject, f"# Exercise {f.subject}: yours\n{f.answer}") for f in tried]
    digits = {
        str(f): ([], d)
        for f, d in zip(tried, bench.try_answers(chapter.key, answers), strict=True)
    }
    runs: list[tuple[dict, list]] = []  # a mistake kept for two equations is tried once
    for fault in faults:
        entered = bench.entered(chapter, fault) if fault.kind == "equation" else {}
        if entered and entered not in [tried for tried, _ in runs]:
            notes = bench.try_out(chapter.key, entered)
            if notes is None:
                raise BookError(f"{chapter.name}: the run of {fault} ended before its end")
            runs.append((entered, notes))
            digits[str(fault)] = sorted(entered), signature(notes)
    found, count = [], {"named": 0, "NOT NAMED": 0, "NOT SEEN": 0}
    for fault in (f for f in faults if str(f) in digits):
        blanks, kept = digits[str(fault)]
        made = {"subject": fault.subject, "mistake": fault.mistake}
        found.append(made | {"blanks": blanks, "signature": kept})
    known = bench.data[chapter.key] | {"mistakes": found}
    said = {text for _, notes in runs for text in told(known, notes)}
    for made in found:
        kept = made["signature"]
        how = "named" if made["mistake"] in said or not made["blanks"] else "NOT NAMED"
        how = how if kept and kept[0][1] != "passed" else "NOT SEEN"
        count[how] += 1
        print(f"{how:9} {made['subject']}: {made['mistake']}", file=sys.stderr, flush=True)
    print(f"{chapter.key}: {count['named']} of {len(found)} named", flush=True)
    if count["named"] < 0.9 * len(found):
        raise BookError(f"{chapter.name}: fewer than nine of ten are named")
    return found


def told(known: dict[str, Any], notes: list[dict]) -> list[str]:
    """The mistakes that a reader is told of, who has written everything."""
    found = judge(known, notes, dict.fromkeys(known["blanks"], "written"))
    return [text for blank in found.values() for text in blank.get("mistakes", [])]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("chapters", nargs="+", help="such as 01")
    options.add_argument("--check", action="store_true", help="only compare, write nothing")
    args = options.parse_args()
    import torch
    from matplotlib import pyplot  # noqa: F401

    torch.set_num_threads(1)
    stale = []
    with tempfile.TemporaryDirectory() as made:
        bench = Bench(args.root.resolve(), Path(made))
        for chapter in select(read_chapters(args.root), args.chapters, args.root):
            found = mistakes_of(bench, chapter)
            lines = ",\n".join(json.dumps(m, ensure_ascii=False) for m in found)
            text = f'{{"mistakes": [\n{lines}\n]}}\n'
            path = args.root / "book" / "workbook" / f"{chapter.name}.json"
            if args.check and (not path.exists() or path.read_text("utf-8") != text):
                stale.append(path.name)
            elif not args.check:
                write_text(path, text)
    if stale:
        raise BookError(f"stale: {', '.join(stale)}; run python tools workbook_mistakes")
    return 0


if __name__ == "__main__":
    run(main)
