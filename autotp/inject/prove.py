"""Proves a plan before a weight is touched: all ranks run in one process, as threads, on stand-ins for the weights.

What runs is the rewritten model itself, with its real layers and real collectives between the threads. Only the sites are
answered from the record of the whole model: a column site returns its rank's columns, a row site a part of the whole
output, and each site's input is compared with what the whole model saw there. Backward goes the same way from random
cotangents: complete ones at whole sites, a rank's columns at row sites, parts that add up at column sites. Then every
gradient must be that of the whole model: one reduction too few, or too many, is a number that does not fit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import TPGroup
from ..errors import ProofError
from .compare import compare_gradient
from .drawing import Drop, Parts, find_parts
from .intercept import Interceptor, flatten, keep_state, running
from .module_plan import ModulePlan
from .plan import Plan
from .rank_run import RankRun, cut_shadow, take
from .record import Call, Site
from .reference import Reference
from .shadow import Shadow
from .styles import ATTENTION_STYLES
from .threads import SoloGroup, ThreadGroup, ThreadRanks

Rewrite = Callable[[nn.Module, Plan, TPGroup], None]


def prove(shadow: Shadow, plan: Plan, references: Sequence[Reference], rewrite: Rewrite) -> list[tuple[Drop, Parts]]:
    """Run every rank of `plan` on every reference, forward and backward.

    Args:
        rewrite: swaps the modules' forwards, given model, plan and group.

    Returns:
        the whole model's draws, and for each which ranks draw alike.

    Raises:
        ProofError: naming the first site, tensor or parameter that differs, on which rank and by how much.
    """
    inner = leave_out(plan, lambda module: module.style in ATTENTION_STYLES)  # torch's own attention has a rule of its own
    inner = replace(inner, sequence_parallel=bool(inner.chains), draws=())  # few as the tokens are; nothing is dropped
    locals_ = [cut_shadow(shadow, inner.shards, rank) for rank in range(plan.tp_size)]
    threads = ThreadRanks(plan.tp_size)
    for rank, local in enumerate(locals_):
        rewrite(local.model, inner, ThreadGroup(threads, rank))
    draws: list[tuple[Drop, Parts]] = []
    for reference in references:
        threads.barrier.reset()
        results = _run_ranks(reference, locals_, inner, threads)
        _check_gradients(reference, inner, results)
        whole = reference.record.drawn
        draws += zip(whole, find_parts(whole, [run.drawn for run, *_ in results]), strict=False)
    return draws


def try_rewrite(shadow: Shadow, plan: Plan, rewrite: Rewrite) -> None:
    """Rewrite a copy of the first and of the last rank's part, so that what a module refuses is known before any is changed.

    Raises:
        PlanError: a module is not what its plan needs.
    """
    for rank in sorted({0, plan.tp_size - 1}):
        rewrite(cut_shadow(shadow, plan.shards, rank).model, plan, SoloGroup(rank, plan.tp_size))


def leave_out(plan: Plan, which: Callable[[ModulePlan], bool]) -> Plan:
    """The plan less some modules but for their tokens, and less the regions whose rows they are."""
    kept = {m.name for m in plan.modules if not which(m)}
    dealt = (m if m.name in kept else ModulePlan(m.name, "local_params", tokens=m.tokens) for m in plan.modules)
    modules = tuple(m for m in dealt if m.name in kept or m.tokens is not None)
    regions = tuple(r for r in plan.regions if set(r.rows) <= kept)
    return replace(plan, modules=modules, regions=regions, head=plan.head if plan.head in kept else None)


def make_parts(size: int) -> list[float]:
    """Unequal weights of the ranks that add up to 1, none of them 0."""
    weights = [1.0 + 0.37 * rank for rank in range(size)]
    return [w / sum(weights) for w in weights]


def _run_ranks(reference: Reference, locals_: list[Shadow], plan: Plan, threads: ThreadRanks) -> list[Any]:
    parts = make_parts(len(locals_))
    results: list[Any] = [None] * len(locals_)
    errors: list[BaseException | None] = [None] * len(locals_)

    def work(rank: int) -> None:
        run = RankRun(reference, locals_[rank], plan.shards, rank, parts)
        try:
            with torch.enable_grad():
                with keep_state(locals_[rank].model), Interceptor(locals_[rank], run.respond, run.note, run.note_draw):
                    output = locals_[rank].model(**run.arguments())
                outputs = [t for t in flatten(output) if t.is_floating_point()]
                results[rank] = (run, *run.finish(outputs))
        except BaseException as error:
            errors[rank] = error
            threads.barrier.abort()

    with running():
        workers = [threading.Thread(target=work, args=(rank,)) for rank in range(len(locals_))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    real = [e for e in errors if e is not None and not isinstance(e, threading.BrokenBarrierError)]
    if real or any(errors):
        error = real[0] if real else ProofError("the ranks do not meet in the same collectives")
        if isinstance(error, ProofError):
            raise error
        raise ProofError(
            f"the sharded forward fails: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    return results


def _check_gradients(reference: Reference, plan: Plan, results: list[Any]) -> None:
    for place in range(len(reference.record.order)):
        index = results[0][0].leaves[place][0]
        site, call = reference.entry(index)
        expected = reference.y_grads[index]
        _check_site(reference, plan, site, call, expected, place, results)
    for name, expected in reference.parameter_grads.items():
        for run, _, grads in results:
            grad = grads.get(name)
            if expected is None and grad is None:
                continue
            like = grad if expected is None else expected
            full = torch.zeros_like(like) if expected is None else expected
            if name in plan.shards and expected is not None:
                full = plan.shards[name].split(expected, run.rank)
            grad = torch.zeros_like(full) if grad is None else grad
            compare_gradient(grad, full, f"the gradient of {name}", run.rank)
    for name, expected in reference.input_grads.items():
        for run, _, _ in results:
            zero = torch.zeros_like(run.inputs[name])
            got, full = (zero if grad is None else grad for grad in (run.input_grads[name], expected))
            compare_gradient(got, full, f"the gradient of the input {name}", run.rank)


def _check_site(reference, plan: Plan, site: Site, call: Call, expected: Tensor | None, place: int, results: list[Any]) -> None:
    """Gradients at one site's output: complete on every rank, or adding up over the holders of each column."""
    total = torch.zeros_like(call.y)
    for run, grads, _ in results:
        grad = grads[place]
        rows, cols = run.role(site)
        if cols is not None:
            if grad is not None:
                _add_columns(total, grad, call, cols, site)
            continue
        grad = torch.zeros_like(call.y) if grad is None else grad
        if run.looks_up(site):
            total += grad
            continue
        full = torch.zeros_like(call.y) if expected is None else expected
        compare_gradient(
            grad / run.part if rows is not None else grad, full, f"{site.parameter}: the gradient at its output", run.rank
        )
    if cols is not None or run.looks_up(site):
        full = torch.zeros_like(call.y) if expected is None else expected
        compare_gradient(total, full, f"{site.parameter}: the gradient at its output, summed over ranks", None)


def _add_columns(total: Tensor, grad: Tensor, call: Call, role: tuple, site: Site) -> None:
    dims, cut_dim, indices = role
    place = torch.arange(total.numel()).view(total.shape)
    local = take(place, call.y_axes, (dims, cut_dim, indices), site, call.y_start)
    total.view(-1).index_add_(0, local.reshape(-1), grad.reshape(-1))
