"""Times the launches of whole decoder layers in one CUDA graph, one new token a row: ours and PyTorch's, and compares them.

torchrun --nproc-per-node 2 scripts/bench_decode_layer.py     (one GPU: python; with --cpu in Triton's interpreter)

Layers of Llama-3-8B's shape at TP=2, bf16, random weights of their own, 1100 tokens in a cache of 2048. "early": kernels start
while the one before runs; "in order": they don't, and must give the same bits. "torch": cuBLAS, SDPA on grouped heads, NCCL, and
autotp's fused norm, gate and rotary kernels. us are of one layer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

if "--cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before transformers imports triton

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_decode import CPU, DEVICE, EPS, RANK, check, draw, error_of, graph_us, report, wrong

from autotp.groups import init_process_group_from_env, resolve_group
from autotp.kernels import triton_cache, triton_early
from autotp.kernels.decode import decoding
from autotp.kernels.gated import gated
from autotp.kernels.norm import add_norm
from autotp.kernels.rotary import rotary
from autotp.kernels.triton_few_rows import linear_few

HIDDEN, INSIDE, HEADS, KV_HEADS, WIDTH = (64, 48, 4, 2, 16) if CPU else (4096, 7168, 16, 4, 128)
LAYERS, CONTEXT, LENGTH = (2, 20, 32) if CPU else (8, 1100, 2048)


class Layer(NamedTuple):
    """One layer's weights on this rank, and its cache."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor]
    keys: torch.Tensor
    values: torch.Tensor


class Step(NamedTuple):
    """What a step is given: the rows and their normalised form, positions and mask."""

    x: torch.Tensor
    y: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    mask: torch.Tensor
    position: torch.Tensor


def make_layer(rows: int) -> Layer:
    def weight(n: int, k: int) -> torch.Tensor:
        return draw(n, k) * k**-0.5

    cache = (rows, KV_HEADS, LENGTH, WIDTH)
    return Layer(
        weight((HEADS + 2 * KV_HEADS) * WIDTH, HIDDEN), weight(HIDDEN, HEADS * WIDTH), weight(2 * INSIDE, HIDDEN),
        weight(HIDDEN, INSIDE), (1 + 0.1 * draw(HIDDEN), 1 + 0.1 * draw(HIDDEN)), draw(*cache), draw(*cache),
    )  # fmt: skip


def make_step(rows: int) -> Step:
    angle = torch.randn(rows, 1, WIDTH // 2, device=DEVICE).repeat(1, 1, 2)
    token = torch.arange(LENGTH, device=DEVICE)
    x = draw(rows, 1, HIDDEN)
    mask = (token <= CONTEXT).view(1, 1, 1, -1).expand(rows, -1, -1, -1)
    y = F.rms_norm(x, (HIDDEN,), None, EPS)
    return Step(x, y, angle.cos().to(x.dtype), angle.sin().to(x.dtype), mask, torch.tensor([CONTEXT], device=DEVICE))


def split_heads(qkv: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
    heads = qkv.view(*qkv.shape[:2], -1, WIDTH).transpose(1, 2)
    q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
    return *rotary(q, k, step.cos, step.sin), v


def run_ours(layers: list[Layer], step: Step, peers: Any) -> torch.Tensor:
    def add_up(part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        if peers is None:
            return add_norm(part, residual, weight, None, EPS, "rms")[::-1]
        return peers.reduce_rows(part, residual=residual, weight=weight, eps=EPS, kind="rms")

    x, y = step.x, step.y
    for layer in layers:
        q, k, v = split_heads(linear_few(y, layer.qkv), step)
        triton_cache.write_cache(k, v, layer.keys, layer.values, step.position)
        attended = triton_cache.attend_cache(q, layer.keys, layer.values, step.mask, WIDTH**-0.5)
        x, y = add_up(linear_few(attended.flatten(2), layer.o), x, layer.norms[0])
        x, y = add_up(linear_few(linear_few(y, layer.gate_up, None, "silu"), layer.down), x, layer.norms[1])
    return x


def run_torch(layers: list[Layer], step: Step, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    x, y = step.x, step.y
    for layer in layers:
        q, k, v = split_heads(F.linear(y, layer.qkv), step)
        layer.keys.index_copy_(2, step.position, k)
        layer.values.index_copy_(2, step.position, v)
        grouped = q.reshape(q.shape[0], KV_HEADS, -1, WIDTH)
        attended = F.scaled_dot_product_attention(grouped, layer.keys, layer.values, step.mask).view(q.shape[0], 1, -1)
        y, x = add_norm(reduce(F.linear(attended, layer.o)), x, layer.norms[0], None, EPS, "rms")
        gate, up = F.linear(y, layer.gate_up).chunk(2, -1)
        y, x = add_norm(reduce(F.linear(gated(gate, up, "silu"), layer.down)), x, layer.norms[1], None, EPS, "rms")
    return x


def replay_often(call: Callable[[], torch.Tensor], times: int = 50) -> torch.Tensor:
    """What a graph of `call` gave in each of many replays, which must all be the same bits."""
    if CPU:
        return call()
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    first = out.clone()
    for _ in range(times):
        graph.replay()
        check("replays that differ", 0.0 if torch.equal(out, first) else 1.0, 0.5)
    return first


def main() -> int:
    torch.manual_seed(RANK)
    tp = None
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        init_process_group_from_env()
        tp = resolve_group()
    together, peers = tp is not None, None if tp is None else tp.find_peers()

    def reduce(part: torch.Tensor) -> torch.Tensor:
        if tp is not None:
            dist.all_reduce(part, group=tp.group)
        return part

    for rows in (1, 2) if CPU else (1, 4, 8, 16):
        layers, step = [make_layer(rows) for _ in range(LAYERS)], make_step(rows)
        if tp is not None:
            for tensor in (*step[:4], *(norm for layer in layers for norm in layer.norms)):
                tp.broadcast(tensor)
        calls = {
            "early": lambda layers=layers, step=step: run_ours(layers, step, peers),
            "in order": lambda layers=layers, step=step: run_ours(layers, step, peers),
            "torch": lambda layers=layers, step=step: run_torch(layers, step, reduce),
        }
        found, times = {}, {}
        for name, call in calls.items():
            triton_early.ENABLED = name == "early"
            with decoding():
                found[name] = replay_often(call)
                times[name] = round(graph_us([call], least=4, together=together) / LAYERS, 1)
        triton_early.ENABLED = True
        check(f"{rows} rows: early and in order differ", 0.0 if found["early"].equal(found["in order"]) else 1.0, 0.5)
        check(f"{rows} rows: ours and torch's", error_of(found["early"], found["torch"].double()), 3e-2)
        if RANK == 0:
            report(layer=f"{rows} rows", ranks=1 if tp is None else tp.tp_size, us=times)
    report(rank=RANK, done=True, wrong=sorted(set(wrong)))
    if together:
        dist.barrier()
        dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
