"""Where a plan comes from: the caller's dict, or the model's own Hugging Face plan.

Both name modules and styles; this file matches the names, pairs columns with rows, decides how many units each rank gets
and says of everything left whole why. It touches no weight and needs no process group: a model on meta is enough.
"""

from __future__ import annotations

import difflib
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import accelerate
import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from ..errors import PlanError, ProofError
from ..layers.entry import SHARDED_LOSS, check_logits_path
from ..version import __version__
from . import plan as styles
from .auto import Planner, Runs, record_runs
from .cache import drop_plan, make_key, read_plan, write_plan
from .draws import keep_random
from .edges import edge_modules, edge_parameters, plan_edges, read_elsewhere
from .pairs import pair_regions
from .plan import ModulePlan, Plan, Region, WholePlan
from .prove import prove, try_rewrite
from .reduce import Reduction
from .shadow import Shadow, empty_weights
from .swap import rewrite_modules

Spec = dict[str, Any]
SPEC_KEYS = {"style", "parts", "unit", "attrs", "reduce_dtype"}
NOT_BUILT_SPEC_KEYS = {"forward": "replacement forwards"}


@keep_random()
def make_plan(
    model_or_config: nn.Module | PreTrainedConfig, tp_size: int, plan: Any = "auto", head: str = "auto", inputs: Any = None
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

    Raises:
        PlanError: what the plan names does not exist, is half a pair, or can't be dealt to `tp_size` ranks.
        ProofError: a given plan does not compute what the model does.
    """
    if not isinstance(tp_size, int) or tp_size < 1:
        raise PlanError(f"tp_size={tp_size!r} is not a number of ranks")
    if head not in ("auto", "whole"):
        raise PlanError(f"head={head!r} is neither 'auto' nor 'whole'")
    model = build_on_meta(model_or_config) if isinstance(model_or_config, PreTrainedConfig) else model_or_config
    if isinstance(plan, Plan):
        check_plan(model, plan, tp_size)
        made = _list_whole(model, plan)
    elif plan == "auto" if isinstance(plan, str) else False:
        return _find_kept(model, tp_size, head) if inputs is None and tp_size > 1 else _discover(model, tp_size, head, inputs)
    elif plan == "hf" if isinstance(plan, str) else False:
        specs = expand_names(model, {key: {"style": style} for key, style in read_hf_plan(model).items()}, source="hf")
        made = _assemble(model, tp_size, specs, head, source="hf")
    elif isinstance(plan, Mapping):
        specs = expand_names(model, {key: read_spec(key, value) for key, value in plan.items()}, source="caller")
        made = _assemble(model, tp_size, specs, head, source="caller")
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
        return _finish(model, tp_size, (), (), {}, None)
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
        return _finish(model, tp_size, planned, regions, {**reasons, **why}, head_name)

    sizes = count_parameters(model)
    try:
        planner = Planner(runs, tp_size, edge_parameters(model), sizes, assemble, rewrite_modules)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        why = f"its backward does not run in evaluation: {' '.join(str(error).split())[:120]}"
        return replace(_finish(model, tp_size, (), (), {"": why}, None), proof=f"not proved: {why}")
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


def read_hf_plan(model: nn.Module) -> dict[str, str]:
    """Transformers' own plan of a model.

    Raises:
        PlanError: it has none.
    """
    found = dict(getattr(model, "_tp_plan", None) or {})
    if not found:
        raise PlanError(
            f"{type(model).__name__} has no Hugging Face tensor-parallel plan. From Python, pass one: "
            f"plan={{'layers.*.mlp.up_proj': 'colwise', 'layers.*.mlp.down_proj': 'rowwise', ...}}"
        )
    return found


def read_spec(key: str, value: Any) -> Spec:
    """One value of a caller's dict as `{style, ...}`.

    Raises:
        PlanError: an unknown style or key.
    """
    spec = {"style": value} if isinstance(value, str) else dict(value) if isinstance(value, Mapping) else None
    if spec is None:
        raise PlanError(f"plan[{key!r}] is {value!r}: expected a style or {{'style': ..., 'parts': ..., 'unit': ...}}")
    for name in spec:
        if name in NOT_BUILT_SPEC_KEYS:
            raise PlanError(f"plan[{key!r}]: {NOT_BUILT_SPEC_KEYS[name]} ({name}=) are not built yet")
        if name not in SPEC_KEYS:
            raise PlanError(f"plan[{key!r}] has {name!r}; known keys are {sorted(SPEC_KEYS)}")
    style = spec.setdefault("style", "replicate")
    if style not in styles.STYLES:
        near = difflib.get_close_matches(str(style), styles.STYLES, 3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"styles are {', '.join(styles.STYLES)}"
        raise PlanError(f"plan[{key!r}]: unknown style {style!r}; {hint}")
    return spec


def expand_names(model: nn.Module, specs: dict[str, Spec], source: str) -> dict[str, Spec]:
    """Patterns to full names of modules or parameters; `*` stands for a layer number or any part of a name.

    Raises:
        PlanError: a caller's key matches nothing (the nearest names are given), or two keys disagree about one name.
    """
    names = [name for name, _ in model.named_modules() if name] + [
        name for name, _ in model.named_parameters(remove_duplicate=False)
    ]
    found: dict[str, Spec] = {}
    from_key: dict[str, str] = {}
    for key, spec in specs.items():
        matched = match_names(key, names)
        if not matched and source == "caller":
            folded = sorted({styles.fold_name(name) for name in names})
            near = difflib.get_close_matches(key, folded, 3, cutoff=0.4)
            raise PlanError(
                f"plan key {key!r} matches no module or parameter of {type(model).__name__}; nearest: {', '.join(near)}"
            )
        for name in matched:
            if name in found and found[name] != spec and source == "caller":
                raise PlanError(f"plan keys {from_key[name]!r} and {key!r} both match {name} and disagree")
            found[name], from_key[name] = spec, key
            if source == "hf" and spec["style"] not in styles.STYLES:
                found[name] = {"style": "replicate", "why": f"unknown style {spec['style']!r}"}
    return found


def match_names(key: str, names: Iterable[str]) -> list[str]:
    """The names that `key` matches: in full, or as the end of a name; `*` is one part of a name, or else several."""
    for star in (r"[^.]+", r".+"):
        body = re.escape(key).replace(r"\*", star)
        for prefix in ("", r"(?:.+\.)?"):
            matched = [name for name in names if re.fullmatch(prefix + body, name)]
            if matched:
                return matched
    return []


def read_versions() -> dict[str, str]:
    """Versions that must agree on all ranks."""
    found = {"autotp": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {**found, "accelerate": accelerate.__version__, "python": platform.python_version()}


def check_plan(model: nn.Module, plan: Plan, tp_size: int) -> None:
    """Refuse a plan that was made for another size or another model.

    Raises:
        PlanError: naming the first module or shape that differs.
    """
    if plan.tp_size != tp_size:
        raise PlanError(
            f"the plan is for {plan.tp_size} ranks, but there are {tp_size}: make it again with make_plan(model, {tp_size})"
        )
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    parameters |= dict(model.named_buffers(remove_duplicate=False))  # type: ignore[arg-type]
    for module in plan.modules:
        if module.name not in modules:
            raise PlanError(f"the plan names module {module.name}, which {type(model).__name__} does not have")
    for name, shard in plan.shards.items():
        if name not in parameters:
            raise PlanError(f"the plan splits {name}, which {type(model).__name__} does not have")
        if tuple(parameters[name].shape) != shard.shape:
            raise PlanError(f"the plan splits {name} of shape {shard.shape}, but it has shape {tuple(parameters[name].shape)}")


def check_ties(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan that gives the names of one tensor different slices, or splits some and leaves others whole.

    Raises:
        PlanError: naming both, and what is planned for each.
    """
    shards, first = plan.shards, {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if shards.get(name) != shards.get(other):
            split, whole = (other, name) if other in shards else (name, other)
            what = "in another way" if whole in shards else "not at all"
            raise PlanError(
                f"{split} and {whole} are one tied tensor, but the plan splits the first and the second {what}. Plan both alike: "
                f"'whole' for both modules (or head='whole'), or 'embedding_rowwise' and 'colwise_gather_output'."
            )


# -- putting a plan together --------------------------------------------------------------------------------------------


def _assemble(model: nn.Module, tp_size: int, specs: dict[str, Spec], head: str, source: str) -> Plan:
    modules = dict(model.named_modules())
    reasons: dict[str, str] = {}
    edges, head_name = plan_edges(model, tp_size, specs, head, source, reasons)
    inner = {name: spec for name, spec in specs.items() if name not in edges and name not in reasons}
    for name, spec in inner.items():
        style = spec["style"]
        if style in styles.NOT_BUILT_STYLES:
            reasons[name] = styles.NOT_BUILT_STYLES[style]
        elif style in ("whole", "replicate"):
            reasons[name] = spec.get("why", "whole by plan")
        elif name not in modules and modules[name.rpartition(".")[0]].get_parameter(name.rpartition(".")[2]).ndim > 2:
            reasons[name] = "stacked experts are not split yet"
    found, regions = pair_regions(model, tp_size, inner, reasons, source)
    for name, spec in specs.items():
        if spec.get("attrs"):
            _check_attrs(modules[name], name, spec["attrs"], tp_size)
            base = found.get(name, ModulePlan(name, "replicate", source=source))
            found[name] = replace(base, attrs={key: tuple(values) for key, values in spec["attrs"].items()})
    found.update(edges)
    order = {name: i for i, name in enumerate(modules)}
    planned = tuple(sorted(found.values(), key=lambda module: order[module.name]))
    return _finish(model, tp_size, planned, regions, reasons, head_name)


def _check_attrs(module: nn.Module, name: str, attrs: Mapping[str, Any], tp_size: int) -> None:
    for key, values in attrs.items():
        if not hasattr(module, key):
            raise PlanError(f"plan[{name!r}] edits attribute {key!r}, which {type(module).__name__} does not have")
        if not isinstance(values, (list, tuple)) or len(values) != tp_size:
            raise PlanError(f"plan[{name!r}]: attrs[{key!r}] must list one value for each of {tp_size} ranks, got {values!r}")


def _finish(model: nn.Module, tp_size: int, planned: tuple[ModulePlan, ...], regions, reasons, head_name) -> Plan:
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters(remove_duplicate=False)}
    ties: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        ties.setdefault(id(parameter), []).append(name)
    tied = tuple(tuple(names) for names in ties.values() if len(names) > 1)
    split = {f"{m.name}.{p}" if m.name else p for m in planned for p in m.shards}
    whole = []
    for name, parameter in model.named_parameters():
        if name not in split:
            whole.append(WholePlan(name, parameter.numel(), _why_whole(name, parameter, planned, reasons)))
    loss = "the head is whole"
    if head_name is not None:
        problem = check_logits_path(model)
        loss = SHARDED_LOSS if problem is None else f"the head gathers its logits: {problem}"
    versions = read_versions()
    return Plan(tp_size, type(model).__name__, planned, regions, tuple(whole), tied, head_name, loss, sizes, versions)


def _list_whole(model: nn.Module, plan: Plan) -> Plan:
    """`plan`, which may have been edited, with every parameter that it leaves whole listed."""
    known, shards = {entry.name: entry for entry in plan.whole}, plan.shards
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if name not in shards}
    whole = (known.get(name, WholePlan(name, numel, "not named by the plan")) for name, numel in sizes.items())
    return replace(plan, whole=tuple(whole))


def _why_whole(name: str, parameter: torch.Tensor, planned: tuple[ModulePlan, ...], reasons: dict[str, str]) -> str:
    owner, _, leaf = name.rpartition(".")
    module = next((m for m in planned if m.name == owner), None)
    if module is not None and leaf in module.summed:
        return "used by every rank's columns; its gradient is summed"
    if module is not None and module.style in styles.ROW_STYLES:
        return "added once, after the reduction"
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in reasons:
            return reasons[".".join(parts[:length])]
    if parameter.ndim < 2:
        return "small"
    return "not named by the plan" if not reasons.get("") else reasons[""]
