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
from autotp.comm import TPGroup
from autotp.errors import PlanError
from autotp.groups import resolve_group
from autotp.layers.linear import Conv1DAllreduce, Conv1DLayer, LinearAllreduce, LinearLayer, prepare, rewrite_linear
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
    assert torch.equal(again.weight, before) and " of [" in repr(again)
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


def check_training(group):
    """Three steps of SGD: a row bias that is added or trained T times drifts at once."""
    plain = [build(LinearLayer, True, 12, 6), build(LinearLayer, True, 6, 12)]
    layers = [LinearLayer(copy.deepcopy(plain[0]), group), LinearAllreduce(copy.deepcopy(plain[1]), group)]
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        for pair in (plain, layers):
            pair[1](torch.tanh(pair[0](x))).square().sum().backward()
            with torch.no_grad():
                for parameter in [p for module in pair for p in module.parameters()]:
                    parameter -= 0.05 * parameter.grad
                    parameter.grad = None
    torch.testing.assert_close(layers[1].bias, plain[1].bias)
    for whole, layer in zip(plain, layers, strict=True):
        objects = list(layer.parameters())
        layer.gather_params()
        torch.testing.assert_close(layer.weight, whole.weight)
        torch.testing.assert_close(layer.bias, whole.bias)
        layer._tp_partition()
        assert all(a is b for a, b in zip(objects, layer.parameters(), strict=True))


def test_a_pair_trains_as_the_whole_linears(ranks):
    ranks.run(check_training, size=3)


def check_autocast(group, cls):
    plain, row = build(cls, True), issubclass(cls, (LinearAllreduce, Conv1DAllreduce))
    layer, tp = cls(copy.deepcopy(plain), group), resolve_group(group)
    x = torch.randn(5, 14, generator=torch.Generator().manual_seed(1))
    whole, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
    columns = autotp.Shard.even((14,), 0, tp.tp_size).cuts[0].indices(tp.tp_rank) if row else slice(None)
    exact = plain(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, got = plain(whole), layer(mine[:, columns])
    assert got.dtype is expected.dtype is torch.bfloat16
    rows = slice(None) if row else autotp.Shard.even((10,), 0, tp.tp_size).cuts[0].indices(tp.tp_rank)
    error = (expected.float() - exact).abs().max()
    assert (got.float() - exact[:, rows]).abs().max() <= 2 * error + 1e-2
    expected.float().sum().backward()
    got.float().sum().backward()
    assert mine.grad.dtype is layer.weight.grad.dtype is torch.float32
    full = tp.all_reduce(mine.grad) if row else mine.grad
    torch.testing.assert_close(full, whole.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("cls", [LinearLayer, LinearAllreduce, Conv1DLayer, Conv1DAllreduce])
def test_autocast_as_the_plain_linear(ranks, cls):
    ranks.run(check_autocast, cls)


def check_reduce_dtype(group):
    """256 + 1 + 1 is 258 in float32 and 256 where 256 + 1 is rounded to bfloat16; in three orders, one adds 1 + 1 first."""
    weight = (torch.ones(3, 3) + 255 * torch.eye(3)).bfloat16()
    for cls in (LinearAllreduce, LinearLayer):
        layer, tp = cls.from_weights(weight, None, group), resolve_group(group)
        prepare(layer, tp, layer.shards, "probe", torch.float32)
        x = torch.ones(1, 1 if cls is LinearAllreduce else 3, dtype=torch.bfloat16, requires_grad=True)
        y = layer(x * 1)
        y.sum().backward()
        assert y.dtype is x.grad.dtype is torch.bfloat16
        assert (y if cls is LinearAllreduce else x.grad).flatten().tolist() == [258.0] * 3


def test_partial_sums_are_added_in_the_dtype_named(ranks):
    ranks.run(check_reduce_dtype, size=3)


def check_parts_given(group):
    tp = resolve_group(group)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(4))
    whole = build(LinearLayer, True, 6, 8)
    for cls in (LinearLayer, LinearAllreduce):
        shards = cls(copy.deepcopy(whole), group).shards
        part = nn.Linear(8, 3) if cls is LinearLayer else nn.Linear(4, 6)
        part.weight.data = shards["weight"].split(whole.weight.data, tp.tp_rank).clone()
        part.bias.data = shards["bias"].split(whole.bias.data, tp.tp_rank).clone() if "bias" in shards else whole.bias.data
        weight = part.weight
        layer = cls(part, group, skip_partition=True)
        assert layer.weight is weight and layer.shards == shards
        got = layer(x if cls is LinearLayer else x[:, tp.tp_rank * 4 : tp.tp_rank * 4 + 4])
        rows = slice(tp.tp_rank * 3, tp.tp_rank * 3 + 3) if cls is LinearLayer else slice(None)
        torch.testing.assert_close(got, whole(x)[:, rows])
        layer.gather_params()
        assert torch.equal(layer.weight, whole.weight) and torch.equal(layer.bias, whole.bias)


def test_skip_partition_takes_the_weight_as_this_ranks_part(ranks):
    ranks.run(check_parts_given)


def check_repr_and_state(group):
    tp = resolve_group(group)
    for cls in (LinearLayer, LinearAllreduce, Conv1DLayer, Conv1DAllreduce):
        plain = build(cls, True)
        layer = cls(copy.deepcopy(plain), group)
        assert f"of {list(plain.weight.shape)}" in repr(layer) and f"tp={tp.tp_rank}/{tp.tp_size}" in repr(layer)
        sizes = (layer.nx, layer.nf) if issubclass(cls, Conv1D) else (layer.out_features, layer.in_features)
        assert sizes == tuple(layer.weight.shape) == layer.shards["weight"].local_shape(tp.tp_rank)
        saved = {name: value.clone() for name, value in layer.state_dict().items()}
        assert list(saved) == list(plain.state_dict())
        full = {name: value + 1 for name, value in plain.state_dict().items()}
        kept, where = dict(full), layer.weight.data_ptr()
        layer.load_state_dict(full)
        assert all(full[name] is kept[name] for name in kept) and layer.weight.data_ptr() == where
        assert torch.equal(layer.weight, layer.shards["weight"].split(kept["weight"], tp.tp_rank))
        layer.load_state_dict(saved)  # its own part
        assert all(torch.equal(value, saved[name]) for name, value in layer.state_dict().items())
        with pytest.raises(RuntimeError, match="size mismatch"):
            layer.load_state_dict({**saved, "weight": torch.zeros(3, 3)})


def test_sizes_shown_and_state_dicts_loaded(ranks):
    ranks.run(check_repr_and_state, size=3)


class Halved(nn.Linear):
    """A subclass whose forward builds on the plain one."""

    def forward(self, input):
        return super().forward(input) / 2


class Replaced(nn.Linear):
    """A subclass whose forward replaces the plain one."""

    def forward(self, input):
        return torch.tanh(input @ self.weight.t())


def check_subclasses(group):
    tp = resolve_group(group)
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(0)
    module = Halved(8, 6)
    expected = module(x)
    shards = LinearLayer.shards_of(autotp.Shard.even((6, 8), 0, tp.tp_size), True)
    rewrite_linear(module, LinearLayer, tp, shards, "probe", None)
    module._tp_partition()
    torch.testing.assert_close(module(x), expected[:, shards["weight"].cuts[0].indices(tp.tp_rank)])
    module = Replaced(8, 6)
    with pytest.raises(PlanError, match="Replaced has a forward of its own"):
        rewrite_linear(module, LinearLayer, tp, shards, "probe", None)
    assert type(module) is Replaced and "tp" not in module.__dict__


def test_a_subclass_keeps_its_forward_or_is_refused(ranks):
    ranks.run(check_subclasses)


def check_wrong_kinds(group):
    """A layer made directly runs its own forward on its own layout, so what has another one would be silently wrong."""
    square = Conv1D(8, 8)
    for cls, module in (
        (LinearLayer, square),
        (LinearAllreduce, square),
        (Conv1DLayer, nn.Linear(8, 8)),
        (LinearLayer, Halved(8, 8)),
        (LinearAllreduce, Replaced(8, 8)),
    ):
        with pytest.raises(PlanError, match=type(module).__name__):
            cls(module, group)
        assert module.weight.shape == (8, 8)


def test_a_layer_made_of_another_kind_of_module_is_refused(ranks):
    ranks.run(check_wrong_kinds)


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
    assert mlp.gate_proj.siblings is mlp.up_proj.siblings and mlp.gate_proj.siblings._round is None
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


@pytest.mark.parametrize("cls", [LinearLayer, LinearAllreduce, Conv1DLayer, Conv1DAllreduce])
@pytest.mark.parametrize("transposed", [False, True])
def test_outputs_can_be_changed_in_place(cls, transposed):
    """As longformer does with its queries; some products of torch return a view, which autograd guards in a Function."""
    layer = cls(build(cls, bias=True), TPGroup(None, torch.device("cpu")))
    x = torch.randn(3, 5, 14)
    y = layer(x.transpose(0, 1).requires_grad_() if transposed else x.requires_grad_())
    y /= 2.0
    y.sum().backward()
    torch.testing.assert_close(layer.bias.grad, torch.full((10,), 7.5))
