"""Gradients added to main_grad: the protocol's attributes, micro-batches, tied, frozen and copied parameters."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autotp
from autotp.errors import AutoTPError
from autotp.groups import resolve_group
from autotp.layers.linear import (
    Conv1DAllreduce,
    Conv1DLayer,
    LinearAllreduce,
    LinearLayer,
    LinearPartial,
    prepare,
    rewrite_linear,
)
from autotp.shard import Shard
from tests.layers.test_linear import build
from tests.layers.test_merged import SIZES, Three, made, pair
from tests.models import batch, tiny


def give_main_grads(model, value=0.0):
    for parameter in model.parameters():
        parameter.main_grad = torch.full_like(parameter, value, dtype=torch.float64)


def steps(model, count=2, scale=1.0):
    for i in range(count):
        sum((y * (scale * (j + 1))).square().sum() for j, y in enumerate(model(made(i, 4, 12)))).backward()


@pytest.mark.parametrize("lay", [True, False])
@pytest.mark.parametrize("biases", [(True, True, True), (True, False, True)])
def test_micro_batches_add_up_in_main_grad(biases, lay):
    plain, mine = pair(lay, biases=biases)
    autotp.enable_main_grad(mine)
    give_main_grads(mine, 0.5)
    seen = []
    for parameter in mine.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    steps(plain)
    steps(mine)
    for whole, parameter in zip(plain.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(parameter.main_grad, whole.grad + 0.5)
        assert parameter.grad_added_to_main_grad is True and not parameter.grad.any()
    assert len(seen) == 2 * len(list(mine.parameters()))  # the hooks ran
    for parameter in mine.parameters():
        parameter.grad_added_to_main_grad, parameter.overwrite_main_grad = False, True
        parameter.main_grad.fill_(float("nan"))
    plain.zero_grad()
    steps(plain, 1)
    steps(mine, 1)
    for whole, parameter in zip(plain.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(parameter.main_grad, whole.grad)
        assert parameter.grad_added_to_main_grad is True
    autotp.enable_main_grad(mine, False)
    mine.zero_grad()
    steps(mine, 1)
    for whole, parameter in zip(plain.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, whole.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_main_grad_under_activation_checkpointing(reentrant):
    plain, mine = pair()
    autotp.enable_main_grad(mine)
    give_main_grads(mine)
    for model in (plain, mine):
        leaf = made(1, 3, 12).requires_grad_()
        sum(y.square().sum() for y in checkpoint(lambda x, m=model: tuple(m(x)), leaf * 1, use_reentrant=reentrant)).backward()
    for whole, parameter in zip(plain.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(parameter.main_grad, whole.grad)


def test_frozen_parameters_need_none_and_trained_ones_are_named():
    plain, mine = pair()
    autotp.enable_main_grad(mine)
    for i, linear in enumerate(mine.linears):
        linear.full_name = f"block.{i}"
    give_main_grads(mine)
    frozen = mine.linears[1].weight.requires_grad_(False)
    del frozen.main_grad
    plain.linears[1].weight.requires_grad_(False)
    steps(plain)
    steps(mine)
    assert frozen.grad is None and not hasattr(frozen, "grad_added_to_main_grad")
    torch.testing.assert_close(mine.linears[1].bias.main_grad, plain.linears[1].bias.grad)
    torch.testing.assert_close(mine.linears[2].weight.main_grad, plain.linears[2].weight.grad)
    del mine.linears[2].weight.main_grad
    with pytest.raises(AutoTPError, match=r"block\.2\.weight is trained .* has none"):
        steps(mine)
    mine.linears[2].weight.main_grad = torch.zeros(3, 3)
    with pytest.raises(AutoTPError, match=r"block\.2\.weight has shape \(6, 12\).* main_grad \(3, 3\)"):
        steps(mine)


def test_what_can_not_accumulate_is_refused():
    with pytest.raises(AutoTPError, match="Three has no sharded linears"):
        autotp.enable_main_grad(Three())
    autotp.enable_main_grad(Three(), False)
    _, mine = pair()
    nn.utils.parametrizations.weight_norm(mine.linears[0])
    with pytest.raises(AutoTPError, match=r"weights of \['linears.0'\] are computed"):
        autotp.enable_main_grad(mine)


def test_only_the_layer_that_is_asked_accumulates():
    plain, mine = pair()
    steps(mine, 1)
    mine.zero_grad()
    mine.linears[0].accumulate_into_main_grad = True
    give_main_grads(mine)
    steps(plain, 1)
    steps(mine, 1)
    torch.testing.assert_close(mine.linears[0].weight.main_grad, plain.linears[0].weight.grad)
    torch.testing.assert_close(mine.linears[1].weight.grad, plain.linears[1].weight.grad)
    assert not mine.linears[1].weight.main_grad.any()
    twin = copy.deepcopy(mine)
    assert twin.linears[0].accumulate_into_main_grad and not twin.linears[1].accumulate_into_main_grad


def check_kinds(group, cls, bias, frozen):
    plain, tp = build(cls, bias), resolve_group(group)
    if plain is None:
        return
    layer = cls(copy.deepcopy(plain), group, name="probe")
    plain.weight.requires_grad_(not frozen)
    layer.weight.requires_grad_(not frozen)
    layer.accumulate_into_main_grad = True
    for parameter in layer.parameters():
        if parameter.requires_grad:
            parameter.main_grad = torch.zeros_like(parameter)
    row = cls in (LinearAllreduce, Conv1DAllreduce, LinearPartial)
    columns = Shard.even((14,), 0, tp.tp_size).cuts[0].indices(tp.tp_rank) if row else slice(None)
    outs = slice(None) if row else Shard.even((10,), 0, tp.tp_size).cuts[0].indices(tp.tp_rank)
    for seed in range(2):
        x = made(seed, 3, 5, 14, dtype=torch.float32)
        whole, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
        cotangent = made(seed + 7, 3, 5, 10, dtype=torch.float32)
        expected, got = plain(whole), layer(mine[..., columns])
        if cls is LinearPartial:
            got = got + (tp.all_reduce(got.detach()) - got.detach())
        torch.testing.assert_close(got, expected[..., outs])
        expected.backward(cotangent)
        got.backward(cotangent[..., outs])
        torch.testing.assert_close(tp.all_reduce(mine.grad) if row else mine.grad, whole.grad)
    for name, parameter in layer.named_parameters():
        reference, shard = plain.get_parameter(name).grad, layer.shards.get(name)
        if reference is None:
            assert parameter.grad is None
            continue
        torch.testing.assert_close(parameter.main_grad, shard.split(reference, tp.tp_rank) if shard else reference)
        assert parameter.grad_added_to_main_grad and not parameter.grad.any()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("bias, frozen", [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("cls", [LinearLayer, LinearAllreduce, LinearPartial, Conv1DLayer, Conv1DAllreduce])
def test_every_kind_of_linear(ranks, cls, bias, frozen, size):
    ranks.run(check_kinds, cls, bias, frozen, size=size)


def check_model(group):
    """A whole model, its kv heads copied where there are more ranks than heads, tied embeddings, two micro-batches."""
    tp, whole = resolve_group(group), tiny("qwen2", tie_word_embeddings=True).train()
    mine = autotp.parallelize(copy.deepcopy(whole), group).train()
    before = [(p, p.data_ptr()) for p in mine.parameters()]
    autotp.enable_main_grad(mine)
    sharded = {id(p) for m in mine.modules() if getattr(m, "accumulate_into_main_grad", False) for p in m.parameters()}
    for parameter in mine.parameters():
        if id(parameter) in sharded:
            parameter.main_grad = torch.zeros_like(parameter)
    for seed in range(2):
        for model in (whole, mine):
            model(**batch(model, seed=seed)).loss.backward()
    copies = 0
    for name, parameter in mine.named_parameters():
        path, _, own = name.rpartition(".")
        shard = getattr(mine.get_submodule(path), "shards", {}).get(own)
        expected = whole.get_parameter(name).grad
        expected = expected if shard is None else shard.split(expected, tp.tp_rank)
        got = parameter.main_grad if id(parameter) in sharded else parameter.grad
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        assert hasattr(parameter, "grad_added_to_main_grad") == (id(parameter) in sharded)
        copies += shard is not None and shard.copied is not None
    assert all(p.data_ptr() == at for p, at in before)
    return copies, len(sharded)


def test_a_model_whose_kv_heads_are_copied(eight_ranks):
    assert eight_ranks.run(check_model, size=8) == [(8, 20)] * 8  # weights and biases of k and v, two layers


def check_copies_unmerged(group):
    """The same sums where siblings compute alone, and for a bias."""
    tp = resolve_group(group)
    torch.manual_seed(0)
    whole = nn.Linear(6, 8)
    indices = [[0, 1, 2, 3], [2, 3, 4, 5], [6, 7, 2, 3], [4, 5, 6, 7]][: tp.tp_size]
    shards = {"weight": Shard.from_indices((8, 6), 0, indices), "bias": Shard.from_indices((8,), 0, indices)}
    layer = copy.deepcopy(whole)
    for name, shard in shards.items():
        layer._parameters[name].data = shard.split(layer._parameters[name].data, tp.tp_rank).clone()
    rewrite_linear(layer, LinearLayer, tp, shards, "probe", None)
    layer.accumulate_into_main_grad = True
    for parameter in layer.parameters():
        parameter.main_grad = torch.ones_like(parameter)
    x = made(0, 5, 6, dtype=torch.float32).requires_grad_()
    layer(x).square().sum().backward()
    y = whole(x.detach())
    dy = torch.zeros_like(y)
    for own in indices:  # each rank's part of the loss counts
        dy[:, own] += 2 * y.detach()[:, own]
    for name, full in (("weight", dy.t() @ x.detach()), ("bias", dy.sum(0))):
        torch.testing.assert_close(layer._parameters[name].main_grad, 1 + full[indices[tp.tp_rank]])
    prepare(layer, tp, shards, "probe")


def test_copies_are_summed_before_they_are_added(ranks):
    ranks.run(check_copies_unmerged, size=4)


def test_compiled_models_accumulate_too():
    torch.compiler.reset()
    plain, mine = pair()
    autotp.enable_main_grad(mine)
    give_main_grads(mine)
    compiled = torch.compile(mine, backend="eager")
    steps(plain, 1)
    steps(compiled, 1)
    for whole, parameter in zip(plain.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(parameter.main_grad, whole.grad)
    assert len(SIZES) == len(mine.linears)
