"""Puts module plans together into a `Plan`: pairs of what specs name, what stays whole and why, ties; and checks that it fits."""

from __future__ import annotations

import platform
from dataclasses import replace

import accelerate
import torch
import transformers
from torch import nn

from ..errors import PlanError
from ..layers.base import held_parameters
from ..layers.entry import SHARDED_LOSS, check_logits_path
from ..version import __version__
from . import styles
from .edges import plan_edges
from .hints import Hints
from .module_plan import ModulePlan
from .pairs import pair_regions
from .plan import Plan, WholePlan
from .regions import TOO_FEW
from .specs import Spec


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
    for name, other in split_ties(model, plan):
        split, whole = (other, name) if other in plan.shards else (name, other)
        what = "in another way" if whole in plan.shards else "not at all"
        raise PlanError(
            f"{split} and {whole} are one tied tensor, but the plan splits the first and the second {what}. Plan both alike: "
            f"'whole' for both modules (or head='whole'), or 'embedding_rowwise' and 'colwise_gather_output'."
        )


def split_ties(model: nn.Module, plan: Plan) -> list[tuple[str, str]]:
    """Two names of one tensor for which a plan says different things, for each name beside the tensor's first."""
    first: dict[int, str] = {}
    pairs = [(name, first.setdefault(id(parameter), name)) for name, parameter in held_parameters(model)]
    return [(name, other) for name, other in pairs if plan.shards.get(name) != plan.shards.get(other)]


def check_units(plan: Plan) -> None:
    """Refuse a plan that leaves something whole, or gathers it, because it has fewer units than there are ranks.

    Raises:
        PlanError: with the names and the numbers of all of it.
    """
    said = [entry.reason for entry in plan.whole] + [module.why for module in plan.modules]
    found = dict.fromkeys(why[why.index(TOO_FEW) :] for why in said if TOO_FEW in why)
    if found:
        raise PlanError(
            f"few_units='refuse', but {'; '.join(found)}. Use fewer ranks than {plan.tp_size}, or few_units='whole' to have this "
            f"computed on every rank."
        )


def assemble_specs(model: nn.Module, tp_size: int, specs: dict[str, Spec], head: str, source: str, hints: Hints) -> Plan:
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
    found.update(edges)
    hints.add_to(found)
    order = {name: i for i, name in enumerate(modules)}
    planned = tuple(sorted(found.values(), key=lambda module: order[module.name]))
    return finish_plan(model, tp_size, planned, regions, reasons, head_name)


def finish_plan(model: nn.Module, tp_size: int, planned: tuple[ModulePlan, ...], regions, reasons, head_name) -> Plan:
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


def list_whole(model: nn.Module, plan: Plan) -> Plan:
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
