"""Models that draw random numbers in their forward, and what planning leaves of everyone's generators."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import autotp
from autotp.inject.rules import make_plan
from tests.models import tiny

KINDS = {
    "noise": lambda x: x + torch.randn_like(x),
    "a new tensor": lambda x: x + torch.rand(x.shape, device=x.device, dtype=x.dtype),
    "in place": lambda x: x + torch.empty_like(x).uniform_(),
    "a mask": lambda x: x.index_select(1, torch.argsort(torch.rand(x.shape[1]))[:3]),
    "dropout": lambda x: nn.functional.dropout(x, 0.3, training=True),
}


class Drawing(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.up, self.down, self.up2, self.down2 = (nn.Linear(a, b) for a, b in [(16, 48), (48, 16), (16, 32), (32, 16)])
        self.kind = kind

    def forward(self, x):
        x = KINDS[self.kind](x)
        x = x + self.down(torch.tanh(self.up(x)))
        x = KINDS[self.kind](x)
        return x + self.down2(torch.tanh(self.up2(x)))


def drawing_of(kind):
    torch.manual_seed(0)
    return Drawing(kind), torch.randn(3, 5, 16)


def check_drawing(group, kind):
    model, x = drawing_of(kind)
    sharded = autotp.parallelize(copy.deepcopy(model), group, inputs={"x": x})
    assert sharded.autotp_plan.proof == "proved" and len(sharded.autotp_plan.regions) == 2
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    torch.testing.assert_close(sharded(x), expected)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_forward_that_draws_is_split(ranks, kind):
    ranks.run(check_drawing, kind)


def states():
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


@pytest.mark.parametrize("make", [lambda: tiny("mixtral", num_local_experts=4), lambda: drawing_of("noise")[0]])
def test_planning_moves_no_generator(make):
    model = make()
    before = states()
    make_plan(model, 2, inputs=None if hasattr(model, "config") else {"x": torch.zeros(3, 5, 16)})
    assert states() == before
