"""Starts of kernels that are remembered: with the same arguments, and never where another kernel would have been compiled."""

import types

import pytest
import torch
from torch import nn

from autotp.kernels import triton_launch
from autotp.kernels.triton_launch import Remembered, ceil_div

triton = pytest.importorskip("triton")


class Kernel:
    """Counts what Triton is asked to start, and keeps what every start was given, as a compiled kernel takes it."""

    arg_names = ("x", "y", "n", "eps", "KIND", "BLOCK")

    def __init__(self, compiles=True):
        self.compiled, self.starts, self.compiles, self.pre_run_hooks = 0, [], compiles, []

    def compile(self):
        return Compiled(self, self.compiled)

    def __getitem__(self, grid):
        def start(*args, KIND, BLOCK, **options):
            self.compiled += 1
            self.starts.append((grid, (*args, KIND, BLOCK)))
            return self.compile() if self.compiles else None

        return start


class Compiled:
    packed_metadata = "packed"

    def __init__(self, kernel, number):
        self.kernel, self.function = kernel, f"function {number}"

    def run(self, x, y, z, stream, function, packed, metadata, before, after, *args):
        assert (stream, function, packed, metadata, before, after) == ("stream", self.function, "packed", None, None, None)
        self.kernel.starts.append(((x, y, z), args))


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)


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


def test_tritons_hooks_hear_of_every_start(monkeypatch):
    kernel, runtime = Kernel(), triton.knobs.runtime
    remembered = Remembered(kernel)
    start(remembered)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        hook = getattr(runtime, name)
        hook.add(print)
        start(remembered)
        hook.remove(print)
        monkeypatch.setattr(runtime, name, print)
        start(remembered)
        monkeypatch.undo()
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)
    kernel.pre_run_hooks.append(print)
    start(remembered)
    assert kernel.compiled == 6
    kernel.pre_run_hooks.clear()
    start(remembered)
    assert kernel.compiled == 6 and len(kernel.starts) == 7


def test_a_compiled_kernel_is_started_as_triton_starts_it():
    from triton.compiler import CompiledKernel

    given = []
    compiled = types.SimpleNamespace(
        _init_handles=lambda: None,
        launch_metadata=lambda *args: None,
        run=lambda *args: given.append(args),
        function="function",
        packed_metadata="packed",
    )
    CompiledKernel.__getitem__(compiled, (3, 1, 1))(X, Y, 4, 1e-5, "rms", 128, stream="stream")
    kernel = Kernel()
    kernel.compile = lambda: compiled
    remembered = Remembered(kernel)
    start(remembered)
    start(remembered)
    theirs, ours = given
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    assert theirs[7:9] == hooks and ours[7:9] == (None, None)
    assert theirs[:7] == ours[:7] and theirs[9:] == ours[9:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.float8_e4m3fn])
def test_what_is_started_as_before_is_what_triton_would_compile_for(dtype):
    """Every pair of arguments that Triton tells apart is told apart."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    memory = torch.zeros(64, dtype=torch.float32)
    tensors = [memory.view(torch.uint8)[at : at + 16].view(dtype) for at in (0, 4, 8, 16, 32)]
    tensors += [memory, nn.Parameter(memory), memory.half(), torch.zeros((), dtype=torch.int32)]
    numbers = [None, 0, 1, 2, 15, 16, 32, 2**31 - 1, 2**31, 2**62, -1, -16, True, False, 1.0, 0.0, 16.0]
    found = {}
    for value in (*tensors, *numbers):
        remembered = Remembered(Kernel())
        start(remembered, y=value)
        (key,) = remembered.starts
        kind = native_specialize_impl(BaseBackend, value, False, True, True)
        assert found.setdefault(key, kind) == kind
    assert len(set(found.values())) > 10 and len(found) < len(tensors) + len(numbers)


@pytest.mark.parametrize(("a", "b", "expected"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2)])
def test_ceil_div_rounds_up(a, b, expected):
    assert ceil_div(a, b) == expected
