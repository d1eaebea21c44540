"""Starts of kernels that are remembered: with the same arguments, and never where another kernel would have been compiled."""

import pytest
import torch

from autotp.kernels import triton_launch
from autotp.kernels.triton_launch import Remembered, ceil_div


class Kernel:
    """Counts what is compiled, and keeps what every start was given, as a compiled kernel takes it."""

    arg_names = ("x", "y", "n", "eps", "KIND", "BLOCK")

    def __init__(self, compiles=True):
        self.compiled, self.starts, self.compiles = 0, [], compiles

    def __getitem__(self, grid):
        def start(*args, KIND, BLOCK, **options):
            self.compiled += 1
            self.starts.append((grid, (*args, KIND, BLOCK)))
            return Compiled(self, self.compiled) if self.compiles else None

        return start


class Compiled:
    def __init__(self, kernel, number):
        self.kernel, self.number = kernel, number

    def __getitem__(self, grid):
        return lambda *args: self.kernel.starts.append((grid, args))


@pytest.fixture(autouse=True)
def remembering(monkeypatch):
    monkeypatch.setattr(triton_launch, "REMEMBERS", True)


X, Y = torch.zeros(8), torch.zeros(8)
GIVEN = dict(x=X, y=Y, n=4, eps=1e-5, KIND="rms", BLOCK=128, num_warps=4)


def start(remembered, grid=(3,), **changed):
    how = {**GIVEN, **changed}
    remembered[grid](how.pop("x"), how.pop("y"), how.pop("n"), how.pop("eps"), **how)


def test_a_start_like_an_earlier_one_compiles_nothing_and_is_given_its_own_arguments():
    kernel = Kernel()
    remembered, other = Remembered(kernel), torch.ones(8)
    start(remembered)
    start(remembered, grid=(5,), x=other, BLOCK=128, num_warps=4)
    assert kernel.compiled == 1 and len(kernel.starts) == 2
    grid, args = kernel.starts[1]
    assert tuple(grid)[:3] == (5, 1, 1) and args[0] is other and args[1] is Y and args[2:] == (4, 1e-5, "rms", 128)


CHANGES = {
    "dtype": dict(x=X.half()),
    "alignment": dict(x=X[1:]),
    "absence": dict(y=None),
    "number": dict(n=16),
    "float": dict(eps=1e-6),
    "kind of number": dict(n=4.0),
    "truth": dict(n=True),
    "constant": dict(KIND="layernorm"),
    "size": dict(BLOCK=256),
    "option": dict(num_warps=8),
    "further option": dict(launch_pdl=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_triton_compiles_for_is_told_apart(change):
    kernel = Kernel()
    remembered = Remembered(kernel)
    base = dict(n=1) if change == "truth" else {}
    for given in (base, CHANGES[change], base, CHANGES[change]):
        start(remembered, **given)
    assert kernel.compiled == 2 and len(kernel.starts) == 4


def test_what_was_compiled_for_one_gpu_is_not_started_on_another(monkeypatch):
    kernel = Kernel()
    remembered = Remembered(kernel)
    for device in (0, 1, 0, 1):
        monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor, device=device: device)
        start(remembered)
    assert kernel.compiled == 2 and len(kernel.starts) == 4


def test_what_is_interpreted_is_started_anew_each_time():
    kernel = Kernel(compiles=False)
    remembered = Remembered(kernel)
    start(remembered)
    start(remembered)
    assert kernel.compiled == 2 and not remembered.starts


def test_what_is_remembered_does_not_grow_without_end(monkeypatch):
    monkeypatch.setattr(triton_launch, "MOST_REMEMBERED", 3)
    kernel = Kernel()
    remembered = Remembered(kernel)
    for n in range(10):
        start(remembered, n=n)
    assert kernel.compiled == 10 and len(remembered.starts) <= 3


@pytest.mark.parametrize(("a", "b", "expected"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2)])
def test_ceil_div_rounds_up(a, b, expected):
    assert ceil_div(a, b) == expected
