"""Norms over a dealt width against torch's own, and against the formula in float64."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from autotp.groups import resolve_group
from autotp.layers.norm import count_holders, install_norm
from autotp.layers.region import Border, install_region
from autotp.shard import Shard
from tests.layers.test_siblings import Reductions

WIDTH = 12
LAYOUTS = {  # columns of each of 3 ranks
    "uneven": [range(5), range(5, 9), range(9, 12)],
    "interleaved": [range(0, 12, 3), range(1, 12, 3), range(2, 12, 3)],
    "copied": [range(6), range(4, 12), [4, 5, 0, 11]],
    "held by all": [range(12)] * 3,
}


class Norm(nn.Module):
    def __init__(self, kind, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.weight = nn.Parameter((torch.randn(WIDTH) + 1).to(dtype))
        self.bias = nn.Parameter(torch.randn(WIDTH).to(dtype)) if kind == "layernorm" else None

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.kind == "layernorm":
            return F.layer_norm(wide, (WIDTH,), self.weight.to(wide.dtype), self.bias.to(wide.dtype), 1e-3).to(x.dtype)
        weight = self.weight.to(wide.dtype) + (self.kind == "rms1p")
        return F.rms_norm(wide, (WIDTH,), weight, 1e-3).to(x.dtype)


def check_norm(group, kind, layout, dtype):
    tp, whole = resolve_group(group), Norm(kind, dtype)
    mine = copy.deepcopy(whole)
    shard = Shard.from_indices((WIDTH,), 0, [list(own) for own in LAYOUTS[layout]])
    shards = {name: shard for name, _ in mine.named_parameters()}
    install_norm(mine, tp, shards, "probe", kind, 1e-3, WIDTH)
    if shard.has_copies:
        install_region(mine, tp, shards, "probe", Border(copied=tuple(shards)))
    for parameter in mine.parameters():
        parameter.data = shard.split(parameter.data, tp.tp_rank).clone()
    columns = shard.cuts[0].indices(tp.tp_rank)
    generator = torch.Generator().manual_seed(1)
    full = torch.randn(2, 3, WIDTH, generator=generator).to(dtype).mul(3).add(5).requires_grad_()
    x = full.detach()[..., columns].requires_grad_()
    # Each holder of a column uses it by itself, so each has its own gradient of it; the unsharded one is their sum.
    parts = [torch.randn(2, 3, len(shard.cuts[0].indices(r)), generator=generator).to(dtype) for r in range(tp.tp_size)]
    total = torch.zeros(2, 3, WIDTH, dtype=torch.float64)
    for rank, part in enumerate(parts):
        total.index_add_(-1, shard.cuts[0].indices(rank), part.double())
    rounding = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}[dtype]
    for _ in range(2):
        want, got = whole(full), mine(x)
        torch.testing.assert_close(got, want[..., columns], rtol=rounding, atol=rounding)
        want.backward(total.to(dtype))
        got.backward(parts[tp.tp_rank])
    summed = torch.zeros(2, 3, WIDTH, dtype=torch.float64).index_add_(-1, columns, x.grad.double())
    scale = float(full.grad.abs().max())
    torch.testing.assert_close(tp.all_reduce(summed), full.grad.double(), rtol=rounding, atol=3 * rounding * max(1, scale))
    for name, parameter in mine.named_parameters():
        expected = whole.get_parameter(name).grad
        scale = float(expected.abs().max())
        torch.testing.assert_close(parameter.grad, expected[columns], rtol=rounding, atol=rounding * max(1, scale), msg=name)
    with torch.no_grad():
        torch.testing.assert_close(mine(x), whole(full)[..., columns], rtol=rounding, atol=rounding)
    mine.requires_grad_(False)
    assert not mine(x.detach()).requires_grad and mine(x).requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("kind", ["rms", "rms1p", "layernorm"])
def test_values_and_gradients(ranks, kind, layout, dtype):
    ranks.run(check_norm, kind, layout, dtype, size=3)


def check_collectives(group):
    tp = resolve_group(group)
    for kind, forward, backward in (("rms", [(2, 3, 1)], (2, 3, 1)), ("layernorm", [(2, 3, 1)] * 2, (2, 3, 2))):
        norm, shard = Norm(kind, torch.float32), Shard.even((WIDTH,), 0, tp.tp_size)
        install_norm(norm, tp, {name: shard for name, _ in norm.named_parameters()}, "probe", kind, 1e-3, WIDTH)
        for parameter in norm.parameters():
            parameter.data = shard.split(parameter.data, tp.tp_rank).clone()
        x = torch.randn(2, 3, shard.local_numel(tp.tp_rank), requires_grad=True)
        with Reductions() as seen:
            y = norm(x)
        assert seen.shapes == forward
        with Reductions() as seen:
            y.sum().backward()
        assert seen.shapes == [backward]
        torch.testing.assert_close(copy.deepcopy(norm)(x), y)


def test_only_sums_of_rows_are_communicated(ranks):
    ranks.run(check_collectives)


def check_far_from_zero(group):
    """A mean of 1e4 beside a deviation of 1: squares summed before the mean is known would lose all digits of float32."""
    tp, whole = resolve_group(group), Norm("layernorm", torch.float32)
    mine, shard = copy.deepcopy(whole), Shard.even((WIDTH,), 0, dist.get_world_size(group))
    install_norm(mine, tp, {"weight": shard, "bias": shard}, "probe", "layernorm", 1e-3, WIDTH)
    for parameter in mine.parameters():
        parameter.data = shard.split(parameter.data, tp.tp_rank).clone()
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)) + 1e4
    exact = F.layer_norm(x.double(), (WIDTH,), whole.weight.double(), whole.bias.double(), 1e-3)
    columns = shard.cuts[0].indices(tp.tp_rank)
    error = (mine(x[..., columns]) - exact[..., columns]).abs().max()
    assert error < 8 * 1e4 * torch.finfo(torch.float32).eps  # a few roundings of the mean


def test_a_large_mean_loses_nothing(ranks):
    ranks.run(check_far_from_zero)


def check_holders(group):
    tp = resolve_group(group)
    shard = Shard.from_indices((4,), 0, [[0, 1], [1, 2, 3], [3, 1]])
    assert count_holders(shard, tp).tolist() == [[1, 3], [3, 1, 2], [2, 3]][tp.tp_rank]


def test_holders_are_counted(ranks):
    ranks.run(check_holders, size=3)
