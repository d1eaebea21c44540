"""The linears used directly, as in DeepSpeed: forward, every gradient, and what is computed when something is frozen."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D

import autotp
from autotp.comm import TPGroup, resolve_group
from autotp.layers.linear import Conv1DAllreduce, Conv1DLayer, LinearAllreduce, LinearLayer
from tests.models import batch, tiny


def build(cls, bias, out_features=10, in_features=14):
    torch.manual_seed(0)
    if issubclass(cls, Conv1D):
        module = Conv1D(out_features, in_features)
        return module if bias else None
    return nn.Linear(in_features, out_features, bias=bias)


def check_direct(group, cls, bias, frozen):
    plain = build(cls, bias)
    if plain is None:
        return
    layer = cls(copy.deepcopy(plain), group, name="probe")
    row = issubclass(cls, (LinearAllreduce, Conv1DAllreduce))
    plain.weight.requires_grad_(not frozen)
    layer.weight.requires_grad_(not frozen)
    x = torch.randn(3, 5, 14, generator=torch.Generator().manual_seed(1))
    rank = dist.get_rank(group)
    in_shard = autotp.Shard.even((14,), 0, dist.get_world_size(group))
    out_shard = autotp.Shard.even((10,), 0, dist.get_world_size(group))
    whole, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
    cotangent = torch.randn(3, 5, 10, generator=torch.Generator().manual_seed(2))
    expected = plain(whole)
    expected.backward(cotangent)
    columns = in_shard.cuts[0].indices(rank) if row else slice(None)
    local_out = slice(None) if row else out_shard.cuts[0].indices(rank)
    got = layer(mine[..., columns])
    torch.testing.assert_close(got, expected[..., local_out])
    got.backward(cotangent[..., local_out])
    full = resolve_group(group).all_reduce(mine.grad) if row else mine.grad
    torch.testing.assert_close(full, whole.grad)
    for name, parameter in layer.named_parameters():
        reference = plain.get_parameter(name).grad
        if reference is None:
            assert parameter.grad is None
        else:
            shard = layer.shards.get(name)
            torch.testing.assert_close(parameter.grad, shard.split(reference, rank) if shard else reference)
    before = layer.weight.detach().clone()
    layer.gather_params([layer.weight])
    assert torch.equal(layer.weight, plain.weight)
    layer._tp_partition([layer.weight])
    assert torch.equal(layer.weight, before)
    again = cls.from_weights(plain.weight.detach(), None if plain.bias is None else plain.bias.detach(), group)
    assert torch.equal(again.weight, before) and "full: weight" in repr(again)
    layer.load_state_dict(plain.state_dict())  # whole tensors are split
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cls", [LinearLayer, LinearAllreduce, Conv1DLayer, Conv1DAllreduce])
def test_direct_use_equals_the_whole_linear(ranks, cls, bias, frozen, size):
    ranks.run(check_direct, cls, bias, frozen, size=size)


def test_without_a_group_it_is_the_plain_linear():
    plain = build(LinearLayer, True)
    layer = LinearLayer(copy.deepcopy(plain))
    x = torch.randn(2, 14)
    assert torch.equal(layer(x), plain(x)) and isinstance(layer.tp, TPGroup) and layer.tp.tp_size == 1


def check_inputs_are_left_alone(group):
    tp = resolve_group(group)
    base = torch.arange(12.0).view(3, 4)
    for x in (base, base.t(), base[:1].expand(5, 4), base[:0]):
        before = x.clone()
        total = tp.all_reduce(x)
        assert torch.equal(x, before) and torch.equal(total, before * tp.tp_size) and total.shape == x.shape


def test_collectives_never_write_into_their_input(ranks):
    ranks.run(check_inputs_are_left_alone)


class Watch(nn.Module):
    """Remembers, weakly, the tensors that entered an MLP."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __call__(self, module, args):
        self.seen.append(weakref.ref(args[0]))


def check_siblings(group):
    model = autotp.parallelize(tiny("llama"), group).train()
    watch = Watch()
    model.model.layers[0].mlp.register_forward_pre_hook(watch)
    model(**batch(model)).loss.backward()
    mlp = model.model.layers[0].mlp
    assert mlp.gate_proj.siblings is mlp.up_proj.siblings and mlp.gate_proj.siblings._source is None
    model.zero_grad()
    gc.collect()
    assert watch.seen[0]() is None
    x = torch.randn(2, 64, requires_grad=True)
    reference = tiny("llama").model.layers[0].mlp
    whole = x.detach().clone().requires_grad_()
    expected = reference(whole * 1)
    expected.sum().backward()
    with torch.no_grad():
        mlp(x)
    for _ in range(2):  # right after no_grad, and again
        x.grad = None
        mlp(x * 1).sum().backward()
        torch.testing.assert_close(x.grad, whole.grad)
    y = x * 1
    gate = mlp.gate_proj(y)
    y.add_(1.0)  # an in-place edit between siblings: up_proj must read the new values
    up = mlp.up_proj(y)
    torch.testing.assert_close(up, (x.detach() + 1) @ mlp.up_proj.weight.t())
    torch.testing.assert_close(gate.detach(), x.detach() @ mlp.gate_proj.weight.detach().t())
    twin = copy.deepcopy(model)
    assert twin.model.layers[0].mlp.gate_proj.siblings is twin.model.layers[0].mlp.up_proj.siblings
    assert twin.model.layers[0].mlp.gate_proj.siblings is not mlp.gate_proj.siblings


def test_siblings_share_one_input_and_keep_nothing(ranks):
    ranks.run(check_siblings)
