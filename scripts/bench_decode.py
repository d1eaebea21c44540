"""Times the kernels of a decoding step in CUDA graphs, beside PyTorch's, and checks their errors; one RESULT line each.

python scripts/bench_decode.py [--shape 70B] [--tp 8]               products and attention of one rank's part, on one GPU
torchrun --nproc-per-node 2 scripts/bench_decode.py                 the same work, dealt to several GPUs
python scripts/bench_decode.py --cpu                                small sizes in Triton's interpreter, to see that it runs

Sizes of a Llama, bf16, M rows. Weights are rotated over several sets, so that none sits in the L2 cache. Each kernel
is timed in a few shapes of its programs; "tile" is the best, "us" its time, "chosen_us" the time of the one that autotp takes.
"err" and "torch_err" are relative to float64. The last line counts what was wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

if "--cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before transformers imports triton

import torch
import torch.distributed as dist
import torch.nn.functional as F

from autotp.groups import init_process_group_from_env
from autotp.kernels import reference, reference_decode, triton_cache
from autotp.kernels.triton_few_rows import Tile, choose_tile, is_elementwise, linear_few
from autotp.kernels.triton_launch import count_processors

CPU = "--cpu" in sys.argv
DEVICE, DTYPE, EPS = "cpu" if CPU else "cuda", torch.float16 if CPU else torch.bfloat16, 1e-5
RANK = int(os.environ.get("RANK", 0))
ROTATED_BYTES = 0 if CPU else 400_000_000
SHAPES = {"8B": (4096, 14336, 32), "70B": (8192, 28672, 64)}  # hidden size, intermediate size, heads; 8 kv heads of 128
VOCABULARY = 128256
wrong: list[str] = []


def products_of(shape: str, tp: int) -> dict[str, tuple[int, int, str]]:
    """N, K of one rank's products, and the activation of a gated one, whose weight has 2N rows."""
    if CPU:
        return {"qkv": (48, 64, ""), "gated": (24, 64, "silu")}
    width, inner, heads = SHAPES[shape]
    own = heads // tp * 128
    return {
        "qkv": (own + 2 * -(-8 // tp) * 128, width, ""),
        "o": (width, own, ""),
        "gate_up": (2 * inner // tp, width, ""),
        "gated": (inner // tp, width, "silu"),
        "down": (width, inner // tp, ""),
        "head": (VOCABULARY // tp, width, ""),
    }


def report(**row: Any) -> None:
    print("RESULT " + json.dumps(row), flush=True)


def check(name: str, error: float, allowed: float) -> None:
    if not error <= allowed:
        wrong.append(name)
        print(f"WRONG rank {RANK} {name}: error {error:.2e}, allowed {allowed:.2e}", flush=True)


def draw(*shape: int) -> torch.Tensor:
    return (
        torch.randn(shape, device=DEVICE, dtype=torch.float32).to(DTYPE)
        if CPU
        else torch.randn(shape, device=DEVICE, dtype=DTYPE)
    )


def graph_us(calls: list[Callable[[], Any]], rounds: int = 5, least: int = 20, together: bool = False) -> float:
    """Microseconds of one call, the median over replays of a graph that runs each of `calls` equally often.

    Args:
        together: all ranks do this; they begin each replay at once.
    """
    if CPU:
        calls[0]()
        return 0.0
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    repeats = max(1, least // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls * repeats:
            call()
    graph.replay()
    times = []
    for _ in range(rounds):
        if together:
            dist.barrier()
        torch.cuda.synchronize()
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / (repeats * len(calls)) * 1e3)
    return statistics.median(times)


def error_of(found: torch.Tensor, exact: Any) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def tiles_of(m: int, k: int, gated: bool) -> Iterable[Tile]:
    """Shapes of a product's programs worth trying."""
    if not is_elementwise(m, DTYPE):
        yield from (Tile(rows, block, 4, depth) for rows, block, depth in
                    ((16, 128, 4), (16, 256, 3), (16, 256, 4), (16, 512, 3), (32, 128, 4), (32, 256, 3)))  # fmt: skip
        return
    blocks = [block for block in (512, 1024, 2048) if k % block == 0] or [256, 512, 1024]
    for rows, block, warps, unroll in itertools.product((1, 2, 4), blocks, (4, 8), (1, 2, 4)):
        loaded = rows * block * (2 if gated else 1) * unroll // (warps * 32)  # numbers of the weight in flight in a thread
        if (m == 1 or (rows < 4 and unroll == 2)) and 16 <= loaded <= 64 and block * unroll <= k:
            yield Tile(rows, block, warps, unroll)


def bench_product(name: str, n: int, k: int, activation: str, m: int) -> None:
    rows = 2 * n if activation else n
    n_bytes = rows * k * DTYPE.itemsize
    weights = [draw(rows, k) for _ in range(count_sets(n_bytes))]
    x = draw(m, k)

    def plain(weight):
        return reference.linear_few(x, weight, None, activation)

    chosen = choose_tile(m, n, k, bool(activation), DTYPE)
    times = {
        tile: graph_us([lambda w=w, tile=tile: linear_few(x, w, None, activation, tile=tile) for w in weights], 3)
        for tile in {chosen, *([] if CPU else tiles_of(m, k, bool(activation)))}
    }
    best = min(times, key=lambda tile: times[tile])
    exact = F.linear(x.double(), weights[0].double())
    if activation:
        exact = F.silu(exact[:, :n]) * exact[:, n:]
    errors = error_of(linear_few(x, weights[0], None, activation), exact), error_of(plain(weights[0]), exact)
    check(f"{name} M={m}", errors[0], 2 * errors[1])
    torch_us = graph_us([lambda w=w: F.linear(x, w) for w in weights])
    report(
        product=name, M=m, N=n, K=k, us=round(times[best], 1), gbps=rate(n_bytes, times[best]), tile=tuple(best),
        chosen_us=round(times[chosen], 1), chosen=tuple(chosen), torch_us=round(torch_us, 1), torch_gbps=rate(n_bytes, torch_us),
        tried=len(times), err=f"{errors[0]:.1e}", torch_err=f"{errors[1]:.1e}",
    )  # fmt: skip


def count_sets(n_bytes: int) -> int:
    """How many sets of inputs to take in turn."""
    return min(64, max(2, ROTATED_BYTES // n_bytes))


def rate(n_bytes: int, us: float) -> int:
    return round(n_bytes / us / 1e3) if us else 0


FORMS = [(block, warps) for block in (32, 64, 128) for warps in (2, 4, 8)]


def attention_us(q: Any, caches: Any, mask: Any, splits: int, block: int, warps: int) -> float:
    calls = [lambda kv=kv: triton_cache.attend_cache(q, *kv, mask, 0.1, splits, block, warps) for kv in caches]
    return round(graph_us(calls), 1)


def bench_attention(batch: int, context: int, length: int, heads: int, kv_heads: int) -> None:
    """One token of `batch` sequences, `context` of a cache of `length` filled, the first ones padded on the left."""
    width = 16 if CPU else 128
    n_bytes = 2 * batch * kv_heads * context * width * DTYPE.itemsize
    caches = [(draw(batch, kv_heads, length, width), draw(batch, kv_heads, length, width)) for _ in range(count_sets(n_bytes))]
    q, scale, token = draw(batch, heads, 1, width), width**-0.5, torch.arange(length, device=DEVICE)
    start = torch.arange(batch, device=DEVICE)[:, None] * 3
    mask = ((token < context) & (token >= start)).view(batch, 1, 1, length)

    def plain(k: torch.Tensor, v: torch.Tensor, repeat: bool = True) -> torch.Tensor:
        if not repeat:  # one query token: kv heads take their queries as rows
            return F.scaled_dot_product_attention(q.view(batch, kv_heads, -1, width), k, v, mask, scale=scale)
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)

    chosen = triton_cache.choose_splits(batch * kv_heads, length, count_processors(caches[0][0].device))
    times = {
        splits: graph_us([lambda kv=kv, splits=splits: triton_cache.attend_cache(q, *kv, mask, scale, splits) for kv in caches])
        for splits in {chosen, *([] if CPU else (1, 2, 4, 8, 16, 32, 64))}
    }
    best = min(times, key=lambda splits: times[splits])
    forms = {} if CPU else {(block, warps): attention_us(q, caches, mask, chosen, block, warps) for block, warps in FORMS}
    exact = reference_decode.attend_cache(q.double(), caches[0][0].double(), caches[0][1].double(), mask, scale)
    errors = (
        error_of(triton_cache.attend_cache(q, *caches[0], mask, scale), exact),
        error_of(plain(*caches[0]).transpose(1, 2), exact),
    )
    check(f"attention {batch} x {context}", errors[0], 2 * errors[1])
    k, v = draw(batch, kv_heads, 1, width), draw(batch, kv_heads, 1, width)
    position = torch.tensor([context], device=DEVICE)
    written = [triton_cache.write_cache, reference_decode.write_cache]
    writes = [graph_us([lambda kv=kv, run=run: run(k, v, *kv, position) for kv in caches]) for run in written]
    times_of = {"repeat_kv": graph_us([lambda kv=kv: plain(*kv) for kv in caches])}
    times_of["grouped"] = graph_us([lambda kv=kv: plain(*kv, repeat=False) for kv in caches])
    report(
        attention=f"{batch} x {context} of {length}", us=round(times[best], 1), gbps=rate(n_bytes, times[best]), splits=best,
        chosen_us=round(times[chosen], 1), chosen=chosen, forms_us={str(form): us for form, us in forms.items()},
        sdpa_us={name: round(us, 1) for name, us in times_of.items()},
        write_us=[round(us, 1) for us in writes], err=f"{errors[0]:.1e}", torch_err=f"{errors[1]:.1e}",
    )  # fmt: skip


def copy_rate() -> int:
    source = torch.empty(1 << (20 if CPU else 30), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return rate(2 * source.numel(), graph_us([lambda: target.copy_(source)], least=3))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="small sizes on the CPU, to see that it runs")
    parser.add_argument("--only", choices=("products", "attention"))
    parser.add_argument("--shape", choices=list(SHAPES), default="8B")
    parser.add_argument("--tp", type=int, default=2, help="ranks that the sizes are dealt to")
    options, start = parser.parse_args(), time.perf_counter()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(RANK)
    if ranks > 1:
        init_process_group_from_env()
    device = "CPU" if CPU else torch.cuda.get_device_name()
    report(rank=RANK, device=device, torch=torch.__version__, shape=options.shape, tp=options.tp, copy_gbps=copy_rate())
    if options.only in (None, "products"):
        products = products_of(options.shape, options.tp)
        works = list(itertools.product((1, 8) if CPU else (1, 2, 4, 8, 16), products))
        for m, name in works[RANK::ranks]:  # each rank some: compiling takes the time
            bench_product(name, *products[name], m)
    if options.only in (None, "attention"):
        heads = (4, 2) if CPU else (SHAPES[options.shape][2] // options.tp, max(1, 8 // options.tp))
        caches = [(1, 40, 64), (2, 30, 96)] if CPU else [(1, 1100, 2048), (8, 1100, 2048), (64, 1100, 2048), (1, 8000, 8192)]
        for batch, context, length in caches[RANK::ranks]:
            bench_attention(batch, context, length, *heads)
    report(rank=RANK, done=True, wrong=sorted(set(wrong)), seconds=round(time.perf_counter() - start))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
