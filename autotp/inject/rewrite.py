"""Makes a model tensor-parallel in place, and plain again: resolve, check everything on every rank, then swap."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..checkpoint.load import fill_from_source
from ..checkpoint.save import save_pretrained
from ..checkpoint.source import ModuleSource, SafetensorsSource, take_part
from ..comm import TPGroup, resolve_group
from ..errors import PlanError
from ..layers.base import (
    SummedGradients,
    TensorParallel_Layer,
    check_usable,
    find_group,
    index_parameters,
    insert_class,
    mark_broken,
    plain_class,
    sharded_modules,
)
from ..layers.embedding import HiddenParallelEmbedding, VocabParallelEmbedding, VocabParallelHead, set_local_sizes
from ..layers.entry import install_entry, remove_entry
from ..layers.guards import install_guards, mark_model, unmark_model
from ..layers.linear import EnteringLinear, ParallelLinear, prepare, rewrite_linear, set_linear_sizes
from ..layers.siblings import SiblingInput
from . import plan as styles
from .checks import check_agreement, check_memory, check_options, digest_weights, refuse_unbuilt, with_attrs
from .load import build_empty, find_checkpoint
from .plan import ModulePlan, Plan
from .rules import make_plan
from .shapes import check_shapes

# Instance attributes that the rewrite sets on modules, over and above its own names.
LAYER_STATE = [
    "tp",
    "shards",
    "full_name",
    "run",
    "siblings",
    "ends",
    "gather_output",
    "split_input",
    "reduce_dtype",
    "summed",
    "columns",
    "keep_sharded",
    "owned_indices",
]


def parallelize(
    model: nn.Module,
    group_or_mesh: Any = None,
    *,
    plan: Any = "auto",
    inputs: Any = None,
    sequence_parallel: Any = False,
    precision: Any = None,
    logits: str = "auto",
    head: str = "auto",
    attrs: Any = None,
    timeout_s: float = 600,
) -> nn.Module:
    """Make `model` tensor-parallel in place over the ranks of a group; every rank calls it with the same model.

    The model keeps its class, module names, state-dict keys and Parameter objects; each Parameter holds this rank's shard
    afterwards. Weights on the CPU go to this rank's GPU shard by shard if the group communicates through NCCL.

    Args:
        model: a transformers model, equal on all ranks.
        group_or_mesh: process group or one-axis DeviceMesh; None for all ranks of a torchrun job, set up here if need be.
        plan: "auto" or "hf" for the model's own Hugging Face plan, a dict, or a `Plan`; see `make_plan`.
        logits: what training with labels returns: "auto" no logits, "full" whole ones, "sharded" this rank's columns.
        head: "auto", or "whole" for losses computed outside the model that read the head's weight.
        attrs: `{module name or pattern: {attribute: one value per rank}}` to be edited beside the plan.
        timeout_s: seconds after which a rank that does not arrive is named.
        inputs, sequence_parallel, precision: not built yet; anything but the default raises.

    Returns:
        `model` itself.

    Raises:
        AutoTPError: before anything is changed: no group, a plan that does not fit, ranks that differ, an option not built.
    """
    refuse_unbuilt(inputs=inputs, sequence_parallel=sequence_parallel, precision=precision)
    check_options(logits)
    if find_group(model) is not None or "autotp_plan" in model.__dict__:
        raise PlanError(f"this {type(model).__name__} is parallelized already; autotp.unshard(model) makes it plain again")
    check_usable(model)
    group = resolve_group(group_or_mesh, timeout_s)
    group.arrive("parallelize")
    with group.together("making the plan"):
        if any(p.is_meta for p in model.parameters()):
            raise PlanError("the model has parameters on meta, which hold no weights: use autotp.from_pretrained(path)")
        made = make_plan(model, group.tp_size, with_attrs(plan, attrs), head)
        check_shapes(model, made, rewrite_modules)
        check_memory(made, group, model)
    check_agreement(group, made, digest_weights(model))
    try:
        cut_weights(model, made, group)
        finish_rewrite(model, made, group, logits)
    except BaseException as error:
        mark_broken(model, f"rewriting it failed half way ({type(error).__name__}: {error})")
        raise
    return model


def from_pretrained(
    path: str,
    group_or_mesh: Any = None,
    *,
    plan: Any = "auto",
    inputs: Any = None,
    sequence_parallel: Any = False,
    precision: Any = None,
    logits: str = "auto",
    head: str = "auto",
    attrs: Any = None,
    timeout_s: float = 600,
    dtype: torch.dtype | str | None = "auto",
) -> nn.Module:
    """`parallelize` of a checkpoint, of which each rank reads only its own slices.

    Args:
        path: a hub id, or a directory with config.json and safetensors files.
        dtype: of floating-point parameters; "auto" keeps the checkpoint's; None the config's own.
        The others as in `parallelize`.

    Raises:
        CheckpointError: a file is missing, truncated or does not fit the model.
        AutoTPError: as `parallelize`.
    """
    refuse_unbuilt(inputs=inputs, sequence_parallel=sequence_parallel, precision=precision)
    check_options(logits)
    group = resolve_group(group_or_mesh, timeout_s)
    group.arrive("from_pretrained")
    with group.together("reading the checkpoint's headers"):
        directory = find_checkpoint(path)
        source = SafetensorsSource(directory)
    with source:
        with group.together("making the plan"):
            model = build_empty(directory, source, dtype)
            made = make_plan(model, group.tp_size, with_attrs(plan, attrs), head)
            check_shapes(model, made, rewrite_modules)
        check_agreement(group, made, source.digest())
        fill_from_source(model, made, source, group)
    finish_rewrite(model, made, group, logits)
    return model.eval()


def unshard(model: nn.Module) -> nn.Module:
    """The inverse of `parallelize`, in place and collective: plain modules that hold whole weights on every rank.

    Parameter objects survive; gradients, which were of shards, are dropped.

    Raises:
        AutoTPError: the model is not parallelized, or is broken.
    """
    group = find_group(model)
    if group is None:
        raise PlanError(f"this {type(model).__name__} is not parallelized")
    check_usable(model)
    group.arrive("unshard")
    remove_entry(model)
    unmark_model(model)
    try:
        join_weights(model)
    except BaseException as error:
        mark_broken(model, f"unsharding it failed half way ({type(error).__name__}: {error})")
        raise
    for module in model.modules():
        for key, value in module.__dict__.pop("autotp_attrs", {}).items():
            setattr(module, key, value)
    model.__dict__.pop("autotp_plan", None)
    return model


# -- the change ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def cut_weights(model: nn.Module, plan: Plan, group: TPGroup) -> None:
    """Replace data and gradient of every Parameter by this rank's part, on the group's device; one tensor at a time."""
    source, shards = ModuleSource(model), plan.shards
    of: dict[int, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in shards:
            of[id(parameter)] = shards[name]
    for name, parameter in model.named_parameters():
        shard = of.get(id(parameter))
        if shard is not None or parameter.device != group.device:
            grad, parameter.grad = parameter.grad, None
            parameter.data = source.read(name, shard, group.tp_rank, parameter.dtype, group.device)
            if grad is not None:
                parameter.grad = take_part(grad, shard, group.tp_rank, grad.dtype, group.device)
    for module in model.modules():
        for key, value in module._buffers.items():
            if value is not None and value.device != group.device:
                module._buffers[key] = value.to(group.device)


@torch.no_grad()
def join_weights(model: nn.Module) -> None:
    """Give every sharded Parameter its whole data on every rank, and its module its own class."""
    done: set[int] = set()
    for _, module in list(sharded_modules(model)):
        for name, shard in module.shards.items():
            parameter = module._parameters[name]
            if parameter is not None and id(parameter) not in done:
                done.add(id(parameter))
                parameter.grad = None
                parameter.data = module.tp.all_gather(parameter.data, shard)
        make_plain(module)


def finish_rewrite(model: nn.Module, plan: Plan, group: TPGroup, logits: str) -> None:
    """Swap the modules' forwards, and put hooks, guards and marks in place; the data is cut already."""
    rewrite_modules(model, plan, group)
    model.__dict__["autotp_plan"] = plan
    install_entry(model, group, plan.head, plan.loss, logits)
    install_guards(save=save_pretrained)
    mark_model(model, group)
    index_parameters(model)


def rewrite_modules(model: nn.Module, plan: Plan, group: TPGroup) -> None:
    """Give every module of the plan its sharded forward."""
    members: dict[str, int] = {}
    for module_plan in plan.modules:
        if module_plan.siblings:
            members[module_plan.siblings] = members.get(module_plan.siblings, 0) + 1
    dtypes = {m.siblings: _dtype(m) for m in plan.modules if m.siblings}
    shared = {key: SiblingInput(group, count, dtypes[key]) for key, count in members.items()}
    for module_plan in plan.modules:
        rewrite_module(model.get_submodule(module_plan.name), module_plan, plan, group, shared)
    for region in plan.regions:
        inputs = {shared[plan[name].siblings or ""] for name in region.columns}
        for name in region.rows:
            model.get_submodule(name).ends = tuple(inputs)  # type: ignore[assignment]


def rewrite_module(module: Any, entry: ModulePlan, plan: Plan, group: TPGroup, shared: dict[str, SiblingInput]) -> None:
    """Turn one module into what its plan says."""
    style, name = entry.style, entry.name
    if entry.attrs:
        module.__dict__["autotp_attrs"] = {key: getattr(module, key) for key in entry.attrs}
        for key, values in entry.attrs.items():
            setattr(module, key, values[group.tp_rank])
    if name == plan.head:
        insert_class(module, VocabParallelHead)
        prepare(module, group, entry.shards, name)
        set_local_sizes(module)
    elif style in styles.EMBEDDING_STYLES:
        insert_class(module, VocabParallelEmbedding if style == "embedding_rowwise" else HiddenParallelEmbedding)
        prepare(module, group, entry.shards, name)
        set_local_sizes(module)
    elif style in styles.COLUMN_STYLES:
        rewrite_linear(module, False, group, entry.shards, name, _dtype(entry))
        module.siblings = shared[entry.siblings or name]
        module.gather_output = style in styles.GATHERING_STYLES
    elif style in styles.ROW_STYLES:
        rewrite_linear(module, True, group, entry.shards, name, _dtype(entry))
        module.split_input = style in styles.SPLITTING_STYLES
    elif style == "mla_kv_a_proj":
        insert_class(module, EnteringLinear)
        prepare(module, group, {}, name)
        module.columns = entry.columns
    elif entry.summed:
        insert_class(module, SummedGradients)
        prepare(module, group, {}, name)
        module.summed = entry.summed
    elif entry.shards:
        insert_class(module, TensorParallel_Layer)
        prepare(module, group, entry.shards, name)


def make_plain(module: Any) -> None:
    """Give a rewritten module its own class and sizes back; its data must be whole already."""
    weight = module.shards.get("weight")
    if weight is not None and isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = weight.shape
    elif weight is not None and isinstance(module, (ParallelLinear, VocabParallelHead)):
        set_linear_sizes(module, weight.shape)
    module.__class__ = plain_class(module)
    for key in LAYER_STATE:
        module.__dict__.pop(key, None)


def _dtype(entry: ModulePlan) -> torch.dtype | None:
    return None if entry.reduce_dtype is None else getattr(torch, entry.reduce_dtype)
