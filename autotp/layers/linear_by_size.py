"""`Linear`: a linear made by its sizes, whole or split over its outputs or inputs, as TransformerEngine's is.

M rows, K in, N out, T ranks; with `sequence_parallel` the rows (dim 0) are dealt to the ranks outside the layer.

| `tensor_parallel_mode` | weight | forward | backward |
|---|---|---|---|
| None | `[N, K]` | `y = x @ w.T + b` | no collective |
| "column" | `[N/T, K]`, bias `[N/T]` | `y_local = x @ w.T + b` | `dx = all_reduce(dy_local @ w)` |
| "column", sequence parallel | the same | `x` all-gathered first | `dx` reduce-scattered |
| "row" | `[N, K/T]`, bias `[N]` whole | `y = all_reduce(x_local @ w.T) + b` | no collective |
| "row", sequence parallel | the same | reduce-scattered instead | `dy` all-gathered; `db` summed over the ranks |

Rows that are gathered or scattered move while the layer multiplies, see overlap.py; a column keeps its own rows alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from ..comm import TPGroup
from ..errors import PlanError
from ..groups import resolve_group
from ..kernels.dealt import multiply_gathered, multiply_scattered
from ..kernels.product import ProductSpec
from ..row_collectives import gather_rows_from_group, scatter_rows_to_group
from ..shard import Shard
from .linear import ParallelLinear, prepare
from .overlap import Overlap, deal_rows, set_options
from .product import make_spec, watches_operations

MODES = (None, "column", "row")


class Linear(ParallelLinear, nn.Linear):
    """A linear of `in_features` and `out_features`, this rank's part of which is made, with the whole layer's initial weights.

    Where ranks draw from equal generators (`torch.manual_seed`), their parts are those of the `nn.Linear` that one rank would
    have drawn, whatever the number of ranks; the whole weight exists for that moment. State dicts have the keys and, from
    `autotp.full_state_dict`, the shapes of `nn.Linear`; `load_state_dict` takes whole tensors, this rank's own, and the older
    keys of TransformerEngine's operation (`basic_ops.0.weight`).

    Args:
        in_features, out_features: of the whole layer; the attributes of these names are this rank's afterwards.
        bias: add one.
        device: of the parameters; None for the group's, "meta" to draw nothing (`to_empty`, then `reset_parameters`).
        dtype: of the parameters; None for torch's default.
        tensor_parallel_mode: None, "column" or "row".
        tensor_parallel_group: process group, one-axis mesh or TPGroup; None for all ranks. Unused without a mode.
        sequence_parallel: rows (dim 0, equally many on each rank) are dealt outside the layer. Nothing without a mode.
        rng_state_tracker_function: returns an object whose `fork()` is the context in which initial weights are drawn.
        accumulate_into_main_grad: add gradients to `parameter.main_grad` (see kernels/main_grad.py).
        name: for messages.
        overlap: what moves while the layer multiplies, see overlap.py.

    Raises:
        PlanError: no such mode or option.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        name: str = "Linear",
        **overlap: Unpack[Overlap],
    ) -> None:
        nn.Module.__init__(self)
        if tensor_parallel_mode not in MODES:
            raise PlanError(f"{name}: tensor_parallel_mode is one of {MODES}, got {tensor_parallel_mode!r}")
        if tensor_parallel_mode is None:
            device = torch.device(device or torch.get_default_device())
            group = TPGroup(None, device)
        else:
            group = resolve_group(tensor_parallel_group)
            device = torch.device(device or group.device)
        self.tensor_parallel_mode = tensor_parallel_mode
        self.sequence_parallel = sequence_parallel and group.tp_size > 1
        self.rng_state_tracker_function = rng_state_tracker_function
        self.cut_dim = self.in_dim if tensor_parallel_mode == "row" else self.out_dim
        shards = self.shards_of(Shard.even((out_features, in_features), self.cut_dim, group.tp_size), bias)
        local = {key: shard.local_shape(group.tp_rank) for key, shard in shards.items()}
        if bias:
            local.setdefault("bias", (out_features,))
        for key in ("weight", "bias"):
            empty = torch.empty(local[key], device=device, dtype=dtype) if key in local else None
            self.register_parameter(key, None if empty is None else nn.Parameter(empty))
        prepare(self, group, shards, name)
        set_options(self, overlap)
        self.accumulate_into_main_grad = accumulate_into_main_grad
        if device.type != "meta":
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw initial weights: those of the whole `nn.Linear`, of which this rank keeps its part."""
        sizes = self.shards["weight"].shape
        tracker = self.rng_state_tracker_function
        with nullcontext() if tracker is None else tracker().fork():
            whole = nn.Linear(sizes[1], sizes[0], self.bias is not None, self.weight.device, self.weight.dtype)
        for key, parameter in self.named_parameters(recurse=False):
            value = whole.get_parameter(key)
            shard = self.shards.get(key)
            parameter.copy_(value if shard is None else shard.split(value, self.tp.tp_rank))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Put `param`, this rank's part, in the place of `weight` or `bias`.

        Raises:
            PlanError: it has another shape than this rank's part.
        """
        shards = self.__dict__.get("shards", {})
        if param is not None and name in shards:
            expected = shards[name].local_shape(self.tp.tp_rank)
            if tuple(param.shape) != expected:
                raise PlanError(
                    f"{self.full_name}: TP rank {self.tp.tp_rank} holds {expected} of {name} {shards[name].shape}, and was given "
                    f"{tuple(param.shape)}: pass layer.shards['{name}'].split(whole, layer.tp.tp_rank)"
                )
        super().register_parameter(name, param)

    def forward(self, input: Tensor) -> Tensor:
        mode = self.tensor_parallel_mode if self.tp.tp_size > 1 else None
        if mode == "column":
            if not self.sequence_parallel:
                return self.multiply(input, enters=True)
            return self._gather(input)
        if mode == "row":
            return self._scatter(input) if self.sequence_parallel else self.multiply(input, leaves=True)
        return self.multiply(input)

    def _gather(self, x: Tensor) -> Tensor:
        if x.dim() < 2:
            raise PlanError(f"{self.full_name}: sequence_parallel deals rows along dim 0, and the input {list(x.shape)} has none")
        if x.shape[-1] != self.in_features:
            raise PlanError(f"{self.full_name} takes [..., {self.in_features}], got {list(x.shape)}")
        if watches_operations():
            return self.multiply(gather_rows_from_group(x, self.tp, self.reduce_dtype))
        rows, *rest = x.shape[:-1]
        spec = self._spec((rows * self.tp.tp_size, *rest), (rows, *rest))
        return multiply_gathered(spec, x, (self.weight,), (self.bias,))[0]

    def _scatter(self, x: Tensor) -> Tensor:
        if x.dim() < 2 or x.shape[0] % self.tp.tp_size:
            raise PlanError(
                f"{self.full_name}: sequence_parallel deals dim 0 of {list(x.shape)} to {self.tp.tp_size} ranks: pad it first"
            )
        if watches_operations():
            y = scatter_rows_to_group(self.multiply_partial(x), self.tp, self.reduce_dtype)
        else:
            rows, *rest = x.shape[:-1]
            y = multiply_scattered(self._spec((rows, *rest), (rows // self.tp.tp_size, *rest)), x, self.weight)
        return self.add_bias_of_rows(y)

    def _spec(self, shape: tuple[int, ...], local_shape: tuple[int, ...]) -> ProductSpec:
        """How rows that are dealt are multiplied: `shape` of all ranks', `local_shape` of this one's."""
        names = (f"{self.full_name}.weight", f"{self.full_name}.bias") if self.accumulate_into_main_grad else (None, None)
        spec = make_spec(self.run, self.tp, self.reduce_dtype, (None, None), names)
        return spec._replace(dealt=deal_rows(self, self.tp, shape, local_shape))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes the keys of TransformerEngine's operation too, whose numbers depend on its options."""
        for key in [key for key in state_dict if key.startswith((f"{prefix}basic_ops.", f"{prefix}_extra_state"))]:
            value, leaf = state_dict[key], key.rpartition(".")[2]
            if leaf in ("weight", "bias"):
                state_dict.setdefault(prefix + leaf, value)
            if leaf in ("weight", "bias", "_extra_state"):  # anything else is not that operation's: strict loading names it
                del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Sizes, ranks and mode."""
        return f"{super().extra_repr()}, mode={self.tensor_parallel_mode}, sequence_parallel={self.sequence_parallel}"
