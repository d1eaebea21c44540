"""peft's LoRA beside sharded layers: each piece of an adapter is dealt as the layer that it stands beside.

| the layer | A `[r, K]` | B `[N, r]` | communication |
|---|---|---|---|
| column | whole | `[N/T, r]`, a column linear of its own | backward: `[M, r]` |
| column entered by a region around it | whole, gradient summed | `[N/T, r]` | backward: A's gradient |
| row | `[r, K/T]`, a row linear of its own | whole | forward: `[M, r]` |
| row whose sum is left to a module around it | `[r, K/T]`, partial | whole, gradient summed | backward: B's gradient |
| embedding | whole | whole | none; merging takes this rank's rows |
| stacked experts | the one on the dealt side is dealt, the other's gradient summed | | backward: that gradient |

peft makes the pieces for the whole layer, drawn as for an unsharded model; then they are cut. What is cut are modules with
shards like others, so gathering, saving, loading, clipping and training state need nothing of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import TPGroup
from ..errors import AutoTPError
from ..shard import Cut, Shard
from .adapter_parts import DealtDelta, DealtDora, DealtDropout, DealtRows, SummedPart
from .base import TensorParallel_Layer, index_parameters, insert_class
from .embedding import HiddenParallelEmbedding, VocabParallelEmbedding, VocabParallelHead
from .linear import (
    Conv1DPartial,
    EnteringLinear,
    LinearAllreduce,
    LinearLayer,
    LinearPartial,
    ParallelLinear,
    prepare,
    set_linear_sizes,
)
from .region import Border, RegionModule
from .siblings import SiblingInput
from .token_modules import TokenModule


@dataclass
class Piece:
    """What one module of an adapter becomes.

    Attributes:
        module: the piece; name: its full name.
        layer: the class that it gets; shards: its parameters' parts.
        state: attributes that the layer reads.
    """

    module: nn.Module
    name: str
    layer: type[TensorParallel_Layer]
    shards: dict[str, Shard] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


def cut_adapters(model: nn.Module, group: TPGroup) -> None:
    """Deal the adapters below `model` that are whole still, equal on all ranks; nothing is changed if one can't be dealt.

    Raises:
        AutoTPError: naming the module that has no such adapter.
    """
    pieces = [piece for name, layer in find_lora(model) for piece in plan_pieces(name, layer)]
    for piece in pieces:
        install_piece(piece, group)
    index_parameters(model)


def find_lora(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """`(name, LoRA layer)` of each one below `model`."""
    from peft.tuners.lora.layer import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def install_piece(piece: Piece, group: TPGroup) -> None:
    """Give one piece its layer's class, and its parameters this rank's data."""
    module: Any = piece.module
    insert_class(module, piece.layer)
    prepare(module, group, piece.shards, piece.name)
    module.__dict__.update(piece.state)
    if module.__dict__.get("gather_output") or module.__dict__.get("split_input"):
        set_linear_sizes(module, piece.shards["weight"].shape)
    with torch.no_grad():
        for name, shard in piece.shards.items():
            parameter = module._parameters[name]
            grad, parameter.grad = parameter.grad, None
            parameter.data = shard.split(parameter.data, group.tp_rank).clone()
            if grad is not None:
                parameter.grad = shard.split(grad, group.tp_rank).clone()


# -- deciding -----------------------------------------------------------------------------------------------------------


def plan_pieces(name: str, layer: Any) -> list[Piece]:
    """What the pieces of one LoRA layer become; none where its base layer is whole on every rank.

    Raises:
        AutoTPError: the base layer has no dealt form of an adapter.
    """
    from peft.tuners.lora.layer import ParamWrapper

    base = layer.get_base_layer()
    if not isinstance(base, TensorParallel_Layer):
        return []
    plan: Callable[[str, Any, Any], list[Piece]] = _refuse
    if isinstance(layer, ParamWrapper):
        plan = plan_experts
    elif isinstance(base, VocabParallelEmbedding | HiddenParallelEmbedding):
        plan = plan_embedding
    elif isinstance(base, nn.Linear | ParallelLinear) and not isinstance(base, TokenModule):
        plan = plan_linear
    return plan(name, layer, base)


def plan_linear(name: str, layer: Any, base: Any) -> list[Piece]:
    """The pieces beside a column or row linear, a head, or a whole linear that only part of a rank's work goes through."""
    pieces = []
    for adapter, a in layer.lora_A.items():
        b, names = layer.lora_B[adapter], (f"{name}.lora_A.{adapter}", f"{name}.lora_B.{adapter}")
        if isinstance(a, TensorParallel_Layer) or isinstance(b, TensorParallel_Layer):
            continue
        form = find_form(base)
        if form is None:
            return _refuse(name, layer, base)
        pieces += FORMS[form](base, a, b, names)
        if form == "row" and isinstance(layer.lora_dropout[adapter], nn.Dropout) and not base.__dict__.get("split_input"):
            pieces.append(Piece(layer.lora_dropout[adapter], f"{name}.lora_dropout.{adapter}", DealtDropout))
        if isinstance(base, EnteringLinear):
            pieces.append(Piece(b, names[1], EnteringLinear, {}, {"columns": base.columns, "reduce_dtype": base.reduce_dtype}))
        if adapter in layer.lora_magnitude_vector:
            pieces.append(_plan_magnitude(name, adapter, layer, base))
    tokens = base.__dict__.get("tokens")
    if pieces and tokens is not None and not isinstance(layer, TensorParallel_Layer):
        pieces.append(Piece(layer, name, DealtRows, {}, {"tokens": tokens}))
    return pieces


def find_form(base: Any) -> str | None:
    """How a linear is dealt: "head", "column", "row", "summed" where it is whole and each rank sees part of the work; or not."""
    border: Border = base.__dict__.get("autotp_border") or Border()
    cut = [each.dim for each in base.shards["weight"].cuts] if "weight" in base.shards else []
    if border.once or border.slices or (border.outputs and cut != [1]):
        return None
    if isinstance(base, VocabParallelHead):
        return "head"
    if isinstance(base, ParallelLinear):
        return "column" if base.cut_dim == base.out_dim else None if border.entries else "row"
    if not cut:
        return None if border.entries else "summed" if border.summed else "whole" if isinstance(base, EnteringLinear) else None
    return "column" if cut == [0] else "row" if cut == [1] and not border.entries else None


def _plan_head(base: Any, a: nn.Module, b: nn.Module, names: tuple[str, str]) -> list[Piece]:
    return [Piece(b, names[1], VocabParallelHead, _cut_outputs(base, 0, b))]


def _plan_column(base: Any, a: nn.Module, b: nn.Module, names: tuple[str, str]) -> list[Piece]:
    border: Border = base.__dict__.get("autotp_border") or Border()
    gathers, dtype = bool(base.__dict__.get("gather_output")), base.__dict__.get("reduce_dtype", border.reduce_dtype)
    enters = base.__dict__.get("siblings") is not None or bool(border.entries) or gathers
    siblings = SiblingInput(base.tp, 1, dtype) if enters else None
    state = {"siblings": siblings, "gather_output": gathers, "reduce_dtype": dtype}
    pieces = [Piece(b, names[1], LinearLayer, _cut_outputs(base, getattr(base, "out_dim", 0), b), state)]
    return pieces if enters else [_sum_always(a, names[0]), *pieces]


def _plan_row(base: Any, a: Any, b: nn.Module, names: tuple[str, str]) -> list[Piece]:
    border: Border = base.__dict__.get("autotp_border") or Border()
    dim, tokens = getattr(base, "in_dim", 1), base.__dict__.get("tokens")
    cuts = tuple(Cut(1, cut.runs) for cut in base.shards["weight"].cuts if cut.dim == dim)
    shards = {"weight": Shard(tuple(a.weight.shape), base.tp.tp_size, cuts)}
    sums = isinstance(base, ParallelLinear) and not isinstance(base, LinearPartial | Conv1DPartial)
    if not (sums or border.outputs):  # the sum is left to the module around it
        if b._parameters.get("bias") is not None:
            raise AutoTPError(
                f"{names[1]} has a bias, which would be added on each rank to a sum that {base.full_name} leaves to the module "
                f"around it: use lora_bias=False, or leave that module out of target_modules"
            )
        return [Piece(a, names[0], LinearPartial, shards), _sum_always(b, names[1])]
    state = {
        "split_input": base.__dict__.get("split_input", False),
        "tokens": tokens,
        "reduce_dtype": base.__dict__.get("reduce_dtype"),
    }
    pieces = [Piece(a, names[0], LinearAllreduce, shards, state)]
    if tokens is not None:
        pieces.append(Piece(b, names[1], SummedPart, {}, {"always": False, "tokens": tokens}))
    return pieces


def _plan_summed(base: Any, a: nn.Module, b: nn.Module, names: tuple[str, str]) -> list[Piece]:
    return [_sum_always(a, names[0]), _sum_always(b, names[1])]


FORMS: dict[str, Callable[[Any, Any, Any, tuple[str, str]], list[Piece]]] = {
    "head": _plan_head,
    "column": _plan_column,
    "row": _plan_row,
    "summed": _plan_summed,
    "whole": lambda base, a, b, names: [],
}


def _plan_magnitude(name: str, adapter: str, layer: Any, base: Any) -> Piece:
    if (
        not isinstance(base, ParallelLinear)
        or base.__dict__.get("gather_output")
        or isinstance(base, LinearPartial | Conv1DPartial)
    ):
        raise AutoTPError(
            f"{name} ({type(base).__name__}) has no DoRA: its output is gathered, or summed by the module around it. Use "
            f"use_dora=False, or leave that module out of target_modules"
        )
    row, module = base.cut_dim == base.in_dim, layer.lora_magnitude_vector[adapter]
    cuts = () if row else tuple(Cut(0, cut.runs) for cut in base.shards["weight"].cuts)
    shards = {} if row else {"weight": Shard(tuple(module.weight.shape), base.tp.tp_size, cuts)}
    state = {"row": row, "always": False, "tokens": base.__dict__.get("tokens") if row else None}
    return Piece(module, f"{name}.lora_magnitude_vector.{adapter}", DealtDora, shards, state)


def plan_embedding(name: str, layer: Any, base: Any) -> list[Piece]:
    """An embedding's adapter reads whole ids and adds to whole rows: it stays whole.

    Raises:
        AutoTPError: it is DoRA, whose norms run over the vocabulary.
    """
    if len(layer.lora_magnitude_vector):
        raise AutoTPError(f"{name} is an embedding that is dealt: use use_dora=False, or leave it out of target_modules")
    return [] if isinstance(layer, TensorParallel_Layer) else [Piece(layer, name, DealtDelta)]


def plan_experts(name: str, layer: Any, base: Any) -> list[Piece]:
    """The pieces of an adapter of one stacked Parameter `[E, .., ..]` or matrix, whose product is added to it at each call.

    Raises:
        AutoTPError: whole experts are dealt, or parts are held twice.
    """
    shard: Shard | None = base.shards.get(layer.parameter_name)
    if shard is None:
        return []
    dims = [cut.dim for cut in shard.cuts]
    last = len(shard.shape) - 1
    if shard.has_copies or len(dims) != 1 or dims[0] not in (last - 1, last):
        raise AutoTPError(
            f"{name}: an adapter of '{layer.parameter_name}', whose dimensions {dims} of {list(shard.shape)} are dealt, can't be "
            f"dealt with it: leave it out of target_parameters"
        )
    inputs_last = len(shard.shape) == 2 or layer._did_swap_in_out_features
    on_b = (dims[0] == last - 1) == inputs_last  # the outputs are dealt
    pieces, wholes = [], []
    for adapter in layer.lora_A:
        a, b = layer.lora_A[adapter], layer.lora_B[adapter]
        if isinstance(a, TensorParallel_Layer) or isinstance(b, TensorParallel_Layer):
            wholes.append(f"lora_{'AB'[not on_b]}.{adapter}.weight")
            continue
        dealt, key = (b, "lora_B") if on_b else (a, "lora_A")
        own = Shard(tuple(dealt.weight.shape), shard.tp_size, (Cut(0 if on_b else 1, shard.cuts[0].runs),))
        pieces.append(Piece(dealt, f"{name}.{key}.{adapter}", TensorParallel_Layer, {"weight": own}))
        wholes.append(f"lora_{'AB'[not on_b]}.{adapter}.weight")
    border = Border(summed=tuple(wholes))
    if isinstance(layer, TensorParallel_Layer):
        layer.__dict__["autotp_border"] = border
        return pieces
    return [*pieces, Piece(layer, name, RegionModule, {}, {"autotp_border": border})]


def _cut_outputs(base: Any, dim: int, b: Any) -> dict[str, Shard]:
    """Shards of B `[N, r]`, and of its bias, cut as the base layer's outputs are."""
    cuts = tuple(Cut(0, cut.runs) for cut in base.shards["weight"].cuts if cut.dim == dim)
    return {
        name: Shard(tuple(parameter.shape), base.tp.tp_size, cuts)
        for name, parameter in b._parameters.items()
        if parameter is not None
    }


def _sum_always(module: nn.Module, name: str) -> Piece:
    return Piece(module, name, SummedPart, {}, {"always": True, "tokens": None})


def _refuse(name: str, layer: Any, base: Any) -> list[Piece]:
    raise AutoTPError(
        f"{name} ({type(base).__name__}) is dealt to {base.tp.tp_size} ranks in a way that has no form for the adapter "
        f"{type(layer).__name__}: leave it out of target_modules, or keep it whole, plan={{'{name}': 'whole'}}"
    )


# -- what peft sees while it makes an adapter ---------------------------------------------------------------------------


@contextmanager
def shown_whole(module: nn.Module) -> Iterator[None]:
    """Inside it the sizes of a sharded module, and the shapes of its parameters, are those of the whole layer."""
    shards: dict[str, Shard] = module.__dict__.get("shards", {}) if isinstance(module, TensorParallel_Layer) else {}
    own, sizes = module._parameters, {key: module.__dict__.get(key) for key in ("in_features", "out_features")}
    shown: dict[str, Any] = {
        name: nn.Parameter(torch.empty(shard.shape, device="meta"), requires_grad=False)
        for name, shard in shards.items()
        if name in own
    }
    module.__dict__["_parameters"] = {**own, **shown}
    if "weight" in shards and isinstance(module, nn.Linear):
        set_linear_sizes(module, shards["weight"].shape)
    try:
        yield
    finally:
        module.__dict__["_parameters"] = own
        module.__dict__.update({key: size for key, size in sizes.items() if size is not None})


@torch.no_grad()
def share_adapters(model: nn.Module, group: TPGroup, adapter: str) -> None:
    """Give the pieces of `adapter`, whole still, rank 0's values on every rank: ranks may have drawn others."""
    for _, layer in find_lora(model):
        for parameter in list_parameters(layer, adapter):
            if not parameter.is_meta:
                data = parameter.data.contiguous()  # beside a weight of 8 bits it is of its dtype, which not every backend moves
                parameter.data = group.broadcast(data.view(torch.uint8) if data.element_size() == 1 else data).view(data.dtype)


def list_parameters(layer: Any, adapter: str) -> list[Tensor]:
    """The parameters of one adapter in one LoRA layer."""
    found = []
    for key in layer.adapter_layer_names:
        table = getattr(layer, key, {})
        if adapter in table:
            value = table[adapter]
            found += [value] if isinstance(value, Tensor) else list(value.parameters())
    return found
