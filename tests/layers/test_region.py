"""A model made by hand with everything that a plan can say, against its unsharded twin."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import autotp
from autotp.inject.module_plan import InputPlan
from autotp.layers import linear_product, product, region
from autotp.layers.base import find_group, sharded_modules
from tests.layers.regions import HEADS, Net, plan_of

CASES = [(2, False), (2, True), (4, False), (4, True)]


def made(group, late=False, dtype=torch.float32):
    """`(sharded, unsharded)`."""
    whole = Net().to(dtype)
    mine = autotp.parallelize(copy.deepcopy(whole), group, plan=plan_of(dist.get_world_size(group), late))
    return mine, whole


def inputs(seed=0, dtype=torch.float32, rows=2):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.randn(rows, HEADS, 5, 5, generator=generator, dtype=dtype)
    return torch.randn(rows, 5, 12, generator=generator, dtype=dtype), mask


def whole_gradients(model):
    """Every gradient, gathered; copies are compared bit for bit on the way."""
    found = {}
    for name, parameter in model.named_parameters():
        path, _, own = name.rpartition(".")
        shard = getattr(model.get_submodule(path), "shards", {}).get(own)
        grad, tp = parameter.grad, find_group(model)
        if grad is None:
            continue
        found[name] = grad if shard is None else tp.all_gather(grad, shard)
        local = found[name] if shard is None else shard.split(found[name], tp.tp_rank)
        assert torch.equal(local, grad), f"{name}: the holders' gradients differ"
        if shard is None:
            every = tp.gather_objects(grad)
            assert all(torch.equal(grad, other) for other in every), f"{name}: the ranks' gradients differ"
    return found


def step(model, seed=0):
    dtype = next(model.parameters()).dtype
    x, mask = inputs(seed, dtype)
    x.requires_grad_()
    y = model(x, mask)
    (y * torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y)).sum().backward()
    return y.detach(), x.grad


def compare(mine, whole, seed=0):
    got, want = step(mine, seed), step(whole, seed)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    grads = whole_gradients(mine)
    for name, parameter in whole.named_parameters():
        if parameter.grad is None:
            assert name not in grads, name
        else:
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-4, atol=2e-5 * max(1, scale), msg=name)


def check_everything(group, late):
    mine, whole = made(group, late)
    compare(mine, whole)
    x, mask = inputs(3)
    with torch.no_grad():
        torch.testing.assert_close(mine(x, mask), whole(x, mask), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine(x), whole(x), rtol=1e-4, atol=1e-5)  # an argument that is None
        torch.testing.assert_close(mine(x, mask[:, :1]), whole(x, mask[:, :1]), rtol=1e-4, atol=1e-5)  # one that broadcasts
    compare(mine, whole, seed=1)  # accumulates on the first gradients
    mine.zero_grad(), whole.zero_grad()
    named = {"gate": torch.ones(2, 5, 6), "mask": None, "alibi": inputs(4)[1][..., 0].reshape(2 * HEADS, 1, 5), "x": x}
    torch.testing.assert_close(mine.attn(**named)[0], whole.attn(**named)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size, late", CASES)
def test_forward_and_every_gradient(ranks, size, late):
    ranks.run(check_everything, late, size=size)


# -- training -----------------------------------------------------------------------------------------------------------


def train(model, clip, steps=2):
    """AdamW steps of two micro-batches each, clipped; returns the norms."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for number in range(steps):
        step(model, 2 * number)
        step(model, 2 * number + 1)
        norms.append(float(clip(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def check_training(group, late):
    mine, whole = made(group, late, torch.float64)
    expected = train(whole, torch.nn.utils.clip_grad_norm_)
    assert train(mine, autotp.clip_grad_norm_) == pytest.approx(expected, rel=1e-9)
    state = autotp.full_state_dict(mine)
    for name, value in whole.state_dict().items() if dist.get_rank(group) == 0 else ():
        torch.testing.assert_close(state[name], value, rtol=1e-8, atol=1e-8, msg=name)
    for name, layer in sharded_modules(mine):  # copies are still copies, and what is whole is equal everywhere
        for own, parameter in layer.named_parameters(recurse=False):
            shard = layer.shards.get(own)
            if shard is not None:
                full = layer.tp.all_gather(parameter.detach(), shard)
                assert torch.equal(shard.split(full, layer.tp.tp_rank), parameter), f"{name}.{own}"
            else:
                assert all(torch.equal(parameter, other) for other in layer.tp.gather_objects(parameter.detach()))


@pytest.mark.parametrize("size, late", CASES)
def test_two_clipped_optimizer_steps(ranks, size, late):
    ranks.run(check_training, late, size=size)


def check_copies(group, late):
    mine, whole = made(group, late)
    twin = copy.deepcopy(mine)
    compare(twin, whole)
    assert all(p.grad is None for p in mine.parameters())
    before = {name: value.clone() for name, value in mine.state_dict().items()}
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in mine.state_dict().items())
    whole.zero_grad()
    compare(mine, whole)
    assert twin.attn.config is not mine.attn.config and type(twin.attn.config).__name__ == "Config"


@pytest.mark.parametrize("size, late", [(2, False), (4, True)])
def test_a_deep_copy_is_a_model_of_its_own(ranks, size, late):
    ranks.run(check_copies, late, size=size)


FROZEN = [
    ("attn.k.weight", "experts.down_bias", "attn.k_norm.bias"),
    ("attn.q.weight", "attn.q.bias", "attn.sinks", "attn.head_norm.weight", "experts.gate_up", "experts.gain"),
    ("attn.table.weight", "attn.k.bias", "attn.v.weight", "attn.v.bias", "attn.q_norm.weight", "gate.weight"),
    ("norm.weight", "norm.bias", "alibi.weight", "alibi.bias", "router.weight", "router.bias"),
]


def check_frozen(group, late):
    mine, whole = made(group, late)
    for names in FROZEN:
        for model in (mine, whole):
            for name in names:
                model.get_parameter(name).requires_grad_(False)
        compare(mine, whole)
        for model in (mine, whole):
            model.zero_grad()
            model.requires_grad_(True)
    compare(mine, whole)
    mine.zero_grad(), whole.zero_grad()
    for model in (mine, whole):  # nothing before the attention asks for a gradient
        model.requires_grad_(False)
        model.attn.requires_grad_(True)
    for model in (mine, whole):
        y = model(*inputs(5))
        y.square().sum().backward()
    for name, grad in whole_gradients(mine).items():
        torch.testing.assert_close(grad, whole.get_parameter(name).grad, rtol=1e-4, atol=1e-3, msg=name)


@pytest.mark.parametrize("size, late", [(2, True), (4, False)])
def test_frozen_and_unfrozen(ranks, size, late):
    ranks.run(check_frozen, late, size=size)


def check_checkpointed(group, late, reentrant):
    mine, whole = made(group, late)
    mine.checkpoint = lambda module, *args: checkpoint(module, *args, use_reentrant=reentrant)
    for seed in range(2):
        compare(mine, whole, seed)
        mine.zero_grad(), whole.zero_grad()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("size, late", [(2, True), (4, False)])
def test_activation_checkpointing(ranks, size, late, reentrant):
    ranks.run(check_checkpointed, late, reentrant, size=size)


# -- data ---------------------------------------------------------------------------------------------------------------


def check_round_trips(group, directory):
    whole = Net()
    mine, rank = autotp.parallelize(copy.deepcopy(whole), group, plan=plan_of(dist.get_world_size(group))), dist.get_rank(group)
    local = {name: value.clone() for name, value in mine.state_dict().items()}
    where = {name: p.data_ptr() for name, p in mine.named_parameters()}
    with autotp.GatherReplacedLayerParams([*mine.parameters(), mine.attn.slopes], mine):
        for name, value in whole.state_dict().items():
            assert torch.equal(mine.state_dict()[name], value), name
        saved = {name: value.clone() for name, value in mine.state_dict().items()}
    assert all(torch.equal(local[name], value) for name, value in mine.state_dict().items())
    assert all(where[name] == p.data_ptr() for name, p in mine.named_parameters())
    state = autotp.full_state_dict(mine)
    assert not state if rank else all(torch.equal(state[name], value) for name, value in whole.state_dict().items())
    doubled = {name: value * 2 for name, value in saved.items()}
    autotp.load_full_state_dict(mine, doubled if rank == 0 else None)
    assert all(torch.equal(local[name] * 2, value) for name, value in mine.state_dict().items())
    mine.load_state_dict(saved)  # whole tensors are split on the way in
    assert all(torch.equal(local[name], value) for name, value in mine.state_dict().items())
    autotp.save_pretrained(mine, directory)
    autotp.unshard(mine)
    assert find_group(mine) is None and mine.attn.config is mine.config and mine.attn.num_heads == HEADS
    assert all(torch.equal(value, mine.state_dict()[name]) for name, value in whole.state_dict().items())
    assert torch.equal(mine.attn.allowed, whole.attn.allowed) and type(mine.experts) is type(whole.experts)
    for name, module in whole.named_modules():
        other = mine.get_submodule(name)
        assert type(other) is type(module) and set(other.__dict__) <= set(module.__dict__) | {"_forward_hooks"}, name
        assert repr(other) == repr(module)
    assert torch.equal(mine(*inputs()), whole(*inputs()))
    if rank == 0:
        from safetensors.torch import load_file

        on_disk = load_file(f"{directory}/model.safetensors")
        assert all(torch.equal(on_disk[name], value) for name, value in whole.state_dict().items())
    again = autotp.parallelize(mine, group, plan=plan_of(dist.get_world_size(group), True))
    assert all(torch.equal(local[name], value) for name, value in again.state_dict().items())


@pytest.mark.parametrize("size", [2, 4])
def test_gather_save_load_and_unshard_are_bitwise(ranks, size, tmp_path):
    ranks.run(check_round_trips, str(tmp_path), size=size)


def check_local_data(group):
    mine, whole = made(group)
    tp = find_group(mine)
    heads = mine.attn.shards["slopes"].cuts[0].indices(tp.tp_rank)
    for name in ("slopes", "allowed", "sinks"):
        assert torch.equal(getattr(mine.attn, name), getattr(whole.attn, name)[heads]), name
    assert mine.attn.allowed.dtype is torch.bool and "attn.allowed" not in mine.state_dict()
    assert mine.attn.table.embedding_dim == len(heads) and mine.attn.q.out_features == 4 * len(heads)
    assert (mine.wide.out_channels, mine.narrow.in_channels) == (mine.wide.weight.shape[0],) * 2
    assert mine.experts.down.shape == (3, 12, 8 // tp.tp_size)
    text = mine.__dict__["autotp_plan"].describe()
    for words in ("enters x", "takes its part of dim 1 of mask", "rank 0's down_bias", "sums gain", "reduces output 0",
                  "rms norm over 32 dealt columns", "columns 3-5 enter", f"num_heads={len(heads)}"):  # fmt: skip
        assert words in text, (words, text)
    # attention's sum, experts' and narrow's; two groups of siblings, three arguments and columns that enter
    assert mine.__dict__["autotp_plan"].collectives == (3, 2 + 3 + 1)


def test_what_each_rank_holds_and_what_the_plan_says(ranks):
    ranks.run(check_local_data)
    ranks.run(check_local_data, size=4)


# -- what each of these is for: without it, the forward is right and a gradient is wrong ----------------------------------

NEEDED = {
    "hidden states enter": ("experts", {"inputs": (InputPlan("routing", 1, True),)}),
    "routing weights enter": ("experts", {"inputs": (InputPlan("x", 0, True),)}),
    "a whole parameter is summed": ("experts", {"summed": ()}),
    "columns enter": ("gate", {"columns": ((0, 1),)}),
    "other columns do not": ("gate", {"columns": ((0, 6),)}),
    "a norm of every head is summed": ("attn.head_norm", {"summed": ()}),
    "siblings sum their input": ("attn.q", {"siblings": None}),
}


def wrong_gradients(group, late, changed, changes, copies):
    size = dist.get_world_size(group)
    plan, whole = plan_of(size, late), Net()
    if changed:
        modules = tuple(replace(m, **changes) if m.name == changed else m for m in plan.modules)
        assert modules != plan.modules
        plan = replace(plan, modules=modules)
    real = region.sum_copies, linear_product.sum_copies, product.sum_over_holders
    if copies:
        region.sum_copies = linear_product.sum_copies = product.sum_over_holders = lambda x, *args, **kwargs: x
    try:
        mine = autotp.parallelize(copy.deepcopy(whole), group, plan=plan)
        got, want = step(mine), step(whole)
        torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-5)
    finally:
        region.sum_copies, linear_product.sum_copies, product.sum_over_holders = real
    wrong = [] if torch.allclose(got[1], want[1], rtol=1e-3, atol=1e-3) else ["x"]
    for name, parameter in mine.named_parameters():
        path, _, own = name.rpartition(".")
        shard = getattr(mine.get_submodule(path), "shards", {}).get(own)
        expected = whole.get_parameter(name).grad
        expected = expected if shard is None else shard.split(expected, dist.get_rank(group))
        if not torch.allclose(parameter.grad, expected, rtol=1e-3, atol=1e-3):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("case", list(NEEDED))
def test_without_it_a_gradient_is_wrong(ranks, case):
    assert ranks.run(wrong_gradients, False, *NEEDED[case], False)[1]


def test_without_sums_of_copies_their_gradients_are_wrong(ranks):
    wrong = set().union(*ranks.run(wrong_gradients, False, None, {}, True, size=4))
    assert wrong == {f"attn.{name}" for name in ("k.weight", "k.bias", "v.weight", "v.bias", "k_norm.weight", "k_norm.bias")}
    assert not set().union(*ranks.run(wrong_gradients, False, None, {}, False, size=4))
