"""Where a plan comes from: the model itself, its Hugging Face plan, a caller's dict or a `Plan`; each is proved.

No weight is touched and no process group needed: a model on meta is enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedConfig

from ..errors import PlanError, ProofError
from . import plan as styles
from .assemble import assemble_specs, check_plan, check_ties, check_units, finish_plan, list_whole, read_versions
from .auto import Planner, Runs, record_runs
from .cache import drop_plan, make_key, read_plan, write_plan
from .draws import keep_random
from .edges import edge_modules, edge_parameters, plan_edges, read_elsewhere
from .plan import ModulePlan, Plan, Region
from .prove import prove, try_rewrite
from .reduce import Reduction
from .shadow import Shadow, empty_weights
from .specs import Spec, expand_names, read_hf_plan, read_spec
from .swap import rewrite_modules


@keep_random()
def make_plan(
    model_or_config: nn.Module | PreTrainedConfig,
    tp_size: int,
    plan: Any = "auto",
    head: str = "auto",
    inputs: Any = None,
    few_units: str = "whole",
) -> Plan:
    """The plan for a model over `tp_size` ranks; touches no weight, so a config or a model on meta will do.

    Args:
        model_or_config: the model, or a transformers config (its class is then built on meta).
        tp_size: number of ranks.
        plan: "auto" to find it in the model itself; "hf" for the model's own Hugging Face plan; a dict of names or patterns to
            a style or to `{style, parts, unit, attrs, reduce_dtype}`; or a `Plan`. Each is proved.
        head: "auto" splits the vocabulary of embedding and head; "whole" leaves the head (and a tied embedding) whole.
        inputs: example calls (keyword arguments of forward, or a list of them) that together run every part to be split;
            None makes them from the signature and the config of a transformers model.
        few_units: what has fewer units (neurons, heads) than there are ranks is left "whole", or gathered, and the plan gives
            the numbers; "refuse" raises instead.

    Raises:
        PlanError: what the plan names does not exist, is half a pair, or can't be dealt to `tp_size` ranks.
        ProofError: a given plan does not compute what the model does.
    """
    if not isinstance(tp_size, int) or tp_size < 1:
        raise PlanError(f"tp_size={tp_size!r} is not a number of ranks")
    if head not in ("auto", "whole"):
        raise PlanError(f"head={head!r} is neither 'auto' nor 'whole'")
    if few_units not in ("whole", "refuse"):
        raise PlanError(f"few_units={few_units!r} is neither 'whole' nor 'refuse'")
    model = build_on_meta(model_or_config) if isinstance(model_or_config, PreTrainedConfig) else model_or_config
    made = _make_plan(model, tp_size, plan, head, inputs)
    if few_units == "refuse":
        check_units(made)
    return made


def _make_plan(model: nn.Module, tp_size: int, plan: Any, head: str, inputs: Any) -> Plan:
    if isinstance(plan, Plan):
        check_plan(model, plan, tp_size)
        made = list_whole(model, plan)
    elif plan == "auto" if isinstance(plan, str) else False:
        return _find_kept(model, tp_size, head) if inputs is None and tp_size > 1 else _discover(model, tp_size, head, inputs)
    elif plan == "hf" if isinstance(plan, str) else False:
        specs = expand_names(model, {key: {"style": style} for key, style in read_hf_plan(model).items()}, source="hf")
        made = assemble_specs(model, tp_size, specs, head, source="hf")
    elif isinstance(plan, Mapping):
        specs = expand_names(model, {key: read_spec(key, value) for key, value in plan.items()}, source="caller")
        made = assemble_specs(model, tp_size, specs, head, source="caller")
    else:
        raise PlanError(f"plan={plan!r} is not 'auto', 'hf', a dict of names to styles, or a Plan")
    check_ties(model, made)
    return _prove_given(model, made, inputs)


def _find_kept(model: nn.Module, tp_size: int, head: str) -> Plan:
    """The plan that was discovered for such a model before, if it still proves; else one discovered now, and kept."""
    key = make_key(model, tp_size, head, read_versions())
    kept = read_plan(key)
    if kept is not None and _still_proves(model, kept, tp_size):
        return kept
    drop_plan(key)
    made = _discover(model, tp_size, head, None)
    write_plan(key, made)
    return made


def _still_proves(model: nn.Module, plan: Plan, tp_size: int) -> bool:
    try:
        check_plan(model, plan, tp_size)
        check_ties(model, plan)
        return not plan.modules or _prove_on_calls(model, plan, None).proof == "proved"
    except Exception:  # whatever a plan that fits no longer runs into: it is discovered anew
        return False


def _discover(model: nn.Module, tp_size: int, head: str, inputs: Any) -> Plan:
    """The plan found in the model itself; nothing in it that is not proved."""
    if tp_size == 1:
        return finish_plan(model, tp_size, (), (), {}, None)
    runs = record_runs(model, inputs)
    whole: dict[str, str] = dict.fromkeys(read_elsewhere(model, runs.records), "its weight is read outside its forward")
    try:
        return _discover_beside(model, runs, tp_size, head, inputs, whole)
    except ProofError as error:  # nothing proves: not even the vocabulary alone
        whole |= dict.fromkeys(edge_modules(model), f"not proved: {error}")
        return _discover_beside(model, runs, tp_size, head, inputs, whole)


def _discover_beside(model: nn.Module, runs: Runs, tp_size: int, head: str, inputs: Any, whole: dict[str, str]) -> Plan:
    """The plan of everything but the modules `whole`, name -> why.

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

    sizes = count_parameters(model)
    try:
        planner = Planner(runs, tp_size, edge_parameters(model), sizes, assemble, rewrite_modules)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        why = f"its backward does not run in evaluation: {' '.join(str(error).split())[:120]}"
        return replace(finish_plan(model, tp_size, (), (), {"": why}, None), proof=f"not proved: {why}")
    made = planner.plan()
    if runs.reduction.crosses(made.regions):
        every = record_runs(model, inputs, reduce=False)
        try:
            prove(every.shadow, made, every.references(), rewrite_modules)
        except (ProofError, PlanError):
            made = Planner(every, tp_size, edge_parameters(model), sizes, assemble, rewrite_modules).plan()
    check_ties(model, made)
    return made


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Numbers of parameters by folded name: all layers of one name together."""
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        folded = styles.fold_name(name)
        found[folded] = found.get(folded, 0) + parameter.numel()
    return found


def _prove_given(model: nn.Module, plan: Plan, inputs: Any) -> Plan:
    """`plan`, proved, or marked as not proved where no example call runs.

    Raises:
        ProofError: it does not compute what the model does.
    """
    if not plan.modules:
        return plan
    try_rewrite(Shadow(model), plan, rewrite_modules)
    return plan if plan.tp_size == 1 else _prove_on_calls(model, plan, inputs)


def _prove_on_calls(model: nn.Module, plan: Plan, inputs: Any) -> Plan:
    """As `_prove_given`, for a plan whose modules are known to take their parts."""
    try:
        runs = record_runs(model, inputs)
        kept = keep_modules(plan, runs.reduction)
        if kept is None or runs.reduction.crosses(plan.regions):  # layers that are not planned each by itself are all run
            runs = record_runs(model, inputs, reduce=False)
            kept = plan
    except PlanError as error:
        if inputs is not None:
            raise
        return replace(plan, proof=f"not proved: {error}")
    try:
        prove(runs.shadow, kept, runs.references(), rewrite_modules)
    except ProofError as error:
        raise ProofError(
            f"the plan does not compute what {type(model).__name__} does: {error}. Every linear that meets the split ones must "
            f"be in the plan (a sibling is missing?), or that module's attributes edited; plan='auto' finds a plan that fits."
        ) from error
    return replace(plan, proof="proved")


def keep_modules(plan: Plan, reduction: Reduction) -> Plan | None:
    """The part of a plan that is about kept layers; None if it says something else about layers that they stand for."""
    kept = {m.name: m for m in plan.modules if reduction.holds(m.name)}
    regions = tuple(r for r in plan.regions if all(map(reduction.holds, (r.scope, *r.columns, *r.rows))))
    grown, _ = reduction.expand(kept, ())

    def compared(module: ModulePlan) -> ModulePlan:
        return replace(module, siblings=None if module.siblings is None else "", source="", why="")

    if {n: compared(m) for n, m in grown.items()} != {m.name: compared(m) for m in plan.modules}:
        return None
    return replace(plan, modules=tuple(kept.values()), regions=regions)


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
