"""Proves whole plans on example calls: in evaluation, and as the model is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from ..errors import PlanError, ProofError
from . import styles
from .drawing import Drawing, spread_draws
from .forwards import prove_forward
from .hints import Hints
from .module_plan import DrawPlan
from .plan import Plan
from .prove import prove, try_rewrite
from .reduce import find_reduction, keep_modules, member_plans
from .reference import Reference
from .runs import Runs, record_runs, uneven_shapes
from .shadow import Shadow
from .swap import rewrite_modules
from .tokens import without_tokens

MOST_CALLS = 4  # of a module in one run of the model, to compare a replacement forward on


def prove_given(model: nn.Module, plan: Plan, inputs: Any, hints: Hints) -> Plan:
    """`plan`, proved, or marked as not proved where no example call runs.

    Raises:
        ProofError: it does not compute what the model does.
    """
    if not plan.modules:
        return plan
    try_rewrite(Shadow(model), plan, partial(rewrite_modules, forwards=hints.forwards))
    prove_forwards(model, inputs, hints)
    return plan if plan.tp_size == 1 else prove_on_calls(model, plan, inputs, hints)


def prove_on_calls(model: nn.Module, plan: Plan, inputs: Any, hints: Hints) -> Plan:
    """As `prove_given`, for a plan whose modules are known to take their parts."""
    try:
        runs, kept = record_kept(model, plan, inputs, hints, dealt=bool(plan.chains))
    except PlanError as error:
        if inputs is not None:
            raise
        return replace(plan, proof=f"not proved: {error}")
    rewrite, references = partial(rewrite_modules, forwards=hints.forwards), runs.references()
    try:
        for part in (without_tokens(kept), kept) if kept.chains else (kept,):  # few tokens are not dealt
            prove(runs.shadow, part, references, rewrite)
    except ProofError as error:
        raise ProofError(
            f"the plan does not compute what {type(model).__name__} does: {error}. Every linear that meets the split ones must "
            f"be in the plan (a sibling is missing?), or that module's attributes edited; plan='auto' finds a plan that fits."
        ) from error
    plan = replace(plan, draws=prove_as_trained(plan, runs, rewrite))
    unrun = [m.name for m in kept.modules if m.style in styles.CALLED_STYLES and m.name not in runs.ran]
    for name in unrun:
        if any(name.startswith(f"{own}.") for own in runs.reduction.shared):
            raise ProofError(
                f"{name} is planned otherwise than its like, and no example call runs it: plan all of them alike, or pass "
                f"inputs= that reach it"
            )
    return replace(plan, proof="proved" if not unrun else f"proved but for what no example call runs: {', '.join(unrun)}")


def prove_as_trained(plan: Plan, runs: Runs, rewrite: Callable[..., None]) -> tuple[DrawPlan, ...]:
    """Prove once more in training mode and with the model's own attention implementation, which may do and read other things.

    Returns:
        which modules draw random numbers on split values there; or in evaluation, where training does not run here.

    Raises:
        ProofError: there the plan does not compute what the model does.
    """

    def find_draws(runs: Runs, references: list[Reference]) -> tuple[DrawPlan, ...]:
        draws = prove(runs.shadow, keep_modules(plan, runs.reduction) or plan, references, rewrite)
        return spread_draws(Drawing(draws).plan(), runs.reduction, dict(runs.recording.model.named_modules()))

    again = runs.as_trained()
    if again is None:
        return find_draws(runs, runs.references())
    references = again.references()
    try:
        return find_draws(again, references)
    except ProofError as error:
        try:
            prove(again.shadow, replace(plan, modules=(), regions=(), chains=()), references, rewrite)
        except ProofError:  # the whole model does not compute the same twice: rows that are masked altogether, say
            return find_draws(runs, runs.references())
        name = getattr(getattr(runs.recording.model, "config", None), "_attn_implementation", None)
        raise ProofError(
            f"the plan proves in evaluation with plain attention, but not in training mode with the model's own attention "
            f"({name}): {error}. Load the model with attn_implementation='eager', or leave whole what its forward reads "
            f"in training alone (a plan of your own, plan={{...}})."
        ) from error


def record_kept(model: nn.Module, plan: Plan, inputs: Any, hints: Hints, dealt: bool) -> tuple[Runs, Plan]:
    """The example calls, on a few layers where these stand for the others in `plan` too, and what it says of those.

    Args:
        dealt: some of the calls have tokens that can't be dealt evenly.
    """
    shapes = uneven_shapes(model, plan.tp_size) if dealt else None
    runs = record_runs(model, inputs, forwards=hints.forwards, shapes=shapes)
    kept = keep_modules(plan, runs.reduction)
    if kept is None or runs.reduction.crosses(plan.regions):  # layers that are not planned each by itself are all run
        runs = record_runs(model, inputs, False, hints.forwards, shapes=shapes)
        kept = keep_modules(plan, runs.reduction)
    if kept is None:  # members of what a forward picks from differ: each kind of them has to run
        runs = record_runs(model, inputs, False, hints.forwards, lambda name: repr(member_plans(plan, name)), shapes)
        kept = keep_modules(plan, runs.reduction) or plan
    return runs.with_cut_maps(kept), kept


def prove_forwards(model: nn.Module, inputs: Any, hints: Hints) -> None:
    """Compare every replacement forward with what it stands for, on the arguments that the model's own run gives it.

    Raises:
        PlanError, ProofError: no example call runs one, or it computes something else.
    """
    if not hints.forwards:
        return
    runs = record_runs(model, inputs, hints.fit(find_reduction(model)))
    for name in filter(runs.reduction.holds, hints.forwards):
        calls = [call for record in runs.records for call in record.module_calls.get(name, [])[:MOST_CALLS]]
        prove_forward(runs.shadow, name, hints.forwards[name], calls)
