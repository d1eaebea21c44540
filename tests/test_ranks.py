"""The pool itself: results in order, errors with the rank's traceback."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError


def _sum(group, value):
    tensor = torch.tensor(float(value + dist.get_rank(group)))
    dist.all_reduce(tensor, group=group)
    return tensor.item(), dist.get_world_size(group)


def _fail(group):
    if dist.get_rank(group) == 1:
        raise ValueError("rank one says no")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_runs_on_the_first_ranks(ranks, size):
    assert ranks.run(_sum, 1, size=size) == [(size + size * (size - 1) / 2, size)] * size


def test_raises_what_a_rank_raised(ranks):
    with pytest.raises(RankError, match="rank one says no"):
        ranks.run(_fail)
    assert ranks.run(_sum, 0) == [(1.0, 2)] * 2
