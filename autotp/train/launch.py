"""Start one process per rank on this machine, watch them, and end them together."""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ..errors import AutoTPError

# For the others to say what they saw, after a failure; to be gone once they are killed; to end after they are done.
GRACE_S, END_S, FINISH_S = 1.0, 2.0, 30.0
START = "spawn"  # how a rank's process begins: with nothing of this one, whose threads or GPU a copy could not use
_LOST = re.compile(r"connection|socket|broken pipe|nccl|peer|timed out|store", re.IGNORECASE)
_SAVING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_pipe: list[Connection] = []  # in a rank: the way to the process that started it


class RankFailed(AutoTPError):
    """A rank raised, or ended without a word; the others were ended.

    Attributes:
        rank: the one that failed first; how: the exception's type, the signal's name, or the exit code.
        cause: the exception itself, if it could be sent; traces: tracebacks of all ranks that raised, as text.
    """

    def __init__(self, rank: int, how: str, message: str, cause: BaseException | None = None, traces: str = "") -> None:
        super().__init__(message)
        self.rank, self.how, self.cause, self.traces = rank, how, cause, traces


def under_torchrun() -> bool:
    """Whether the ranks run already, started by torchrun or another launcher that sets its variables."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def send_message(message: Any) -> bool:
    """In a rank that `launch_ranks` started: give `message` (picklable) to its `on_message`; False in any other process."""
    for pipe in _pipe:
        pipe.send(("message", message))
    return bool(_pipe)


def launch_ranks(
    work: Callable[..., Any],
    size: int,
    *args: Any,
    log: str | os.PathLike | None = None,
    on_message: Callable[[Any], None] | None = None,
) -> Any:
    """Run `work(*args)` in `size` processes with torchrun's variables set; returns what rank 0's returned.

    A rank that fails, or is killed, ends the others within seconds. The first SIGINT or SIGTERM is handed to every rank once
    (KeyboardInterrupt where `work` has no handler of its own) and they may finish in their own time; the second kills them.

    Args:
        work: a function that the new processes can import.
        size: number of processes.
        args: picklable.
        log: a file to which the ranks' stdout and stderr are appended; None leaves them as they are.
        on_message: called with what the ranks hand to `send_message`.

    Raises:
        AutoTPError: more ranks than GPUs.
        RankFailed: a rank failed: its number and its own error.
        KeyboardInterrupt: the ranks ended because of a signal.
    """
    if torch.cuda.is_available() and size > torch.cuda.device_count():
        raise AutoTPError(f"{size} ranks need {size} GPUs, and this machine has {torch.cuda.device_count()}: lower --tp")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // size)))
    # The store takes a free port and keeps it, so that no other process can come between.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with _Ranks(work, size, args, store.port, log) as ranks:
        return ranks.watch(on_message or (lambda message: None))


class _Ranks:
    """The processes, seen from the one that starts them."""

    def __init__(self, work: Callable, size: int, args: tuple, port: int, log: str | os.PathLike | None) -> None:
        context = mp.get_context(START)
        self.size, self.signals, self.forwarded = size, 0, 0
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        self.results: dict[int, Any] = {}
        self.failures: dict[int, dict[str, Any]] = {}
        resource_tracker.ensure_running()  # its start unblocks the signals again, and the first rank would start with them
        with _blocked_signals():  # the ranks inherit this, and begin to listen when they can
            for rank in range(size):
                ours, theirs = context.Pipe(duplex=False)
                job = (rank, size, port, theirs, None if log is None else str(log), work, args)
                process = context.Process(target=_serve, args=job, daemon=True)
                process.start()
                theirs.close()
                self.pipes.append(ours)
                self.processes.append(process)

    def __enter__(self) -> _Ranks:
        self.kept: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self.kept = {number: signal.signal(number, self._count) for number in _SAVING_SIGNALS}
        return self

    def __exit__(self, *error: Any) -> None:
        for process in self.processes if error[0] is None else ():
            process.join(FINISH_S)  # what they still write at their end
        for number, handler in self.kept.items():
            signal.signal(number, handler)
        for process in self.processes:
            if process.is_alive():  # not SIGTERM, at which a rank may begin to save what it can't finish
                process.kill()
        for process in self.processes:
            process.join(END_S)
        for pipe in self.pipes:
            pipe.close()

    def _count(self, number: int, frame: Any) -> None:
        self.signals += 1

    def watch(self, on_message: Callable[[Any], None]) -> Any:
        """Until all ranks are done, or one failed and the others had time to say what they saw."""
        until = None
        while len(self.results) + len(self.failures) < self.size:
            if self.signals > 1:
                raise KeyboardInterrupt
            if self.signals > self.forwarded:
                self.forwarded = self.signals
                self._forward()
            if until is not None and time.monotonic() > until:
                break
            self._read(on_message)
            if self.failures and until is None:
                until = time.monotonic() + GRACE_S
        if self.failures:
            self._raise()
        return self.results[0]

    def _forward(self) -> None:
        for process in self.processes:
            if process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGINT)

    def _read(self, on_message: Callable[[Any], None]) -> None:
        """What the ranks sent or how they ended, for at most a moment."""
        open_ranks = [rank for rank in range(self.size) if rank not in self.results and rank not in self.failures]
        ready = wait([self.pipes[rank] for rank in open_ranks], timeout=0.1)  # a pipe is ready too when its rank has ended
        for rank in open_ranks:
            if self.pipes[rank] not in ready:
                continue
            try:
                kind, value = self.pipes[rank].recv()
            except (EOFError, OSError):
                self.processes[rank].join(END_S)
                self.failures[rank] = _describe_end(rank, self.processes[rank])
                continue
            if kind == "message":
                on_message(value)
            else:
                (self.results if kind == "result" else self.failures)[rank] = value

    def _raise(self) -> None:
        """The failure of the rank that others lost, not of those that lost it."""
        rank = min(self.failures, key=lambda rank: (self.failures[rank]["lost"], self.failures[rank]["time"]))
        failure = self.failures[rank]
        if self.signals and any(each["how"] in ("KeyboardInterrupt", "SIGINT") for each in self.failures.values()):
            raise KeyboardInterrupt
        traces = "\n".join(f"--- rank {rank}\n{each['trace']}" for rank, each in sorted(self.failures.items()))
        cause = None
        if failure["pickled"] is not None:
            with suppress(Exception):  # an exception whose constructor wants other arguments
                cause = pickle.loads(failure["pickled"])
        raise RankFailed(rank, failure["how"], f"rank {rank} failed: {failure['message']}", cause, traces) from cause


def _describe_end(rank: int, process: Any) -> dict[str, Any]:
    """A rank that ended without an exception: killed by a signal, or by an exit in C code."""
    code = process.exitcode
    if code is not None and code < 0:
        how = signal.Signals(-code).name
        message = f"process {process.pid} was killed by {how}"
    else:
        how = f"exit code {code}"
        message = f"process {process.pid} ended with {how} and no error"
    return dict(how=how, message=message, lost=False, time=time.time(), trace=f"{message}\n", pickled=None)


@contextmanager
def _blocked_signals() -> Iterator[None]:
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, _SAVING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept)


# -- in a rank -----------------------------------------------------------------------------------------------------------


def _serve(rank: int, size: int, port: int, pipe: Connection, log: str | None, work: Callable, args: tuple) -> None:
    """What a started process runs: `work`, and word of how it went."""
    if log is not None:
        _redirect(log)
    _listen()
    names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_ADDR="localhost", MASTER_PORT=port)
    os.environ.update({name: str(value) for name, value in names.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    _pipe.append(pipe)
    code = 1
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SAVING_SIGNALS)
        result = work(*args)
        pipe.send(("result", result if rank == 0 else None))
        code = 0
    except BaseException as error:  # a rank that says nothing would be taken for one that was killed
        signal.pthread_sigmask(signal.SIG_BLOCK, _SAVING_SIGNALS)
        if log is not None:
            traceback.print_exc()
        pipe.send(("failure", _describe(error)))
    if code:  # at once: what waits for other ranks at exit would wait for ever
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(log: str) -> None:
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for number in (1, 2):
        os.dup2(file, number)


def _listen() -> None:
    """Signals come from the parent alone, not from the terminal too; and the parent's end is this process's."""
    with suppress(OSError):
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parent = mp.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _describe(error: BaseException) -> dict[str, Any]:
    """An exception as data that any process can read."""
    try:
        pickled = pickle.dumps(error)
    except Exception:  # exceptions may hold anything
        pickled = None
    text = str(error).strip() or type(error).__name__
    known = isinstance(error, AutoTPError)
    lost = not known and isinstance(error, RuntimeError | OSError) and bool(_LOST.search(text))
    message = " ".join((text if known else f"{type(error).__name__}: {text}").split())
    return dict(
        how=type(error).__name__, message=message, lost=lost, time=time.time(), trace=traceback.format_exc(), pickled=pickled
    )
