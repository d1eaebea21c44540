"""What runs on a shadow in other arithmetic than the model's own computes the same."""

import pytest
import torch
from torch import nn

from autotp.errors import PlanError
from autotp.inject.intercept import Interceptor, running
from autotp.inject.record import Recorder
from autotp.inject.rules import make_plan
from autotp.inject.shadow import Shadow

CONVOLUTIONS = {
    "causal": nn.Conv1d(12, 12, 4, padding=3, groups=12, bias=False),
    "strided": nn.Conv1d(12, 12, 3, stride=2, groups=12),
    "dilated": nn.Conv1d(12, 12, 3, dilation=2, padding=1, groups=12),
    "an image": nn.Conv2d(16, 16, (3, 5), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=16),
    "a clip": nn.Conv3d(16, 16, (1, 2, 3), padding=1, groups=16),
    "by name": nn.Conv1d(12, 12, 3, padding="same", groups=12),
    "more taps than channels": nn.Conv1d(4, 4, 6, padding=3, groups=4),
}


def refuse(*_):
    raise AssertionError("not a linear map")


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_a_convolution_of_each_channel_by_itself(kind):
    torch.manual_seed(0)
    module = CONVOLUTIONS[kind].double()
    shadow = Shadow(nn.Sequential(module))
    parameters = list(shadow.model.parameters())
    with torch.no_grad():
        for own, given in zip(shadow.model.parameters(), module.parameters(), strict=True):
            own.copy_(given)
    x = torch.randn(2, module.in_channels, *[11] * (module.weight.ndim - 2), dtype=torch.float64, requires_grad=True)
    with running(), Interceptor(shadow, refuse):
        got = shadow.model(x)
    want = module(x)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(want)
    mine = torch.autograd.grad(got, [x, *parameters], cotangent)
    theirs = torch.autograd.grad(want, [x, *module.parameters()], cotangent)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_many_channels_take_no_convolution():
    """In float64 torch computes one channel after the other."""
    shadow = Shadow(nn.Sequential(nn.Conv1d(512, 512, 4, padding=3, groups=512)))
    with torch.profiler.profile() as profile:
        Recorder(shadow).run({"input": torch.randn(1, 512, 5, dtype=torch.float64)})
    names = {event.key for event in profile.key_averages()}
    assert "aten::mul" in names and "aten::convolution" not in names


class Running(nn.Module):
    """Writes a running mean into its buffer in every forward, in evaluation too."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x):
        hidden = self.up(x)
        self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return self.down(torch.relu(hidden - self.mean))


def test_a_forward_that_writes_into_its_buffers_starts_from_the_same_numbers_each_time():
    model = Running()
    plan = make_plan(model, 2, inputs={"x": torch.randn(4, 16)})
    assert plan.proof == "proved" and {module.name for module in plan.modules} >= {"up", "down"}
    assert not model.mean.any()


@pytest.mark.parametrize("inputs", [[], torch.ones(2, 16), [torch.ones(2, 16)]], ids=["no calls", "a tensor", "tensors"])
def test_inputs_that_are_no_calls_are_refused(inputs):
    with pytest.raises(PlanError, match=r"inputs= is a .*: pass a dict of keyword arguments"):
        make_plan(Running(), 2, inputs=inputs)


class Branching(nn.Module):
    """Which branch is taken hangs on a sum over the hidden width."""

    def __init__(self, test):
        super().__init__()
        self.up, self.down, self.test = nn.Linear(16, 32), nn.Linear(32, 16), test

    def forward(self, x):
        hidden = self.up(x)
        return self.down(hidden.relu() if self.test(hidden.sum()) else 2 * hidden.relu())


@pytest.mark.parametrize(
    "test", [lambda s: float(s) > 0, lambda s: s > 1e6, lambda s: s.item() > 0], ids=["float", "bool", "item"]
)
def test_a_branch_on_a_sum_over_what_is_cut_is_no_region(test):
    plan = make_plan(Branching(test), 2, inputs={"x": torch.randn(4, 16)})
    assert not plan.regions and "a number that the forward reads" in str(plan)
