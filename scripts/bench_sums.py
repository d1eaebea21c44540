"""Times sums over the ranks, with the residual and norm that follow, in CUDA graphs, and checks them; one RESULT line each.

torchrun --nproc-per-node N scripts/bench_sums.py [--width 8192]
torchrun --nproc-per-node N scripts/bench_sums.py --cpu             small sizes over gloo, to see that it runs

Few rows are a decoding step's: "nccl", PyTorch's "one_shot" and "two_shot", and "push", each rank writing to all, with the norm
apart or in the same launch. Many rows are a prompt's: the sum of whole rows with the norm of all of them on every rank, or rows
dealt for that moment, so that each rank norms its own. Microseconds, the median of replays that all ranks begin at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from bench_decode import CPU, DEVICE, EPS, RANK, check, draw, error_of, graph_us, report, wrong
from torch import Tensor

from autotp.comm import TPGroup
from autotp.groups import resolve_group
from autotp.kernels import reference, reference_decode
from autotp.kernels.norm import add_norm

FEW, MANY, COLUMNS = ((1, 4), (16,), 64) if CPU else ((1, 4, 16, 64), (256, 1024, 4096), 16032)


def check_sums(tp: TPGroup, width: int, rows: int) -> None:
    """Many sums of changing rows, some from a graph, against those of what all ranks give."""
    peers: Any = tp.find_peers()
    x, residual, weight = draw_case(tp, rows, width)
    rest = dict(residual=residual, weight=weight, eps=EPS, kind="rms")
    warm = peers.reduce_rows(x, **rest)
    assert warm is not None, "no memory that the ranks write to each other"
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = [peers.reduce_rows(x, **rest) for _ in range(3)]
    for turn in range(40):
        x.copy_(draw(rows, width))
        parts = tp.gather_rows(x).view(tp.tp_size, rows, width)
        total, y = reference.reduce_rows(list(parts.double()), residual.double(), None, weight.double(), None, EPS, "rms")
        if turn % 2:
            graph.replay()
        found = replayed[-1] if turn % 2 else peers.reduce_rows(x, **rest)
        check(f"sum {rows} x {width}", max(error_of(found[0], total), error_of(found[1], y)), 4e-3)
        same = tp.all_reduce(found[0].float(), "max").equal(tp.all_reduce(found[0].float(), "min"))
        check(f"sum {rows} x {width}: bits that differ among ranks", 0.0 if same else 1.0, 0.5)


def draw_case(tp: TPGroup, rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part of the sum, and the residual and the norm's weight, which all have."""
    x, residual, weight = draw(rows, width), draw(rows, width), draw(width)
    return x, tp.broadcast(residual), tp.broadcast(weight)


def time_kinds(kinds: dict[str, Callable[[], Any]], calls: int = 20) -> dict[str, float]:
    return {name: round(graph_us([call] * calls, together=True), 2) for name, call in kinds.items()}


def bench_few_rows(tp: TPGroup, rows: int, width: int) -> dict[str, float]:
    """Sums of a decoding step."""
    x, residual, weight = draw_case(tp, rows, width)

    def nccl() -> Tensor:
        dist.all_reduce(x, group=tp.group)
        return x

    kinds = {"nccl": nccl, "nccl + add_norm": lambda: add_norm(nccl(), residual, weight, None, EPS, "rms")}
    peers: Any = tp.find_peers()
    if peers is None:
        times = time_kinds(kinds)
    else:
        check_sums(tp, width, rows)
        times = time_kinds(kinds | kinds_of_peers(peers, x, residual, weight))
        times |= time_warps(lambda: peers.reduce_rows(x, residual=residual, weight=weight, eps=EPS, kind="rms"))
        times["best columns"] = bench_choice(tp, rows)
    if RANK == 0:
        report(sum=f"{rows} x {width}", bytes=x.nbytes, ranks=tp.tp_size, us=times)
    return times


def kinds_of_peers(peers: Any, x: Tensor, residual: Tensor, weight: Tensor) -> dict[str, Callable[[], Any]]:
    return {
        "one_shot": lambda: peers.sum_small(x, "one_shot"),
        "two_shot": lambda: peers.sum_small(x, "two_shot"),
        "push": lambda: peers.sum_small(x),
        "two_shot + add_norm": lambda: add_norm(peers.sum_small(x, "two_shot"), residual, weight, None, EPS, "rms"),
        "push + add_norm": lambda: add_norm(peers.sum_small(x), residual, weight, None, EPS, "rms"),
        "push, add and norm in one": lambda: peers.reduce_rows(x, residual=residual, weight=weight, eps=EPS, kind="rms"),
    }


def time_warps(fused: Callable[[], Any]) -> dict[str, float]:
    """The launch in one, in other shapes of its programs."""
    from autotp.kernels import triton_peers

    own, times = triton_peers.choose_warps, {}
    for warps in (4, 8, 16, 32):
        triton_peers.choose_warps = lambda words, warps=warps: warps
        times |= time_kinds({f"in one, {warps} warps": fused})
    triton_peers.choose_warps = own
    return times


def bench_choice(tp: TPGroup, rows: int) -> float:
    """Microseconds of the choice of the largest logit, which is checked."""
    peers: Any = tp.find_peers()
    logits, halt = draw(rows, COLUMNS), torch.tensor([RANK], device=DEVICE)
    starts = [rank * COLUMNS for rank in range(tp.tp_size)]
    for _ in range(5):
        logits.copy_(draw(rows, COLUMNS).round())  # so that several are the largest
        parts = list(tp.gather_rows(logits).view(tp.tp_size, rows, COLUMNS))
        halts = [torch.tensor([rank], device=DEVICE) for rank in range(tp.tp_size)]
        expected, found = reference_decode.best_columns(parts, starts, halts), peers.best_columns(logits, starts[RANK], halt)
        same = found[0].equal(expected[0]) and found[1].equal(expected[1])
        check(f"best of {rows} rows", 0.0 if same else 1.0, 0.5)
    return time_kinds({"": lambda: peers.best_columns(logits, starts[RANK], halt)})[""]


def bench_many_rows(tp: TPGroup, rows: int, width: int) -> dict[str, float]:
    """Sums of a prompt, of which the norm and its input are wanted on all ranks."""
    x, residual, weight = draw_case(tp, rows, width)
    own, scratch = residual.chunk(tp.tp_size)[tp.tp_rank].contiguous(), x.clone()

    def whole() -> tuple[Tensor, Tensor]:  # in the product's own memory, as a layer sums it; its numbers grow from call to call
        return add_norm(tp.all_reduce_owned(scratch), residual, weight, None, EPS, "rms")

    def dealt() -> tuple[Tensor, Tensor]:
        y, total = add_norm(tp.reduce_scatter_rows(x), own, weight, None, EPS, "rms")
        return tp.gather_rows(y), tp.gather_rows(total)

    def kept() -> Tensor:
        return tp.gather_rows(add_norm(tp.reduce_scatter_rows(x), own, weight, None, EPS, "rms")[0])

    for found, expected in zip(dealt(), whole(), strict=True):
        check(f"sum and norm of {rows} x {width}", error_of(found, expected.double()), 1e-2)
    times = time_kinds({"sum, add and norm": whole, "dealt for the norm": dealt, "left dealt": kept}, 4)
    if RANK == 0:
        report(sum=f"{rows} x {width}", bytes=x.nbytes, ranks=tp.tp_size, us=times)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="small sizes over gloo")
    parser.add_argument("--width", type=int, default=64 if CPU else 4096)
    options = parser.parse_args()
    tp = resolve_group()
    torch.manual_seed(RANK)
    for rows in FEW:
        bench_few_rows(tp, rows, options.width)
    for rows in MANY:
        bench_many_rows(tp, rows, options.width)
    found = tp.gather_objects(sorted(set(wrong)))
    if RANK == 0:
        report(done=True, wrong=found)
    dist.destroy_process_group()
    return 1 if any(found) else 0


if __name__ == "__main__":
    sys.exit(main())
