"""What to say of a path that is not there."""

from __future__ import annotations

import difflib
import os
from pathlib import Path


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
