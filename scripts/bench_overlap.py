"""Times products whose rows are dealt to the ranks, with what moves hidden behind them, in sequence, and cut out.

torchrun --nproc-per-node 2 scripts/bench_overlap.py [--out FILE.json] [--rows 16384 --widths 8192]
torchrun --nproc-per-node 2 scripts/bench_overlap.py --cpu        (small sizes, to see that it runs)

For a width H the column product is that of q, k and v, or of gate and up, of a Llama (`[1.5 H / T, H]`, `[7 H / T, H]`), the row
product that of o or down; "sum" of these: the same where all ranks have all rows, and sum what they compute. "copies" moves rows
by copy engines beside the GEMMs, "sequence" by NCCL before and after them, "alone" moves nothing (its numbers are wrong): what it
takes less is the communication that shows; "blocks" the same, in the blocks of "copies". Microseconds on the GPU, calls being
queued ahead, and "host" those that queueing a step takes; medians, of the slowest rank. "error" is the largest difference between
the gradients of "copies" and "sequence", relative to their norm.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from no_communication import NoExchange, NoExchangeInBlocks
from torch import Tensor

from autotp.comm import TPGroup
from autotp.exchange import CopyExchange, Exchange
from autotp.groups import resolve_group
from autotp.kernels.dealt import Dealt, multiply_gathered, multiply_scattered
from autotp.kernels.moves import Moves
from autotp.kernels.product import ProductSpec, multiply

CPU = "--cpu" in sys.argv
DTYPE = torch.float32 if CPU else torch.bfloat16
ROWS, WIDTHS = ([64], [64]) if CPU else ([2048, 4096, 8192, 16384], [2048, 4096, 8192])
MOVES = Moves(True, True, True, True)  # at any size
CALLS, ROUNDS = (1, 1) if CPU else (4, 7)


def time_calls(call: Callable[[], Any], group: TPGroup) -> tuple[float, float]:
    """Microseconds of a call on the slowest rank: of its GPU, and of its host alone."""
    times = []
    for _ in range(2):
        call()
    for _ in range(ROUNDS):
        synchronize()
        dist.barrier()
        begin: Any = None if CPU else torch.cuda.Event(enable_timing=True)
        end: Any = None if CPU else torch.cuda.Event(enable_timing=True)
        if begin is not None:
            torch.cuda._sleep(20_000_000)  # about 11 ms in which the host queues all calls
            begin.record()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        host = (time.perf_counter() - start) / CALLS * 1e6
        if end is not None:
            end.record()
        synchronize()
        times.append((host if begin is None else begin.elapsed_time(end) / CALLS * 1e3, host))
    return tuple(max(group.gather_objects(statistics.median(column))) for column in zip(*times, strict=True))


def synchronize() -> None:
    if not CPU:
        torch.cuda.synchronize()


def make_cases(rows: int, width: int, group: TPGroup) -> dict[str, Callable[[Exchange], tuple[Callable, list[Tensor]]]]:
    """Name -> what builds `(forward, leaves)` for an exchange."""
    size, device = group.tp_size, group.device
    torch.manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, device=device, dtype=torch.float32) * shape[-1] ** -0.5).to(DTYPE)

    def dealt(exchange: Exchange) -> ProductSpec:
        how = Dealt(exchange, group.tp_rank, size, (1, rows), (1, rows // size), moves=MOVES)
        return ProductSpec(dealt=how)

    def summed(exchange: Exchange, name: str) -> ProductSpec:
        how = Dealt(exchange, group.tp_rank, size, (rows,), (rows // size,), moves=MOVES)
        total = (lambda part: part) if isinstance(exchange, NoExchange) else group.all_reduce_owned
        sums = how if exchange.decide(1, True).copies else None
        return ProductSpec(sums=sums)._replace(**{name: total})

    cases: dict[str, Any] = {}
    for name, n in (("qkv", 3 * width // 2 // size), ("gate_up", 7 * width // size)):
        w, x = draw(n, width), draw(rows, width)

        def column(exchange: Exchange, w: Tensor = w, x: Tensor = x) -> tuple[Callable, list[Tensor]]:
            local = x.chunk(size)[group.tp_rank].clone()[None].requires_grad_()
            weight = w.detach().clone().requires_grad_()
            return lambda: multiply_gathered(dealt(exchange), local, (weight,), (None,))[0], [local, weight]

        def column_summed(exchange: Exchange, w: Tensor = w, x: Tensor = x) -> tuple[Callable, list[Tensor]]:
            leaf, weight = x.detach().clone()[None].requires_grad_(), w.detach().clone().requires_grad_()
            spec = summed(exchange, "sum_input")
            return lambda: multiply(spec, leaf, (weight,), (None,)), [leaf, weight]

        cases[name], cases[f"{name} sum"] = column, column_summed
    for name, k in (("o", width // size), ("down", 7 * width // 2 // size)):
        w, x = draw(width, k), draw(1, rows, k)

        def row(exchange: Exchange, w: Tensor = w, x: Tensor = x) -> tuple[Callable, list[Tensor]]:
            leaf, weight = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
            return lambda: multiply_scattered(dealt(exchange), leaf, weight), [leaf, weight]

        def row_summed(exchange: Exchange, w: Tensor = w, x: Tensor = x) -> tuple[Callable, list[Tensor]]:
            leaf, weight = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
            spec = summed(exchange, "sum_output")
            return lambda: multiply(spec, leaf, (weight,), (None,)), [leaf, weight]

        cases[name], cases[f"{name} sum"] = row, row_summed
    return cases


def run_case(make: Callable, exchanges: dict[str, Exchange], group: TPGroup) -> dict[str, Any]:
    result: dict[str, Any] = {}
    outputs = {}
    for name, exchange in exchanges.items():
        forward, leaves = make(exchange)
        y = forward()
        torch.manual_seed(1 + (group.tp_rank if y.shape[-2] * group.tp_size == leaves[0].shape[-2] else 0))  # each has its rows'
        dy = torch.randn(y.shape, device=y.device, dtype=torch.float32).to(y.dtype)
        outputs[name] = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
        del y

        def forward_alone(forward: Callable = forward) -> None:
            with torch.no_grad():
                forward()

        def step(forward: Callable = forward, leaves: Any = leaves, dy: Tensor = dy) -> None:
            torch.autograd.grad(forward(), leaves, dy)

        result[f"{name}_forward"], _ = (round(us, 1) for us in time_calls(forward_alone, group))
        result[f"{name}_step"], result[f"{name}_host"] = (round(us, 1) for us in time_calls(step, group))
    if "copies" in outputs:
        pairs = zip(outputs["copies"], outputs["sequence"], strict=True)
        errors = [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs]
        result["error"] = max(group.gather_objects(max(errors)))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="of all ranks")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    options = parser.parse_args()
    group = resolve_group()
    exchanges: dict[str, Exchange] = {
        "sequence": Exchange(group),
        "alone": NoExchange(group),
        "blocks": NoExchangeInBlocks(group),
    }
    if not CPU:
        exchanges["copies"] = CopyExchange(group)
    results = []
    if group.tp_rank == 0:
        print("rows width product, then forward, step and host us of each of:", *exchanges, flush=True)
    for width in options.widths:
        for rows in options.rows:
            for name, make in make_cases(rows, width, group).items():
                found = {"rows": rows, "width": width, "product": name, **run_case(make, exchanges, group)}
                results.append(found)
                if group.tp_rank == 0:
                    print(*(f"{key}={value}" if key == "error" else value for key, value in found.items()), flush=True)
                if not CPU:
                    torch.cuda.empty_cache()
    if options.out and group.tp_rank == 0:
        with open(options.out, "w") as file:
            json.dump(
                {"device": "cpu" if CPU else torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}, file
            )
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
