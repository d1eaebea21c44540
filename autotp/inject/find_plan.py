"""Finds the plan of a whole model: what its linears allow beside the vocabulary, as far as it proves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from ..errors import PlanError, ProofError
from ..layers.base import held_parameters
from .assemble import check_ties, finish_plan, split_ties
from .auto import Planner
from .describe import fold_name
from .edges import edge_modules, edge_parameters, plan_edges, read_elsewhere
from .hints import Hints, check_used
from .module_plan import ModulePlan
from .plan import Plan, Region
from .proofs import prove_as_trained, prove_forwards
from .prove import prove
from .reduce import find_reduction, keep_modules
from .runs import Runs, record_runs
from .specs import Spec
from .swap import rewrite_modules


def discover_plan(model: nn.Module, tp_size: int, head: str, inputs: Any, hints: Hints) -> Plan:
    """The plan found in the model itself, with the caller's hints; nothing in it that is not proved.

    Raises:
        PlanError, ProofError: a hint does not prove, or nothing that it is about can be split.
    """
    if tp_size == 1:
        return finish_plan(model, tp_size, (), (), {}, None)
    prove_forwards(model, inputs, hints)
    tell = (lambda name: repr(hints.below(name))) if hints else None
    runs = record_runs(model, inputs, hints.fit(find_reduction(model)), hints.forwards, tell)
    whole: dict[str, str] = dict.fromkeys(read_elsewhere(model, runs.records), "its weight is read outside its forward")
    try:
        made = _discover_beside(model, runs, tp_size, head, inputs, whole, hints)
    except ProofError as error:  # nothing proves: not even the vocabulary alone
        whole |= dict.fromkeys(edge_modules(model), f"not proved: {error}")
        made = _discover_beside(model, runs, tp_size, head, inputs, whole, hints)
    check_used(made, hints)
    return made


def _discover_beside(
    model: nn.Module, runs: Runs, tp_size: int, head: str, inputs: Any, whole: dict[str, str], hints: Hints, apart: Any = ()
) -> Plan:
    """The plan of everything but the modules `whole`, name -> why, and the Parameters `apart`.

    Raises:
        ProofError: the vocabulary's split does not prove.
    """
    reasons: dict[str, str] = {}
    specs: dict[str, Spec] = {name: {"style": "whole", "why": why} for name, why in whole.items()}
    edges, head_name = plan_edges(model, tp_size, specs, head, "discovered", reasons)
    order = {name: i for i, name in enumerate(dict(model.named_modules()))}

    def assemble(modules: dict[str, ModulePlan], regions: tuple[Region, ...], why: dict[str, str]) -> Plan:
        planned = tuple(sorted({**modules, **edges}.values(), key=lambda module: order[module.name]))
        return finish_plan(model, tp_size, planned, regions, {**reasons, **why}, head_name)

    sizes, rewrite = count_parameters(model), partial(rewrite_modules, forwards=hints.forwards)
    for name in (half := runs.half_run()):
        reasons.setdefault(name, "held in several places, some of which no example call runs")
    reasons |= dict.fromkeys(apart, "shares a Parameter with a module that would be split otherwise")
    blocked = edge_parameters(model) | half | set(apart)

    def start(runs: Runs, as_trained: bool = False) -> Planner:
        return Planner(runs, tp_size, blocked, sizes, assemble, rewrite, hints, as_trained)

    try:
        planner = start(runs)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        why = f"its backward does not run in evaluation: {' '.join(str(error).split())[:120]}"
        return replace(finish_plan(model, tp_size, (), (), {"": why}, None), proof=f"not proved: {why}")
    made = planner.plan()
    if runs.reduction.crosses(made.regions):
        runs = record_runs(model, inputs, False, hints.forwards)
        try:
            prove(runs.shadow, keep_modules(made, runs.reduction) or made, runs.references(), rewrite)
        except (ProofError, PlanError):
            made = start(runs).plan()
    try:
        draws = prove_as_trained(made, runs, rewrite)
    except ProofError:
        made = _find_as_trained(runs, start, partial(record_runs, model, inputs, False, hints.forwards))
        draws = prove_as_trained(made, runs, rewrite)
    made = replace(made, draws=draws)
    if (ties := split_ties(model, made)) and not apart:
        owners = {name.rpartition(".")[0] for pair in ties for name in pair}
        apart = {name for name, _ in held_parameters(model) if name.rpartition(".")[0] in owners}
        return _discover_beside(model, runs, tp_size, head, inputs, whole, hints, apart)
    check_ties(model, made)
    return made


def _find_as_trained(runs: Runs, start: Callable[[Runs, bool], Planner], record_whole: Callable[[], Runs]) -> Plan:
    """The plan of what proves both in evaluation and in training mode; the rest stays whole.

    Raises:
        ProofError: the vocabulary's split does not prove in training mode.
    """
    made = start(runs, True).plan()
    return start(record_whole(), True).plan() if runs.reduction.crosses(made.regions) else made


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Numbers of parameters by folded name: all layers of one name together."""
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        folded = fold_name(name)
        found[folded] = found.get(folded, 0) + parameter.numel()
    return found
