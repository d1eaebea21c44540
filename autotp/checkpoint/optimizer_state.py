"""An optimizer's state by the names of the model's parameters: what is elementwise is sharded as its parameter is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import CheckpointError
from .plain import decode_plain, encode_plain

# How a step is computed, not what: a state that was saved by a fused optimizer goes on in a plain one.
IMPLEMENTATION = ("params", "param_names", "fused", "foreach", "capturable", "differentiable")


class NamedOptimizer:
    """A torch optimizer, seen through names.

    Args:
        optimizer: wrapped by accelerate or not.
        names: id of each tensor that it may update -> the parameter's name.
        sharded: names of parameters of which this rank holds a part.

    Raises:
        CheckpointError: it updates a tensor that has no name.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], sharded: Mapping[str, Any]) -> None:
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = inner
        self.optimizer, self.sharded = optimizer, sharded
        self.groups: list[list[str]] = []
        self.params: dict[str, Tensor] = {}
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if id(param) not in names:
                    raise CheckpointError(
                        f"{type(optimizer).__name__} updates a tensor of shape {tuple(param.shape)} (group {number}) that is "
                        f"none of the model's parameters: make the optimizer of this model's"
                    )
                self.params[names[id(param)]] = param
            self.groups.append([names[id(param)] for param in group["params"]])

    @property
    def class_name(self) -> str:
        """The optimizer's class, in messages and to compare."""
        return type(self.optimizer).__name__

    # -- saving -------------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """All but the tensors, for JSON; equal on all ranks.

        Raises:
            CheckpointError: an option or a state that a training state can't hold.
        """
        groups = []
        for names, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            options = {key: value for key, value in group.items() if key not in IMPLEMENTATION}
            groups.append({"params": names, "options": encode_plain(options, f"an option of {self.class_name}")})
        plain: dict[str, dict[str, Any]] = {}
        tensors: dict[str, list[str]] = {}
        for name, param in self.params.items():
            for key, value in self.optimizer.state.get(param, {}).items():
                if _is_large(value):
                    tensors.setdefault(name, []).append(key)
                else:
                    plain.setdefault(name, {})[key] = encode_plain(value, f"state '{key}' of '{name}' in {self.class_name}")
        return {"class": self.class_name, "groups": groups, "plain": plain, "tensors": tensors}

    def iterate_tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Each tensor of the state with its parameter's name and its own; of the parameter's shape where that is sharded.

        Raises:
            CheckpointError: a state of another shape, of which it can't be known what it is a part of.
        """
        for name, param in self.params.items():
            for key, value in self.optimizer.state.get(param, {}).items():
                if not _is_large(value):
                    continue
                if name in self.sharded and value.shape != param.shape:
                    raise CheckpointError(
                        f"state '{key}' of '{name}' in {self.class_name} has shape {tuple(value.shape)}, this rank's part of the "
                        f"parameter {tuple(param.shape)}: only states that lie beside each element can be saved from shards"
                    )
                yield name, key, value

    # -- loading ------------------------------------------------------------------------------------------------------

    def find_problems(self, saved: dict[str, Any]) -> list[str]:
        """Why a described state is not this optimizer's; [] if it is."""
        if saved["class"] != self.class_name:
            return [f"the state is of {saved['class']}, and the optimizer is {self.class_name}"]
        theirs = [group["params"] for group in saved["groups"]]
        if len(theirs) != len(self.groups):
            return [f"the state has {len(theirs)} groups of parameters, {self.class_name} has {len(self.groups)}"]
        problems = []
        for number, (before, now) in enumerate(zip(theirs, self.groups, strict=True)):
            lacking, more = sorted(set(before) - set(now)), sorted(set(now) - set(before))
            if lacking or more:
                problems.append(f"group {number} of {self.class_name} lacks {lacking[:3]} and has {more[:3]} beside the state's")
        return problems

    def make_tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Room for a saved tensor of a parameter's state, beside the parameter: this rank's part, or all of `shape`."""
        param = self.params[name]
        if name in self.sharded:
            return torch.empty_like(param, dtype=dtype, memory_format=torch.contiguous_format)
        return torch.empty(shape, dtype=dtype, device=param.device)

    def load(self, saved: dict[str, Any], tensors: Mapping[tuple[str, str], Tensor]) -> None:
        """Go on from a state, through the optimizer's own `load_state_dict`; options of the implementation stay."""
        state: dict[str, dict[str, Any]] = {}
        for name, plain in saved["plain"].items():
            state.setdefault(name, {}).update({key: decode_plain(value) for key, value in plain.items()})
        for (name, key), tensor in tensors.items():
            state.setdefault(name, {})[key] = tensor
        numbers: dict[str, int] = {}
        groups = []
        for names, group, theirs in zip(self.groups, self.optimizer.param_groups, saved["groups"], strict=True):
            numbers |= {name: len(numbers) + number for number, name in enumerate(names)}
            options = decode_plain(theirs["options"])
            for key, value in options.items():
                if isinstance(group.get(key), Tensor):  # a learning rate that a graph reads stays the tensor it is
                    options[key] = group[key].copy_(value) if isinstance(value, Tensor) else group[key].fill_(value)
                elif isinstance(value, Tensor) and value.ndim == 0:
                    options[key] = value.item()
            kept = {key: value for key, value in group.items() if key not in options}
            groups.append({**kept, **options, "params": [numbers[name] for name in names]})
        by_number = {numbers[name]: values for name, values in state.items()}
        self.optimizer.load_state_dict({"state": by_number, "param_groups": groups})


def _is_large(value: Any) -> bool:
    """Whether it is a tensor of the checkpoint; numbers, tensors without dims among them, are plain values."""
    return isinstance(value, Tensor) and value.ndim > 0
