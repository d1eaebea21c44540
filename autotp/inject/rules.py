"""Where a plan comes from: the model itself, its Hugging Face plan, a caller's dict or a `Plan`; each is proved.

No weight is touched and no process group needed: a model on meta is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedConfig

from ..errors import PlanError, ProofError
from ..layers.base import held_parameters
from . import styles
from .assemble import assemble_specs, check_plan, check_ties, check_units, finish_plan, list_whole, read_versions, split_ties
from .auto import Planner
from .block import check_fusions, find_fusions
from .cache import drop_plan, make_key, read_plan, write_plan
from .describe import fold_name
from .drawing import Drawing, spread_draws
from .draws import keep_random
from .edges import edge_modules, edge_parameters, plan_edges, read_elsewhere
from .forwards import prove_forward
from .hints import Hints, check_given, check_used, read_hints
from .module_plan import DrawPlan, ModulePlan
from .plan import Plan, Region
from .precision import check_precision, choose_products
from .prove import prove, try_rewrite
from .reduce import find_reduction, keep_modules, member_plans
from .reference import Reference
from .runs import Runs, record_runs, uneven_shapes
from .shadow import Shadow, empty_weights
from .specs import Spec, expand_names, read_hf_plan, read_spec
from .swap import rewrite_modules
from .threads import one_core
from .tokens import deal_tokens, without_tokens

MOST_CALLS = 4  # of a module in one run of the model, to compare a replacement forward on


@keep_random()
@one_core()
def make_plan(
    model_or_config: nn.Module | PreTrainedConfig,
    tp_size: int,
    plan: Any = "auto",
    head: str = "auto",
    inputs: Any = None,
    few_units: str = "whole",
    attrs: Any = None,
    sequence_parallel: bool | str = False,
    precision: Any = None,
) -> Plan:
    """The plan for a model over `tp_size` ranks; touches no weight, so a config or a model on meta will do.

    Args:
        model_or_config: the model, or a transformers config (its class is then built on meta).
        tp_size: number of ranks.
        plan: "auto" to find it in the model itself; "hf" for the model's own Hugging Face plan; a dict of names or patterns to
            a style or to `{style, parts, unit, attrs, forward, reduce_dtype}` with any option of layers/overlap.py; or a `Plan`.
            Each is proved.
        head: "auto" splits the vocabulary of embedding and head; "whole" leaves the head (and a tied embedding) whole.
        inputs: example calls (keyword arguments of forward, or a list of them) that together run every part to be split;
            None makes them from the signature and the config of a transformers model.
        few_units: what has fewer units (neurons, heads) than there are ranks is left "whole", or gathered, and the plan gives
            the numbers; "refuse" raises instead.
        attrs: hints for odd forward code, module name, pattern or class -> attribute ("config.name" too) -> its value on each
            rank; what is not given is searched for. "forward" -> a function `(module, ...)` that stands for the module's own
            forward: it is proved to compute the same, and a plan notes its name alone, so it is given again beside the plan.
        sequence_parallel: True deals the tokens to the ranks between regions, in every forward of as many tokens as ranks but
            for decoding steps; "auto" where there are many, if it proves. A `Plan` that deals them keeps what it says.
        precision: which linears multiply in FP8: "fp8" (tensorwise scales), "fp8-rowwise", "fp8-blockwise", an `autotp.Recipe`,
            or a dict of names or patterns to these and "bf16", the tensors' own dtype; None: none, or what a `Plan` says.

    Raises:
        PlanError: what the plan names does not exist, is half a pair, or can't be dealt to `tp_size` ranks.
        ProofError: a given plan, or a hint, does not compute what the model does.
    """
    if type(tp_size) is not int or tp_size < 1:
        raise PlanError(f"tp_size={tp_size!r} is not a number of ranks")
    if head not in ("auto", "whole"):
        raise PlanError(f"head={head!r} is neither 'auto' nor 'whole'")
    if few_units not in ("whole", "refuse"):
        raise PlanError(f"few_units={few_units!r} is neither 'whole' nor 'refuse'")
    check_mode(sequence_parallel)
    check_precision(precision)
    model = build_on_meta(model_or_config) if isinstance(model_or_config, PreTrainedConfig) else model_or_config
    made = _make_plan(model, tp_size, plan, head, inputs, attrs, sequence_parallel)
    if sequence_parallel is True and not made.chains and tp_size > 1:
        raise PlanError(
            f"sequence_parallel=True, but the tokens of {made.model} are {made.tokens}. Pass sequence_parallel='auto' to leave "
            f"them whole there, or False."
        )
    if isinstance(plan, Plan):
        check_fusions(model, plan)
    elif not made.fused:  # it was not kept
        made = replace(made, fused=find_fusions(model))
    if few_units == "refuse":
        check_units(made)
    return choose_products(model, made, precision)


@keep_random()
@one_core()
def reuse_plan(model: nn.Module, tp_size: int, plan: Plan) -> Plan | None:
    """`plan`, made for such a model before, if it still proves; None if it does not."""
    return plan if _still_proves(model, plan, tp_size) else None


def check_mode(sequence_parallel: Any) -> None:
    """Raise for a value of `sequence_parallel` that is none."""
    if not isinstance(sequence_parallel, bool) and sequence_parallel != "auto":
        raise PlanError(f"sequence_parallel={sequence_parallel!r} is none of True, False, 'auto'")


def _make_plan(
    model: nn.Module, tp_size: int, plan: Any, head: str, inputs: Any, attrs: Any, sequence_parallel: bool | str
) -> Plan:
    hints = hints_of(model, tp_size, plan, attrs)
    if isinstance(plan, Plan):
        check_plan(model, plan, tp_size)
        check_given(plan, hints)
        made = list_whole(model, plan)
    elif plan == "auto" if isinstance(plan, str) else False:
        if inputs is None and tp_size > 1 and not hints:
            return _find_kept(model, tp_size, head, sequence_parallel)
        return _deal(model, _discover(model, tp_size, head, inputs, hints), inputs, hints, sequence_parallel)
    elif plan == "hf" if isinstance(plan, str) else False:
        specs = expand_names(model, {key: {"style": style} for key, style in read_hf_plan(model).items()}, source="hf")
        made = assemble_specs(model, tp_size, specs, head, "hf", hints)
    elif isinstance(plan, Mapping):
        made = assemble_specs(model, tp_size, read_specs(model, plan), head, "caller", hints)
    else:
        raise PlanError(f"plan={plan!r} is not 'auto', 'hf', a dict of names to styles, or a Plan")
    check_ties(model, made)
    proved = _prove_given(model, made, inputs, hints)
    return proved if proved.chains else _deal(model, proved, inputs, hints, sequence_parallel)


def _deal(model: nn.Module, plan: Plan, inputs: Any, hints: Hints, sequence_parallel: bool | str) -> Plan:
    """`plan`, proved, with tokens dealt between its regions if that is asked for, and proves."""
    plan = replace(plan, sequence_parallel=sequence_parallel, tokens="")
    if not sequence_parallel:
        return plan
    if plan.tp_size == 1 or not plan.regions or not plan.proof.startswith("proved"):
        why = "there is one rank" if plan.tp_size == 1 else "nothing between which to deal them is split and proved"
        return replace(plan, tokens=f"not dealt: {why}")
    try:
        runs, kept = _record_kept(model, plan, inputs, hints, dealt=True)
    except PlanError as error:
        return replace(plan, tokens=f"not dealt: {error}")
    references, rewrite = runs.references(), partial(rewrite_modules, forwards=hints.forwards)

    def check(part: Plan, whole: Plan) -> None:
        prove(runs.shadow, part, references, rewrite)
        _prove_as_trained(whole, runs, rewrite)

    return deal_tokens(plan, runs, kept, check)


def hints_of(model: nn.Module, tp_size: int, plan: Any, attrs: Any) -> Hints:
    """The hints in what a caller asked for: `attrs=`, and a dict's own.

    Raises:
        PlanError: they do not fit the model.
    """
    return read_hints(model, tp_size, attrs, read_specs(model, plan) if isinstance(plan, Mapping) else None)


def read_specs(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, Spec]:
    """A caller's dict by full name.

    Raises:
        PlanError: it names what does not exist.
    """
    return expand_names(model, {key: read_spec(key, value) for key, value in plan.items()}, source="caller")


def _find_kept(model: nn.Module, tp_size: int, head: str, sequence_parallel: bool | str) -> Plan:
    """The plan that was discovered for such a model before, if it still proves; else one discovered now, and kept."""
    key = make_key(model, tp_size, head, read_versions(), sequence_parallel)
    kept = read_plan(key)
    if kept is not None and _still_proves(model, kept, tp_size):
        return kept
    drop_plan(key)
    made = _deal(model, _discover(model, tp_size, head, None, Hints()), None, Hints(), sequence_parallel)
    made = replace(made, fused=find_fusions(model))
    write_plan(key, made)
    return made


def _still_proves(model: nn.Module, plan: Plan, tp_size: int) -> bool:
    try:
        check_plan(model, plan, tp_size)
        check_ties(model, plan)
        check_fusions(model, plan)
        return not plan.modules or _prove_on_calls(model, plan, None, Hints()).proof == "proved"
    except Exception:  # whatever a plan that fits no longer runs into: it is discovered anew
        return False


def _discover(model: nn.Module, tp_size: int, head: str, inputs: Any, hints: Hints) -> Plan:
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
        draws = _prove_as_trained(made, runs, rewrite)
    except ProofError:
        made = _find_as_trained(runs, start, partial(record_runs, model, inputs, False, hints.forwards))
        draws = _prove_as_trained(made, runs, rewrite)
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


def _prove_as_trained(plan: Plan, runs: Runs, rewrite: Callable[..., None]) -> tuple[DrawPlan, ...]:
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


def _record_kept(model: nn.Module, plan: Plan, inputs: Any, hints: Hints, dealt: bool) -> tuple[Runs, Plan]:
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


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Numbers of parameters by folded name: all layers of one name together."""
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        folded = fold_name(name)
        found[folded] = found.get(folded, 0) + parameter.numel()
    return found


def _prove_given(model: nn.Module, plan: Plan, inputs: Any, hints: Hints) -> Plan:
    """`plan`, proved, or marked as not proved where no example call runs.

    Raises:
        ProofError: it does not compute what the model does.
    """
    if not plan.modules:
        return plan
    try_rewrite(Shadow(model), plan, partial(rewrite_modules, forwards=hints.forwards))
    prove_forwards(model, inputs, hints)
    return plan if plan.tp_size == 1 else _prove_on_calls(model, plan, inputs, hints)


def _prove_on_calls(model: nn.Module, plan: Plan, inputs: Any, hints: Hints) -> Plan:
    """As `_prove_given`, for a plan whose modules are known to take their parts."""
    try:
        runs, kept = _record_kept(model, plan, inputs, hints, dealt=bool(plan.chains))
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
    plan = replace(plan, draws=_prove_as_trained(plan, runs, rewrite))
    unrun = [m.name for m in kept.modules if m.style in styles.CALLED_STYLES and m.name not in runs.ran]
    for name in unrun:
        if any(name.startswith(f"{own}.") for own in runs.reduction.shared):
            raise ProofError(
                f"{name} is planned otherwise than its like, and no example call runs it: plan all of them alike, or pass "
                f"inputs= that reach it"
            )
    return replace(plan, proof="proved" if not unrun else f"proved but for what no example call runs: {', '.join(unrun)}")


def build_on_meta(config: PreTrainedConfig) -> nn.Module:
    """The config's model, its parameters on meta: the class it names, or else the causal LM, or else the bare model."""
    names = getattr(config, "architectures", None) or []
    cls = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    with empty_weights():
        if cls is not None:
            model = cls(config)
        else:
            try:
                model = transformers.AutoModelForCausalLM.from_config(config)
            except ValueError:
                model = transformers.AutoModel.from_config(config)
    model.tie_weights()  # accelerate gives every name a Parameter of its own
    return model
