"""Your workbook: python check.py 3 runs the checks of chapter 3 on what you wrote.

python check.py            how far you are, and what is next
python check.py --help     hints, answers, milestones and the rest
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    sys.path.insert(0, str(here / "tools"))
    try:
        from workkit.cli import main
    except ModuleNotFoundError as error:
        print(
            f"{error.name} is not installed for {sys.executable}: is that the Python of "
            "your .venv? Activate it, or install what README.md names.",
            file=sys.stderr,
        )
        sys.exit(2)
    sys.exit(main(here, sys.argv[1:]))
