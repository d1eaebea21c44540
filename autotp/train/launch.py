"""Start one process per rank on this machine, for callers that were not started by torchrun."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..errors import AutoTPError


def under_torchrun() -> bool:
    """Whether the ranks run already, started by torchrun or another launcher that sets its variables."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch_ranks(work: Callable[..., Any], size: int, *args: Any) -> Any:
    """Run `work(*args)` in `size` processes with torchrun's variables set; returns what rank 0's returned.

    A rank that fails ends the others.

    Args:
        work: a function that the new processes can import.
        size: number of processes.
        args: picklable.

    Raises:
        AutoTPError: more ranks than GPUs, or a rank failed: its number and its own error.
    """
    if torch.cuda.is_available() and size > torch.cuda.device_count():
        raise AutoTPError(f"{size} ranks need {size} GPUs, and this machine has {torch.cuda.device_count()}: lower --tp")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // size)))
    # They log a failed rank as two screens of traceback; the error raised here says it in one line.
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="spawn",
    )
    try:
        return elastic_launch(config, work)(*args)[0]
    except ChildFailedError as error:
        raise AutoTPError(_describe(error)) from error


def _describe(error: ChildFailedError) -> str:
    """One line on the rank that failed first."""
    rank, failure = error.get_first_failure()
    data = failure.error_file_data or {}
    message = data.get("message", failure.message)
    if isinstance(message, dict):
        message = message.get("message", failure.message)
    return f"rank {rank} failed: {str(message).strip() or f'exit code {failure.exitcode}'}"
