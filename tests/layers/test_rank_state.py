"""Optimizer states beside a library's checkpoint: of any number of ranks, on any number; what can't go on is named before."""

import copy
import random

import numpy as np
import pytest
import torch

import autotp
from autotp.errors import CheckpointError
from autotp.groups import resolve_group
from autotp.layers.rank_state import (
    SHARDS,
    check_rank_state,
    find_shards,
    find_size,
    load_rank_state,
    own_loading,
    save_rank_state,
    share_random_state,
)
from autotp.shard import Shard
from tests.models import batch, tiny

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


def take_step(model, kind):
    optimizer = OPTIMIZERS[kind](model.parameters())
    model.train()(**batch(model)).loss.backward()
    optimizer.step()
    return optimizer


def reference(kind):
    model = tiny("qwen3", num_key_value_heads=2)
    return take_step(model, kind).state_dict()["state"]


def save(group, directory, kind):
    model = autotp.parallelize(tiny("qwen3", num_key_value_heads=2), group)
    optimizer = take_step(model, kind)
    save_rank_state(model.autotp_group, [optimizer], directory, model.autotp_group.tp_rank)


def load(group, directory, kind):
    """On other ranks: what each holds is its part of the state of an unsharded run."""
    model = autotp.parallelize(tiny("qwen3", num_key_value_heads=2), group)
    optimizer, tp = OPTIMIZERS[kind](model.parameters()), model.autotp_group
    check_rank_state(tp, directory)
    load_rank_state(tp, [optimizer], directory)
    compare(optimizer, kind, tp.tp_rank)


def compare(optimizer, kind, rank=0):
    found, want, shards = optimizer.state_dict()["state"], reference(kind), find_shards(optimizer)
    assert set(found) == set(want) and any(values for values in want.values())
    for number, values in want.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.ndim and shards[number] is not None:
                value = shards[number].split(value, rank)
            torch.testing.assert_close(found[number][key], value, rtol=1e-4, atol=1e-6, msg=f"{number} {key}")


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_goes_on_at_any_number_of_ranks(ranks, tmp_path, kind):
    """Two ranks' files on four, where key heads have copies; on two; and unsharded."""
    ranks.run(save, tmp_path, kind)
    for size in (4, 2):
        ranks.run(load, tmp_path, kind, size=size)
    model = tiny("qwen3", num_key_value_heads=2)
    optimizer = OPTIMIZERS[kind](model.parameters())
    check_rank_state(None, tmp_path)
    load_rank_state(None, [optimizer], tmp_path)
    compare(optimizer, kind)
    ranks.run(save, tmp_path, kind, size=4)
    assert find_size(tmp_path, 0, 2) == 4  # what two ranks wrote before is no part of it
    ranks.run(load, tmp_path, kind)


def load_whole(group, directory):
    model = autotp.parallelize(tiny("qwen3", num_key_value_heads=2), group)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    whole = take_step(tiny("qwen3", num_key_value_heads=2), "adamw")
    optimizer.load_state_dict(copy.deepcopy(whole.state_dict()))  # as the libraries do on every rank
    load_rank_state(model.autotp_group, [optimizer], directory)
    compare(optimizer, "adamw", model.autotp_group.tp_rank)


def test_an_unsharded_runs_state_is_cut(ranks, tmp_path):
    ranks.run(load_whole, tmp_path)


def draw():
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def check_numbers(group, directory):
    tp = resolve_group(group)
    agree = []
    for other in (False, True):
        torch.manual_seed(tp.tp_rank)
        random.seed(tp.tp_rank)
        np.random.seed(tp.tp_rank)
        if tp.tp_rank == 0:
            for rank in range(2 + other):
                (directory / f"optimizer_0.tp{rank}-of-{2 + other}.pt").touch()
            for path in directory.glob("*-of-2.pt") if other else ():
                path.unlink()
        tp.gather_objects(None)
        share_random_state(tp, directory)
        drawn = tp.gather_objects(draw())
        agree.append([len(set(each)) == 1 for each in zip(*drawn, strict=True)])
    assert agree == [[False] * 3, [True] * 3]


def test_ranks_draw_alike_after_another_number_of_ranks(ranks, tmp_path):
    ranks.run(check_numbers, tmp_path)


def save_beside(group, directory):
    """Files as a library wrote them; what is read on then is the ranks' own, and nothing of the library's reaches them."""
    model = autotp.parallelize(tiny("qwen3", num_key_value_heads=2), group)
    optimizer, tp = take_step(model, "adamw"), model.autotp_group
    names = ("optimizer.pt", "optimizer.bin")
    for name in names if tp.tp_rank == 0 else ():
        torch.save(optimizer.state_dict(), directory / name)
    save_rank_state(tp, [optimizer], directory, tp.tp_rank)
    tp.gather_objects(None)
    for name in names:
        state = torch.load(directory / name, weights_only=True)
        assert "autotp.parallelize" in state["autotp"]
        with pytest.raises(ValueError, match="different number of parameter groups"):
            optimizer.load_state_dict(state)
        before = optimizer.state_dict()["state"][0]["exp_avg"]
        with own_loading([optimizer], directory):
            optimizer.load_state_dict(state)
        assert optimizer.state_dict()["state"][0]["exp_avg"] is before
        load_rank_state(tp, [optimizer], directory)
    compare(optimizer, "adamw", tp.tp_rank)


def test_a_part_is_taken_for_the_whole_by_no_optimizer(ranks, tmp_path):
    ranks.run(save_beside, tmp_path)


def write(directory, rank, size, state):
    torch.save(state, directory / f"optimizer_0.tp{rank}-of-{size}.pt")


def test_what_cannot_go_on_is_named(tmp_path):
    model = torch.nn.Linear(4, 6, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    good = optimizer.state_dict()
    write(tmp_path, 0, 2, {**good, SHARDS: [None]})
    with pytest.raises(CheckpointError, match=r"tp1-of-2.pt is missing.*written on 2 ranks, and 1 of the files"):
        check_rank_state(None, tmp_path)
    for rank in range(2):
        write(tmp_path, rank, 2, good)  # as before Shards were noted
    with pytest.raises(CheckpointError, match=r"written on 2 ranks.* on 1: resume it on 2 ranks"):
        check_rank_state(None, tmp_path)
    other = Shard.even((12, 4), 0, 2).to_json()
    for shards, text in (([None, None], "of 2 parameters, the optimizer has 1"), ([other], r"\(6, 4\) on rank 0")):
        for rank in range(2):
            write(tmp_path, rank, 2, {**good, SHARDS: shards})
        check_rank_state(None, tmp_path)
        before = optimizer.state_dict()["state"][0]["exp_avg"]
        with pytest.raises(CheckpointError, match=text):
            load_rank_state(None, [optimizer], tmp_path)
        assert optimizer.state_dict()["state"][0]["exp_avg"] is before


def test_a_format_of_the_optimizers_own_is_named(tmp_path):
    """bitsandbytes keeps 8-bit moments, scales and maps in a nest of each parameter."""
    bnb = pytest.importorskip("bitsandbytes")
    model = torch.nn.Linear(64, 128, bias=False)
    optimizer = bnb.optim.AdamW8bit(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    for rank in range(2):
        write(tmp_path, rank, 2, {**optimizer.state_dict(), SHARDS: [Shard.even((256, 64), 0, 2).to_json()]})
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointError, match=r"in AdamW8bit's own format, .*: resume on the 2 rank\(s\)"):
        load_rank_state(None, [optimizer], tmp_path)
    assert str(optimizer.state_dict()) == str(before)
