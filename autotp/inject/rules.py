"""Where a plan comes from: the model itself, its Hugging Face plan, a caller's dict or a `Plan`; each is proved.

No weight is touched and no process group needed: a model on meta is enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedConfig

from ..errors import PlanError
from .assemble import assemble_specs, check_plan, check_ties, check_units, list_whole, read_versions
from .block import check_fusions, find_fusions
from .cache import drop_plan, make_key, read_plan, write_plan
from .draws import keep_random
from .find_plan import discover_plan
from .hints import Hints, check_given, read_hints
from .plan import Plan
from .precision import check_precision, choose_products
from .proofs import prove_as_trained, prove_given, prove_on_calls, record_kept
from .prove import prove
from .shadow import empty_weights
from .specs import Spec, expand_names, read_hf_plan, read_spec
from .swap import rewrite_modules
from .threads import one_core
from .tokens import deal_tokens


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
        return _deal(model, discover_plan(model, tp_size, head, inputs, hints), inputs, hints, sequence_parallel)
    elif plan == "hf" if isinstance(plan, str) else False:
        specs = expand_names(model, {key: {"style": style} for key, style in read_hf_plan(model).items()}, source="hf")
        made = assemble_specs(model, tp_size, specs, head, "hf", hints)
    elif isinstance(plan, Mapping):
        made = assemble_specs(model, tp_size, read_specs(model, plan), head, "caller", hints)
    else:
        raise PlanError(f"plan={plan!r} is not 'auto', 'hf', a dict of names to styles, or a Plan")
    check_ties(model, made)
    proved = prove_given(model, made, inputs, hints)
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
        runs, kept = record_kept(model, plan, inputs, hints, dealt=True)
    except PlanError as error:
        return replace(plan, tokens=f"not dealt: {error}")
    references, rewrite = runs.references(), partial(rewrite_modules, forwards=hints.forwards)

    def check(part: Plan, whole: Plan) -> None:
        prove(runs.shadow, part, references, rewrite)
        prove_as_trained(whole, runs, rewrite)

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
    made = _deal(model, discover_plan(model, tp_size, head, None, Hints()), None, Hints(), sequence_parallel)
    made = replace(made, fused=find_fusions(model))
    write_plan(key, made)
    return made


def _still_proves(model: nn.Module, plan: Plan, tp_size: int) -> bool:
    try:
        check_plan(model, plan, tp_size)
        check_ties(model, plan)
        check_fusions(model, plan)
        return not plan.modules or prove_on_calls(model, plan, None, Hints()).proof == "proved"
    except Exception:  # whatever a plan that fits no longer runs into: it is discovered anew
        return False


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
