"""Finding the group that a caller means: process groups, meshes, all ranks of the job, and what is refused."""

import pytest
import torch.distributed as dist

from autotp.errors import AutoTPError
from autotp.groups import resolve_group
from tests.ranks import grid


def message(function, *args):
    """The message of the AutoTPError that a call raises."""
    with pytest.raises(AutoTPError) as info:
        function(*args)
    return str(info.value)


def check_resolve(group):
    assert "2 axes" in message(resolve_group, grid()) and "mesh['tp']" in message(resolve_group, grid())
    tp = resolve_group(grid()["tp"])
    assert tp.ranks == ((0, 1) if dist.get_rank() < 2 else (2, 3)) and tp.tp_rank == dist.get_rank() % 2
    assert resolve_group(tp) is tp
    assert "str" in message(resolve_group, "tp")
    assert "not in the process group" in message(resolve_group, dist.GroupMember.NON_GROUP_MEMBER)
    assert resolve_group(None).ranks == (0, 1, 2, 3)
    first, second = resolve_group(group), resolve_group(group)  # two models over the same ranks don't share their turns
    if dist.get_rank() == 0:
        next(second._arrivals)
    assert first.arrive("first") == [""] * 4


def test_resolve_group_takes_groups_and_one_axis_meshes(ranks):
    ranks.run(check_resolve, size=4)


def test_without_torchrun_there_is_no_group(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not dist.is_initialized()
    assert "torchrun" in message(resolve_group)
