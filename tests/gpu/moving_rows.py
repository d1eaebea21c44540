"""Checks that two or more ranks run (two_gpus.py): rows that copy engines move, against the group's collectives."""

import os
import random
from functools import partial

import torch
import torch.distributed as dist

import autotp
from autotp.errors import AutoTPError
from autotp.exchange import CopyExchange, Exchange, find_exchange
from autotp.groups import resolve_group
from autotp.kernels.blocks import Dealt, block_of, multiply_and_sum, pad, sum_whole
from autotp.kernels.moves import Moves

CUDA = os.environ.get("DEVICE", "cuda") == "cuda"
STEPS = int(os.environ.get("STEPS", 300 if CUDA else 3))  # that check_many_steps runs
SIZES = [(4096, 1024), (1001, 77), (2, 3), (1, 64), (4097, 1023)]  # rows, width: odd ones, and fewer rows than ranks
ALL = Moves(True, True, True, True)


def make_group(timeout_s=60.0):
    """A group of all ranks, whose exchange copies on GPUs."""
    tp = resolve_group(dist.new_group(list(range(dist.get_world_size()))), timeout_s)
    assert isinstance(find_exchange(tp), CopyExchange) == CUDA
    return tp


def draw(tp, *shape, seed=0, own=True, dtype=torch.bfloat16):
    """Another tensor on each rank, or the same."""
    generator = torch.Generator(tp.device).manual_seed(10 * seed + (tp.tp_rank if own else 5))
    return torch.randn(shape, generator=generator, device=tp.device, dtype=torch.float32).to(dtype)


def scatter_both(tp, exchange, parts, dtype=None):
    """This rank's rows of the sum of `parts`, by copies and by a collective."""
    rows, width = parts.shape
    scatter = exchange.scatter(rows, width, parts, dtype, True)
    want = Exchange(tp).scatter(rows, width, parts, dtype).reduce(pad(parts, Dealt(None, tp.tp_rank, tp.tp_size, (rows,), (0,))))
    own = block_of(rows, tp.tp_rank, tp.tp_size)
    if not scatter.order:
        return want, want
    for rank in scatter.order:
        scatter.place(rank).copy_(parts[block_of(rows, rank, tp.tp_size)])
        scatter.send(rank)
    got = parts[own].to(scatter.dtype or parts.dtype) + scatter.receive()
    return got.to(parts.dtype), want[: own.stop - own.start]


def is_same_sum(tp, got, want):
    """Two parts have one sum; of more it is rounded as the order says."""
    if tp.tp_size == 2:
        return torch.equal(got, want)
    return got.shape == want.shape and (got - want).float().norm() <= 1e-2 * want.float().norm()


def check_copies():
    tp = make_group()
    exchange = find_exchange(tp)
    for seed, (rows, width) in enumerate(SIZES * 3):
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            local = draw(tp, -(-rows // tp.tp_size), width, seed=seed, dtype=dtype)
            want = Exchange(tp).gather(local).wait_all()
            for gather in (exchange.gather(local, True), exchange.gather(local, True, lent=True)):
                for rank in gather.order:
                    assert torch.equal(gather.wait(rank), want[rank * local.shape[0] :][: local.shape[0]])
                assert torch.equal(gather.wait_all(), want)
            parts = draw(tp, rows, width, seed=seed + 100, dtype=dtype)
            for reduce_dtype in (None, torch.float32):
                got, want = scatter_both(tp, exchange, parts, reduce_dtype)
                assert is_same_sum(tp, got, want), (rows, width, dtype, reduce_dtype)
    return "bitwise those of the collectives" if tp.tp_size == 2 else "gathers bitwise those of the collectives, sums to rounding"


def check_sums():
    tp = make_group()
    worst = 0.0
    for rows, width in SIZES:
        x, w = draw(tp, rows, 512), draw(tp, 512, width, seed=1) / 16
        dealt = Dealt(find_exchange(tp), tp.tp_rank, tp.tp_size, (rows,), (-(-rows // tp.tp_size),), moves=ALL)
        want = tp.all_reduce((x @ w).float())
        blocks = []
        if CUDA:
            blocks += [multiply_and_sum(dealt, x, [w]), sum_whole(dealt, [(x, w)], partial(torch.mm, x.t(), x))[0]]
        for got in blocks:
            worst = max(worst, ((got - want).norm() / want.norm()).item())
            assert torch.equal(got, tp.broadcast(got.clone())), "ranks differ"
    assert worst < 1e-2, worst
    return f"{worst:.1e} from one in float32"


def run_layers(tp, rows, moves_all):
    """A column LayerNormLinear and a row Linear, rows dealt: output and gradients."""
    torch.manual_seed(3)
    options = dict(ub_overlap_ag=moves_all, ub_overlap_rs=moves_all, ub_bulk_dgrad=moves_all, ub_bulk_wgrad=moves_all)
    types = dict(device=tp.device, sequence_parallel=True)
    up = autotp.LayerNormLinear(520, 1038, parallel_mode="column", tp_group=tp, params_dtype=torch.bfloat16, **types, **options)
    down = autotp.Linear(
        1038, 520, dtype=torch.bfloat16, tensor_parallel_mode="row", tensor_parallel_group=tp, **types, **options
    )
    x = draw(tp, rows, 520).requires_grad_()
    y = down(up(x))
    y.backward(draw(tp, rows, 520, seed=4))
    return [y.detach(), x.grad, *(parameter.grad for parameter in (*up.parameters(), *down.parameters()))]


def check_layers():
    tp = make_group()
    worst = 0.0
    for rows in (1024, 333, 1):
        for got, want in zip(run_layers(tp, rows, True), run_layers(tp, rows, False), strict=True):
            worst = max(worst, ((got - want).float().norm() / want.float().norm()).item())
    assert worst < 2e-2, worst
    return f"{worst:.1e} from collectives in sequence"


def check_two_groups():
    first, second = make_group(), make_group()
    for seed in range(20):
        locals_ = [draw(tp, 257 + seed, 129, seed=seed + i) for i, tp in enumerate((first, second))]
        begun = [find_exchange(tp).gather(local, True) for tp, local in zip((first, second), locals_, strict=True)]
        for gather, local in zip(reversed(begun), reversed(locals_), strict=True):
            assert torch.equal(gather.wait_all(), Exchange(first).gather(local).wait_all())
    return "in turn"


def check_streams():
    if not CUDA:
        return "a CPU has none"
    tp = make_group()
    exchange, streams = find_exchange(tp), [torch.cuda.Stream(tp.device) for _ in range(3)]  # more than there are buffers
    found = []
    for seed in range(30):
        with torch.cuda.stream(streams[seed % len(streams)]):
            local = draw(tp, 500 + seed, 257, seed=seed)
            big = local.float() @ local.float().t()  # so that one lags behind the other
            gather = exchange.gather(local + 0 * big.sum().to(local.dtype), True, lent=seed % 2 == 0)
            parts = draw(tp, 501, 129, seed=seed)
            scatter = exchange.scatter(501, 129, parts, None, True)
            for rank in scatter.order:
                scatter.place(rank).copy_(parts[block_of(501, rank, tp.tp_size)])
                scatter.send(rank)
            found.append((local, gather.wait_all().clone(), parts, scatter.receive().clone()))
    torch.cuda.synchronize()
    for local, gathered, parts, received in found:
        assert torch.equal(gathered, Exchange(tp).gather(local).wait_all())
        every = Exchange(tp).gather(parts).wait_all().view(tp.tp_size, 501, 129)[:, block_of(501, tp.tp_rank, tp.tp_size)]
        others = [every[rank].float() for rank in range(tp.tp_size) if rank != tp.tp_rank]
        assert is_same_sum(tp, received, sum(others).to(received.dtype))
    return "30 uses in turn"


def check_many_steps():
    tp, lengths = make_group(), random.Random(5)
    held = 0
    for step in range(STEPS):
        found = run_layers(tp, lengths.choice((1, 7, 64, 65, 130)), True)
        total = torch.stack([found[i].double().sum() for i in (2, 3)])  # of the norm, the same on both ranks
        assert torch.equal(total, tp.broadcast(total.clone())), step
        del found, total
        if CUDA and step == min(50, STEPS // 2):
            held = torch.cuda.memory_allocated()
    grown = torch.cuda.memory_allocated() - held if CUDA else 0
    assert grown <= 0, grown
    return f"{STEPS} steps: the ranks agree, no memory more"


def check_missing_rank():
    """Rank 1 leaves one gather out: the others are let go, and told why."""
    if not CUDA:
        return "collectives have their own timeouts"
    tp = make_group(3.0)
    exchange, local = find_exchange(tp), draw(tp, 100, 64)
    for _ in range(2):  # buffers are made together
        exchange.gather(local, True).wait_all()
    torch.cuda.synchronize()
    said = "nothing"
    if tp.tp_rank != 1:
        exchange.gather(local, True).wait_all()
        torch.cuda.synchronize()
        try:
            exchange.gather(local, True)
        except AutoTPError as error:
            said = str(error)
    every = resolve_group().gather_objects(said)
    assert all("TP rank(s) [1] did not come within 3 s" in said for rank, said in enumerate(every) if rank != 1), every
    return every[0][:90]


CHECKS = (check_copies, check_sums, check_layers, check_two_groups, check_streams, check_many_steps, check_missing_rank)
