"""What bench_fp8.py measures of single operations, each against its floor, and how it measures and says it."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotp.kernels import fp8
from autotp.kernels.decode import decoding
from autotp.kernels.dispatch import Problem, select
from autotp.kernels.few_rows import linear, linear_scaled
from autotp.kernels.fp8_scaled import LIMITS, Quantised

PRODUCTS = {"qkv": (4096, 3072), "o": (2048, 4096), "gate_up": (4096, 14336), "down": (7168, 4096)}  # inputs, outputs of a rank
TILES = ((1, 1024, 4, 2), (1, 2048, 4, 2), (2, 1024, 4, 2), (2, 2048, 4, 2), (2, 2048, 8, 2), (4, 1024, 4, 2), (4, 1024, 8, 2))
PEAK = {"bf16": 989.0, "fp8": 1979.0}


def say(*cells: Any, widths: tuple[int, ...] = (34, 11, 11, 11, 12, 12)) -> None:
    """One line of a table, of rank 0."""
    if dist.get_rank() == 0:
        print("".join(str(cell).ljust(width) for cell, width in zip(cells, widths, strict=False)).rstrip(), flush=True)


def time_us(run: Callable[[], Any], device: torch.device, count: int = 20) -> float:
    """Median microseconds of a call."""
    for _ in range(3):
        run()
    if device.type == "cpu":
        start = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - start)
    found = []
    for _ in range(count):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found.append(1e3 * start.elapsed_time(end))
    return statistics.median(found)


@contextmanager
def saying_errors(name: str) -> Iterator[None]:
    """What does not run is a line of the table: it fails on all ranks alike."""
    try:
        yield
    except Exception as error:
        say(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")


def measure_products(device: torch.device, rows: int, scale: int) -> None:
    """Products and their errors."""
    say("product, M x K x N", "us", "TFLOP/s", "of peak", "error", "by hand")
    for name, (k, n) in PRODUCTS.items():
        k, n = k // scale, n // scale
        x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
        w = torch.randn(n, k, device=device, dtype=torch.bfloat16) * k**-0.5
        exact = x.float() @ w.float().t()
        us = time_us(lambda x=x, w=w: x @ w.t(), device)
        say(f"{name} {rows}x{k}x{n} bf16", *rate(us, rows * k * n, "bf16"), error(x @ w.t(), exact), "-")
        for scaling in fp8.SCALINGS:
            recipe = fp8.Recipe(scaling)
            a, _ = fp8.quantise(x, scaling, columns=False)
            b, _ = fp8.quantise(w, recipe.weight_scaling, columns=False)
            assert a is not None and b is not None
            with saying_errors(f"{name} {scaling}"):
                us = time_us(partial(fp8.multiply, a, b, torch.bfloat16, True), device)
                found = error(fp8.multiply(a, b, torch.bfloat16, True), exact)
                say(f"{name} {scaling}", *rate(us, rows * k * n, "fp8"), found, error_by_hand(x, w, exact, scaling))


def rate(us: float, terms: int, kind: str) -> tuple[str, str, str]:
    """Microseconds, TFLOP/s and their share of the peak."""
    flops = 2 * terms / us / 1e6
    return f"{us:.1f}", f"{flops:.0f}", f"{flops / PEAK[kind]:.0%}"


def error(y: Tensor, exact: Tensor) -> str:
    """The relative error."""
    return f"{((y.float() - exact).norm() / exact.norm()).item():.3e}"


def error_by_hand(x: Tensor, w: Tensor, exact: Tensor, scaling: str) -> str:
    """The error where PyTorch's plain operations make the operands."""
    if scaling == "blockwise":
        return "-"
    dtype, dim = torch.float8_e4m3fn, {"tensorwise": None, "rowwise": 1}[scaling]

    def cast(tensor: Tensor) -> Quantised:
        amax = tensor.abs().amax() if dim is None else tensor.abs().amax(dim, keepdim=True)
        factor = LIMITS[dtype] / amax.float()
        return Quantised((tensor.float() * factor).to(dtype), 1 / factor, scaling)

    return error(fp8.multiply(cast(x), cast(w), torch.bfloat16, True), exact)


def measure_operands(device: torch.device, rows: int, scale: int) -> None:
    """Quantising, both operands."""
    say("\noperands of M x K, both", "us", "GB/s", "of 4.8 TB/s")
    for k in (4096 // scale, 14336 // scale):
        x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
        for scaling in (*fp8.SCALINGS, "squares"):
            n_bytes = rows * k * (2 + 2 + 2 * (scaling in ("tensorwise", "rowwise")))
            with saying_errors(f"{rows}x{k} {scaling}"):
                us = time_us(partial(fp8.quantise, x, scaling), device)
                say(f"{rows}x{k} {scaling}", f"{us:.1f}", f"{n_bytes / us / 1e3:.0f}", f"{n_bytes / us / 4.8e6:.0%}")


def measure_few(device: torch.device, scale: int, tiles_too: bool) -> None:
    """One row, weights of 16 and of 8 bits; several sets, so that none lies in the cache."""
    say("\none row, K x N", "us", "GB/s", "of bf16", "error")
    for name, (k, n) in PRODUCTS.items():
        k, n = k // scale, n // scale
        x = torch.randn(1, k, device=device, dtype=torch.bfloat16)
        wide = [torch.randn(n, k, device=device, dtype=torch.bfloat16) * k**-0.5 for _ in range(12 if scale == 1 else 2)]
        small = [quantised for w in wide if (quantised := fp8.quantise(w, "rowwise", columns=False)[0]) is not None]
        exact, tiles = x.float() @ wide[0].float().t(), []
        with torch.no_grad(), decoding():
            us = graph_us([partial(linear, x, w) for w in wide], device)
            less = graph_us([partial(linear_scaled, x, w.values, w.scale) for w in small], device)
            errors = error(linear(x, wide[0]), exact), error(linear_scaled(x, small[0].values, small[0].scale), exact)
            for tile in TILES if tiles_too else ():
                tile_of = importlib.import_module("autotp.kernels.triton_few_rows").Tile
                run = partial(select(Problem("linear_few", "cuda", x.dtype), "triton"), tile=tile_of(*tile))
                tiles.append(f"{tile} {graph_us([partial(run, x, w.values, None, '', w.scale) for w in small], device):.1f}")
        say(f"{name} {k}x{n} bf16", f"{us:.1f}", f"{2 * k * n / us / 1e3:.0f}", "-", errors[0])
        say(f"{name} fp8", f"{less:.1f}", f"{k * n / less / 1e3:.0f}", f"{less / us:.2f}", errors[1])
        if tiles:
            say(f"{name} fp8, us by tile", *tiles, widths=(24, *[22] * len(TILES)))


def graph_us(runs: list[Callable[[], Any]], device: torch.device) -> float:
    """Microseconds a call, of all calls in one CUDA graph."""
    if device.type == "cpu":
        return time_us(runs[0], device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return time_us(graph.replay, device) / len(runs)
