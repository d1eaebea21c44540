"""What our Triton kernels' callers share: how a tensor's rows are addressed, the device that a kernel is started on, and starts
that cost the host little.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache, partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_REMEMBERED = 1024  # starts of one kernel; more rows than that are seldom counted in one process
PLAIN = frozenset((int, float, bool, type(None)))  # what is no tensor: isinstance takes long to deny it


class Start(NamedTuple):
    """What was compiled, and what its launcher is given besides the stream and the arguments.

    Attributes:
        run: Triton's launcher of it, called as torch's inductor does.
        constants: what it wants behind the arguments.
    """

    compiled: Any
    run: Callable[..., Any]
    function: Any
    packed: Any
    constants: tuple[Any, ...]


class Remembered:
    """A kernel that is started as it was before, where nothing differs that Triton compiles for: it takes longer to find out.

    Started as the kernel itself is, `kernel[grid](*tensors_and_numbers, **constants_and_options)`: a tensor first, all constants
    by name, and the tensors' device is current. Numbers are told apart by value; tensors by dtype, device, and whether their
    memory begins at a multiple of 16 bytes. Triton's own settings are read where it compiles, hooks at every start.

    Attributes:
        starts: what was told apart -> how it was started.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.starts: dict[tuple[Any, ...], Start] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self._start, grid)

    def _start(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        device = args[0].get_device()
        told = [arg if type(arg) in PLAIN else (arg.dtype, not arg.data_ptr() & 15) for arg in args]
        key = device, *named, *named.values(), *map(type, args), *told  # types: 1 is equal to 1.0 and True
        found = self.starts.get(key)
        if found is None or self.kernel.pre_run_hooks or _are_watched():
            self._start_anew(grid, key, args, named)
            return
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)
        found.run(x, y, z, stream, found.function, found.packed, None, None, None, *args, *found.constants)

    def _start_anew(self, grid: tuple[int, ...], key: tuple[Any, ...], args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Start it as Triton does."""
        compiled = self.kernel[grid](*args, **named)
        run, function, packed = (getattr(compiled, name, None) for name in ("run", "function", "packed_metadata"))
        if run is None or function is None or packed is None:  # interpreted, or not compiled yet
            return
        if len(self.starts) >= MOST_REMEMBERED:
            self.starts.clear()
        constants = tuple(named[name] for name in self.kernel.arg_names[len(args) :])
        self.starts[key] = Start(compiled, run, function, packed, constants)


def _are_watched() -> bool:
    """Whether someone has asked Triton to be told of every start."""
    runtime = sys.modules["triton"].knobs.runtime
    before, after = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))


def on_own_device(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, with the device of its first argument current: Triton starts kernels on the current one."""

    @wraps(run)
    def guarded(x: Tensor, *args, **kwargs):
        if not x.is_cuda or x.device.index == torch._C._cuda_getDevice():
            return run(x, *args, **kwargs)
        with torch.cuda.device(x.device):
            return run(x, *args, **kwargs)

    return guarded


@lru_cache
def count_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a small number for the interpreter, so that programs get several rows there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def ceil_div(a: int, b: int) -> int:
    """`a / b` rounded up; Triton's own takes the host as long as a small operation of torch."""
    return -(-a // b)


def ceil_power(n: int) -> int:
    """The least power of two that is at least n; 1 for 0."""
    return 1 << max(0, n - 1).bit_length()


def address_rows(x: Tensor, inner_allowed: bool = False) -> tuple[Tensor, int, int, int]:
    """How a kernel reaches row m of `x` `[..., N]`: at `m // inner * outer_step + m % inner * inner_step`, columns side by side.

    Args:
        inner_allowed: False: the caller's kernel knows one step only, inner must be 1.

    Returns:
        x, copied where its rows can't be addressed so; inner; outer_step and inner_step in elements.
    """
    if x.is_contiguous():
        return x, 1, x.shape[-1], 0
    groups: list[tuple[int, int]] = []
    *sizes, width = x.shape
    *steps, last = x.stride()
    for size, step in zip(sizes, steps, strict=True):
        if size == 1:
            continue
        if groups and groups[-1][1] == size * step:
            groups[-1] = (groups[-1][0] * size, step)
        else:
            groups.append((size, step))
    if (last != 1 and width != 1) or len(groups) > 1 + inner_allowed:
        return x.contiguous(), 1, width, 0
    if len(groups) < 2:
        return x, 1, groups[0][1] if groups else width, 0
    return x, groups[1][0], groups[0][1], groups[1][1]
