"""Which linears multiply in FP8: chosen when a plan is made, noted in it with the reasons of those that do not, carried out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from ..comm import TPGroup
from ..errors import PlanError
from ..kernels.fp8 import Recipe
from ..kernels.fp8_scaled import why_not_fp8
from ..layers.fp8 import ScaledLinear, Scaling, store_weight
from ..layers.fp8_together import Together
from ..layers.linear import ParallelLinear
from . import styles
from .module_plan import ModulePlan
from .plan import Plan, ProductPlan
from .specs import match_names

OWN = "bf16"  # the tensors' own dtype, whatever it is
RECIPES: dict[str, Recipe | None] = {
    "fp8": Recipe(),
    "fp8-tensorwise": Recipe(),
    "fp8-rowwise": Recipe("rowwise"),
    "fp8-blockwise": Recipe("blockwise"),
    "fp8-weights": Recipe("rowwise", weights_only=True),
    OWN: None,
}
STACKED = "stacked experts, whose grouped products have no FP8"
EDGE = "first and last layers, outside the repeated ones, stay as they are"


def read_recipe(value: Any) -> Recipe | None:
    """What one value of `precision=` asks for.

    Raises:
        PlanError: it is none.
    """
    if value is None or isinstance(value, Recipe):
        return value
    if isinstance(value, str) and value in RECIPES:
        return RECIPES[value]
    raise PlanError(f"precision={value!r} is none of {', '.join(RECIPES)}, nor an autotp.Recipe, nor a dict of names to these")


def check_precision(precision: Any) -> None:
    """Raise for a value of `precision=` that is none."""
    for value in precision.values() if isinstance(precision, Mapping) else (precision,):
        read_recipe(value)


def choose_products(model: nn.Module, plan: Plan, precision: Any) -> Plan:
    """`plan` with the products of its model's linears as `precision` asks; one that says so already keeps what it says.

    Args:
        precision: None, a name of RECIPES, a Recipe, or a dict of module names or patterns to these, of which the last that
            matches counts; "*" are all linears.

    Raises:
        PlanError: a name that matches no linear, or no such precision.
    """
    check_precision(precision)
    if precision is None:
        check_products(model, plan)
        return plan
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    precision = precision if isinstance(precision, Mapping) else {"*": precision}
    asked = _ask(model, linears, precision)
    found = {name: _choose(model, plan, name, module, *asked[name]) for name, module in linears.items() if name in asked}
    found = _agree(plan, linears, found)
    if read_recipe(precision.get("*")) is not None:
        found |= {name: ProductPlan(name, None, STACKED) for name in _find_stacked(model, plan)}
    return replace(plan, products=tuple(found.values()))


def _find_stacked(model: nn.Module, plan: Plan) -> list[str]:
    """Modules that hold the weights of several linears in one Parameter: experts."""
    experts = {fusion.name for fusion in plan.fused if fusion.kind == "experts"}
    for name, module in model.named_modules():
        entry = plan.by_name.get(name)
        stacked = () if entry is None else (key for key, shard in entry.shards.items() if len(shard.shape) == 3)
        if any(True for _ in stacked) and not isinstance(module, nn.modules.conv._ConvNd):
            experts.add(name)
    return [name for name, _ in model.named_modules() if name in experts]


def check_products(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan whose products are not those of `model`."""
    modules, stacked = dict(model.named_modules()), set(_find_stacked(model, plan)) if plan.products else set()
    for product in plan.products:
        if product.name in stacked and product.recipe is None:
            continue
        if not isinstance(modules.get(product.name), nn.Linear | Conv1D):
            raise PlanError(f"the plan has an FP8 product of {product.name}, which is no linear of {type(model).__name__}")


def _ask(
    model: nn.Module, linears: Mapping[str, nn.Module], precision: Mapping[str, Any]
) -> dict[str, tuple[Recipe | None, bool]]:
    """Name of a linear -> what is asked for it, and whether by more than `*`."""
    found: dict[str, tuple[Recipe | None, bool]] = {}
    for key, value in precision.items():
        matched = list(linears) if key == "*" else [n for n in linears if n in match_names(key, linears)]
        if not matched and key != "*":
            raise PlanError(f"precision= names {key!r}, which matches no linear of {type(model).__name__}")
        found |= dict.fromkeys(matched, (read_recipe(value), key != "*"))
    return found


def _choose(model: nn.Module, plan: Plan, name: str, module: Any, recipe: Recipe | None, named: bool) -> ProductPlan:
    if recipe is None:
        return ProductPlan(name, None, "as asked" if named else "")
    entry = plan.by_name.get(name)
    split = entry is not None and entry.style in styles.COLUMN_STYLES + styles.ROW_STYLES + styles.PARTIAL_STYLES
    outputs = getattr(model, "get_output_embeddings", lambda: None)
    head = name == plan.head or module is _try(outputs)
    why = ""
    if head or (not named and not re.search(r"(^|\.)\d+(\.|$)", name)):
        why = EDGE
    elif entry is not None and entry.columns:
        why = "some of its columns enter sharded computation"
    elif not split and type(module) is not nn.Linear:
        why = f"a {type(module).__name__} that is not split"
    elif entry is not None and not split and entry.shards:
        why = f"its style is {entry.style}"
    elif split and type(module) not in (nn.Linear, Conv1D) and "forward" in type(module).__dict__:
        why = f"{type(module).__name__} has a forward of its own"
    elif recipe.weights_only and isinstance(module, Conv1D):
        why = "a Conv1D, whose weight lies turned"
    else:
        return ProductPlan(name, recipe, "")
    return ProductPlan(name, None, why)


def _try(ask: Any) -> Any:
    try:
        return ask()
    except (NotImplementedError, AttributeError, TypeError):
        return None


def _agree(plan: Plan, linears: Mapping[str, Any], found: dict[str, ProductPlan]) -> dict[str, ProductPlan]:
    """The same where linears that read one input are one product: all are FP8, or none; and what is too small is not."""
    groups: dict[str, list[str]] = {}
    for name in found:
        entry = plan.by_name.get(name)
        groups.setdefault(f"={entry.siblings}" if entry is not None and entry.siblings else name, []).append(name)
    for names in groups.values():
        recipes = {found[name].recipe for name in names}
        if recipes == {None}:
            continue
        why = ""
        if len(recipes) > 1:
            others = [name for name in names if found[name].recipe is None] or names
            why = f"reads one input with {others[0].rpartition('.')[2]}, which is another product"
        else:
            why = _why_too_small(found[names[0]].recipe, [_local_sizes(plan, name, linears[name]) for name in names])
        if why:
            found |= {name: ProductPlan(name, None, found[name].why or why) for name in names}
    return found


def _local_sizes(plan: Plan, name: str, module: Any) -> list[tuple[int, int]]:
    """(outputs, inputs) on each rank."""
    shard = plan.shards.get(f"{name}.weight")
    shape = tuple(module.weight.shape)
    sizes = [shape] * plan.tp_size if shard is None else [shard.local_shape(rank) for rank in range(plan.tp_size)]
    return [(size[1], size[0]) if isinstance(module, Conv1D) else (size[0], size[1]) for size in sizes]


def _why_too_small(recipe: Recipe | None, members: list[list[tuple[int, int]]]) -> str:
    assert recipe is not None
    for rank, sizes in enumerate(zip(*members, strict=True)):
        for n, k in sizes:
            if n % recipe.multiple or k % recipe.multiple or 0 in (n, k):
                where = f" on rank {rank}" if len(members[0]) > 1 else ""
                return f"{n} x {k}{where} are not multiples of {recipe.multiple}"
        n, k = sum(n for n, _ in sizes), sizes[0][1]
        if min(n, k) < recipe.least:
            return f"{n} x {k} are fewer than {recipe.least}: quantising would take longer than it saves"
    return ""


# -- carrying it out ------------------------------------------------------------------------------------------------------


def check_device(plan: Plan, group: TPGroup) -> None:
    """Refuse a GPU that has no such products.

    Raises:
        PlanError: with the reason.
    """
    for recipe in {product.recipe for product in plan.products if product.recipe is not None}:
        if reason := why_not_fp8(group.device, recipe.scaling):
            raise PlanError(f"precision= asks for FP8 products, but {reason}; or leave precision= out")


def store_weights(model: nn.Module, plan: Plan) -> Callable[[str], None]:
    """What is to be told the name of each Parameter that was read: those that are kept in FP8 alone are quantised at once."""
    kept = {f"{p.name}.weight": p.name for p in plan.products if p.recipe is not None and p.recipe.weights_only}

    def store(name: str) -> None:
        if name in kept:
            module: Any = model.get_submodule(kept[name])
            store_weight(module, module.weight)

    return store


def install_products(model: nn.Module, plan: Plan, group: TPGroup) -> None:
    """Give every linear of which the plan says so its FP8 products; the modules are rewritten already."""
    together = Together()
    for product in plan.products:
        if product.recipe is None:
            continue
        module: Any = model.get_submodule(product.name)
        entry = plan.by_name.get(product.name)
        if product.recipe.weights_only and module.weight.element_size() > 1:  # not stored as it was read
            store_weight(module, module.weight)
        if not isinstance(module, ParallelLinear):
            module.__class__ = ScaledLinear
            module.scaling = Scaling(product.recipe, product.name, together=together)
            continue
        cut = _find_cut(module, entry)
        module.scaling = Scaling(product.recipe, product.name, group, cut, module.out_dim == 1, together)
        siblings: Any = module.siblings
        place: Any = module.place if siblings is not None else -1
        if siblings is not None and siblings.members > 1 and siblings.scaling is None and place >= 0:
            siblings.scaling = Scaling(product.recipe, product.name, group, cut, together=together)


def _find_cut(module: Any, entry: ModulePlan | None) -> int | None:
    dims = [cut.dim for cut in module.shards["weight"].cuts]
    return None if not dims else 0 if dims[0] == module.out_dim else 1


def remove_products(model: nn.Module) -> None:
    """Make whole linears plain again; split ones were, with their shards."""
    for module in model.modules():
        if type(module) is ScaledLinear:
            module.__class__ = nn.Linear  # type: ignore[assignment]
            module.__dict__.pop("scaling", None)
