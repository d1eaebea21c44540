"""Gives every module of a plan its sharded forward, and plain modules their own again; data is cut and joined elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..comm import TPGroup
from ..errors import PlanError
from ..layers.base import TensorParallel_Layer, insert_class, plain_class
from ..layers.conv import CONVOLUTIONS, ConvAllreduce, ConvLayer, ConvPartial, rewrite_conv, set_conv_sizes
from ..layers.embedding import (
    HiddenParallelEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
    check_embedding,
    set_local_sizes,
)
from ..layers.linear import (
    Conv1DAllreduce,
    Conv1DLayer,
    Conv1DPartial,
    EnteringLinear,
    LinearAllreduce,
    LinearLayer,
    LinearPartial,
    ParallelLinear,
    prepare,
    rewrite_linear,
    set_linear_sizes,
)
from ..layers.norm import install_norm
from ..layers.region import Border, Entry, install_region
from ..layers.siblings import SiblingInput
from . import plan as styles
from .attributes import set_attributes
from .plan import ModulePlan, Plan

COLUMN, ROW, PARTIAL = 0, 1, 2
LINEARS = (LinearLayer, LinearAllreduce, LinearPartial)
CONV1DS = (Conv1DLayer, Conv1DAllreduce, Conv1DPartial)
CONVS = (ConvLayer, ConvAllreduce, ConvPartial)
ROLES = {
    **dict.fromkeys(styles.COLUMN_STYLES, COLUMN),
    **dict.fromkeys(styles.ROW_STYLES, ROW),
    **dict.fromkeys(styles.PARTIAL_STYLES, PARTIAL),
}
EMBEDDINGS = {
    "embedding_rowwise": VocabParallelEmbedding,
    "embedding_colwise": HiddenParallelEmbedding,
    "embedding_colwise_local": TensorParallel_Layer,  # the plain lookup, of this rank's columns
}

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
    "columns",
    "keep_sharded",
    "owned_indices",
    "autotp_border",
    "autotp_norm",
]


def rewrite_modules(model: nn.Module, plan: Plan, group: TPGroup) -> None:
    """Give every module of the plan its sharded forward.

    Raises:
        PlanError: a module is not of the kind that its style needs.
    """
    members: dict[str, int] = {}
    for entry in plan.modules:
        if entry.siblings:
            members[entry.siblings] = members.get(entry.siblings, 0) + 1
    dtypes = {entry.siblings: _dtype(entry) for entry in plan.modules if entry.siblings}
    shared = {key: SiblingInput(group, count, dtypes[key]) for key, count in members.items()}
    for entry in plan.modules:
        rewrite_module(model.get_submodule(entry.name), entry, plan, group, shared)
    last = {plan[name].siblings: region for region in plan.regions for name in region.columns if name in plan.by_name}
    for region in plan.regions:
        ended = tuple(shared[key] for key, until in last.items() if key is not None and until is region)
        for name in region.rows:
            row = model.get_submodule(name)
            if hasattr(type(row), "ends"):
                row.ends = ended  # type: ignore[assignment]


def rewrite_module(module: Any, entry: ModulePlan, plan: Plan, group: TPGroup, shared: Mapping[str, SiblingInput]) -> None:
    """Turn one module into what its plan says: its attributes, its own forward by style, then what surrounds that."""
    name, style, shards, dtype = entry.name, entry.style, entry.shards, _dtype(entry)
    set_attributes(module, name, entry.attrs, group.tp_rank)
    if name == plan.head:
        insert_class(module, VocabParallelHead)
        prepare(module, group, shards, name)
        set_local_sizes(module)
    elif style in EMBEDDINGS:
        check_embedding(module, name)
        insert_class(module, EMBEDDINGS[style])
        prepare(module, group, shards, name)
        set_local_sizes(module)
    elif style in ROLES:
        rewrite_matmul(module, entry, group, shared)
    elif entry.norm is not None:
        install_norm(module, group, shards, name, entry.norm.kind, entry.norm.eps, entry.norm.width)
    elif entry.columns:
        insert_class(module, EnteringLinear)
        prepare(module, group, shards, name)
        module.columns, module.reduce_dtype = entry.columns, dtype
    elif shards:
        insert_class(module, TensorParallel_Layer)
        prepare(module, group, shards, name)
    entries = tuple(
        Entry(i.argument, i.position, i.sums, i.dim, i.period, i.indices[group.tp_rank] if i.indices else ())
        for i in entry.inputs
    )
    border = Border(entry.summed, entry.once, find_copied(module, entry), entries, entry.outputs, dtype)
    if border:
        install_region(module, group, shards, name, border)


def rewrite_matmul(module: Any, entry: ModulePlan, group: TPGroup, shared: Mapping[str, SiblingInput]) -> None:
    """Turn a linear, Conv1D or convolution into its column, row or partial layer.

    Raises:
        PlanError: the module is none of them.
    """
    style, role = entry.style, ROLES[entry.style]
    if isinstance(module, CONVOLUTIONS):
        rewrite_conv(module, CONVS[role], group, entry.shards, entry.name, _dtype(entry))
    elif isinstance(module, nn.Linear | Conv1D):
        layer = (CONV1DS if isinstance(module, Conv1D) else LINEARS)[role]
        rewrite_linear(module, layer, group, entry.shards, entry.name, _dtype(entry))
    else:
        raise PlanError(
            f"{entry.name} is a {type(module).__name__}, which has no {style} form: nn.Linear, Conv1D and convolutions have"
        )
    state = module.__dict__
    if role == COLUMN:
        state["siblings"] = shared[entry.siblings] if entry.siblings else None
    if style in styles.GATHERING_STYLES + styles.SPLITTING_STYLES:
        state["gather_output" if role == COLUMN else "split_input"] = True


def find_copied(module: nn.Module, entry: ModulePlan) -> tuple[str, ...]:
    """Names of parameters with copies whose gradient the module's own layer does not sum."""
    if isinstance(module, ParallelLinear):
        return ()
    return tuple(name for name, shard in entry.shards.items() if name in module._parameters and shard.copied is not None)


def make_plain(module: Any) -> None:
    """Give a rewritten module its own class and sizes back; its data must be whole already."""
    weight = module.shards.get("weight")
    if weight is not None and isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = weight.shape
    elif weight is not None and isinstance(module, (ParallelLinear, VocabParallelHead)):
        set_linear_sizes(module, weight.shape)
    elif weight is not None and isinstance(module, CONVS):
        set_conv_sizes(module, weight.shape)
    while isinstance(module, TensorParallel_Layer):  # a layer inside a region was inserted first
        module.__class__ = plain_class(module)
    for key in LAYER_STATE:
        module.__dict__.pop(key, None)


def _dtype(entry: ModulePlan) -> torch.dtype | None:
    return None if entry.reduce_dtype is None else getattr(torch, entry.reduce_dtype)
