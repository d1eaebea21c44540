"""Gradients of a model's own inputs, with which what comes before it is trained; and plans that split nothing."""

import copy

import pytest
import torch
from torch import nn

import autotp
from autotp.inject.rules import make_plan


class Masked(nn.Module):
    """Weights that are no layer's: a masked one, and a plain Parameter; `around` adds the input to the output."""

    def __init__(self, masked, around, width=12):
        super().__init__()
        self.weight, self.down = nn.Parameter(0.3 * torch.randn(2 * width, width)), nn.Linear(2 * width, width)
        self.register_buffer("mask", (torch.rand(2 * width, width) > 0.5).float() if masked else None)
        self.around = around

    def forward(self, x):
        weight = self.weight if self.mask is None else self.weight * self.mask
        y = self.down(nn.functional.linear(x, weight).relu())
        return x + y if self.around else y


class Dense(nn.Module):
    """One map that has fewer columns than there are ranks."""

    def __init__(self):
        super().__init__()
        self.only = nn.Linear(12, 1)

    def forward(self, x):
        return self.only(x)


def build(kind):
    torch.manual_seed(0)
    model = Dense() if kind == "dense" else Masked("masked" in kind, "around" in kind)
    return model, torch.randn(2, 5, 12)


def check_input_gradient(group, kind):
    model, x = build(kind)
    sharded = autotp.parallelize(copy.deepcopy(model), group, inputs={"x": x})
    given, own = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, seen = model(own), sharded(given)
    torch.testing.assert_close(seen, expected)
    expected.square().sum().backward()
    seen.square().sum().backward()
    torch.testing.assert_close(given.grad, own.grad)


@pytest.mark.parametrize("kind", ["plain", "masked", "plain around", "masked around"])
def test_the_gradient_of_an_input_is_the_whole_models(ranks, kind):
    ranks.run(check_input_gradient, kind)


def test_an_input_that_nothing_else_reads_enters_and_its_maps_are_split():
    model, x = build("plain")
    plan = make_plan(model, 2, inputs={"x": x})
    assert plan[""].style == "local_params" and plan["down"].style == "rowwise"


def check_nothing_split(group):
    model, x = build("dense")
    sharded = autotp.parallelize(copy.deepcopy(model), group, inputs={"x": x})
    assert not sharded.autotp_plan.by_name
    torch.testing.assert_close(sharded(x), model(x))
    assert bool(autotp.full_state_dict(sharded)) == (group.rank() == 0)
    autotp.load_full_state_dict(sharded, model.state_dict() if group.rank() == 0 else None)
    with pytest.raises(autotp.PlanError, match="unshard"):
        autotp.parallelize(sharded, group, inputs={"x": x})
    autotp.unshard(sharded)
    with pytest.raises(autotp.PlanError, match="is not parallelized"):
        autotp.unshard(sharded)
    torch.testing.assert_close(autotp.parallelize(sharded, group, inputs={"x": x})(x), model(x))


def test_a_model_of_which_nothing_is_split_behaves_like_any_other(ranks):
    ranks.run(check_nothing_split)
