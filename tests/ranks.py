"""A pool of gloo ranks, started once per test session: starting processes is what makes multi-rank suites slow."""

from __future__ import annotations

import os
import queue
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

POOL = 4
# What every rank would import, imported once in the process that ranks are forked from.
PRELOAD = ["autotp", "transformers.models.llama.modeling_llama", "transformers.trainer"]
_grids: dict[int, Any] = {}  # in a rank: meshes of 2 x that many ranks, made at its start


def _serve(rank: int, count: int, store_file: str, inbox: Any, outbox: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store_file}", rank=rank, world_size=count)
    groups = {size: dist.new_group(list(range(size))) for size in range(1, count + 1)}
    # Made now, while all ranks have made the same groups: torch names a new group by a count that each rank keeps for itself.
    for tp in range(2, count // 2 + 1, 2):
        _grids[tp] = dist.init_device_mesh("cpu", (2, tp), mesh_dim_names=("dp", "tp"))
    while True:
        job = inbox.get()
        if job is None:
            break
        fn, args, size = job
        try:
            result = fn(groups[size], *args)
            outbox.put((rank, True, result))
        except BaseException:
            outbox.put((rank, False, traceback.format_exc()))
    dist.destroy_process_group()


def grid(tp: int = 2) -> dist.DeviceMesh:
    """In a rank: the mesh with axes `dp`, of 2 ranks, and `tp`, of an even number that the pool has twice."""
    return _grids[tp]


class RankError(AssertionError):
    """A rank raised; the message holds every failing rank's traceback."""


class RankPool:
    """`count` processes that run module-level functions of the tests on process groups of 1 to `count` ranks."""

    def __init__(self, count: int = POOL) -> None:
        self.count = count
        self._start()

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._dir = tempfile.TemporaryDirectory()
        self._inboxes = [context.Queue() for _ in range(self.count)]
        self._outbox = context.Queue()
        store = os.path.join(self._dir.name, "store")
        self._processes = [
            context.Process(target=_serve, args=(rank, self.count, store, self._inboxes[rank], self._outbox), daemon=True)
            for rank in range(self.count)
        ]
        for process in self._processes:
            process.start()

    def run(self, fn: Callable, *args: Any, size: int = 2, timeout_s: float = 240) -> list[Any]:
        """`fn(group, *args)` on the first `size` ranks; their results in rank order.

        Raises:
            RankError: some rank raised (all tracebacks), or did not answer in time; the pool is started afresh then.
        """
        for rank in range(size):
            self._inboxes[rank].put((fn, args, size))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(results) + len(failures) < size:
            try:
                # Once one rank has failed, the others may wait for it for ever.
                rank, good, value = self._outbox.get(timeout=15 if failures else timeout_s)
            except queue.Empty:
                break
            (results if good else failures)[rank] = value
        silent = [rank for rank in range(size) if rank not in results and rank not in failures]
        if silent:
            self.restart()
        if failures or silent:
            text = "".join(f"\n--- rank {rank}\n{trace}" for rank, trace in sorted(failures.items()))
            raise RankError(text + (f"\n--- ranks {silent} did not answer" if silent else ""))
        return [results[rank] for rank in range(size)]

    def restart(self) -> None:
        """New processes, after a hang."""
        self.stop(kill=True)
        self._start()

    def stop(self, kill: bool = False) -> None:
        """End the processes."""
        for process, inbox in zip(self._processes, self._inboxes, strict=True):
            if kill:
                process.kill()
            else:
                inbox.put(None)
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
        self._dir.cleanup()
