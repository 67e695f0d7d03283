"""Run one of these programs: python tools NAME …, such as python tools tangle --check.

Python looks for imports in the folder that it runs, this one: so the rooms find each other.
"""

import runpy
import sys
from pathlib import Path

MAIN = 'if __name__ == "__main__":'
HERE = Path(__file__).parent
PROGRAMS = {
    path.stem: ".".join(path.relative_to(HERE).with_suffix("").parts)
    for path in sorted(HERE.rglob("*.py"))
    if path.name != "__main__.py" and MAIN in path.read_text(encoding="utf-8")
}

if __name__ == "__main__":
    del sys.argv[0]
    if not sys.argv or sys.argv[0] not in PROGRAMS:
        sys.exit(f"python tools NAME, where NAME is one of: {', '.join(PROGRAMS)}")
    runpy.run_module(PROGRAMS[sys.argv[0]], run_name="__main__", alter_sys=True)
