"""What moves between the ranks while a linear multiplies: TransformerEngine's and DeepSpeed's options, as attributes of a layer.

Each is None (as the size says, see kernels/moves.py; for `tp_overlap_comm` False), True (by copy engines, beside the products) or
False (by collectives, in sequence), may be set at any time, and is read in each forward. On a CPU nothing could hide, so True
runs in sequence as well.

| option | layers | what it is about |
|---|---|---|
| `ub_overlap_ag` | column, row; rows dealt | the gather of x before the product; row: of the output's gradient before dgrad |
| `ub_overlap_rs` | row; rows dealt | the scatter of the output behind the product's blocks |
| `ub_overlap_rs_dgrad` | column; rows dealt | the scatter of dx behind dgrad's blocks: dx is complete before wgrad begins |
| `ub_bulk_wgrad` | column; rows dealt | the scatter of dx behind wgrad |
| `ub_bulk_dgrad` | column; rows dealt | the gather of x for wgrad, behind dgrad |
| `tp_overlap_comm` | column, row; rows whole | the sum of dx behind wgrad; row: of the output behind the product's blocks |

`symmetric_ar_type` is about the sum of a row's output of few whole rows: "one_shot" or "two_shot", by PyTorch's kernels
over symmetric memory in place of NCCL's; up to 1 MiB, and on GPUs that reach each other, elsewhere the collective runs.

`ub_overlap_rs_dgrad=True` excludes the bulk options' True. Where both options of one scatter are set, True outweighs False. What
is not about a layer's kind does nothing there: a caller may set all of them on all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, TypedDict

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from ..comm import TPGroup
from ..errors import AutoTPError, PlanError
from ..exchange import find_exchange
from ..kernels.blocks import Dealt
from ..kernels.moves import BY_SIZE, Moves
from ..peers import KINDS, check_kind

WAYS = ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad", "tp_overlap_comm")
UNSET = (None,) * len(WAYS)
OPTIONS = (*WAYS, "symmetric_ar_type", "ub_name")


class Overlap(TypedDict, total=False):
    """The options as keyword arguments."""

    ub_overlap_ag: bool | None
    ub_overlap_rs: bool | None
    ub_overlap_rs_dgrad: bool | None
    ub_bulk_dgrad: bool | None
    ub_bulk_wgrad: bool | None
    tp_overlap_comm: bool | None
    symmetric_ar_type: str | None
    ub_name: str | None


class OverlapOptions:
    """What a linear layer inherits; see the module's table.

    Attributes:
        ub_name: the layer's name in messages, in place of its full name.
    """

    ub_overlap_ag: bool | None = None
    ub_overlap_rs: bool | None = None
    ub_overlap_rs_dgrad: bool | None = None
    ub_bulk_dgrad: bool | None = None
    ub_bulk_wgrad: bool | None = None
    tp_overlap_comm: bool | None = None
    symmetric_ar_type: str | None = None
    ub_name: str | None = None


def set_options(layer: Any, options: Any) -> None:
    """Set overlap options given by name.

    Raises:
        PlanError: an unknown one, or one of another type.
    """
    for key, value in options.items():
        if key not in OPTIONS:
            raise PlanError(f"{layer.full_name}: there is no option {key!r}; the overlap options are {', '.join(OPTIONS)}")
        setattr(layer, key, value)
    read_moves(layer)
    read_symmetric(layer)


def read_moves(layer: Any) -> Moves:
    """What a layer's options say of each move.

    Raises:
        PlanError: options that exclude each other, or of another type.
    """
    ways = (
        layer.ub_overlap_ag,
        layer.ub_overlap_rs,
        layer.ub_overlap_rs_dgrad,
        layer.ub_bulk_dgrad,
        layer.ub_bulk_wgrad,
        layer.tp_overlap_comm,
    )
    if ways == UNSET:  # in every forward of every layer
        return BY_SIZE
    return _moves(is_row(layer), ways, name_of(layer))


def read_symmetric(layer: Any) -> str | None:
    """How a row layer sums small outputs; None: as any other.

    Raises:
        PlanError: no such kind, or one that needs NVLink multicast.
    """
    kind = layer.symmetric_ar_type
    if kind is None:
        return None
    if kind not in KINDS:
        try:
            check_kind(str(kind))
        except AutoTPError as error:
            raise PlanError(f"{name_of(layer)}: symmetric_ar_type: {error}") from None
    return kind


def is_row(layer: Any) -> bool:
    """Whether a layer's weight is split over its inputs."""
    mode = getattr(layer, "parallel_mode", "")  # LayerNormLinear's
    return mode == "row" if mode != "" else layer.cut_dim == layer.in_dim


def _moves(row: bool, ways: tuple[bool | None, ...], name: str) -> Moves:
    for option, way in zip(WAYS, ways, strict=True):
        if way is not None and not isinstance(way, bool):
            raise PlanError(f"{name}: {option} is None (as the size says), True or False, got {way!r}")
    ag, rs, rs_dgrad, bulk_dgrad, bulk_wgrad, sums = ways
    if rs_dgrad and (bulk_dgrad or bulk_wgrad):
        raise PlanError(
            f"{name}: ub_overlap_rs_dgrad=True completes dx before wgrad begins, and so excludes ub_bulk_dgrad=True and "
            f"ub_bulk_wgrad=True: set one or the other"
        )
    if row:
        return Moves(forward=rs, gather=ag, sums=sums)
    scatter = True if rs_dgrad or bulk_wgrad else False if False in (rs_dgrad, bulk_wgrad) else None
    return Moves(forward=ag, gather=bulk_dgrad, scatter=scatter, sums=sums, early=bool(rs_dgrad))


def choose_moves(layers: Sequence[Any], group: TPGroup) -> Moves:
    """What the options say of the moves of one call: of one layer, or of several that are multiplied as one.

    Raises:
        PlanError: the layers' options differ.
        KernelUnsupported: copies are asked for between ranks that can't copy.
    """
    first, *others = layers
    moves = read_moves(first)
    for other in others:
        if read_moves(other) != moves:
            raise PlanError(
                f"{name_of(first)} and {name_of(other)} read one input and are one product, but their overlap options differ: "
                f"set the same ones on both"
            )
    if moves is not BY_SIZE:
        find_exchange(group).check(moves, name_of(first))
    return moves


def refuse_copies(layers: Sequence[Any]) -> None:
    """Raise where options ask for copies beside the products of layers whose products are FP8.

    Raises:
        PlanError: naming the layer.
    """
    for layer in layers:
        moves = read_moves(layer)
        if moves is not BY_SIZE and True in moves:
            raise PlanError(
                f"{name_of(layer)}: rows move beside products of the tensors' own dtype only, and this layer's are FP8: leave "
                f"the overlap options unset, or name it in precision= as 'bf16'"
            )


def name_of(layer: Any) -> str:
    """A layer's name in messages."""
    return layer.ub_name or layer.full_name


def check_rows(layer: Any, group: TPGroup, rows: int) -> None:
    """Refuse `rows` of this rank that are not as many on all ranks, whose collective would hang or mix them up.

    On a CPU in every call; on GPUs, where nothing may wait, when a number of rows is new to the group.

    Raises:
        PlanError: with every rank's number; GatherError: the number is new here, and other ranks went on with theirs.
    """
    on_gpu = group.device.type == "cuda"
    known = group.owned.setdefault("numbers of rows", set())
    if on_gpu and (rows in known or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing()):
        return
    if on_gpu:
        every = [int(note) for note in group.arrive(f"{name_of(layer)} with a number of rows that is new to it", str(rows))]
    else:
        every = group.gather_rows(torch.tensor([rows])).tolist()
    if len(set(every)) > 1:
        raise PlanError(
            f"{name_of(layer)}: sequence_parallel wants as many rows on each rank, and TP ranks 0 to {group.tp_size - 1} have "
            f"{every}: pad them to {max(every)}"
        )
    known.add(rows)


def deal_rows(layer: Any, group: TPGroup, shape: tuple[int, ...], local_shape: tuple[int, ...]) -> Dealt:
    """How a layer's rows are dealt in this call: `shape` of all ranks', `local_shape` of one's.

    Raises:
        PlanError: ranks have different numbers of rows; KernelUnsupported: copies are asked for between ranks that can't copy.
    """
    check_rows(layer, group, prod(shape))
    moves, exchange = choose_moves([layer], group), find_exchange(group)
    return Dealt(exchange, group.tp_rank, group.tp_size, shape, local_shape, layer.reduce_dtype, moves=moves)


def deal_sums(layers: Sequence[Any], group: TPGroup, x: Tensor, width: int, reduce_dtype: torch.dtype | None) -> Dealt | None:
    """How rows that all ranks have are dealt while their sums of `width` columns are made; None: the sum is one collective.

    Args:
        layers: which are multiplied with `x` `[..., K]` as one.

    Raises:
        KernelUnsupported: copies are asked for between ranks that can't copy.
    """
    if not any(layer.tp_overlap_comm for layer in layers):
        return None
    rows = x.numel() // max(1, x.shape[-1])
    n_bytes = rows * width * x.element_size()
    return deal_sum(group, choose_moves(layers, group), rows, n_bytes, reduce_dtype)


def deal_sum(group: TPGroup, moves: Moves, rows: int, n_bytes: int, reduce_dtype: torch.dtype | None) -> Dealt | None:
    """The same where the moves are known already."""
    exchange = find_exchange(group)
    if not (moves.sums and exchange.decide(n_bytes, True).copies):
        return None
    own = -(-rows // group.tp_size)
    return Dealt(exchange, group.tp_rank, group.tp_size, (rows,), (own,), reduce_dtype, moves=moves)


def explain_overlap(layer: Any, rows: int, dtype: torch.dtype | None = None) -> str:
    """Which way each move of a layer goes for `rows` of all ranks together, one line for each, and why; called on every rank.

    Args:
        dtype: of the activations; None for the weights'.

    Raises:
        AutoTPError: the layer's group is not known yet.
    """
    if layer.tp is None:
        raise AutoTPError(f"{layer.full_name}: its ranks are not known yet: call set_tensor_parallel_group first")
    moves, row, exchange = read_moves(layer), is_row(layer), find_exchange(layer.tp)
    names = ("nx", "nf") if isinstance(layer, Conv1D) else ("in_features", "out_features")
    width = getattr(layer, names[row])
    n_bytes = rows * width * (dtype or next(iter(layer.parameters())).dtype).itemsize
    lines = [
        f"{name_of(layer)}, {'row' if row else 'column'}, {rows} x {width}, {layer.tp.tp_size} ranks on {layer.tp.device.type}"
    ]
    titles = {"forward": "scatter of y" if row else "gather of x", "gather": f"gather of {'dy' if row else 'x'} in backward"}
    titles |= {"sums": f"sum of {'y' if row else 'dx'} where rows are whole"} | ({} if row else {"scatter": "scatter of dx"})
    for move, title in titles.items():
        copies, reason = exchange.decide(n_bytes, getattr(moves, move))
        if move == "sums" and moves.sums is None and not exchange.why_not:
            copies, reason = False, "tp_overlap_comm=True asks for copies"
        behind = ", complete before wgrad" if move == "scatter" and copies and moves.early else ""
        lines.append(f"  {title}: {'copy engines' if copies else 'collectives in sequence'}{behind} ({reason})")
    return "\n".join(lines)
