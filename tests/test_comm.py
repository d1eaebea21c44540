"""Groups: their collectives without gradient, and who is named when a rank fails or stays away."""

import copy
import os
import pickle
import time

import pytest
import torch

from autotp.collectives import copy_to_group, gather_from_group, reduce_from_group, reduce_owned_from_group, split_to_group
from autotp.comm import TPGroup
from autotp.errors import AutoTPError, GatherError
from autotp.groups import resolve_group
from autotp.shard import Shard


def made(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def message(function, *args, **kwargs):
    """The message of the AutoTPError that a call raises."""
    with pytest.raises(AutoTPError) as info:
        function(*args, **kwargs)
    return str(info.value)


# -- collectives without gradient ---------------------------------------------------------------------------------------


def layouts(base):
    return {"plain": base, "transposed": base.t(), "expanded": base[:1].expand(5, 4), "strided": base[:, ::2], "empty": base[:0]}


def check_all_reduce(group):
    tp = resolve_group(group)
    for name, x in layouts(made(tp.tp_rank, 3, 4)).items():
        before, version = x.clone(), x._version
        every = [layouts(made(rank, 3, 4))[name] for rank in range(tp.tp_size)]
        for op, expected in (("sum", torch.stack(every).sum(0)), ("max", torch.stack(every).amax(0))):
            got = tp.all_reduce(x, op)
            torch.testing.assert_close(got, expected, msg=f"{name} {op}")
            assert torch.equal(x, before) and x._version == version, name
        owned = tp.all_reduce_owned(x.clone(memory_format=torch.preserve_format))
        torch.testing.assert_close(owned, torch.stack(every).sum(0), msg=f"{name} owned")
    parts = [made(rank, 2, 8) for rank in range(tp.tp_size)]
    torch.testing.assert_close(tp.all_reduce_small(parts[tp.tp_rank].clone()), torch.stack(parts).sum(0))
    assert "multicast" in message(tp.all_reduce_small, parts[0], "multimem_all_reduce")
    assert "none of push, one_shot, two_shot" in message(tp.all_reduce_small, parts[0], "ring")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_reduce_returns_the_sum_and_leaves_its_input(ranks, size):
    ranks.run(check_all_reduce, size=size)


def check_reduce_dtype(group):
    """256 + 1 + 1 is 258 in float32 and 256 where 256 + 1 is rounded to bfloat16; in three orders, one adds 1 + 1 first."""
    tp = resolve_group(group)
    x = (torch.ones(3, 3) + 255 * torch.eye(3)).bfloat16()[tp.tp_rank]
    got = tp.all_reduce(x, dtype=torch.float32)
    assert got.dtype is torch.bfloat16 and got.tolist() == [258.0] * 3


def test_all_reduce_sums_in_the_dtype_named(ranks):
    ranks.run(check_reduce_dtype, size=3)


def check_rows(group):
    tp = resolve_group(group)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for name, x in layouts(made(tp.tp_rank, 6, 4).to(dtype)).items():
            before = x.clone()
            every = [layouts(made(rank, 6, 4).to(dtype))[name] for rank in range(tp.tp_size)]
            assert torch.equal(tp.gather_rows(x), torch.cat(every)) and torch.equal(x, before), name
            if x.shape[0] % tp.tp_size:
                assert "can't be scattered evenly" in message(tp.reduce_scatter_rows, x)
                continue
            own = x.shape[0] // tp.tp_size
            summed = sum(part.double() for part in every)[tp.tp_rank * own : (tp.tp_rank + 1) * own]
            got = tp.reduce_scatter_rows(x, torch.float64)
            assert got.dtype is dtype and torch.equal(x, before), name
            torch.testing.assert_close(got, summed.to(dtype), msg=name)
            torch.testing.assert_close(tp.reduce_scatter_rows(x).double(), summed, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_are_gathered_and_reduce_scattered(ranks, size):
    ranks.run(check_rows, size=size)


def shard_cases(size):
    yield Shard.even((7, 3), 0, size)
    yield Shard.even((3, 7), 1, size)
    yield Shard.dealt((2, 4, 3), 1, [4] + [0] * (size - 1))  # ranks with nothing
    yield Shard.from_indices((6,), 0, [list(range(rank, 6, size)) for rank in range(size)])  # dealt out of order
    yield Shard.even((0, 4), 1, size)  # nothing at all
    if size > 1:
        yield Shard.from_indices((6,), 0, [[0, 1, 2, 3], [2, 3, 4, 5]] + [[2, 3]] * (size - 2))  # parts held twice


def check_all_gather(group):
    tp = resolve_group(group)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        for shard in shard_cases(tp.tp_size):
            full = (made(0, *shard.shape) * 100).to(dtype)
            local = shard.split(full, tp.tp_rank)
            before = local.clone()
            got = tp.all_gather(local, shard)
            assert torch.equal(got, full) and got.dtype is dtype and torch.equal(local, before)
            assert got.untyped_storage().data_ptr() != local.untyped_storage().data_ptr() or not got.numel()
    every, work = tp.start_gather(made(tp.tp_rank, 4, 3).t())
    if work is not None:
        work.wait()
    assert torch.equal(every, torch.stack([made(rank, 4, 3).t() for rank in range(tp.tp_size)]))


@pytest.mark.parametrize("size", [2, 3])
def test_all_gather_is_bitwise_with_uneven_and_empty_parts(ranks, size):
    ranks.run(check_all_gather, size=size)


def check_any_dtype(group):
    tp = resolve_group(group)
    shard = Shard.from_indices((5,), 0, [[0, 3], [1, 2], [4]])
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float16, torch.complex64):
        full = torch.arange(5).remainder(3).to(dtype)
        assert torch.equal(tp.all_gather(shard.split(full, tp.tp_rank).clone(), shard), full), dtype


def test_buffers_of_any_dtype_are_gathered(ranks):
    ranks.run(check_any_dtype, size=3)


# -- agreement ----------------------------------------------------------------------------------------------------------


def check_together(group):
    tp = resolve_group(group)
    with tp.together("a good block"):
        pass

    def block():
        with tp.together("reading"):
            if tp.tp_rank >= 1:
                raise KeyError(f"seeded on {tp.tp_rank}")

    if tp.tp_rank == 0:
        text = message(block)
        assert "reading" in text and "[1, 2]" in text and "seeded on 1" in text
    else:
        with pytest.raises(KeyError, match=f"seeded on {tp.tp_rank}"):
            block()
    assert tp.gather_objects(tp.tp_rank) == [0, 1, 2] and tp.broadcast_object(tp.tp_rank, 2) == 2


def test_together_names_the_ranks_that_failed(ranks):
    ranks.run(check_together, size=3)


def check_arrive(group, absent):
    tp = resolve_group(group, timeout_s=1.0)
    assert tp.arrive("saving", f"from {tp.tp_rank}|x") == [f"from {rank}|x" for rank in range(3)]
    if tp.tp_rank in absent:
        next(tp._arrivals)
        time.sleep(1.6)
    else:
        with pytest.raises(GatherError, match="saving") as info:
            tp.arrive("saving")
        assert f"rank(s) {absent} did not come within 1 s" in str(info.value)
    tp.gather_objects(None)
    what = "saving" if tp.tp_rank else "gathering"
    with pytest.raises(GatherError, match="while rank"):
        tp.arrive(what)
    assert tp.arrive("loading") == [""] * 3  # still in step


@pytest.mark.parametrize("absent", [[0], [2], [1, 2]])
def test_arrive_names_who_did_not_come(ranks, absent):
    ranks.run(check_arrive, absent, size=3)


def check_copy_and_pickle(group):
    tp = resolve_group(group)
    holder = {"tp": tp, "again": tp}
    twin = copy.deepcopy(holder)
    assert twin["tp"] is tp and twin["again"] is tp
    assert "unshard" in message(pickle.dumps, tp)
    assert "full_state_dict" in message(torch.save, tp, os.devnull)


def test_deepcopy_shares_the_group_and_pickle_refuses(ranks):
    ranks.run(check_copy_and_pickle)


def test_a_group_of_one_needs_no_torch_distributed():
    tp, x = TPGroup(None, torch.device("cpu")), torch.randn(2, 3, requires_grad=True)
    shard = Shard.even((2, 3), 1, 1)
    for function in (copy_to_group, reduce_from_group, reduce_owned_from_group):
        assert function(x, tp) is x
    assert gather_from_group(x, tp, shard) is x and split_to_group(x, tp, shard) is x
    assert tp.arrive("alone", "note") == ["note"] and tp.gather_objects(1) == [1] and tp.broadcast_object(2) == 2
    total = tp.all_reduce(x.detach())
    assert torch.equal(total, x) and total.data_ptr() != x.data_ptr()
