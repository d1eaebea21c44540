"""The model's edges by a rule of their own: input and output embedding, tied or not, split over the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..errors import PlanError
from ..layers.base import held_parameters
from ..layers.embedding import check_embedding
from ..shard import Shard
from . import styles
from .module_plan import ModulePlan
from .record import Record

Spec = dict[str, Any]


def plan_edges(
    model: nn.Module, tp_size: int, specs: dict[str, Spec], head: str, source: str, reasons: dict[str, str]
) -> tuple[dict[str, ModulePlan], str | None]:
    """Input and output embedding, tied or not: split over the vocabulary, by one rule of their own.

    Further modules that hold such a weight are planned alike if they are embeddings or plain linears; otherwise it stays whole.
    """
    edges, name_out = _plan_pair(model, tp_size, specs, head, source, reasons)
    if source != "discovered":
        return edges, name_out
    holders: dict[int, list[tuple[str, str]]] = {}
    for name, parameter in held_parameters(model):
        owner, _, leaf = name.rpartition(".")
        holders.setdefault(id(parameter), []).append((owner, leaf))
    for name in [name for name, plan in edges.items() if "weight" in plan.shards]:
        weight = model.get_submodule(name).weight
        others = [holder for holder in holders[id(weight)] if holder[0] not in edges]
        plans = [_plan_alike(model, edges[name], owner, leaf) for owner, leaf in others]
        edges |= {plan.name: plan for plan in plans if plan is not None}
        if None in plans:
            for owner, _ in holders[id(weight)]:
                edges.pop(owner, None)
                reasons[owner] = f"one tensor with {', '.join(o for o, _ in others)}, which can't be split over the vocabulary"
    if name_out not in edges:  # its bias, by whatever name, is whole with it
        edges = {name: plan for name, plan in edges.items() if plan.style != "local_params"}
        return edges, None
    return edges, name_out


def _plan_alike(model: nn.Module, planned: ModulePlan, owner: str, leaf: str) -> ModulePlan | None:
    """The plan of another module that holds the weight of a planned one; None if it can't be split over the vocabulary."""
    module, shard = model.get_submodule(owner), planned.shards["weight"]
    if leaf != "weight" or planned.style == "embedding_colwise":
        return None
    if isinstance(module, nn.Embedding):
        try:
            check_embedding(module, owner, shard)
        except PlanError:
            return None
        return ModulePlan(owner, "embedding_rowwise", {"weight": shard}, source=planned.source, why="vocabulary")
    if type(module) is nn.Linear:
        shards = {"weight": shard}
        if module.bias is not None:
            shards["bias"] = Shard(tuple(module.bias.shape), shard.tp_size, shard.cuts)
        own = f"{owner}:vocabulary"  # it enters its input, as every layer whose columns are split
        return ModulePlan(owner, "colwise_gather_output", shards, siblings=own, source=planned.source, why="vocabulary")
    return None


def _plan_pair(
    model: nn.Module, tp_size: int, specs: dict[str, Spec], head: str, source: str, reasons: dict[str, str]
) -> tuple[dict[str, ModulePlan], str | None]:
    names = {module: name for name, module in model.named_modules()}
    embedding, output = _embeddings(model)
    edges: dict[str, ModulePlan] = {}
    for name, spec in specs.items():
        if spec["style"] in styles.EMBEDDING_STYLES and isinstance(model.get_submodule(name), nn.Embedding):
            edges[name] = _plan_embedding(model.get_submodule(name), name, spec["style"], tp_size, source)
    wanted = source in ("hf", "discovered") or any(names.get(m) in specs for m in (embedding, output) if m is not None)
    tied = embedding is not None and output is not None and embedding.weight is output.weight
    name_in, name_out = names.get(embedding), names.get(output)
    for name in (name_in, name_out):
        if name and specs.get(name, {}).get("style") in ("whole", "replicate"):
            wanted, reasons[name] = False, specs[name].get("why", "whole by plan")
    if head == "whole" and name_out:
        reasons[name_out] = "head='whole'"
        if tied and name_in:
            edges.pop(name_in, None)
            reasons[name_in] = "tied to a head that is whole"
            return edges, None
    if not wanted:
        return edges, None
    asked = source in ("hf", "discovered") or tied
    if embedding is not None and name_in and name_in not in edges and (asked or name_in in specs):
        edges[name_in] = _plan_embedding(embedding, name_in, "embedding_rowwise", tp_size, source)
    if head == "whole" or output is None or not name_out or not (asked or name_out in specs):
        return edges, None
    if type(output) is not nn.Linear or output.weight.shape[0] < tp_size:
        reasons[name_out] = f"the head is a {type(output).__name__} of {tuple(output.weight.shape)}, not a plain nn.Linear"
        if tied and name_in:
            edges.pop(name_in, None)
            reasons[name_in] = "tied to a head that is whole"
        return edges, None
    if tied and name_in and edges[name_in].style == "embedding_colwise":
        raise PlanError(
            f"{name_in} is tied to {name_out}: embedding_colwise would split the head's inputs. Use embedding_rowwise."
        )
    shards = {"weight": Shard.even(output.weight.shape, 0, tp_size)}
    if output.bias is not None:
        shards["bias"] = Shard.even(output.bias.shape, 0, tp_size)
    edges[name_out] = ModulePlan(name_out, "colwise_gather_output", shards, source=source, why="vocabulary")
    for name, parameter in held_parameters(model):
        owner, _, leaf = name.rpartition(".")
        if parameter is output.bias and owner != name_out:  # the same tensor under another name, as in BERT's heads
            edges[owner] = ModulePlan(owner, "local_params", {leaf: shards["bias"]}, source=source, why="vocabulary")
    return edges, name_out


def _embeddings(model: nn.Module) -> tuple[Any, Any]:
    def ask(method: str) -> Any:
        try:
            return getattr(model, method)()
        except (AttributeError, NotImplementedError):
            return None

    embedding, output = ask("get_input_embeddings"), ask("get_output_embeddings")
    has_weight = isinstance(output, nn.Module) and isinstance(getattr(output, "weight", None), nn.Parameter)
    return embedding if isinstance(embedding, nn.Embedding) else None, output if has_weight else None


def edge_modules(model: nn.Module) -> set[str]:
    """Names of the input and output embedding."""
    return {name for name, module in model.named_modules() if any(module is edge for edge in _embeddings(model))}


def edge_parameters(model: nn.Module) -> set[str]:
    """Names of the Parameters that this rule decides about."""
    edges = {id(m.weight) for m in _embeddings(model) if isinstance(getattr(m, "weight", None), nn.Parameter)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in edges}


def read_elsewhere(model: nn.Module, records: Sequence[Record]) -> set[str]:
    """Names of the input and output embedding where no call runs them, or what they hold is read outside their forward."""
    names = {module: name for name, module in model.named_modules()}
    found = set()
    for module in _embeddings(model):
        if module is None or module not in names:
            continue
        owners = {name for other, name in names.items() if getattr(other, "weight", None) is module.weight}
        parameters = {f"{name}.weight" for name in owners}
        called = any(names[module] in record.module_calls for record in records)
        sites = [site for record in records for site in record.sites.values() if site.parameter in parameters]
        if not called or any(call.modules[-1] not in owners for site in sites for call in site.calls):
            found.add(names[module])
    return found


def _plan_embedding(module: Any, name: str, style: str, tp_size: int, source: str) -> ModulePlan:
    dim = 0 if style == "embedding_rowwise" else 1
    if module.weight.shape[dim] < tp_size:
        raise PlanError(
            f"{name} has {module.weight.shape[dim]} rows for {tp_size} ranks: plan {{'{name}': 'whole'}} leaves it whole"
        )
    shard = Shard.even(module.weight.shape, dim, tp_size)
    check_embedding(module, name, shard)
    return ModulePlan(name, style, {"weight": shard}, source=source, why="vocabulary" if dim == 0 else "")
