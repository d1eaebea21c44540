"""Scripts started as torchrun starts them, one process a rank, forked from a process that has imported the libraries already."""

from __future__ import annotations

import gc
import os
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from tests.ranks import PRELOAD

ROOT = Path(__file__).parent.parent


class JobError(AssertionError):
    """A rank failed or did not end in time; the message holds what every rank printed last."""


def _run(env: dict[str, str], script: str, args: list[str], cwd: str, log: str) -> None:
    gc.freeze()  # a full collection would look at all that the libraries made, and so copy its memory
    with open(log, "w", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = [script, *args]
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _rank_env(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun tells rank `rank` of `size` on one machine; nothing for a job of 0 ranks."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if size:
        env |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), GROUP_RANK="0")
        env |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    return env


def run_job(script: Any, *args: Any, cwd: Path, size: int = 2, timeout_s: float = 240) -> list[str]:
    """Run `script` with `args` on `size` ranks in the directory `cwd`; 0 runs it alone, without a launcher.

    Returns:
        what each rank printed.

    Raises:
        JobError: as soon as a rank failed, or after `timeout_s`; the other ranks are killed.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    # The ranks meet at a store of this process, as torchrun's do: a port let go of for rank 0 could be taken by another process.
    # It keeps the addresses of a process group that was ended, so a script begins one only.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs = [str(cwd / f"{Path(script).stem}-rank{rank}.log") for rank in range(size or 1)]
    processes = []
    for rank, log in enumerate(logs):
        given = (_rank_env(rank, size, store.port), str(script), [str(arg) for arg in args], str(cwd), log)
        processes.append(context.Process(target=_run, args=given, daemon=True))
        processes[-1].start()
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and any(p.is_alive() for p in processes):
        if any(p.exitcode for p in processes):
            end = min(end, time.monotonic() + 5)
        processes[0].join(0.05)
        time.sleep(0.02)
    for process in processes:
        process.kill()
        process.join()
    said = [Path(log).read_text() if os.path.exists(log) else "" for log in logs]
    if any(p.exitcode for p in processes):
        told = zip(processes, said, strict=True)
        last = "".join(f"\n--- rank {rank}, exit code {p.exitcode}\n{text[-4000:]}" for rank, (p, text) in enumerate(told))
        raise JobError(f"{script}{last}")
    return said
