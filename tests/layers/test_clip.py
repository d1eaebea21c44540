"""The norm over ranks is the unsharded model's, for any p, with one all-reduce for each group."""

import math

import pytest
import torch
from torch import nn

from autotp.errors import AutoTPError
from autotp.layers.clip import clip_grad_norm_, grad_norm
from tests.layers.handmade import build, give_gradients, shard_of


def run_clip(group, norm_type, foreach, dtype):
    model, full, tp = build(group, dtype=dtype)
    give_gradients(model, full, tp)
    other, other_full, other_tp = build(group, dtype=dtype)
    give_gradients(other, other_full, other_tp, scale=3.0)
    plain = nn.Parameter(torch.ones(3, dtype=dtype))
    plain.grad = torch.full((3,), 0.5, dtype=dtype)
    expected_plain = nn.Parameter(torch.ones(3, dtype=dtype))
    expected_plain.grad = plain.grad.clone()
    calls = []
    for each in (tp, other_tp):
        each.all_reduce_owned = lambda *args, _tp=each: calls.append(1) or type(_tp).all_reduce_owned(_tp, *args)
    mine = (p for p in [*model.parameters(), plain, *other.parameters()])  # a generator
    total = clip_grad_norm_(mine, 0.7, norm_type, foreach=foreach)
    theirs = [*full.parameters(), expected_plain, *other_full.parameters()]
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.7, norm_type)
    tolerance = dict(rtol=1e-5) if dtype != torch.bfloat16 else dict(rtol=2e-2)
    assert math.isclose(total.item(), expected.item(), rel_tol=tolerance["rtol"]) and len(calls) == 2
    for (name, param), whole in zip(model.named_parameters(), full.parameters(), strict=True):
        if whole.grad is not None:
            shard = shard_of(model, name)
            grad = shard.split(whole.grad, tp.tp_rank) if shard else whole.grad
            torch.testing.assert_close(param.grad, grad, atol=1e-6, **tolerance)
    return total.item()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf, "inf"])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clip_equals_the_unsharded_norm(ranks, norm_type, foreach):
    assert len(set(ranks.run(run_clip, norm_type, foreach, torch.float32))) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_clip_in_other_dtypes(ranks, dtype):
    ranks.run(run_clip, 2.0, None, dtype)


def test_clip_over_three_ranks(ranks):
    ranks.run(run_clip, 2.0, None, torch.float32, size=3)


def run_edges(group):
    model, full, tp = build(group)
    assert grad_norm(model.parameters()).item() == 0  # no gradients at all
    give_gradients(model, full, tp)
    one = grad_norm(model.copied.weight)  # a single tensor, some of whose rows two ranks hold
    torch.testing.assert_close(one, full.copied.weight.grad.norm())
    torch.testing.assert_close(grad_norm([model.norm.weight]), full.norm.weight.grad.norm())
    if tp.tp_rank == 1:
        model.up.weight.grad[0, 0] = math.inf
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    for wrong in (0, -1.0):
        with pytest.raises(AutoTPError, match="norm_type"):
            grad_norm(model.parameters(), wrong)


def test_edges(ranks):
    ranks.run(run_edges)


def run_after_backward(group):
    model, full, _ = build(group)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(4))
    for each in (model, full):
        each(x).pow(3).sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(full.parameters(), 1e9)
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 1e9), expected)


def test_norm_after_a_backward(ranks):
    ranks.run(run_after_backward)
