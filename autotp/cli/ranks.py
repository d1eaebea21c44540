"""Ranks as a command sees them: who of them speaks, and what is said of one that failed."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..errors import AutoTPError
from ..train.launch import RankFailed, launch_ranks, under_torchrun
from ..train.options import TrainOptions
from .screen import paint


class SpokenFor(Exception):
    """An error of which another rank tells the user."""


class Failure(AutoTPError):
    """What went wrong, and the file `log` with all that the ranks said of it."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


def is_other_rank() -> bool:
    """Whether a launcher started this process beside a rank 0 that speaks for all."""
    return under_torchrun() and os.environ["RANK"] != "0"


def say_error(error: BaseException, log: str = "") -> None:
    """One line on stderr, and a second one that names the file with full traces, if there is one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    known = isinstance(error, AutoTPError | OSError)
    said = " ".join(lines) if known else f"{type(error).__name__}: {' '.join(lines)}"
    print(f"{paint('autotp: error:', 'red', sys.stderr)} {said}", file=sys.stderr)
    log = log or (error.log if isinstance(error, Failure) else "")
    if log:
        print(f"autotp: full traces: {log}", file=sys.stderr, flush=True)


def write_trace(text: str, log: str | None = None) -> str:
    """Append `text` to the file `log`, or put it in a new one in the temporary directory; the file's path."""
    if log is None:
        file, log = tempfile.mkstemp(prefix="autotp-", suffix=".log")
        os.close(file)
    with open(log, "a", encoding="utf-8") as stream:
        stream.write(text)
    return log


def run_ranks(
    work: Callable[..., Any], size: int, *args: Any, log: str | None = None, on_message: Callable[[Any], None] | None = None
) -> Any:
    """`launch_ranks`, with what the ranks print in a file, which is kept only if one fails or it was named.

    Raises:
        Failure: a rank failed.
    """
    path = log or write_trace("")
    try:
        result = launch_ranks(work, size, *args, log=path, on_message=on_message)
    except RankFailed as error:
        write_trace(f"\n=== {error}\n{error.traces}", path)
        raise Failure(explain_end(error, size), path) from error
    except BaseException:
        _forget(path, log)
        raise
    _forget(path, log)
    return result


def _forget(path: str, log: str | None) -> None:
    file = Path(path)
    if log is None or (file.is_file() and not file.stat().st_size):  # ranks that ended early have made none
        file.unlink(missing_ok=True)


def explain_end(error: RankFailed, size: int) -> str:
    """What is said of the rank that failed first: its own message, or how it ended and what that usually means."""
    if not error.how.startswith(("SIG", "exit code")):
        return str(error)
    others = f" The other {size - 1} rank(s) were ended." if size > 1 else ""
    hint = "autotp sends no signals of its own."
    if error.how == "SIGKILL":
        hint = (
            "Someone killed it, or the system did as memory ran out (`dmesg | tail` tells): lower --batch-size or --seq-length."
        )
    elif error.how in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE"):
        hint = "It crashed in compiled code; the file below may hold what that said. SIGBUS is often a full /dev/shm."
    return f"{error}.{others} {hint}"


def is_memory_error(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or for torch on the CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def explain_memory(error: BaseException, options: TrainOptions) -> str:
    """The numbers that torch gives, the options that take memory, and which of them to change."""
    sentences = re.split(r"(?<=[.!])\s+", str(error).strip())
    numbers = [sentence for sentence in sentences if re.search(r"\d", sentence) and "http" not in sentence][:3]
    ways = []
    if options.batch_size > 1:
        ways.append(f"--batch-size {options.batch_size // 2} --grad-accum {options.grad_accum * 2} (nearly the same steps)")
    if not options.gradient_checkpointing:
        ways.append("--gradient-checkpointing")
    if options.dtype == "float32":
        ways.append("--dtype bfloat16")
    if options.seq_length > 128:
        ways.append(f"--seq-length {options.seq_length // 2}")
    ways.append(f"--tp {options.tp * 2} where there are GPUs for it")
    given = f"--batch-size {options.batch_size} --seq-length {options.seq_length} --tp {options.tp} --dtype {options.dtype}"
    return f"out of memory with {given}: {' '.join(numbers) or 'torch gives no numbers.'} Ways out: {'; '.join(ways)}"
