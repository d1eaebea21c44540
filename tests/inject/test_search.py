"""The search for edits tries modules out alone, and leaves them as they were."""

import torch
from torch import nn

from autotp.inject.rules import make_plan


class Caching(nn.Module):
    """Attention with a bias a head, picked once and kept while the model is evaluated."""

    def __init__(self, width=32, heads=4, length=5):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.heads, self.kept = heads, {}
        self.bias = nn.Parameter(torch.randn(heads, length))

    def pick(self):
        if self.training:
            return self.bias[:, [0, 1, 1, 0]]
        if "bias" not in self.kept:
            self.kept["bias"] = self.bias[:, [0, 1, 1, 0]]
        return self.kept["bias"]

    def forward(self, x):
        q, k, v = (proj(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for proj in (self.q, self.k, self.v))
        weights = (q @ k.transpose(2, 3) + self.pick()[:, None]).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def test_a_module_that_keeps_what_it_computed_is_planned():
    torch.manual_seed(0)
    plan = make_plan(nn.Sequential(Caching(), nn.Tanh(), Caching()), 2, inputs={"input": torch.randn(3, 4, 32)})
    assert plan.proof == "proved"
    assert {"0.o", "2.o"} == {row for region in plan.regions for row in region.rows}
    assert plan["0"].attrs["heads"] == (2, 2) and plan["0"].shards["bias"].local_shape(0) == (2, 5)
