"""The parameters of a LayerNormLinear: their sizes, which part of each a rank holds, and the values that they start from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import TPGroup
from ..errors import AutoTPError, PlanError
from ..groups import resolve_group
from ..shard import Shard
from .base import TensorParallel_Layer
from .linear import LinearLayer
from .norm_parts import SideBySide, check_size


class NormLinearParameters(SideBySide, TensorParallel_Layer):
    """What a LayerNormLinear holds, made by sizes or taken over from the modules that it stands for.

    Attributes:
        tp: the ranks; None until `set_tensor_parallel_group` names them.
        tp_size: how many they are; parallel_mode: how the parameters are dealt to them, None, "column" or "row".
        normalization, zero_centered_gamma: which norm the parameters are of, and whether its weight is stored less one.
        init_method, get_rng_state_tracker: how initial weights are drawn.
        in_features, out_features: columns and rows of this rank's weights; part_sizes: rows of each part's.
        copied: of each weight, then each bias, the Shard where several ranks hold parts of it.
    """

    tp_size: int
    parallel_mode: str | None
    normalization: str
    zero_centered_gamma: bool
    init_method: Callable[[Tensor], Any] | None
    get_rng_state_tracker: Callable[[], Any] | None
    tp: TPGroup | None  # type: ignore[assignment]
    layer_norm_weight: nn.Parameter | None
    layer_norm_bias: nn.Parameter | None

    def _make_parameters(self, width: int, parts: dict[str, int], bias: bool, device: Any, dtype: torch.dtype | None) -> None:
        """Register what this rank holds, uninitialised, and note how it is dealt."""
        self.weight_names = [f"{part}_weight" if part else "weight" for part in parts]
        self.bias_names = [f"{part}_bias" if part else "bias" for part in parts]
        norm = ["layer_norm_weight", "layer_norm_bias"]
        shapes: dict[str, tuple[int, ...] | None] = dict.fromkeys(norm, (width,))
        shapes |= {name: (size, width) for name, size in zip(self.weight_names, parts.values(), strict=True)}
        shapes |= {name: (size,) if bias else None for name, size in zip(self.bias_names, parts.values(), strict=True)}
        if self.normalization == "RMSNorm":
            shapes["layer_norm_bias"] = None
        dealt = {None: [], "column": [*self.weight_names, *self.bias_names], "row": [*norm, *self.weight_names]}
        self.shards = {}
        for name, shape in shapes.items():
            if shape is not None and name in dealt[self.parallel_mode]:
                self.shards[name] = Shard.even(shape, len(shape) - 1 if self.parallel_mode == "row" else 0, self.tp_size)
        self._check_sizes_only(torch.device(device or torch.get_default_device()))
        rank = 0 if self.tp is None else self.tp.tp_rank
        for name, shape in shapes.items():
            local = self.shards[name].local_shape(rank) if name in self.shards else shape
            self.register_parameter(name, None if local is None else nn.Parameter(torch.empty(local, device=device, dtype=dtype)))
        self._note_sizes()

    def _check_sizes_only(self, device: torch.device) -> None:
        if self.tp is not None or self.tp_size == 1 or not self.shards:
            return
        uneven = [name for name, shard in self.shards.items() if len({shard.local_shape(r) for r in range(self.tp_size)}) > 1]
        if device.type != "meta" or uneven:
            reason = f"{uneven} would be dealt unevenly" if uneven else "which slice of the initial weights it holds is not known"
            raise PlanError(
                f"{self.full_name}: tp_size={self.tp_size} without tp_group says how large a rank's part is, but not which, and "
                f'{reason}. Give tp_group, or build with device="meta", then set_tensor_parallel_group(group), '
                f"to_empty(device=...) and reset_parameters() or load_state_dict"
            )

    def _note_sizes(self) -> None:
        weights = [self.get_parameter(name) for name in self.weight_names]
        self.part_sizes = [weight.shape[0] for weight in weights]
        self.in_features, self.out_features = weights[0].shape[1], sum(self.part_sizes)
        shards = [self.shards.get(name) for name in (*self.weight_names, *self.bias_names)]
        self.copied = tuple(None if shard is None or shard.copied is None else shard for shard in shards)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Name the ranks, where the constructor got `tp_size` alone: a process group, one-axis mesh or TPGroup.

        Raises:
            PlanError: the group has another size.
        """
        group = resolve_group(tp_group)
        check_size(group, self.tp_size, self.full_name)
        self.tp = group

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw initial weights: those of the unsharded layer, of which this rank keeps its part; biases are zero.

        Raises:
            AutoTPError: the group is not known yet.
        """
        rank = self._group().tp_rank if self.shards else 0
        if self.layer_norm_weight is not None:
            nn.init.constant_(self.layer_norm_weight, 0.0 if self.zero_centered_gamma else 1.0)
        for name in ("layer_norm_bias", *self.bias_names):
            if self._parameters[name] is not None:
                nn.init.zeros_(self._parameters[name])  # type: ignore[arg-type]
        draw = self.init_method or (lambda weight: nn.init.normal_(weight, 0.0, 0.023))
        with nullcontext() if self.get_rng_state_tracker is None else self.get_rng_state_tracker().fork():
            for name in self.weight_names:
                weight, shard = self._parameters[name], self.shards.get(name)
                assert weight is not None
                full = weight if shard is None or shard.is_whole else weight.new_empty(shard.shape)
                draw(full)
                if full is not weight:
                    assert shard is not None
                    weight.copy_(shard.split(full, rank))

    def _group(self) -> TPGroup:
        if self.tp is None:
            raise AutoTPError(
                f"{self.full_name}: its {self.tp_size} ranks are not known yet: call set_tensor_parallel_group first"
            )
        return self.tp

    def _take_over(self, norm: nn.Module, linears: Mapping[str, Any]) -> None:
        self._owns = False
        for name in ("weight", "bias"):
            own = norm._parameters.get(name)
            if own is not None and own.shape != (self.in_features,):
                raise PlanError(
                    f"{self.full_name}: the norm's {name} is {list(own.shape)}, and the linears read {self.in_features}"
                )
            self._parameters[f"layer_norm_{name}"] = own
        for linear, weight, bias in zip(linears.values(), self.weight_names, self.bias_names, strict=True):
            self._parameters[weight], self._parameters[bias] = linear.weight, linear.bias
            for name, key in (("weight", weight), ("bias", bias)):
                self.shards.pop(key, None)
                if isinstance(linear, LinearLayer) and name in linear.shards:
                    self.shards[key] = linear.shards[name]
        self.tp = self.tp if self.tp_size > 1 else TPGroup(None, self._parameters[self.weight_names[0]].device)  # type: ignore[union-attr]
        self._note_sizes()
