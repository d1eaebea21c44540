"""Which ranks are meant: the group of what a caller gave, or of what torchrun's variables say, and this process's device."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from .comm import TPGroup
from .errors import AutoTPError


def local_device() -> torch.device:
    """The GPU that belongs to this process (`LOCAL_RANK`), or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("cpu")


def init_process_group_from_env() -> None:
    """Start `torch.distributed` under torchrun: NCCL bound to this rank's GPU where there is one, gloo otherwise."""
    if dist.is_initialized():
        return
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")


def resolve_group(group_or_mesh: Any = None, timeout_s: float = 600) -> TPGroup:
    """The TPGroup of what the caller gave: a process group, a one-axis DeviceMesh, a TPGroup, or None.

    None means all ranks of the job: the default process group, which is started if torchrun's variables are there.

    Raises:
        AutoTPError: no group, no mesh and no torchrun; a mesh of several axes; a rank outside the group.
    """
    if isinstance(group_or_mesh, TPGroup):
        return group_or_mesh
    if group_or_mesh is None:
        if not dist.is_initialized():
            if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
                raise AutoTPError(
                    "there is no process group to shard over. Start the script with `torchrun --nproc-per-node N script.py`, "
                    "or pass a process group or a one-axis DeviceMesh as the second argument."
                )
            init_process_group_from_env()
        group = dist.group.WORLD
    elif isinstance(group_or_mesh, dist.DeviceMesh):
        if group_or_mesh.ndim != 1:
            names = group_or_mesh.mesh_dim_names
            raise AutoTPError(
                f"a DeviceMesh of {group_or_mesh.ndim} axes {names} does not say which is the TP axis: pass mesh['tp'], say"
            )
        group = group_or_mesh.get_group()
    elif isinstance(group_or_mesh, dist.ProcessGroup):
        group = group_or_mesh
    elif group_or_mesh is dist.GroupMember.NON_GROUP_MEMBER:  # what torch gives the ranks outside a new group
        group = None
    else:
        raise AutoTPError(f"expected a process group, a one-axis DeviceMesh or None, got {type(group_or_mesh).__name__}")
    if group is None or dist.get_rank(group) < 0:
        raise AutoTPError("this rank is not in the process group it was given: only its members call parallelize")
    on_gpu = "nccl" in dist.get_backend_config(group)
    return TPGroup(group, local_device() if on_gpu else torch.device("cpu"), timeout_s)


def ranks_of(group: Any = None) -> tuple[int, ...]:
    """Global ranks of a process group or DeviceMesh; None is the default group, and a tuple of them is taken together."""
    if isinstance(group, tuple | list):
        return tuple(rank for part in group for rank in ranks_of(part))
    if isinstance(group, dist.DeviceMesh):
        return tuple(group.mesh.flatten().tolist())
    return tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
