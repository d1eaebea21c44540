"""Where the weights of linears that read one input lie: side by side in one allocation, as long as nobody moves one.

Each is a tensor with a storage of its own: savers, optimizers and `state_dict` see separate tensors.
"""

from __future__ import annotations

import copy
import ctypes
import sys
import weakref
from typing import Any

import torch
from torch import nn

from .side_by_side import ALIGNMENT_BYTES, Laid, can_lie, find_place, is_foreign, lay_together


class SiblingMemory:
    """The linears that read one input, and the allocation that holds their weights and biases.

    Args:
        members: how many there are.
    """

    def __init__(self, members: int) -> None:
        self.members = members
        self._slots: list[Any] = [lambda: None] * members  # weak: a copy of one member is a member of no group
        self._laid: Laid | None = None

    def copy_laid(self, memo: dict[int, Any]) -> Laid | None:
        """Copies of the members' parameters, side by side again; None where these are not."""
        laid = self.find_laid()
        if laid is None:
            return None
        weights, biases = ([copy.deepcopy(each, memo) for each in part] for part in (laid.weights, laid.biases))
        return lay_together(weights, biases)

    def add(self, layer: nn.Module) -> None:
        """Count a linear layer as the next member; others (convolutions, Conv1Ds) only enter their input here."""
        place = next(i for i, slot in enumerate(self._slots) if slot() is None)
        layer.__dict__["place"] = place
        self._slots[place] = weakref.ref(layer)

    def follow_copy(self, layer: nn.Module) -> None:
        """Take a copied layer for the member that it is, if the group was copied with it."""
        place = layer.__dict__.get("place", -1)
        if place >= 0 and self._slots[place]() is None:
            self._slots[place] = weakref.ref(layer)

    def lay(self) -> None:
        """Move the members' weights and biases side by side, where they are all there and alike."""
        params = self.read_parameters()
        layers = [slot() for slot in self._slots]
        if params is not None and can_lie(params[0]) and all(_keeps_alignment(layer) for layer in layers):
            self._laid = lay_together(*params)

    def lies_in_file(self) -> bool:
        """Whether a member's weight lies in memory that torch did not allocate: in a mapped checkpoint, say."""
        params = self.read_parameters()
        return params is not None and any(is_foreign(weight) for weight in params[0])

    def follow(self, moved: bool) -> None:
        """After a member's data was converted or moved: let go of the old memory, and lay the new when all have moved."""
        if self.find_laid() is None and moved and not any(_is_gathered(slot()) for slot in self._slots):
            self.lay()

    def find_laid(self) -> Laid | None:
        """The allocation, if it is still what the members' parameters lie in; where it is not, it is let go."""
        laid = self._laid
        if laid is None:
            return None
        for slot, weight, bias, place in zip(self._slots, laid.weights, laid.biases, laid.places, strict=True):
            layer = slot()
            if layer is None or _is_gathered(layer):
                return None
            table = layer._parameters
            if table.get("weight") is not weight or table.get("bias") is not bias or place != find_place(weight, bias):
                self._laid = None
                return None
        return laid

    def read_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter | None]] | None:
        """The members' own weights and biases; None where some are quantised, computed of others, sharded further, or gone."""
        weights, biases = [], []
        for slot in self._slots:
            layer = slot()
            if layer is None:
                return None
            weight, bias = layer._parameters.get("weight"), getattr(layer, "bias", None)  # pruned, it is no Parameter
            if layer.packed or type(weight) is not nn.Parameter or (bias is not None and type(bias) is not nn.Parameter):
                return None
            weights.append(weight)
            biases.append(bias)
        return weights, biases


def lay_siblings(model: nn.Module) -> None:
    """Move the weights of each group of siblings below `model` side by side; their Parameters stay the objects they are.

    What lies in a mapped file stays there: one product in place of a few would cost the CPU a copy of the weights.
    """
    groups = {id(g): g for g in (m.__dict__.get("siblings") for m in model.modules()) if isinstance(g, SiblingMemory)}
    for group in groups.values():
        if not group.lies_in_file():
            group.lay()
            trim_heap()
    if groups and torch.cuda.is_available():
        torch.cuda.empty_cache()  # the old memory lies in pieces that the next allocation, a larger one, can't use


def trim_heap() -> None:
    """Give freed memory on the CPU back to the system: glibc keeps it in pieces, and what is laid next needs larger ones."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # another C library has none
        trim(0)


def _is_gathered(layer: nn.Module | None) -> bool:
    """Whether a `GatherReplacedLayerParams` has made some of its tensors whole, which go back to where they were."""
    return layer is not None and "gathered" in layer.__dict__


def _keeps_alignment(layer: Any) -> bool:
    """Whether the next weight would begin where reads are fast, on every rank alike: ranks must lay the same groups."""
    weight, shard = layer._parameters["weight"], layer.shards.get("weight")
    shapes = [tuple(weight.shape)] if shard is None else [shard.local_shape(rank) for rank in range(shard.tp_size)]
    return all(rows * columns * weight.element_size() % ALIGNMENT_BYTES == 0 for rows, columns in shapes)
