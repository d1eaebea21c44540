"""Where a rank stands in a run: in the group that shares its model, and in the one over which data is dealt."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .comm import TPGroup
from .errors import AutoTPError
from .groups import init_process_group_from_env, local_device, resolve_group


@dataclass(frozen=True)
class Places:
    """Both groups of a rank; rank `d * tp + t` is TP rank t of model d.

    Attributes:
        tp: the ranks that share this rank's model.
        dp: the ranks that hold the same shards of the other models.
    """

    tp: TPGroup
    dp: TPGroup

    @property
    def is_main(self) -> bool:
        """Whether this rank writes and speaks for all."""
        return self.tp.tp_rank == 0 and self.dp.tp_rank == 0

    @property
    def rank(self) -> int:
        """This rank's number in the run."""
        return self.dp.tp_rank * self.tp.tp_size + self.tp.tp_rank

    @property
    def size(self) -> int:
        """Ranks of the run."""
        return self.tp.tp_size * self.dp.tp_size

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (picklable), in the order of `rank`, on every rank."""
        return [each for row in self.dp.gather_objects(self.tp.gather_objects(value)) for each in row]

    @contextmanager
    def together(self, doing: str):
        """A block without collectives that raises on all ranks if it raises on one: `TPGroup.together` over all ranks."""
        with self.dp.together(doing), self.tp.together(doing):
            yield

    @classmethod
    def alone(cls, device: torch.device) -> Places:
        """Of a single rank, without `torch.distributed`."""
        return cls(TPGroup(None, device), TPGroup(None, device))

    @classmethod
    def find(cls, tp: int, dp: int, group_or_mesh: Any = None) -> Places:
        """This rank's places in the job, whose process group is started if need be.

        Args:
            tp, dp: sizes of the axes.
            group_or_mesh: a process group of `tp` ranks, or a DeviceMesh of two axes, data and TP; None for all ranks.

        Raises:
            AutoTPError: another number of ranks, or none were started.
        """
        under_launcher = dist.is_initialized() or ("RANK" in os.environ and "WORLD_SIZE" in os.environ)
        if group_or_mesh is None and not under_launcher and tp * dp == 1:
            return cls.alone(local_device())
        if group_or_mesh is None and under_launcher:
            init_process_group_from_env()
            found = dist.get_world_size()
            if found != tp * dp:
                raise AutoTPError(f"{found} processes run, but --tp {tp} x --dp {dp} is {tp * dp}: make them equal")
            if dp > 1:
                group_or_mesh = dist.init_device_mesh(local_device().type, (dp, tp))
        if isinstance(group_or_mesh, dist.DeviceMesh) and group_or_mesh.ndim == 2:
            return cls(resolve_group(group_or_mesh.get_group(1)), resolve_group(group_or_mesh.get_group(0)))
        group = resolve_group(group_or_mesh)
        return cls(group, TPGroup(None, group.device))
