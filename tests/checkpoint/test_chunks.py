"""Shards as boxes of a saved tensor: every layout is written once, read back exactly, and bounded in boxes."""

import random

import pytest
import torch

from autotp.checkpoint.chunks import (
    MOST_BOXES,
    ChunkedTensor,
    PickedTensor,
    check_order,
    find_order,
    held_boxes,
    owned_boxes,
    take_owned,
)
from autotp.errors import CheckpointError
from autotp.shard import Shard

COLUMNS = 600


def shuffled(size, seed):
    return random.Random(seed).sample(range(size), size)


SHARDS = {
    "even": Shard.even((12, 5), 0, 4),
    "uneven": Shard.even((5, 13), 1, 3),
    "fewer units than ranks": Shard.even((2, 3), 0, 4),
    "packed": Shard.dealt((24, 4), 0, (3, 1), parts=(8, 8, 8)),
    "copied heads": Shard.from_indices((8, 3), 0, [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7], [0, 1, 6, 7]]),
    "repeated inside": Shard.from_indices((6, 2), 0, [[0, 1, 0, 1, 2, 3], [4, 5, 2, 3, 4, 5]]),
    "experts x columns": Shard.from_indices((4, 6, 9), 0, [[0, 1], [0, 1], [2, 3], [2, 3]]).and_cut(
        Shard.from_indices((4, 6, 9), 2, [[0, 1, 4, 5, 8], [2, 3, 6, 7], [0, 1, 2], [3, 4, 5, 6, 7, 8]])
    ),
    "columns in turn": Shard.from_indices((4, COLUMNS), 1, [range(rank, COLUMNS, 3) for rank in range(3)]),
    "columns in turn, copied": Shard.from_indices((4, COLUMNS), 1, [range(0, COLUMNS, 2), range(COLUMNS)]),
    "any order": Shard.from_indices(
        (COLUMNS, 2), 0, [shuffled(COLUMNS, 0)[: COLUMNS // 2], shuffled(COLUMNS, 0)[COLUMNS // 2 :]]
    ),
    "a vector": Shard.even((7,), 0, 2),
}


def write(full, shard):
    """The saved tensor, of every rank's own boxes; each element must be written once."""
    saved, times = torch.full_like(full, -1), torch.zeros(full.shape, dtype=torch.int64)
    for rank in range(shard.tp_size):
        part, boxes = take_owned(shard.split(full, rank), shard, rank), owned_boxes(shard, rank)
        assert len(boxes) <= MOST_BOXES
        for box in boxes:
            place = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
            saved[place] = box.view(part)
            times[place] += 1
    assert (times == 1).all()
    return saved


def read(saved, shard, rank, order):
    part = torch.full(shard.local_shape(rank), -2, dtype=saved.dtype)
    boxes = held_boxes(shard, rank, order)
    picked = PickedTensor(part, shard, rank, order) if boxes is None else None
    chunked = ChunkedTensor(part, shard.shape, boxes) if picked is None else picked.chunked
    assert chunked.shape == shard.shape and len(chunked.boxes) <= MOST_BOXES
    for number, item in enumerate(chunked.__create_chunk_list__()):
        place = tuple(slice(a, a + n) for a, n in zip(item.offsets, item.sizes, strict=True))
        index = type("Index", (), dict(offset=item.offsets, index=number))
        chunked.__get_tensor_shard__(index).copy_(saved[place])
    if picked is not None:
        picked.finish()
    return part


@pytest.mark.parametrize("name", SHARDS)
def test_each_layout_is_saved_once_and_read_by_each(name):
    shard = SHARDS[name]
    full = torch.arange(torch.Size(shard.shape).numel()).view(shard.shape)
    saved, order = write(full, shard), find_order(shard)
    check_order(order, shard.shape, name)
    assert bool(order) == (name in ("columns in turn", "columns in turn, copied", "any order"))
    assert order or torch.equal(saved, full)  # in its own order wherever boxes are few
    others = [Shard.whole(shard.shape, 1), Shard.even(shard.shape, 0, 3), Shard.even(shard.shape, len(shard.shape) - 1, 2), shard]
    for other in others:
        for rank in range(other.tp_size):
            assert torch.equal(read(saved, other, rank, order), other.split(full, rank)), (other, rank)
    for scattered in (SHARDS["columns in turn"], SHARDS["any order"]):
        if scattered.shape == shard.shape:
            assert torch.equal(read(saved, scattered, 1, order), scattered.split(full, 1))


def test_an_order_that_is_none_is_refused():
    check_order(((1, ((1, 1, 2, 2), (0, 1, 2, 2))),), (3, 4), "w")
    for order in (
        ((2, ((0, 4, 4, 1),)),),
        ((1, ((0, 3, 3, 1),)),),
        ((1, ((0, 2, 2, 1), (0, 2, 2, 1))),),
        ((1, ((-1, 4, 4, 1),)),),
    ):
        with pytest.raises(CheckpointError, match="the order in which 'w' is saved is none of dim"):
            check_order(order, (3, 4), "w")


def test_it_stands_for_a_shard_and_computes_nothing():
    shard = Shard.even((8, 2), 0, 2)
    chunked = ChunkedTensor(torch.zeros(4, 2), shard.shape, owned_boxes(shard, 1))
    (item,) = chunked.__create_write_items__("k", chunked)
    assert chunked.shape == (8, 2) and item.index.offset == (4, 0)
    with pytest.raises(CheckpointError, match="stands for a shard"):
        chunked + 1
