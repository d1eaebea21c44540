"""Paths that a run can't use, and what to say of them."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from ..errors import AutoTPError


def nearest_path(path: str | os.PathLike) -> str:
    """` Did you mean X?` for a path that is not there, by its first missing part; empty if nothing beside that is like it."""
    whole = Path(path)
    for part in [*reversed(whole.parents), whole]:
        if part.exists():
            continue
        try:
            beside = os.listdir(part.parent)
        except OSError:
            return ""
        found = difflib.get_close_matches(part.name, beside, 1, cutoff=0.6)
        return f" Did you mean {part.parent / found[0] / whole.relative_to(part)}?" if found else ""
    return ""


def check_out(path: str) -> None:
    """Refuse a place where no directory can be made."""
    for part in [Path(path), *Path(path).parents]:
        if part.exists():
            if not part.is_dir():
                raise AutoTPError(f"--out {path}: {part} is a file, not a directory")
            if not os.access(part, os.W_OK):
                raise AutoTPError(f"--out {path}: {part} can't be written to")
            return
