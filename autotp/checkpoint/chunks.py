"""A rank's part of a tensor as boxes of the whole one: what `torch.distributed.checkpoint` writes, and reads at other sizes.

A rank holds runs of indices along each cut dimension, so its part is a product of unbroken blocks: boxes. There are a few for
usual layouts (even, uneven, packed, copied heads), and thousands where single columns are dealt in turn. Such a tensor is
written *in order*: along its cut dimensions first what rank 0 owns, then what rank 1 does. Each rank's part is one box then,
and the order is noted beside. What would take too many boxes to read is read from the first to the last index that is needed,
and picked from that.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..errors import CheckpointError
from ..index_runs import Run, compress_indices, run_width
from ..shard import Cut, Shard

MOST_BOXES = 64  # of one tensor, on one rank

Order = tuple[tuple[int, tuple[Run, ...]], ...]  # cut dimension -> its indices in the order in which they are saved
_Block = tuple[int, int, int]  # first index in the saved tensor, first in the rank's part, length


@dataclass(frozen=True)
class Box:
    """A box of the saved tensor, and where it begins in the rank's part."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[int, ...]

    def view(self, part: Tensor) -> Tensor:
        """The box in the rank's part."""
        for dim, (start, size) in enumerate(zip(self.local, self.sizes, strict=True)):
            part = part.narrow(dim, start, size)
        return part


# -- which boxes ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def find_order(shard: Shard) -> Order:
    """How a tensor of this shard is saved: () as it is, if no rank owns more than `MOST_BOXES` boxes of it."""
    if all(_count(_owned_blocks(shard, rank, ())) <= MOST_BOXES for rank in range(shard.tp_size)):
        return ()
    order = []
    for cut in shard.cuts:
        seen = torch.zeros(shard.shape[cut.dim], dtype=torch.bool)
        indices = []
        for rank in range(shard.tp_size):
            mine = cut.indices(rank)
            mine = mine[~seen[mine]]
            indices += dict.fromkeys(mine.tolist())
            seen[mine] = True
        order.append((cut.dim, compress_indices(indices)))
    return tuple(order)


@lru_cache(maxsize=4096)
def owned_boxes(shard: Shard, rank: int) -> tuple[Box, ...]:
    """What `rank` saves: of copies, the lowest holder's; together all ranks' are the whole tensor, once.

    They lie in what `take_owned` gives.
    """
    return _make_boxes(shard, _owned_blocks(shard, rank, find_order(shard)))


def take_owned(part: Tensor, shard: Shard, rank: int) -> Tensor:
    """The rank's part; where that is saved in order, only what the rank owns of it, as a copy if that is less."""
    for dim, mask in shard.owned(rank) if find_order(shard) else ():
        part = part.index_select(dim, mask.nonzero().flatten().to(part.device))
    return part


@lru_cache(maxsize=4096)
def held_boxes(shard: Shard, rank: int, order: Order = ()) -> tuple[Box, ...] | None:
    """All that `rank` holds, as boxes of a tensor that is saved in `order`; None where they are too many."""
    blocks = {dim: _find_blocks(places) for dim, places in _places(shard, rank, order).items()}
    return _make_boxes(shard, blocks) if _count(blocks) <= MOST_BOXES else None


def check_order(order: Order, shape: tuple[int, ...], name: str) -> None:
    """Refuse what is no order of the dimensions of `shape`.

    Raises:
        CheckpointError: naming the tensor.
    """
    for dim, runs in order:
        good = 0 <= dim < len(shape) and run_width(runs) == shape[dim] and all(min(run) >= 0 for run in runs)
        if not good or not torch.equal(Cut(dim, (runs,)).indices(0).sort().values, torch.arange(shape[dim])):
            raise CheckpointError(
                f"the order in which '{name}' is saved is none of dim {dim} of shape {shape}: the state is damaged"
            )


def _places(shard: Shard, rank: int, order: Order) -> dict[int, Tensor]:
    """For each dim that is cut or reordered, where the rank's indices lie in the saved tensor, int64, in the rank's order."""
    found = {cut.dim: cut.indices(rank) for cut in shard.cuts}
    for dim, runs in order:
        where = torch.empty(shard.shape[dim], dtype=torch.int64)
        where[Cut(dim, (runs,)).indices(0)] = torch.arange(shard.shape[dim])
        found[dim] = where[found[dim]] if dim in found else where
    return found


def _owned_blocks(shard: Shard, rank: int, order: Order) -> dict[int, list[_Block]]:
    masks, places = dict(shard.owned(rank)), _places(shard, rank, order)
    if order:
        return {dim: _find_blocks(each[masks[dim]] if dim in masks else each) for dim, each in places.items()}
    return {dim: _find_blocks(each, masks.get(dim)) for dim, each in places.items()}


def _find_blocks(places: Tensor, mask: Tensor | None = None) -> list[_Block]:
    """Neighbours in the saved tensor that are neighbours in the part too."""
    local = torch.arange(len(places)) if mask is None else mask.nonzero().flatten()
    places = places[local]
    if not len(places):
        return []
    breaks = (((places.diff() != 1) | (local.diff() != 1)).nonzero().flatten() + 1).tolist()
    return [(int(places[a]), int(local[a]), b - a) for a, b in itertools.pairwise([0, *breaks, len(places)])]


def _count(blocks: dict[int, list[_Block]]) -> int:
    return prod(map(len, blocks.values()))


def _make_boxes(shard: Shard, blocks: dict[int, list[_Block]]) -> tuple[Box, ...]:
    boxes = []
    for chosen in itertools.product(*blocks.values()):
        offsets, sizes, local = [0] * len(shard.shape), list(shard.shape), [0] * len(shard.shape)
        for dim, (offset, start, length) in zip(blocks, chosen, strict=True):
            offsets[dim], local[dim], sizes[dim] = offset, start, length
        boxes.append(Box(tuple(offsets), tuple(sizes), tuple(local)))
    return tuple(boxes)


# -- tensors that torch.distributed.checkpoint takes ----------------------------------------------------------------------


class ChunkedTensor(torch.Tensor):
    """A rank's part of a tensor, in the shape of the whole one, for `torch.distributed.checkpoint` alone.

    Made for one save or load and dropped after it. It has no values of its own, and no operation but these.

    Args:
        part: this rank's part; boxes are written from it, or into it.
        shape: of the whole tensor.
        boxes: see `owned_boxes` and `held_boxes`.
    """

    part: Tensor
    boxes: tuple[Box, ...]

    @staticmethod
    def __new__(cls, part: Tensor, shape: tuple[int, ...], boxes: tuple[Box, ...]) -> ChunkedTensor:
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=part.dtype, device=part.device)  # type: ignore[attr-defined]
        self.part, self.boxes = part, boxes
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise CheckpointError(f"{func} of a tensor that stands for a shard in a checkpoint: use the model's own tensors")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ChunkedTensor({tuple(self.shape)}, {self.dtype}, {len(self.boxes)} boxes)"

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=self.size()),
            )
            for box in self.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The part that `index` names; by its number where it is right, since a rank may hold a box twice."""
        number, offsets = index.index, tuple(index.offset or ())
        if number is not None and number < len(self.boxes) and self.boxes[number].offsets == offsets:
            return self.boxes[number].view(self.part)
        return next(box for box in self.boxes if box.offsets == offsets).view(self.part)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def chunk_to_save(part: Tensor, shard: Shard | None, rank: int) -> Tensor:
    """What a save is given for a rank's part; a tensor that every rank holds whole is itself."""
    if shard is None or not shard.cuts:
        return part.detach()
    return ChunkedTensor(take_owned(part.detach(), shard, rank), shard.shape, owned_boxes(shard, rank))


class PickedTensor:
    """Reads what lies too scattered: from the first to the last index, and then picked into the rank's part.

    Attributes:
        chunked: for the load.
    """

    def __init__(self, part: Tensor, shard: Shard, rank: int, order: Order) -> None:
        self.part, self.places = part, _places(shard, rank, order)
        offsets, sizes = [0] * len(shard.shape), list(shard.shape)
        for dim, places in self.places.items():
            offsets[dim] = int(places.min())
            sizes[dim] = int(places.max()) + 1 - offsets[dim]
        self.read = torch.empty(sizes, dtype=part.dtype)
        self.chunked = ChunkedTensor(self.read, shard.shape, (Box(tuple(offsets), tuple(sizes), (0,) * len(sizes)),))

    def finish(self) -> None:
        """Write the rank's part."""
        found = self.read
        for dim, places in self.places.items():
            found = found.index_select(dim, places - places.min())
        self.part.copy_(found)
