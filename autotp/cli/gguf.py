"""A GGUF file as a plain checkpoint, which is what ranks can read slices of."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path

from ..errors import AutoTPError


def convert_gguf(file: Path, beside: Path) -> Path:
    """The checkpoint of `file` with float32 weights, made once in a directory `.autotp-gguf` beside the directory `beside`.

    A file that has changed since is converted again.

    Raises:
        AutoTPError: the package gguf is missing, or transformers can't read the file.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    state = file.stat()
    key = hashlib.sha256(f"{file.resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:8]
    directory = beside.resolve().parent / ".autotp-gguf" / f"{file.stem}-{key}"
    if (directory / "config.json").exists():
        return directory
    print(f"converting {file.name} once, into {directory}", file=sys.stderr, flush=True)
    try:
        loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except ImportError as error:
        raise AutoTPError(f"{file} is GGUF, which needs a package more: pip install gguf ({error})") from error
    except Exception as error:  # a reader of foreign files raises anything
        raise AutoTPError(f"transformers can't read {file} as a causal language model: {error}") from error
    config = loaded.config
    if hasattr(config, "quantization_config"):  # it describes the GGUF file, not what is saved here
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype="float32")
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=directory.parent))
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(directory)
    return directory
