"""Linears that read one input: one backward all-reduce for all, never a stale input, and nothing kept alive."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import autotp
from autotp.comm import TPGroup
from autotp.inject.module_plan import ModulePlan
from autotp.inject.plan import Plan, Region
from autotp.layers.siblings import SiblingInput
from autotp.shard import Shard
from tests.models import tiny

ATTENTION = ("q_proj", "k_proj", "v_proj")


class Reductions:
    """Shapes of what is all-reduced inside the `with`."""

    def __enter__(self):
        self.shapes, self.real = [], TPGroup.all_reduce_owned

        def counted(group, tensor, op="sum"):
            self.shapes.append(tuple(tensor.shape))
            return self.real(group, tensor, op)

        TPGroup.all_reduce_owned = counted
        return self

    def __exit__(self, *args):
        TPGroup.all_reduce_owned = self.real


def made(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pair(group):
    """The first layers' attention and MLP, whole and sharded."""
    whole, mine = tiny("llama").train(), autotp.parallelize(tiny("llama"), group).train()
    return whole.model.layers[0], mine.model.layers[0], mine


def holds(linear):
    """Whether the linear's group keeps an input or outputs for members that have not come yet."""
    group = linear.siblings
    kept = group._round is not None and (group._round.source is not None or any(y is not None for y in group._round.outputs))
    return kept or group._source is not None or group._entered is not None


def project(attention, x):
    """The three projections of x."""
    return [getattr(attention, name)(x) for name in ATTENTION]


def check_projections(whole, mine, seed=0):
    """Values and the input's gradient of q, k, v against the whole ones."""
    grads, outputs = [], []
    for attention in (whole, mine):
        leaf = made(seed, 2, 5, 64).requires_grad_()
        x = leaf * 1
        out = project(attention, x)
        loss = 0
        for name, y in zip(ATTENTION, out, strict=True):
            cotangent = made(7 + len(name) + ord(name[0]), *whole.get_submodule(name).weight.shape[:1])
            shard = getattr(getattr(mine, name), "shards", {}).get("weight") if attention is mine else None
            if shard is not None:
                cotangent = cotangent[shard.cuts[0].indices(mine.q_proj.tp.tp_rank)]
            loss = loss + (y * cotangent).sum()
        loss.backward()
        grads.append(leaf.grad)
        outputs.append(out)
    for name, full, local in zip(ATTENTION, *outputs, strict=True):
        shard = mine.get_submodule(name).shards["weight"]
        torch.testing.assert_close(local, full[..., shard.cuts[0].indices(mine.q_proj.tp.tp_rank)])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)


def check_one_reduction(group):
    whole, mine, _ = pair(group)
    with Reductions() as seen:
        check_projections(whole.self_attn, mine.self_attn)
    assert seen.shapes == [(2, 5, 64)]
    x = made(1, 2, 5, 64).requires_grad_()
    with Reductions() as seen:
        mine.mlp(x * 1).sum().backward()
    assert seen.shapes == [(2, 5, 64)] * 2  # the row linear's forward, and one for gate and up


@pytest.mark.parametrize("size", [2, 4])
def test_the_input_gradient_is_reduced_once_for_all_siblings(ranks, size):
    ranks.run(check_one_reduction, size=size)


def check_after_others(group):
    whole, mine, model = pair(group)
    attention = mine.self_attn
    with torch.no_grad():
        project(attention, made(3, 2, 5, 64))
    check_projections(whole.self_attn, attention)
    with torch.no_grad():
        attention.q_proj(made(3, 2, 5, 64))  # one sibling alone
    check_projections(whole.self_attn, attention)
    same = made(4, 2, 5, 64).requires_grad_()  # the same tensor: with a gradient, without, and again
    first = attention.q_proj(same)
    with torch.no_grad():
        assert not attention.k_proj(same).requires_grad
    second = attention.k_proj(same)
    (first.sum() + second.sum()).backward()
    q, k = whole.self_attn.q_proj.weight, whole.self_attn.k_proj.weight
    torch.testing.assert_close(same.grad, (q.sum(0) + k.sum(0)).expand_as(same), rtol=1e-4, atol=1e-5)
    for seed in (5, 6):  # second and third step
        check_projections(whole.self_attn, attention, seed=seed)
    with pytest.raises(RuntimeError):
        attention.q_proj(made(4, 2, 5, 63).requires_grad_() * 1)  # a forward that dies half way
    check_projections(whole.self_attn, attention)
    twin = copy.deepcopy(model).model.layers[0].self_attn
    check_projections(whole.self_attn, twin)
    shared = {id(getattr(twin, name).siblings) for name in ATTENTION}
    assert len(shared) == 1 and id(attention.q_proj.siblings) not in shared


def test_right_after_no_grad_a_failed_call_a_second_step_and_deepcopy(ranks):
    ranks.run(check_after_others)


def check_edit(group):
    whole, mine, _ = pair(group)

    leaf = made(0, 2, 5, 64)
    for attention, rows in ((whole.self_attn, slice(None)), (mine.self_attn, None)):
        x = leaf.clone().requires_grad_() * 1
        attention.q_proj(x)
        with torch.no_grad():
            x.mul_(3)
        rows = mine.self_attn.k_proj.shards["weight"].cuts[0].indices(dist.get_rank(group)) if rows is None else rows
        expected = (leaf * 3) @ whole.self_attn.k_proj.weight.t()
        got = attention.k_proj(x)
        torch.testing.assert_close(got, expected[..., rows])


def test_an_edit_of_the_input_between_siblings_is_seen(ranks):
    ranks.run(check_edit)


def check_autocast_between(group):
    _, mine, _ = pair(group)
    x = made(0, 2, 5, 64).requires_grad_() * 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mine.self_attn.q_proj(x).dtype is torch.bfloat16
    assert mine.self_attn.k_proj(x).dtype is torch.float32


def test_autocast_between_siblings(ranks):
    ranks.run(check_autocast_between)


def check_checkpointed(group, reentrant):
    whole, mine, _ = pair(group)
    gradients = []
    for mlp in (whole.mlp, mine.mlp):
        leaf = made(2, 2, 5, 64).requires_grad_()
        with Reductions() as seen:
            y = checkpoint(mlp, leaf * 1, use_reentrant=reentrant)
            y = checkpoint(mlp, y, use_reentrant=reentrant)  # the same module twice in one graph
            y.square().sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)
    # Each call: its forward, perhaps the recomputed one (which may stop early), and once backward.
    assert 4 <= len(seen.shapes) <= 6
    for name, parameter in whole.mlp.named_parameters():
        layer = mine.mlp.get_submodule(name.rpartition(".")[0])
        expected = layer.shards["weight"].split(parameter.grad, layer.tp.tp_rank)
        torch.testing.assert_close(mine.mlp.get_parameter(name).grad, expected, rtol=1e-4, atol=1e-4)
    assert not holds(mine.mlp.gate_proj)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(ranks, reentrant):
    ranks.run(check_checkpointed, reentrant)


def check_nothing_lives(group):
    _, mine, model = pair(group)
    project(mine.self_attn, made(0, 2, 5, 64).requires_grad_() * 1)  # dropped by the last one, with no row linear after it
    assert not holds(mine.self_attn.q_proj)
    seen = []
    for module in (mine.self_attn.q_proj, mine.mlp.gate_proj):
        module.register_forward_pre_hook(lambda module, args: seen.append(weakref.ref(args[0])))
    ids = torch.arange(3, 13).view(2, 5)
    out = model(input_ids=ids, use_cache=False)
    assert not holds(mine.self_attn.q_proj) and not holds(mine.mlp.gate_proj)
    del out  # the graph goes without a backward
    gc.collect()
    assert len(seen) == 2 and all(ref() is None for ref in seen)


def test_nothing_is_kept_alive_after_the_forward(ranks):
    ranks.run(check_nothing_lives)


def check_row_ends(group):
    _, mine, _ = pair(group)
    for grad in (True, False):
        x = made(0, 2, 5, 64).requires_grad_() * 1
        with torch.set_grad_enabled(grad):
            h = mine.mlp.gate_proj(x)  # up_proj is never called
            assert mine.mlp.gate_proj.siblings._round.source is x
            mine.mlp.down_proj(h)
        assert not holds(mine.mlp.gate_proj)
        with torch.set_grad_enabled(grad):
            mine.mlp.gate_proj(x)  # from now on members compute alone
            assert mine.mlp.gate_proj.siblings._round is None
            mine.mlp.down_proj(h)
        assert not holds(mine.mlp.gate_proj)


def test_the_row_linear_drops_what_a_skipped_sibling_left(ranks):
    ranks.run(check_row_ends)


def test_equal_tensors_are_not_the_same_input():
    entry = SiblingInput(TPGroup(None, torch.device("cpu")), 2)
    a, b = torch.ones(2, requires_grad=True) * 1, torch.ones(2, requires_grad=True) * 1
    assert entry.enter(a) is a and entry.enter(b) is b and entry.enter(a) is a


class Parallel(nn.Module):
    """Two column -> row pairs that read one tensor, as falcon's attention and MLP read one norm's output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))) + self.d(torch.tanh(self.c(x)))


def check_two_regions(group):
    size, whole = dist.get_world_size(group), Parallel()
    modules, regions = [], []
    for column, row, width in (("a", "b", 8), ("c", "d", 10)):
        shards = {"weight": Shard.even((width, 6), 0, size), "bias": Shard.even((width,), 0, size)}
        modules.append(ModulePlan(column, "colwise", shards, siblings="x"))
        modules.append(ModulePlan(row, "rowwise", {"weight": Shard.even((6, width), 1, size)}))
        regions.append(Region(column, (column,), (row,), (), (row,), (1,) * size))
    plan = Plan(size, "Parallel", tuple(modules), tuple(regions))
    assert plan.collectives == (2, 1)
    mine = autotp.parallelize(copy.deepcopy(whole), group, plan=plan)
    for seed in range(2):
        grads = []
        for model in (mine, whole):
            leaf = made(seed, 3, 6).requires_grad_()
            with Reductions() as seen:
                model(leaf * 1).square().sum().backward()
            assert len(seen.shapes) == (3 if model is mine else 0)
            grads.append(leaf.grad)
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    assert mine.a.siblings is mine.c.siblings and not holds(mine.a)


def test_two_regions_that_read_one_tensor_share_one_reduction(ranks):
    ranks.run(check_two_regions)


def check_changed_bias(group):
    whole, mine = tiny("qwen2"), autotp.parallelize(tiny("qwen2"), group, logits="full")
    ids = {"input_ids": torch.arange(12).view(1, 12)}
    mine(**ids)
    for model in (whole, mine):
        for layer in model.model.layers:
            for linear in (layer.self_attn.q_proj, layer.self_attn.v_proj):  # as pruning does
                linear.register_parameter("bias_orig", linear._parameters.pop("bias"))
                linear.bias = linear.bias_orig.tanh()
    for _ in range(2):
        assert torch.allclose(mine(**ids).logits, whole(**ids).logits, atol=1e-4)


def test_biases_computed_afterwards_are_added(ranks):
    ranks.run(check_changed_bias)
