"""Shards that FSDP2 deals further: each data rank holds a chunk of its TP rank's shard, as a DTensor over the data axis.

A chunk is described as what it is, a part of the whole tensor (`Shard.deal_further`), so that norms, checkpoints and loading
know two axes as they know one. `fully_shard` makes DTensors, and gathers a module's parameters into plain ones while it runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate
from torch.distributed.tensor.placement_types import Shard as Dealt

from ..comm import TPGroup
from ..errors import AutoTPError
from ..groups import resolve_group
from ..shard import Shard
from .base import find_group

deal_further = lru_cache(maxsize=4096)(Shard.deal_further)


class Part(NamedTuple):
    """What this rank holds of a tensor: `local`, which is rank `rank`'s part by `shard`; None where all hold it whole."""

    local: Tensor
    shard: Shard | None
    rank: int


def find_part(tensor: Tensor, shard: Shard | None, tp: TPGroup | None) -> Part:
    """This rank's part of a tensor that `shard` deals over `tp`, and FSDP2 further if it is a DTensor.

    Raises:
        AutoTPError: FSDP2 deals it over two axes, or as a partial sum.
    """
    tp_rank, tp_size = (0, 1) if tp is None else (tp.tp_rank, tp.tp_size)
    if not isinstance(tensor, DTensor):
        return Part(tensor, shard, tp_rank)
    axis = _find_axis(tensor)
    if axis is None:
        return Part(tensor.to_local(), shard, tp_rank)
    mesh = tensor.device_mesh
    whole = shard or Shard.whole(tuple(tensor.shape), tp_size)
    dim = tensor.placements[axis].dim % tensor.ndim  # type: ignore[attr-defined]
    further = deal_further(whole, dim, mesh.size(axis))
    return Part(tensor.to_local(), further, mesh.get_local_rank(axis) * tp_size + tp_rank)


def _find_axis(tensor: DTensor) -> int | None:
    """The axis of its mesh that a DTensor is dealt over; None where all ranks hold it whole."""
    axes = [axis for axis, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)]
    if len(axes) > 1 or any(type(tensor.placements[axis]) is not Dealt for axis in axes):
        raise AutoTPError(
            f"a parameter of shape {tuple(tensor.shape)} is dealt as {tensor.placements} over its mesh: beside TP, FSDP2 may "
            f"shard over one axis, in plain chunks"
        )
    return axes[0] if axes else None


def make_whole(tensor: Tensor) -> Tensor:
    """What the TP rank holds, on each rank: a DTensor's chunks are gathered, which all its data ranks do together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def combine_norm(norm: Tensor, like: DTensor, norm_type: float) -> Tensor:
    """The norm of all chunks together, out of each data rank's own; collective over the axis that `like` is dealt over."""
    places = tuple(Dealt(0) if isinstance(each, Dealt) else Replicate() for each in like.placements)
    own = norm.reshape(1).to(like.device_mesh.device_type)  # parameters may be offloaded to the CPU
    every = DTensor.from_local(own, like.device_mesh, places, run_check=False).full_tensor()
    return torch.linalg.vector_norm(every, norm_type).to(norm.device)


def refuse_dealt(tensors: Iterable[tuple[str, Any]], doing: str, instead: str) -> None:
    """Raise if one of the named `tensors` is FSDP2's.

    Raises:
        AutoTPError: naming it, and what to do instead.
    """
    for name, tensor in tensors:
        if isinstance(tensor, DTensor):
            raise AutoTPError(
                f"{doing} can't work on '{name}', which fully_shard dealt over ranks {data_ranks(tensor)}: {instead}"
            )


def refuse_inner(parameter: Any, module: str, name: str) -> None:
    """Raise if `parameter`, whose gradient `module` sums over the ranks for its forward, is gathered by FSDP2 only inside it.

    Raises:
        AutoTPError: naming it, and the module to wrap.
    """
    if isinstance(parameter, DTensor):
        raise AutoTPError(
            f"'{module}.{name}' was given to fully_shard below {module}, which sums its gradient over the TP ranks: that sum "
            f"would be lost. Call fully_shard on {module}, or on the layer that holds it, and not on modules inside"
        )


def data_ranks(tensor: DTensor) -> list[int]:
    """Global ranks that a DTensor lies on."""
    return tensor.device_mesh.mesh.flatten().tolist()


def find_data_group(model: nn.Module) -> TPGroup | None:
    """The ranks that hold the chunks of this rank's shards; None where FSDP2 deals none. Collective over them at first."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            mesh, axis = parameter.device_mesh, _find_axis(parameter)
            if axis is None:
                return None
            key, tp = f"data ranks {data_ranks(parameter)}", find_group(model)
            kept = {} if tp is None else tp.owned
            if key not in kept:
                kept[key] = resolve_group(mesh.get_group(axis))
            return kept[key]
    return None
