"""`DataSampler` is torch's DistributedSampler over the data axis, and goes on in the midst of an epoch."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import autotp
from autotp.errors import AutoTPError
from tests.ranks import grid


def check_dealt(group):
    mesh, data = grid(), list(range(10, 33))
    rank = mesh["dp"].get_local_rank()
    for options in ({}, {"shuffle": False}, {"seed": 5, "drop_last": True}):
        mine, torchs = autotp.DataSampler(data, mesh["dp"], **options), DistributedSampler(data, 2, rank, **options)
        for epoch in (0, 3):
            mine.set_epoch(epoch)
            torchs.set_epoch(epoch)
            assert list(mine) == list(torchs) and len(mine) == len(torchs)
    sampler = autotp.DataSampler(data, dp=mesh["dp"])
    batches = torch.cat(list(DataLoader(data, batch_size=4, sampler=sampler)))  # type: ignore[arg-type]
    sampler.set_epoch(0, start=8)
    assert torch.equal(torch.cat(list(DataLoader(data, batch_size=4, sampler=sampler))), batches[4:])  # type: ignore[arg-type]
    everyone = [None] * 4
    dist.all_gather_object(everyone, batches.tolist(), group=group)
    assert everyone[0] == everyone[1] and everyone[2] == everyone[3]  # TP ranks 0 and 1 of each data rank
    assert set(everyone[0]) | set(everyone[2]) == set(data) and len(everyone[0]) == len(everyone[2]) == 12


def test_data_ranks_share_the_samples_and_tp_ranks_get_the_same(ranks):
    ranks.run(check_dealt, size=4)


def test_another_number_of_data_ranks_goes_on_in_the_same_order():
    sampler = autotp.DataSampler(range(23))
    whole = list(sampler)
    sampler.set_epoch(0, start=8)
    assert list(sampler) == whole[8:] and len(sampler) == 15
    with pytest.raises(AutoTPError, match="has no length"):
        autotp.DataSampler(iter([1]))
