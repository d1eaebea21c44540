"""What parallelize checks on every rank before it changes anything: options, memory, and that the ranks agree."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import TPGroup
from ..errors import AutoTPError, PlanError
from ..layers.base import unwrap
from ..layers.digest import digest_tensors
from .assemble import read_versions
from .plan import Plan


def check_options(logits: str) -> None:
    """Raise for a value outside its choices."""
    if logits not in ("auto", "full", "sharded"):
        raise PlanError(f"logits={logits!r} is none of 'auto', 'full', 'sharded'")


def refuse_wrapped(model: nn.Module, doing: str) -> None:
    """Raise for a model in a wrap that was made for the parameters as they are.

    Raises:
        PlanError: naming the wrap, and the model inside.
    """
    inside = unwrap(model)
    if inside is not model:
        raise PlanError(
            f"{doing} changes what {type(model).__name__} was made for: call autotp.{doing} of the {type(inside).__name__} "
            f"inside, and wrap it after that"
        )


def refuse_quantised(model: nn.Module) -> None:
    """Raise for weights that lie in a quantised format: their blocks, scales and layout are of the whole tensor.

    Raises:
        PlanError: naming the first one.
    """
    for name, parameter in model.named_parameters():
        plain = type(parameter) in (nn.Parameter, nn.UninitializedParameter)
        if not plain or (parameter.ndim > 1 and not (parameter.is_floating_point() or parameter.is_complex())):
            raise PlanError(
                f"{name} is a {type(parameter).__name__} of {parameter.dtype}, shape {list(parameter.shape)}, a format "
                f"that can't be cut: load plain weights with autotp.from_pretrained(path, quantization_config=..), or "
                f"parallelize the model in bfloat16 and then autotp.quantize(model, config): each rank quantises its part. Where "
                f"there is only the quantised checkpoint, model.dequantize() comes first"
            )


def check_memory(plan: Plan, group: TPGroup, model: nn.Module) -> None:
    """Raise if this rank's shards can't fit its GPU beside what is there."""
    moving = any(p.device != group.device for p in model.parameters())
    if group.device.type != "cuda" or not moving:
        return
    free, total = torch.cuda.mem_get_info(group.device)
    needed = plan.bytes_of_rank(group.tp_rank)
    if needed > free:
        raise PlanError(
            f"rank {group.tp_rank} needs {needed / 2**30:.1f} GiB for its shards, but {group.device} has {free / 2**30:.1f} of "
            f"{total / 2**30:.1f} GiB free: use more ranks, or a smaller dtype"
        )


def check_agreement(group: TPGroup, weights: str) -> None:
    """Raise on every rank if library versions or weights differ between ranks.

    Raises:
        AutoTPError: naming what differs and on which ranks.
    """
    check_alike(group, {"library versions": read_versions(), "weights": weights})


def check_alike(group: TPGroup, note: dict[str, Any]) -> None:
    """Raise on every rank if what `note` holds differs between ranks.

    Raises:
        AutoTPError: naming what differs and on which ranks.
    """
    notes = group.gather_objects(note)
    for what, first in notes[0].items():
        others = [rank for rank, note in enumerate(notes) if note[what] != first]
        if others:
            detail = f": rank 0 has {first}, rank {others[0]} {notes[others[0]][what]}" if what != "weights" else ""
            hint = "Load the same checkpoint, or seed every rank alike" if what == "weights" else "Give all ranks the same"
            raise AutoTPError(f"TP rank(s) {others} have other {what} than rank 0{detail}. {hint}.")


def digest_weights(model: nn.Module) -> str:
    """A hash of the names, shapes, dtypes and bits of every parameter and buffer."""
    state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    form = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in state.items()]
    return hashlib.sha256(repr((form, digest_tensors(list(state.values())))).encode()).hexdigest()[:16]
