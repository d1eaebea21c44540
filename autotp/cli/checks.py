"""What can be known before ranks start: half a minute earlier, and once."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable

from ..errors import AutoTPError


def nearest(name: str, names: Iterable[str]) -> str:
    """` Did you mean X?` for the name most like `name`; empty if none is."""
    found = difflib.get_close_matches(name, list(names), 1, cutoff=0.6)
    return f" Did you mean {found[0]}?" if found else ""


def check_ranks(tp: int, dp: int, gpus: int, started: int | None, launcher: str) -> None:
    """Refuse a number of ranks that the launcher did not start, or that there are no GPUs for.

    Args:
        gpus: on this machine; 0 for ranks on the CPU. started: ranks that `launcher` started on all machines, None if the
            ranks are started here.
    """
    size = tp * dp
    sizes = f"--tp {tp}" + (f" times --dp {dp}" if dp > 1 else "")
    if started is not None and started != size:
        raise AutoTPError(
            f"{launcher} started {started} rank(s), but {sizes} is {size}: start {size}, or make --tp times --dp {started}"
        )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size)) if started is not None else size
    if gpus and here > gpus:
        raise AutoTPError(
            f"{sizes} needs {here} GPUs on this machine, and it has {gpus}: lower --tp to {gpus} or less"
            f"{', or --dp' if dp > 1 else ''} (CUDA_VISIBLE_DEVICES= runs on the CPU)"
        )
