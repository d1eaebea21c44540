"""Checks that two ranks run (two_gpus.py): sums of many rows written into each other's memory, against float64."""

import os

import torch

from autotp.groups import resolve_group
from autotp.kernels import reference

CUDA = os.environ.get("DEVICE", "cuda") == "cuda"
FORMS = [
    (65, 4096, torch.bfloat16, "rms"),
    (333, 1024, torch.float16, "layernorm"),
    (1001, 576, torch.float32, ""),
    (4096, 4096, torch.bfloat16, "rms1p"),
    (16001, 64, torch.float32, "rms"),
]
BARS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def draw(*shape, dtype):
    return torch.randn(shape, device="cuda").to(dtype)


def check_sums_of_many_rows():
    """Called one by one and from a graph in turn: right, and the same bits on both ranks."""
    if not CUDA:
        return "needs GPUs"
    tp, worst = resolve_group(torch.distributed.group.WORLD), 0.0
    peers = tp.find_peers()
    for rows, width, dtype, kind in FORMS:
        x = draw(rows, width, dtype=dtype)
        rest = {
            name: tp.broadcast(draw(*shape, dtype=dtype)) for name, shape in (("residual", (rows, width)), ("bias", (width,)))
        }
        rest |= {"weight": tp.broadcast(draw(width, dtype=dtype))} if kind else {}
        rest |= {"shift": tp.broadcast(draw(width, dtype=dtype))} if kind == "layernorm" else {}
        how = dict(eps=1e-5, kind=kind)
        assert peers.reduce_rows(x, **rest, **how) is not None, "no memory that the ranks write to each other"
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = [peers.reduce_rows(x, **rest, **how) for _ in range(3)]
        for turn in range(20):
            x.copy_(draw(rows, width, dtype=dtype))
            parts = tp.gather_rows(x).view(tp.tp_size, rows, width).double()
            wants = reference.reduce_rows(list(parts), **{name: value.double() for name, value in rest.items()}, **how)
            if turn % 2:
                graph.replay()
            found = replayed[-1] if turn % 2 else peers.reduce_rows(x, **rest, **how)
            for got, want in zip(found, wants, strict=True):
                if want is not None:
                    error = ((got.double() - want).abs().max() / want.abs().max()).item()
                    worst = max(worst, error / BARS[dtype])
                    assert error <= BARS[dtype], (rows, width, dtype, kind, turn, error)
            total = found[0].float()
            assert torch.equal(tp.all_reduce(total, "max"), tp.all_reduce(total, "min")), (rows, turn)
    return f"at most {worst:.2f} of the bar, the same bits on both ranks"


CHECKS = (check_sums_of_many_rows,)
