"""FP8 beside bf16, in one run on one machine: every operation against its floor, a training step, decoding, memory.

torchrun --nproc-per-node 2 scripts/bench_fp8.py
torchrun --nproc-per-node 2 scripts/bench_fp8.py --tiny        (small shapes, to see that it runs)

| work | what is measured, by CUDA events, medians |
|---|---|
| products | `F.scaled_mm` of 8192 rows by recipe, TFLOP/s; error against float32 beside scales and casts written by hand |
| operands | both operands of a tensor, GB/s of what a kernel with no cache would move |
| few | the product of one row, GB/s of the weight |
| body | forward and backward of 8 decoder layers of Llama-3-8B's shape, 2 x 4096 tokens, and its peak memory |
| decode | `generate()`, 32 layers, batch 1, 256 tokens after 1024, wall time; bytes of weights |

Every line is rank 0's. The floors are what the data sheet of an H200 promises: 989 TFLOP/s in bf16, 1979 in FP8, 4.8 TB/s.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import autotp
from autotp.comm import init_process_group_from_env, local_device
from autotp.kernels import fp8
from autotp.kernels.decode import decoding
from autotp.kernels.dispatch import Problem, select
from autotp.kernels.few_rows import linear, linear_scaled
from autotp.kernels.fp8_scaled import LIMITS, Quantised

SHAPE: dict[str, Any] = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
TINY: dict[str, Any] = dict(hidden_size=512, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)
PRODUCTS = {"qkv": (4096, 3072), "o": (2048, 4096), "gate_up": (4096, 14336), "down": (7168, 4096)}  # inputs, outputs of a rank
TILES = ((1, 1024, 4, 2), (1, 2048, 4, 2), (2, 1024, 4, 2), (2, 2048, 4, 2), (2, 2048, 8, 2), (4, 1024, 4, 2), (4, 1024, 8, 2))
PEAK = {"bf16": 989.0, "fp8": 1979.0}
RECIPES = {
    "fp8-tensorwise": fp8.Recipe(),
    "fp8-tensorwise, fast gradients": fp8.Recipe(fast_gradients=True),
    "fp8-tensorwise, fast, own scales": fp8.Recipe(fast_gradients=True, agree=False),
    "fp8-rowwise": fp8.Recipe("rowwise"),
    "fp8-blockwise": fp8.Recipe("blockwise"),
}


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


# -- operations -----------------------------------------------------------------------------------------------------------


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


# -- models ---------------------------------------------------------------------------------------------------------------


def build(shape: dict[str, Any], layers: int, vocabulary: int, device: torch.device) -> Any:
    """A random Llama, alike on all ranks."""
    config = LlamaConfig(
        **shape, num_hidden_layers=layers, vocab_size=vocabulary, max_position_embeddings=8192, dtype=torch.bfloat16
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model


def free(device: torch.device) -> None:
    """Give back what was measured."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure_body(shape: dict[str, Any], device: torch.device, layers: int, tokens: int, recipes: list[str]) -> None:
    """Forward and backward of the decoder's body."""
    say("\nbody, forward and backward", "ms", "of bf16", "peak GiB", "gradient's difference", widths=(34, 11, 11, 11, 30))
    ids = torch.randint(0, 1024, (2, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    plan: Any = "auto"
    first, grad = 0.0, torch.empty(0)
    for name in ("bf16", *recipes):
        model = build(shape, layers, 1024, device)
        autotp.parallelize(model, plan=plan, precision=None if name == "bf16" else RECIPES[name])
        plan = replace(model.autotp_plan, products=())
        with saying_errors(name):
            ms, peak, own = time_body(model.train(), ids, device)
            first, grad = first or ms, grad if grad.numel() else own
            said = f"{((own - grad).norm() / grad.norm()).item():.3f}"
            say(name, f"{ms:.2f}", f"{ms / first:.3f}", peak, said, widths=(34, 11, 11, 11, 30))
            if bad := autotp.fp8_report(model):
                say(f"  not finite: {bad}")
        del model
        free(device)


def time_body(model: Any, ids: Tensor, device: torch.device) -> tuple[float, str, Tensor]:
    """Milliseconds, peak memory, and one weight's gradient."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        out = model.model(ids, use_cache=False).last_hidden_state
        out.backward(torch.full_like(out, 1e-4))

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ms = time_us(step, device, 10) / 1e3
    peak = f"{torch.cuda.max_memory_allocated() / 2**30:.2f}" if device.type == "cuda" else "-"
    return ms, peak, model.model.layers[0].mlp.up_proj.weight.grad.float()


@contextmanager
def saying_errors(name: str) -> Iterator[None]:
    """What does not run is a line of the table: it fails on all ranks alike."""
    try:
        yield
    except Exception as error:
        say(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")


def measure_decode(shape: dict[str, Any], device: torch.device, layers: int, context: int, new: int) -> None:
    """Tokens of a batch of one."""
    say("\ndecode, batch 1", "ms a token", "of bf16", "GiB of weights")
    ids = torch.randint(0, 1024, (1, context), generator=torch.Generator().manual_seed(0)).to(device)
    plan: Any = "auto"
    first = 0.0
    for name in ("bf16", "fp8-weights"):
        model = build(shape, layers, 128256 if device.type == "cuda" else 1024, device).eval()
        autotp.parallelize(model, plan=plan, precision=None if name == "bf16" else name)
        plan = replace(model.autotp_plan, products=())
        n_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        how: dict[str, Any] = dict(do_sample=False, pad_token_id=0, eos_token_id=None)
        seconds = []
        for count in (new, new, 1, new, 1, new):  # the first captures
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            model.generate(ids, max_new_tokens=count, min_new_tokens=count, **how)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append((count, time.perf_counter() - start))
        whole = min(s for count, s in seconds[1:] if count == new)
        ms = 1e3 * whole / new
        first = first or ms
        say(name, f"{ms:.3f}", f"{ms / first:.3f}", f"{n_bytes / 2**30:.2f}")
        autotp.release(model)
        del model
        free(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    works = ("products", "operands", "few", "body", "decode")
    parser.add_argument("--work", nargs="+", choices=works, default=list(works))
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES), help="of the body")
    parser.add_argument("--tiles", action="store_true", help="one row by every tile, too")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    args = parser.parse_args()
    init_process_group_from_env()
    device = local_device()
    shape, scale = (TINY, 16) if args.tiny else (SHAPE, 1)
    rows, layers = (256, 2) if args.tiny else (8192, 8)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    say(f"torch {torch.__version__}, {dist.get_world_size()} x {name}")
    if "products" in args.work:
        measure_products(device, rows, scale)
    if "operands" in args.work:
        measure_operands(device, rows, scale)
    if "few" in args.work:
        measure_few(device, scale, args.tiles)
    free(device)
    dist.barrier()
    if "body" in args.work:
        measure_body(shape, device, layers, 64 if args.tiny else 4096, args.recipes)
    if "decode" in args.work:
        measure_decode(shape, device, 2 if args.tiny else 32, 16 if args.tiny else 1024, 8 if args.tiny else 256)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
