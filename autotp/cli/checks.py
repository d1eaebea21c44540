"""What can be known before ranks start: half a minute earlier, and once."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import AutoTPError
from ..train.paths import nearest_path


def nearest(name: str, names: Iterable[str]) -> str:
    """` Did you mean X?` for the name most like `name`; empty if none is."""
    found = difflib.get_close_matches(name, list(names), 1, cutoff=0.6)
    return f" Did you mean {found[0]}?" if found else ""


def load_config(model: str) -> Any:
    """The config of a hub id or a directory.

    Raises:
        AutoTPError: there is none, or this transformers doesn't know it.
    """
    from transformers import AutoConfig

    _check_directory(model)
    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise AutoTPError(
            f"can't read the config of {model}, neither a directory with one nor a hub id that is known here: "
            f"{error}{nearest_path(model)}"
        ) from error


def _check_directory(model: str) -> None:
    """Refuse what looks like a path and is none; a hub id is `name` or `owner/name`."""
    path = Path(model).expanduser()
    looks = model.startswith(("/", ".", "~")) or model.count("/") > 1
    if looks and not path.exists():
        raise AutoTPError(f"MODEL {model}: there is no such directory.{nearest_path(path)}")


def check_file(option: str, path: str) -> None:
    """Refuse a file that is not there."""
    if not Path(path).is_file():
        raise AutoTPError(f"{option} {path}: there is no such file.{nearest_path(path)}")


def check_out(path: str) -> None:
    """Refuse a place where no directory can be made."""
    for part in [Path(path), *Path(path).parents]:
        if part.exists():
            if not part.is_dir():
                raise AutoTPError(f"--out {path}: {part} is a file, not a directory")
            if not os.access(part, os.W_OK):
                raise AutoTPError(f"--out {path}: {part} can't be written to")
            return


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
