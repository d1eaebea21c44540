"""Calls of Triton kernels that are remembered: the compiled kernel runs again only for what it was compiled for."""

import pytest
import torch

triton_launch = pytest.importorskip("autotp.kernels.triton_launch")


class Kernel:
    """What Triton compiles for, of a kernel `(x, n, ROWS, KIND)`."""

    arg_names = ("x", "n", "ROWS", "KIND")

    def __init__(self):
        self.looked_up, self.ran = [], []

    def __getitem__(self, grid):
        def run(x, n, **options):
            self.looked_up.append((grid, n, options))
            return Compiled(self)

        return run


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.ran.append((grid, *args))


def test_a_call_like_an_earlier_one_takes_its_kernel_and_no_other_call_does():
    kernel, x = Kernel(), torch.zeros(64)

    def call(x=x, n=3, programs=2, **options):
        triton_launch.launch(kernel, programs, x, n, **dict(dict(num_warps=4, KIND="rms", ROWS=8), **options))

    call()
    call(programs=5)  # with the constants in the kernel's order
    assert kernel.looked_up == [((2,), 3, dict(num_warps=4, KIND="rms", ROWS=8))] and kernel.ran == [((5, 1, 1), x, 3, 8, "rms")]
    others = [dict(n=1), dict(x=x[1:]), dict(x=x.half()), dict(x=None), dict(num_warps=8), dict(KIND="layernorm")]
    for count, other in enumerate([*others, dict(launch_pdl=True)], 2):
        call(**other)
        assert len(kernel.looked_up) == count, other
    call(x[4:])  # as aligned
    assert len(kernel.ran) == 2
