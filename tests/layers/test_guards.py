"""One test for each guard: what used to corrupt plain shards silently is put right, or refused by name."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from autotp.errors import AutoTPError
from autotp.layers.data_parallel import check_data_group
from autotp.layers.gather import GatherReplacedLayerParams
from autotp.layers.guards import install_guards, mark_model, unmark_model
from tests.layers.handmade import build, give_gradients, shard_of
from tests.ranks import grid


def refused(function, *args, **kwargs):
    with pytest.raises(AutoTPError) as info:
        function(*args, **kwargs)
    return str(info.value)


# -- gradients ----------------------------------------------------------------------------------------------------------


def run_stock_clip(group):
    install_guards()
    install_guards()
    model, full, tp = build(group)
    give_gradients(model, full, tp)
    params, full_params = list(model.parameters()), list(full.parameters())
    expected = torch.nn.utils.clip_grad_norm_(full_params, 1e9)  # not ours: passes through
    torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(iter(params), 1e9), expected)
    torch.testing.assert_close(torch.nn.utils.clip_grad.clip_grad_norm_(params, 1e9), expected)
    grads = [p.grad for p in params if p.grad is not None]
    torch.testing.assert_close(torch.nn.utils.get_total_norm(grads), expected)
    assert torch.nn.utils.get_total_norm([torch.ones(4)]).item() == 2


def test_stock_clipping_uses_the_global_norm(ranks):
    ranks.run(run_stock_clip)


def run_grad_scaler(group):
    install_guards()
    model, _, tp = build(group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = model.down.weight.detach().clone()
    x = torch.ones(2, 6)
    loss = scaler.scale(model(x).pow(2).sum())
    loss.backward()
    if tp.tp_rank == 1:
        model.up.weight.grad[0, 0] = math.inf  # on one rank alone
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.down.weight, before) and scaler.get_scale() == 2.0
    optimizer.zero_grad()
    scaler.scale(model(x).pow(2).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.down.weight, before) and scaler.get_scale() == 2.0


def test_grad_scaler_shares_found_inf(ranks):
    ranks.run(run_grad_scaler)


# -- optimizers ---------------------------------------------------------------------------------------------------------


class Lamb(torch.optim.Optimizer):
    """A whole-matrix optimizer that needs what can't be guessed, so that only its name tells."""

    def __init__(self, params, secret):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        pass


class Mystery(Lamb):
    pass


class Normed(torch.optim.Optimizer):
    """Divides each step by the norm of the whole gradient."""

    def __init__(self, params, lr=0.1, power=1.0):
        super().__init__(params, {"lr": lr, "power": power})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * param.grad / (param.grad.norm() + 1e-6) ** group["power"])


def run_optimizers(group):
    install_guards()
    model, full, tp = build(group)
    give_gradients(model, full, tp)

    def step(cls, params=None, **options):
        cls(list(model.parameters()) if params is None else params, **options).step()

    from transformers.optimization import Adafactor

    assert "Muon" in refused(step, torch.optim.Muon, [model.up.weight], lr=0.0)  # a warm-up's first step
    assert "Adafactor" in refused(step, torch.optim.Adafactor)
    assert "Adafactor" in refused(step, Adafactor, lr=1e-3, relative_step=False)
    assert "Normed" in refused(step, Normed)
    step(Normed, power=0.0)  # the same class, elementwise with these hyperparameters
    assert "Lamb" in refused(step, Lamb, secret=1)
    with pytest.warns(UserWarning, match="Mystery"):
        step(Mystery, secret=1)
    give_gradients(model, full, tp)
    for cls in (torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad):
        step(cls, lr=1e-3)
    step(torch.optim.AdamW, lr=1e-3, fused=True)
    whole = [p for p in model.parameters() if p.requires_grad and p.dim() == 1 and p is not model.up.bias]
    step(torch.optim.Adafactor, whole, lr=1e-3)  # only parameters that every rank holds whole
    step(Normed, list(full.parameters())[:1], lr=0.1)  # not ours


def test_optimizers_that_are_not_elementwise_are_refused(ranks):
    ranks.run(run_optimizers)


def run_old_state(group):
    install_guards()
    model, full, tp = build(group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.state[model.up.weight]["exp_avg"] = torch.zeros(7, 6)  # as made before parallelize
    give_gradients(model, full, tp)
    assert "AdamW has state 'exp_avg' of shape (7, 6)" in refused(optimizer.step)
    optimizer.state.clear()
    optimizer.step()


def test_an_optimizer_with_state_of_the_whole_model_is_refused(ranks):
    ranks.run(run_old_state)


def run_fused_adamw(group):
    install_guards()
    model, full, tp = build(group)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(5))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True) for each in (model, full)]
    for _ in range(3):
        for each, optimizer in zip((model, full), optimizers, strict=True):
            each(x).pow(3).sum().backward()
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
    for (name, param), whole in zip(model.named_parameters(), full.parameters(), strict=True):
        shard = shard_of(model, name)
        expected = shard.split(whole, tp.tp_rank) if shard else whole
        torch.testing.assert_close(param, expected, atol=1e-5, rtol=1e-5)


def test_fused_adamw_with_foreach_clipping_trains_as_the_unsharded_model(ranks):
    ranks.run(run_fused_adamw)


# -- data parallelism ---------------------------------------------------------------------------------------------------


def run_ddp(group):
    install_guards()
    model, full, tp = build(group)
    ranks_list = str(list(tp.ranks))
    before = [p.detach().clone() for p in model.parameters()]
    for wrap in (nn.parallel.DistributedDataParallel, FullyShardedDataParallel):
        text = refused(wrap, model, process_group=group)
        assert ranks_list in text and "different shards" in text, text
    assert "different shards" in refused(fully_shard, model, mesh=dist.DeviceMesh.from_group(group, "cpu"))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    nn.parallel.DistributedDataParallel(full, process_group=group)  # not ours


def test_data_parallelism_inside_a_tp_group_is_refused(ranks):
    ranks.run(run_ddp)


def run_two_axes(group):
    """Stock DDP over the data axis of a 2x2 mesh equals the unsharded model on the whole batch."""
    install_guards()
    mesh = grid()
    model, full, tp = build(mesh["tp"].get_group())
    data = mesh["dp"].get_group()
    model.copied.requires_grad_(False)  # takes no part in the forward, which DDP would wait for
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=data)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(6))
    wrapped(x.chunk(2)[dist.get_rank(data)]).pow(3).mean().backward()
    full(x).pow(3).mean().backward()
    for (name, param), whole in zip(model.named_parameters(), full.parameters(), strict=True):
        if whole.grad is not None:
            shard = shard_of(model, name)
            expected = shard.split(whole.grad, tp.tp_rank) if shard else whole.grad
            torch.testing.assert_close(param.grad, expected)
    check_data_group([model], data, "DDP")
    assert "different shards" in refused(check_data_group, [model], mesh, "DDP")
    torch.testing.assert_close(
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), torch.nn.utils.clip_grad_norm_(full.parameters(), 1.0)
    )


def test_ddp_over_the_data_axis_is_exact(ranks):
    ranks.run(run_two_axes, size=4)


# -- marks and gather ---------------------------------------------------------------------------------------------------


def run_marks(group):
    model, _, tp = build(group)
    mark_model(model, tp)
    assert model._tp_size == model.tp_size == tp.tp_size
    assert not any("tp_size" in name for name in model.state_dict())
    unmark_model(model)
    assert not hasattr(model, "tp_size") and not hasattr(model, "_tp_size")


def test_marks_are_set_and_taken_back(ranks):
    ranks.run(run_marks)


def run_forward_in_gather(group):
    model, _, _ = build(group)
    with GatherReplacedLayerParams(model.parameters(), model):
        assert "whole inside GatherReplacedLayerParams" in refused(model, torch.zeros(1, 6))
    with warnings.catch_warnings():
        model(torch.zeros(1, 6))


def test_a_forward_inside_a_gather_raises(ranks):
    ranks.run(run_forward_in_gather)
