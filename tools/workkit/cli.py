"""The command line of the workbook."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from workkit import help as helping
from workkit import progress
from workkit.alone import quickly
from workkit.checking import check, time_ratio
from workkit.compare import compare, disagree
from workkit.report import MOST, graded, in_words, of_one
from workkit.workbook import Workbook, called

USES = """\
python check.py               how far you are, and what is next
python check.py 3             checks of chapter 3 on your code; --json FILE for a grader
python check.py 3 NAME        one definition of it, in seconds; nothing is kept of it
python check.py watch 3       the same of each definition when you save the notebook
python check.py all           checks of all chapters
python check.py hint NAME     the next hint for a definition; there are two
python check.py answer NAME   our answer, after the hints; it is noted that you saw it
python check.py lend 3        ours stand in for what does not pass up to chapter 3
python check.py return        yours or nothing again
python check.py compare NAME  yours beside ours, once it has passed: lines, time, text
python check.py disagree NAME puts your cell and the verdict into one file, for a judge
python check.py path english  what is next is then on the way to this milestone
python check.py reset NAME    empties a cell; what it held stays in yours/history.jsonl
python check.py milestone     what you have reached, and how to try the next"""

ACTIONS = helping.ACTIONS | {"compare": compare, "disagree": disagree}


def main(folder: Path, words: list[str], in_kernel: bool = False) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8")
    form = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(
        prog="check.py", description=USES, formatter_class=form
    )
    options.add_argument("what", nargs="?", default="progress", help="a chapter or a word")
    options.add_argument(
        "name", nargs="?", default="", help="a definition, a chapter or a milestone"
    )
    options.add_argument(
        "--json", type=Path, metavar="FILE", help="the result for a grader"
    )
    options.add_argument("--time", action="store_true", help="compare the time with ours")
    args = options.parse_args(words)
    try:
        return act(Workbook(folder, in_kernel), args, options)
    except KeyboardInterrupt:
        many = args.what == "all"
        print(f"\nStopped; {'what was done is kept' if many else 'nothing was changed'}.")
        return 130


def act(book: Workbook, args: argparse.Namespace, options: argparse.ArgumentParser) -> int:
    """Does what the words ask for; 0 if nothing is wrong."""
    status, key = 0, key_of(book, args.what)
    if key and args.name:
        return one(book, key, args.name)
    if args.what == "watch":
        return watch(book, args.name, options)
    if key or args.what == "all":
        keys = [key] if key else [k for k, c in book.data.items() if c["blanks"]]
        return checks(book, keys, args.json, args.time)
    if args.what == "progress":
        said = book.sync()
        print("\n".join([*said, progress.line(book)]))
    elif args.what == "milestone":
        status = progress.show(book, args.name)
    elif args.what == "path":
        status = progress.choose(book, args.name)
    elif args.what in ACTIONS:
        said = ACTIONS[args.what](book, key_of(book, args.name) or args.name)
        print("\n".join([*book.asides, said]))
    elif looks_like_key(args.what):
        print(no_chapter(book, args.what), file=sys.stderr)
        return 2
    else:
        options.error(f"what is {args.what}?\n\n{USES}")
    progress.write_page(book)
    return status


def one(book: Workbook, key: str, word: str) -> int:
    """Checks a definition of a chapter by itself, quickly."""
    known = book.data[key]
    names = [n for n, b in known["blanks"].items() if word in (n, b["symbol"])]
    if not names:
        there = ", ".join(f"`{b['symbol']}`" for b in known["blanks"].values())
        print(f"There is no definition {word} in {called(key)}; there are {there}.")
        return 2
    for line in book.sync():
        print(line)
    return tell(book, key, names[0])


def tell(book: Workbook, key: str, name: str) -> int:
    """Says what is found of one definition; 0 if it passes."""
    found = quickly(book, key, name)
    lines = of_one(book, book.data[key], name, found)
    if found["state"] == "passed":
        lines += [f"Nothing is kept of it: python check.py {key.lstrip('0')} checks all."]
    print("\n".join(lines), flush=True)
    return int(found["state"] != "passed")


def watch(book: Workbook, word: str, options: argparse.ArgumentParser) -> int:
    """Checks each definition of a chapter that has changed, whenever it is saved."""
    if not (key := key_of(book, word)):
        options.error("watch which chapter? For example: check.py watch 3")
    file, seen = book.folder / "book" / book.data[key]["file"], 0
    print(f"{file.name} is watched; Ctrl-C ends it.", flush=True)
    before = dict(book.store.answers)
    while True:
        if file.exists() and file.stat().st_mtime_ns != seen:  # an editor may replace it
            seen = file.stat().st_mtime_ns
            book = Workbook(book.folder)
            for line in book.sync():
                print(line, flush=True)
            now = book.store.answers
            for name in book.data[key]["blanks"]:
                if name in now and now[name] != before.get(name):
                    tell(book, key, name)
            before = dict(now)
        time.sleep(0.3)


def key_of(book: Workbook, word: str) -> str:
    """`03` for 3, 03 or 03_causal_attention; empty if it is no chapter."""
    word = word.partition("_")[0]
    wanted = f"{int(word):02d}" if word.isdigit() else word
    return wanted if wanted in book.data else ""


def looks_like_key(word: str) -> bool:
    return word.partition("_")[0].isdigit() or len(word) == 1


def no_chapter(book: Workbook, word: str) -> str:
    """Which chapters there are: those in which something is to be written."""
    keys = [key.lstrip("0") for key, known in book.data.items() if known["blanks"]]
    numbers = [key for key in keys if key.isdigit()]
    others = "".join(f" and {key}" for key in keys if not key.isdigit())
    there = f"{numbers[0]} to {numbers[-1]}{others}"
    return f"there is no chapter {word}; chapters are {there}"


def checks(book: Workbook, keys: list[str], file: Path | None, timed: bool) -> int:
    """Checks chapters, prints what came of each; 0 if all of it passes."""
    grades, good = [], True
    for key in keys:
        result = check(book, key)
        states = [found["state"] for found in result["blanks"].values()]
        good = good and all(state == "passed" for state in states)
        if timed and all(state == "passed" for state in states):
            result["ratio"] = time_ratio(book, key)
            good = good and result["ratio"] <= MOST
        print(in_words(book, result), flush=True)
        grades.append(graded(book, result))
    if file:
        text = json.dumps({"chapters": grades}, indent=1, ensure_ascii=False)
        file.write_text(text + "\n", encoding="utf-8")
    progress.write_page(book)
    return 0 if good else 1
