"""What can be known before ranks start: half a minute earlier, and once."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import AutoTPError


def nearest(name: str, names: Iterable[str]) -> str:
    """` Did you mean X?` for the name most like `name`; empty if none is."""
    found = difflib.get_close_matches(name, list(names), 1, cutoff=0.6)
    return f" Did you mean {found[0]}?" if found else ""


def nearest_path(path: str | os.PathLike) -> str:
    """The same for a path that is not there: its first part that is missing, among those beside it."""
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


def check_tokenizer(model: str) -> None:
    """Refuse a model whose tokenizer can't be loaded, or is empty because its files are missing."""
    from transformers import AutoTokenizer

    way_out = "copy tokenizer.json and tokenizer_config.json of the model into its directory"
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except Exception as error:  # transformers raises whatever its many tokenizers do where files are missing
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise AutoTPError(f"{model} has no tokenizer that transformers can load ({said[0]}): {way_out}") from error
    if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids):
        raise AutoTPError(f"{model} has no tokenizer: its vocabulary is empty, as its files are missing. {way_out.capitalize()}")


def check_text(option: str, path: str) -> None:
    """Refuse a data file that is not there, empty, or may not be read."""
    if Path(path).is_dir():
        return  # a file that is wrong in another way
    check_file(option, path)
    try:
        with open(path, "rb") as file:
            first = file.read(1)
    except OSError as error:
        raise AutoTPError(f"{option} {path} can't be read: {error.strerror or error}") from error
    if not first:
        raise AutoTPError(f"{option} {path} is empty: there is nothing to train on")


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
