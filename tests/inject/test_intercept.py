"""What runs on a shadow in other arithmetic than the model's own computes the same."""

import pytest
import torch
from torch import nn

from autotp.inject.intercept import Interceptor, running
from autotp.inject.record import Recorder
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
