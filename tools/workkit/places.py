"""Where an error came, in the reader's own lines."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from pathlib import Path


def place_of(error: BaseException, cells: Iterable[str] = ()) -> str:
    """The last line that was running in the reader's cells, or in the package."""
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    for frame in frames:
        if (name := frame.filename.strip("<>")) in cells:
            return f"in line {frame.lineno} of your {name}: {frame.line}"
    for frame in frames:
        if "attnlib" in Path(frame.filename).parts[-3:]:
            file = frame.filename[frame.filename.rindex("attnlib") :]
            return f"in line {frame.lineno} of {file}: {frame.line}"
    return ""
