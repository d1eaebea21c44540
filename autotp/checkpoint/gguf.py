"""A GGUF file as a plain checkpoint, which is what ranks can read slices of."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from ..errors import AutoTPError, CheckpointError


def find_gguf(model: str) -> Path | None:
    """The GGUF file that `model` is, or the only one in its directory if there are no safetensors.

    Raises:
        CheckpointError: several.
    """
    path = Path(model)
    if path.suffix == ".gguf" and path.is_file():
        return path
    found = sorted(path.glob("*.gguf")) if path.is_dir() and not list(path.glob("*.safetensors")) else []
    if len(found) > 1:
        raise CheckpointError(
            f"{model} holds {len(found)} GGUF files, {', '.join(each.name for each in found)}: name one of them"
        )
    return found[0] if found else None


def convert_beside(file: Path, out: str | Path) -> Path:
    """As `convert_gguf`, into a directory `.autotp-gguf` beside the directory `out`; a file that has changed since, again."""
    state = file.stat()
    key = hashlib.sha256(f"{file.resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:8]
    return convert_gguf(file, Path(out).resolve().parent / ".autotp-gguf" / f"{file.stem}-{key}")


def convert_gguf(file: Path, directory: Path) -> Path:
    """`directory`, in which the model and tokenizer of `file` are saved with float32 weights, if they are not there yet.

    Raises:
        AutoTPError: the package gguf is missing, or transformers can't read the file.
    """
    if (directory / "config.json").exists():
        return directory
    print(f"converting {file.name} once, into {directory}", file=sys.stderr, flush=True)
    model, tokenizer = _read(file)
    partial = directory.with_name(f".{directory.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(directory)
    return directory


def _read(file: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        import gguf
    except ImportError as error:
        raise AutoTPError(f"{file} is GGUF, which needs a package more: pip install gguf") from error
    try:
        with mock.patch("gguf.get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)):  # else made for every module
            loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
        own = (file.parent / "tokenizer_config.json").exists()
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **({} if own else {"gguf_file": file.name}))
    except Exception as error:  # a reader of foreign files raises anything
        raise AutoTPError(f"transformers can't read {file} as a causal language model: {error}") from error
    config = loaded.config
    if hasattr(config, "quantization_config"):  # it describes the GGUF file, not what is saved here
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype="float32")
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    return model, tokenizer
