"""Gives every module of a plan its sharded forward, and plain modules their own again; data is cut and joined elsewhere."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..comm import TPGroup
from ..errors import PlanError
from ..layers.adapter_parts import SummedPart
from ..layers.attention import disable_fast_paths, rewrite_attention
from ..layers.base import TensorParallel_Layer, insert_class, plain_class
from ..layers.conv import CONVOLUTIONS, ConvAllreduce, ConvLayer, ConvPartial, ParallelConv, rewrite_conv, set_conv_sizes
from ..layers.draws import DrawPart, Draws, install_draws
from ..layers.embedding import (
    HiddenParallelEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
    check_embedding,
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
from ..layers.overlap import OPTIONS, set_options
from ..layers.region import Border, Entry, install_region
from ..layers.siblings import SiblingInput
from ..layers.tokens import TokenStream
from . import styles
from .attributes import set_attributes
from .callsites import apply_fixes, remove_fixes
from .chains import find_stream, rewrite_chain
from .forwards import Forward, find_forward, replace_forward
from .module_plan import ModulePlan
from .plan import Plan

Shared = Mapping[str, SiblingInput]
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

# Instance attributes that the rewrite sets: on every rewritten module, and on linears, convolutions and embeddings alone.
STATE = ("tp", "shards", "full_name", "owned_indices", "autotp_border", "autotp_norm", "autotp_tokens", "autotp_draws")
LINEAR_STATE = (
    "run",
    "copied",
    "siblings",
    "place",
    "accumulates",
    "ends",
    "gather_output",
    "split_input",
    "reduce_dtype",
    "scaling",
    "columns",
    "keep_sharded",
    "ran",
    "tokens",
    "always",
    "row",
    *OPTIONS,
)


def rewrite_modules(model: nn.Module, plan: Plan, group: TPGroup, forwards: Mapping[str, Forward] | None = None) -> None:
    """Give every module of the plan its sharded forward; `forwards` are the replacement forwards that it speaks of.

    Raises:
        PlanError: a module is not of the kind that its style needs, or its replacement forward is missing.
    """
    members: dict[str, int] = {}
    for entry in plan.modules:
        if entry.siblings:
            members[entry.siblings] = members.get(entry.siblings, 0) + 1
    dtypes = {entry.siblings: _dtype(entry) for entry in plan.modules if entry.siblings}
    draws = Draws(group)
    streams = {chain.name: TokenStream(group, plan.sequence_parallel, draws) for chain in plan.chains}
    inside = {entry.siblings: find_stream(plan, streams, entry.name) for entry in plan.modules if entry.siblings}
    shared = {key: SiblingInput(group, count, dtypes[key], inside[key]) for key, count in members.items()}
    for entry in plan.modules:
        module = model.get_submodule(entry.name)
        if entry.forward is not None:
            replace_forward(module, entry.name, find_forward(forwards or {}, entry.name, entry.forward))
        rewrite_module(module, entry, plan, group, shared, find_stream(plan, streams, entry.name))
    disable_fast_paths(model)
    for each in plan.draws:
        part = DrawPart(draws, each.parts[group.tp_rank] if each.parts else 0, each.inside, each.after, each.rates)
        install_draws(model.get_submodule(each.name), each.name, part)
    for chain in plan.chains:
        rewrite_chain(model, chain, plan, group, streams[chain.name])
    last = {plan[name].siblings: region for region in plan.regions for name in region.columns if name in plan.by_name}
    for region in plan.regions:
        ended = tuple(shared[key] for key, until in last.items() if key is not None and until is region)
        for name in region.rows:
            row = model.get_submodule(name)
            if hasattr(type(row), "ends"):
                row.ends = ended  # type: ignore[assignment]


def rewrite_module(
    module: Any, entry: ModulePlan, plan: Plan, group: TPGroup, shared: Shared, stream: TokenStream | None = None
) -> None:
    """Turn one module into what its plan says: its own source and attributes, a forward of one kind, what surrounds that.

    Raises:
        PlanError: the plan says two kinds at once, or the module is not of that kind.
    """
    is_head = entry.name == plan.head
    kinds = {
        install_head: is_head,
        install_embedding: entry.style in EMBEDDINGS,
        install_matmul: entry.style in ROLES and not is_head,
        install_attention: entry.style in styles.ATTENTION_STYLES,
        install_dealt_norm: entry.norm is not None,
        install_entering: bool(entry.columns) and entry.style not in styles.ROW_STYLES,
    }
    wanted = [install for install, wants in kinds.items() if wants]
    if len(wanted) > 1:
        raise PlanError(f"{entry.name}: the plan says style {entry.style}, norm {entry.norm} and columns {entry.columns} at once")
    if wanted and entry.forward:
        raise PlanError(
            f"{entry.name}: as {entry.style} it gets a forward of its own, and can't have {entry.forward}: leave it out"
        )
    border = make_border(module, entry, group.tp_rank, stream)
    if wanted or border or entry.shards:
        check_names(module, entry.name)
    if entry.fixes:
        apply_fixes(module, entry.fixes, group.tp_rank, entry.name)
    set_attributes(module, entry.name, entry.attrs, group.tp_rank)
    (wanted or [install_shards])[0](module, entry, group, shared)
    if border:
        install_region(module, group, entry.shards, entry.name, border)


def make_border(module: nn.Module, entry: ModulePlan, rank: int, stream: TokenStream | None = None) -> Border:
    """What is to happen around the module's forward on `rank`; a linear sums the gradients of its copies itself."""
    check_inputs(module, entry)
    entries = tuple(
        Entry(i.argument, i.position, i.sums, i.dim, i.period, i.indices[rank] if i.indices else ()) for i in entry.inputs
    )
    copied = [name for name, shard in entry.shards.items() if name in module._parameters and shard.copied is not None]
    if entry.style in ROLES and isinstance(module, nn.Linear | Conv1D):
        copied = []
    return Border(entry.summed, entry.once, (*copied, *entry.copied), entries, entry.outputs, _dtype(entry), stream)


def check_inputs(module: nn.Module, entry: ModulePlan) -> None:
    """Raise if the plan names an argument that the module's forward does not have, or has in another place."""
    parameters = inspect.signature(module.forward).parameters if entry.inputs else {}
    kinds = {parameter.kind for parameter in parameters.values()}
    for each in entry.inputs:
        names = list(parameters)
        found = names.index(each.argument) if each.argument in parameters else None
        wrong = found is None and inspect.Parameter.VAR_KEYWORD not in kinds
        wrong |= each.position not in (None, found) and (found is not None or inspect.Parameter.VAR_POSITIONAL not in kinds)
        if wrong or (each.dim is not None and not each.indices):
            raise PlanError(
                f"{entry.name}: the plan has argument '{each.argument}' at place {each.position} with {len(each.indices)} ranks' "
                f"parts; {type(module).__name__}.forward takes ({', '.join(names)}). Make the plan again."
            )


def check_names(module: nn.Module, name: str) -> None:
    """Raise if the module has an attribute of its own where a rewritten one keeps its shards."""
    taken = [key for key in STATE[:3] if key in module.__dict__ or key in module._modules or key in module._parameters]
    if taken and not isinstance(module, TensorParallel_Layer):
        raise PlanError(
            f"{name} ({type(module).__name__}) has attributes {taken} of its own, where a split module keeps its shards: "
            f"leave it out of the plan"
        )


# -- one installer for each kind of forward -------------------------------------------------------------------------------


def refuse_copies(entry: ModulePlan) -> None:
    """Raise if ranks hold copies of what this module adds up or gathers."""
    if any(shard.has_copies for shard in entry.shards.values()):
        raise PlanError(
            f"{entry.name}: a module of style {entry.style} adds up or gathers the ranks' parts, but some are held twice"
        )


def install_head(module: Any, entry: ModulePlan, group: TPGroup, shared: Shared) -> None:
    """The output embedding.

    Raises:
        PlanError: its style says that it does something else.
    """
    if entry.style not in styles.GATHERING_STYLES:
        raise PlanError(f"{entry.name} is the plan's head, which gathers its columns: its style can't be {entry.style}")
    refuse_copies(entry)
    insert_class(module, VocabParallelHead)
    prepare(module, group, entry.shards, entry.name)


def install_embedding(module: Any, entry: ModulePlan, group: TPGroup, shared: Shared) -> None:
    """An embedding cut over its rows or columns.

    Raises:
        PlanError: it is none, or has an option that needs the whole table.
    """
    if not isinstance(module, nn.Embedding):
        raise PlanError(f"{entry.name} is a {type(module).__name__}, which has no {entry.style} form: nn.Embedding has")
    check_embedding(module, entry.name)
    if entry.style != "embedding_colwise_local":
        refuse_copies(entry)
    insert_class(module, EMBEDDINGS[entry.style])
    prepare(module, group, entry.shards, entry.name)
    if entry.style == "embedding_colwise_local":
        module.embedding_dim = entry.shards["weight"].local_shape(group.tp_rank)[1]


def install_matmul(module: Any, entry: ModulePlan, group: TPGroup, shared: Shared) -> None:
    """A linear, Conv1D or convolution as its column, row or partial layer.

    Raises:
        PlanError: the module is none of them, or a convolution is to split its input.
    """
    style, role = entry.style, ROLES[entry.style]
    alone = style in styles.GATHERING_STYLES + styles.SPLITTING_STYLES
    if alone:
        refuse_copies(entry)
    if isinstance(module, CONVOLUTIONS) and style not in styles.SPLITTING_STYLES:
        rewrite_conv(module, CONVS[role], group, entry.shards, entry.name, _dtype(entry))
    elif isinstance(module, nn.Linear | Conv1D):
        layer = (CONV1DS if isinstance(module, Conv1D) else LINEARS)[role]
        rewrite_linear(module, layer, group, entry.shards, entry.name, _dtype(entry))
        set_options(module, entry.overlap)
    else:
        raise PlanError(f"{entry.name} is a {type(module).__name__}, which has no {style} form: leave it out of the plan")
    state = module.__dict__
    if role == COLUMN:
        state["siblings"] = shared[entry.siblings] if entry.siblings else None
        if entry.siblings and isinstance(module, LinearLayer):
            shared[entry.siblings].add(module)
    if alone:
        state["gather_output" if role == COLUMN else "split_input"] = True
        set_sizes(module, entry.shards["weight"].shape)  # it takes and returns whole columns
    if entry.columns:  # what the ranks have summed enters again (Mamba's x_proj)
        insert_class(module, EnteringLinear)
        state["columns"] = entry.columns


def install_attention(module: Any, entry: ModulePlan, group: TPGroup, shared: Shared) -> None:
    """torch's own attention, heads dealt."""
    rewrite_attention(module, group, entry.shards, entry.name, _dtype(entry))


def install_dealt_norm(module: Any, entry: ModulePlan, group: TPGroup, shared: Shared) -> None:
    """A norm over a dealt width."""
    norm = entry.norm
    assert norm is not None
    install_norm(module, group, entry.shards, entry.name, norm.kind, norm.eps, norm.width)


def install_entering(module: Any, entry: ModulePlan, group: TPGroup, shared: Shared) -> None:
    """A linear kept whole of which some columns enter."""
    insert_class(module, EnteringLinear)
    prepare(module, group, entry.shards, entry.name)
    module.columns, module.reduce_dtype = entry.columns, _dtype(entry)


def install_shards(module: Any, entry: ModulePlan, group: TPGroup, shared: Shared) -> None:
    """Any module that runs as it is on parts of its parameters and buffers."""
    if entry.shards:
        insert_class(module, TensorParallel_Layer)
        prepare(module, group, entry.shards, entry.name)


def set_sizes(module: Any, shape: tuple[int, ...]) -> None:
    """Make the sizes that a linear, convolution or embedding shows those of a weight of `shape`."""
    if isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = shape
    elif isinstance(module, CONVOLUTIONS):
        set_conv_sizes(module, shape)
    else:
        set_linear_sizes(module, shape)


# -- and back -----------------------------------------------------------------------------------------------------------


def make_plain(module: Any) -> None:
    """Give a rewritten module its own class and sizes back; its data must be whole already."""
    weight = module.shards.get("weight")
    if weight is not None:
        set_sizes(module, weight.shape)
    linear = isinstance(module, ParallelLinear | VocabParallelHead | EnteringLinear | ParallelConv | SummedPart)
    for key in STATE + LINEAR_STATE if linear else STATE:
        module.__dict__.pop(key, None)
    while isinstance(module, TensorParallel_Layer):  # a layer inside a region was inserted first
        module.__class__ = plain_class(module)
    remove_fixes(module)


def _dtype(entry: ModulePlan) -> torch.dtype | None:
    return None if entry.reduce_dtype is None else getattr(torch, entry.reduce_dtype)
