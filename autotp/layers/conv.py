"""Convolutions that mix all channels, split like linears: over their output channels, or over their input channels.

B batch, K input channels, N output channels, T ranks; `...` is the kernel's or the positions' extent, which stays whole.

| layer | weight | forward | backward |
|---|---|---|---|
| `ConvLayer` | `[N/T, K, ...]`, bias `[N/T]` | `y_local = conv(x, w) + b` | `dx` all-reduced, once for all siblings |
| `ConvAllreduce` | `[N, K/T, ...]`, bias `[N]` whole | `y = all_reduce(conv(x_local, w)) + b` | no collective |
| `ConvPartial` | the same | `y_partial = conv(x_local, w) + (b on rank 0)` | `db` = rank 0's |

Depthwise and grouped convolutions mix no channels between ranks: their shards alone are enough.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..collectives import keep_on_first, reduce_from_group
from ..comm import TPGroup
from ..errors import PlanError
from ..shard import Shard
from .base import TensorParallel_Layer, insert_class
from .embedding import gather_columns
from .siblings import SiblingInput

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class ParallelConv(TensorParallel_Layer):
    """What the convolutions have in common; mixed in front of `nn.Conv1d`, `nn.Conv2d` or `nn.Conv3d`.

    Attributes:
        reduce_dtype: dtype in which partial sums are added up; None for their own.
    """

    cut_dim = 0
    bias: nn.Parameter | None
    weight: nn.Parameter
    _conv_forward: Any
    reduce_dtype: torch.dtype | None = None


class ConvLayer(ParallelConv):
    """A convolution split over its output channels.

    Attributes:
        siblings, gather_output: as of a LinearLayer.
    """

    siblings: SiblingInput | None
    gather_output = False

    def forward(self, input: Tensor) -> Tensor:
        if self.siblings is not None and input.requires_grad and torch.is_grad_enabled():
            input = self.siblings.enter(input)
        y = self._conv_forward(input, self.weight, self.bias)
        if not self.gather_output:
            return y
        channels = 1 - self.weight.ndim
        full = gather_columns(y.movedim(channels, -1), self.shards["weight"], 0, self.tp)
        return full.movedim(-1, channels).contiguous()


class ConvAllreduce(ParallelConv):
    """A convolution split over its input channels; the partial outputs are summed, then the bias is added once.

    Attributes:
        ends: as of a LinearAllreduce.
    """

    cut_dim = 1
    ends: tuple[SiblingInput, ...] = ()

    def forward(self, input: Tensor) -> Tensor:
        for entered in self.ends:
            entered.clear()
        y = reduce_from_group(self._conv_forward(input, self.weight, None), self.tp, self.reduce_dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype).view(-1, *[1] * (self.weight.ndim - 2))


class ConvPartial(ParallelConv):
    """`ConvAllreduce` whose sum is left to the module around it."""

    cut_dim = 1
    ends: tuple[SiblingInput, ...] = ()

    def forward(self, input: Tensor) -> Tensor:
        for entered in self.ends:
            entered.clear()
        bias = None if self.bias is None else keep_on_first(self.bias, self.tp)
        return self._conv_forward(input, self.weight, bias)


def rewrite_conv(
    module: Any, layer: type[ParallelConv], group: TPGroup, shards: dict[str, Shard], name: str, dtype: torch.dtype | None
) -> None:
    """Turn a convolution into `layer` in place; the data of its Parameters is cut elsewhere.

    Raises:
        PlanError: it has groups or a forward of its own, or ranks hold copies of its input channels.
    """
    if module.groups != 1:
        raise PlanError(f"{name}: a convolution of {module.groups} groups is split with its channels: plan it local_params")
    if type(module).forward not in [cls.forward for cls in CONVOLUTIONS]:
        raise PlanError(
            f"{name}: {type(module).__name__} has a forward of its own, so it can't be split. Leave it out of the plan."
        )
    dims = [cut.dim for cut in shards["weight"].cuts]
    if dims not in ([], [layer.cut_dim]):
        raise PlanError(f"{name}: the weight of a {layer.__name__} is cut on dim {layer.cut_dim}, the plan cuts {dims}")
    if layer.cut_dim == 1 and shards["weight"].copied is not None:
        raise PlanError(f"{name}: several ranks hold the same input channels, so their products would be added twice")
    insert_class(module, layer)
    module.tp, module.shards, module.full_name, module.reduce_dtype = group, shards, name, dtype
    if layer is ConvLayer:
        module.siblings = SiblingInput(group, 1, dtype)
    set_conv_sizes(module, shards["weight"].local_shape(group.tp_rank))


def set_conv_sizes(module: Any, shape: tuple[int, ...]) -> None:
    """Make `out_channels` and `in_channels` those of a weight of `shape`."""
    module.out_channels, module.in_channels = shape[0], shape[1] * module.groups


def local_groups(module: Any, shard: Shard | None) -> dict[str, tuple[int, ...]]:
    """The groups that each rank keeps of a convolution of several, cut over its output channels; {} if it is none."""
    if not isinstance(module, CONVOLUTIONS) or module.groups == 1 or shard is None or [cut.dim for cut in shard.cuts] != [0]:
        return {}
    each = module.out_channels // module.groups
    held = [shard.local_shape(rank)[0] for rank in range(shard.tp_size)]
    return {} if any(n % each for n in held) else {"groups": tuple(n // each for n in held)}
