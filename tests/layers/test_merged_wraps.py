"""Siblings under what wraps and saves a model: FSDP2, DDP over other ranks, accelerate, pickling."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import autotp
from autotp.errors import AutoTPError
from tests.layers.test_merged import pair
from tests.layers.test_siblings import Reductions
from tests.models import batch, tiny
from tests.ranks import grid


def laid(model):
    """How many groups of siblings of `model` lie side by side."""
    groups = {id(m.siblings): m.siblings for m in model.modules() if getattr(m, "siblings", None) is not None}
    return sum(group.find_laid() is not None for group in groups.values())


def check_fully_sharded(group):
    """FSDP2 over the data-parallel axis: its parameters are others, in memory that it gathers and frees."""
    mesh = grid()
    whole = tiny("llama").train()
    model = autotp.parallelize(copy.deepcopy(whole), mesh["tp"]).train()
    assert laid(model) == 4
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    assert all(m.siblings._laid is None for m in model.modules() if getattr(m, "siblings", None) is not None)  # memory is freed
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(whole.parameters(), lr=0.1)
    for seed in range(2):
        for each, stepper in ((model, optimizer), (whole, reference)):
            loss = each(**batch(whole, seed=seed)).loss
            loss.backward()
            stepper.step()
            stepper.zero_grad()
        assert laid(model) == 0
        with torch.no_grad():
            torch.testing.assert_close(
                model(**batch(whole, seed=9)).loss, whole(**batch(whole, seed=9)).loss, rtol=1e-4, atol=1e-5
            )
    dist.barrier(mesh["dp"].get_group())


def test_fully_sharded_data_parallel(ranks):
    ranks.run(check_fully_sharded, size=4)


def check_data_parallel(group, bucket_views):
    mesh, whole = grid(), tiny("llama").train()
    model = autotp.parallelize(copy.deepcopy(whole), mesh["tp"]).train()
    wrapped = nn.parallel.DistributedDataParallel(
        model, process_group=mesh["dp"].get_group(), gradient_as_bucket_view=bucket_views
    )
    for seed in range(2):
        wrapped(**batch(whole, seed=seed)).loss.backward()
        whole(**batch(whole, seed=seed)).loss.backward()
    assert laid(model) == 4
    for name, parameter in model.named_parameters():
        path, _, own = name.rpartition(".")
        shard = getattr(model.get_submodule(path), "shards", {}).get(own)
        expected = whole.get_parameter(name).grad
        expected = expected if shard is None else shard.split(expected, mesh["tp"].get_local_rank())
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("bucket_views", [False, True])
def test_data_parallel_over_other_ranks(ranks, bucket_views):
    ranks.run(check_data_parallel, bucket_views, size=4)


def test_accelerate_saves_and_loads_separate_tensors(tmp_path):
    _, mine = pair(dtype=torch.float32)
    state = {name: value.clone() for name, value in mine.state_dict().items()}
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(mine)
    accelerator.save_model(prepared, tmp_path / "model")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert len(saved) == len(state) and all(torch.equal(saved[name], value) for name, value in state.items())
    accelerator.save_state(tmp_path / "state")
    with torch.no_grad():
        for parameter in mine.parameters():
            parameter.zero_()
    accelerator.load_state(tmp_path / "state")
    assert all(torch.equal(value, state[name]) for name, value in mine.state_dict().items()) and laid(mine) == 1
    accelerator.free_memory()
    type(accelerator.state)._reset_state(reset_partial_state=True)  # other tests of this process name their own


def check_converted(group):
    whole, model = tiny("llama"), autotp.parallelize(tiny("llama"), group)
    assert laid(model) == 4
    for convert in (lambda each: each.bfloat16(), lambda each: each.to(torch.float64), lambda each: each.to(torch.float64)):
        with autotp.GatherReplacedLayerParams(model.parameters(), model):
            convert(model)
        convert(whole)
        assert laid(model) == 4
        state = autotp.full_state_dict(model)
        assert all(torch.equal(value, whole.state_dict()[name]) for name, value in state.items())
    torch.testing.assert_close(model(**batch(model)).loss, whole(**batch(whole)).loss)


def test_weights_converted_while_they_are_whole_lie_side_by_side(ranks):
    ranks.run(check_converted)


def check_pickled(group):
    model = autotp.parallelize(tiny("llama"), group)
    with pytest.raises(AutoTPError, match="can't be pickled"):
        pickle.dumps(model)
    parameter = model.model.layers[0].self_attn.k_proj.weight
    assert len(pickle.dumps(parameter)) < parameter.numel() * 4 + 2000  # not the whole allocation
    whole = autotp.full_state_dict(model)
    with autotp.GatherReplacedLayerParams(model.parameters(), model), torch.no_grad():
        parameter.mul_(2)
    assert laid(model) == 4
    with Reductions() as seen:
        model.train()(**batch(model)).loss.backward()
    assert seen.shapes
    autotp.unshard(model)
    if dist.get_rank(group) == 0:
        name = "model.layers.0.self_attn.k_proj.weight"
        torch.testing.assert_close(model.state_dict()[name], whole[name] * 2)
    assert not any("siblings" in m.__dict__ for m in model.modules())


def test_pickled_gathered_and_unsharded(ranks):
    ranks.run(check_pickled)
