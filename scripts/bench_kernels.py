"""Times each fused operation: every backend that can run it, transformers' eager formula, and the bandwidth floor.

python scripts/bench_kernels.py --out FILE.json [--sweep]
python scripts/bench_kernels.py --cpu                     (small sizes in Triton's interpreter, to see that it runs)

Llama-3-8B's sizes at TP=2: H 4096, F 7168, 16 query and 4 kv heads of 128; bf16; M rows. "us" is device time: the calls are
queued behind a pause, so that they run back to back, over several sets of inputs where one would stay in the cache; "host" is
what a call costs the thread that makes it. The floor is the operation's bytes at the bandwidth of a large copy on the device.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

if "--cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before transformers imports triton

import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from autotp.kernels.dispatch import BACKENDS, Problem, select

CPU = "--cpu" in sys.argv
DEVICE, DTYPE, EPS = "cpu" if CPU else "cuda", torch.bfloat16, 1e-5
ROWS = (1, 6) if CPU else (1, 64, 2048, 8192)
H, F_LOCAL, HEADS, KV_HEADS, D = (64, 96, 4, 2, 16) if CPU else (4096, 7168, 16, 4, 128)
CALLS, ROUNDS, CACHE_BYTES = (2, 1, 0) if CPU else (20, 5, 256 << 20)
PAUSE_CYCLES = 20_000_000  # about 11 ms, longer than queueing the calls takes

Call = Callable[[], Any]


@dataclass
class Work:
    """One operation at one size: the problem, the bytes it must move, and what makes a call of a backend or of plain PyTorch."""

    name: str
    problem: Problem
    n_bytes: int
    ours: Callable[[Callable[..., Any]], Call]
    eager: Callable[[], Call]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32, device=DEVICE).to(DTYPE)


def llama_rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def layernorm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, None, EPS)


def backward_of(compute: Callable[..., Any], *tensors: torch.Tensor) -> Call:
    """Autograd's backward of `compute` alone, with respect to all tensors."""
    inputs = [t.detach().requires_grad_() for t in tensors]
    outputs = compute(*inputs)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    incoming = [torch.randn_like(y) for y in outputs]
    return lambda: torch.autograd.grad(outputs, inputs, incoming, retain_graph=True)


def norm_works(m: int, width: int, kind: str) -> list[Work]:
    plain = llama_rms if kind == "rms" else layernorm
    size = m * width * DTYPE.itemsize

    def forward(run, residual=False):
        x, weight, more = draw(m, width), draw(width), draw(m, width) if residual else None
        return lambda: run(x, weight, None, EPS, kind, more)

    def backward(run, residual=False, wanted=(True, True, False)):
        x, dy, weight, more = draw(m, width), draw(m, width), draw(width), draw(m, width) if residual else None
        _, rstd, mean, _ = select(problem("norm_forward"), "reference")(x, weight, None, EPS, kind)
        return lambda: run(dy, x, weight, rstd, mean, kind, more, wanted)

    def eager(residual=False):
        x, weight, more = draw(m, width), draw(width), draw(m, width)
        return (lambda: plain(x + more, weight)) if residual else (lambda: plain(x, weight))

    def add_plain(x, residual, weight):
        total = x + residual
        return plain(total, weight), total

    def problem(op):
        return Problem(op, DEVICE, DTYPE, kind, m, width, DTYPE)

    return [
        Work(f"{kind} forward", problem("norm_forward"), 2 * size, forward, eager),
        Work(f"{kind} add+forward", problem("norm_forward"), 4 * size, lambda run: forward(run, True), lambda: eager(True)),
        Work(
            f"{kind} backward",
            problem("norm_backward"),
            3 * size,
            backward,
            lambda: backward_of(plain, draw(m, width), draw(width)),
        ),
        Work(
            f"{kind} backward+add",
            problem("norm_backward"),
            4 * size,
            lambda run: backward(run, True),
            lambda: backward_of(add_plain, draw(m, width), draw(m, width), draw(width)),
        ),
    ]


def gated_works(m: int) -> list[Work]:
    size = m * F_LOCAL * DTYPE.itemsize

    def sliced():
        return draw(m, 2 * F_LOCAL).chunk(2, -1)

    def plain(gate, up):
        return F.silu(gate) * up

    def forward(run):
        gate, up = sliced()
        return lambda: run(gate, up, "silu")

    def backward(run):
        (gate, up), dy = sliced(), draw(m, F_LOCAL)
        return lambda: run(dy, gate, up, "silu")

    def eager():
        gate, up = sliced()
        return lambda: plain(gate, up)

    def problem(op):
        return Problem(op, DEVICE, DTYPE, "silu", m, F_LOCAL)

    return [
        Work("silu gate forward", problem("gated_forward"), 3 * size, forward, eager),
        Work("silu gate backward", problem("gated_backward"), 5 * size, backward, lambda: backward_of(plain, *sliced())),
    ]


def rotary_works(m: int) -> list[Work]:
    size = m * D * DTYPE.itemsize * (2 * (HEADS + KV_HEADS) + 2)

    def heads():
        qkv = draw(1, m, (HEADS + 2 * KV_HEADS) * D).split([HEADS * D, KV_HEADS * D, KV_HEADS * D], -1)
        angles = torch.randn(1, m, D // 2, device=DEVICE).repeat(1, 1, 2)
        q, k = (x.unflatten(-1, (-1, D)).transpose(1, 2) for x in qkv[:2])
        return q, k, angles.cos().to(DTYPE), angles.sin().to(DTYPE)

    def ours(run):
        tensors = heads()
        return lambda: run(*tensors)

    def eager():
        tensors = heads()
        return lambda: apply_rotary_pos_emb(*tensors)

    def eager_backward():
        q, k, cos, sin = heads()
        return backward_of(lambda q, k: tuple(apply_rotary_pos_emb(q, k, cos, sin)), q, k)

    def problem(op):
        return Problem(op, DEVICE, DTYPE, "halves", m, D)

    return [
        Work("rotary forward", problem("rotary_forward"), size, ours, eager),
        Work("rotary backward", problem("rotary_backward"), size, ours, eager_backward),
    ]


def all_works(m: int) -> list[Work]:
    per_head = norm_works(m * HEADS, D, "rms")  # one norm for each head, as in Qwen3
    for work in per_head:
        work.name += f" N {D}"
    return [*norm_works(m, H, "rms"), *norm_works(m, H, "layernorm"), *per_head, *gated_works(m), *rotary_works(m)]


def time_calls(make: Callable[[], Call], n_bytes: int) -> tuple[float, float]:
    """(device us, host us) of a call: medians over rounds, each over several sets of inputs."""
    calls = [make() for _ in range(min(CALLS, max(2, CACHE_BYTES // max(n_bytes, 1))))]
    for call in calls:
        call()
    device, host = [], []
    for _ in range(ROUNDS):
        if not CPU:
            torch.cuda.synchronize()
            torch.cuda._sleep(PAUSE_CYCLES)
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
        start = time.perf_counter()
        for i in range(CALLS):
            calls[i % len(calls)]()
        host.append((time.perf_counter() - start) / CALLS * 1e6)
        if not CPU:
            last.record()
            torch.cuda.synchronize()
            device.append(first.elapsed_time(last) / CALLS * 1e3)
    return statistics.median(device or host), statistics.median(host)


def copy_bandwidth() -> float:
    """Bytes read and written a second by a large copy."""
    source = torch.empty((1 << 20) if CPU else (2 << 30), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    device_us, _ = time_calls(lambda: lambda: target.copy_(source), 2 * source.numel())
    return 2 * source.numel() / device_us * 1e6


def measure(work: Work, bandwidth: float) -> dict[str, Any]:
    times = {"eager": time_calls(work.eager, work.n_bytes)}
    for backend in BACKENDS[work.problem.op]:
        if not backend.why_not(work.problem):
            run = select(work.problem, backend.name)
            times[backend.name] = time_calls(lambda run=run: work.ours(run), work.n_bytes)
    return {
        "operation": work.name,
        "rows": work.problem.rows,
        "width": work.problem.width,
        "floor_us": work.n_bytes / bandwidth * 1e6,
        "us": {name: device for name, (device, _) in times.items()},
        "host_us": {name: host for name, (_, host) in times.items()},
    }


def show(results: list[dict[str, Any]]) -> None:
    names = ("eager", "reference", "torch", "triton")
    print(f"{'operation':26}{'M':>8}{'floor':>9}" + "".join(f"{name:>11}" for name in names) + f"{'triton/floor':>14}   host us")
    for r in results:
        row = "".join(f"{r['us'][name]:11.1f}" if name in r["us"] else f"{'-':>11}" for name in names)
        share = f"{r['us']['triton'] / r['floor_us']:14.2f}" if r["us"].get("triton") and r["floor_us"] > 1 else f"{'':14}"
        host = " ".join(f"{name} {r['host_us'][name]:.0f}" for name in names if name in r["host_us"])
        print(f"{r['operation']:26}{r['rows']:8}{r['floor_us']:9.1f}{row}{share}   {host}")


def sweep() -> list[dict[str, Any]]:
    """Launch parameters of the Triton kernels at the largest M."""
    from autotp.kernels import triton_gated, triton_norm, triton_rotary

    m, results = ROWS[-1], []

    def record(work: Work, **settings):
        device_us, _ = time_calls(lambda: work.ours(select(work.problem, "triton")), work.n_bytes)
        results.append({"operation": work.name, "rows": work.problem.rows, **settings, "us": device_us})

    works = {work.name: work for work in all_works(m)}
    kept = triton_norm.tile_rows, triton_norm.PROGRAMS_PER_PROCESSOR
    wide, narrow = product((4, 8, 16), (1,), ("",)), product((2, 4), (8, 32), (f" N {D}",))
    for (warps, rows, suffix), programs in product([*wide, *narrow], (1, 2, 3, 4, 6, 8)):
        triton_norm.tile_rows = lambda width, rows=rows, warps=warps: (rows, width, warps)
        triton_norm.PROGRAMS_PER_PROCESSOR = programs
        if programs == 1:
            record(works["rms add+forward" + suffix], warps=warps, rows_a_program=rows)
        record(works["rms backward+add" + suffix], warps=warps, rows_a_program=rows, programs=programs)
    triton_norm.tile_rows, triton_norm.PROGRAMS_PER_PROCESSOR = kept
    kept = triton_gated.TILE, triton_gated.WARPS
    for tile, warps in ((512, 2), (512, 4), (1024, 2), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8)):
        triton_gated.TILE, triton_gated.WARPS = tile, warps
        for name in ("silu gate forward", "silu gate backward"):
            record(works[name], tile=tile, warps=warps)
    triton_gated.TILE, triton_gated.WARPS = kept
    kept = triton_rotary.TILE, triton_rotary.WARP_ELEMENTS
    for tile, elements in product((1024, 2048, 4096), (256, 512, 1024)):
        triton_rotary.TILE, triton_rotary.WARP_ELEMENTS = tile, elements
        record(works["rotary forward"], tile=tile, elements_a_warp=elements)
    triton_rotary.TILE, triton_rotary.WARP_ELEMENTS = kept
    return results


def show_sweep(results: list[dict[str, Any]]) -> None:
    """The best three settings of each operation."""
    for name in dict.fromkeys(r["operation"] for r in results):
        best = sorted((r for r in results if r["operation"] == name), key=lambda r: r["us"])[:3]
        settings = ("; ".join(f"{k} {v}" for k, v in r.items() if k not in ("operation", "rows", "us")) for r in best)
        print(f"best {name}: " + " | ".join(f"{r['us']:.1f} us ({text})" for r, text in zip(best, settings, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--cpu", action="store_true", help="small sizes on the CPU, to see that it runs")
    parser.add_argument("--sweep", action="store_true", help="also launch parameters of the Triton kernels, at the largest M")
    options = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    device = "CPU" if CPU else torch.cuda.get_device_name()
    results = [measure(work, bandwidth) for m in ROWS for work in all_works(m)]
    swept = sweep() if options.sweep else []
    if options.out:
        about = {"device": device, "torch": torch.__version__, "bandwidth": bandwidth, "dtype": str(DTYPE)}
        with open(options.out, "w") as file:
            json.dump({**about, "results": results, "sweep": swept}, file, indent=1)
    show_sweep(swept)
    print(f"{device}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s, {DTYPE}; us")
    show(results)


if __name__ == "__main__":
    main()
