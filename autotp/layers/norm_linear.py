"""LayerNormLinear: a norm and the linear behind it as one module, with TransformerEngine's arguments.

M rows, K in, N out, T ranks; S rows along dim 0 where rows are dealt (`sequence_parallel`).

| parallel_mode | weight | norm weight | x -> y | the same, rows dealt |
|---|---|---|---|---|
| None | `[N, K]` | `[K]` | `[..., K] -> [..., N]` | `[S/T, ..., K] -> [S/T, ..., N]` |
| "column" | `[N/T, K]` | `[K]` | `[..., K] -> [..., N/T]` | `[S/T, ..., K] -> [S, ..., N/T]` |
| "row" | `[N, K/T]` | `[K/T]` | `[..., K/T] -> [..., N]` | `[S, ..., K/T] -> [S/T, ..., N]` |

Gradients are complete on every rank. What each argument means is tabled in docs/layer_norm_linear.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from ..collectives import copy_to_group, sum_copies
from ..comm import TPGroup
from ..errors import AutoTPError, PlanError
from ..groups import resolve_group
from .norm import DealtNorm, normalise_over_group
from .norm_linear_parameters import NormLinearParameters
from .norm_parts import NORMS, check_size, join_biases, name_linears, name_parts, read_linears, read_norm
from .norm_product import multiply_normalised, outside_graphs
from .norm_wgrad import NormProduct, Product, Sink
from .overlap import Overlap, OverlapOptions, check_rows, read_moves, read_symmetric, set_options
from .pending import settle
from .product import watches_operations, widen

MODES = (None, "column", "row")


class LayerNormLinear(OverlapOptions, NormLinearParameters):
    """`linear(norm(x))`; the norm's output is not kept for backward but computed again.

    Parameters are `layer_norm_weight`, `layer_norm_bias`, `weight` and `bias`, or `NAME_weight` and `NAME_bias` for each part.

    Args:
        in_features, out_features: K and N of the whole layer.
        eps: added to the variance or mean square.
        sequence_parallel: rows (dim 0) are dealt to the ranks, equally many to each.
        fuse_wgrad_accumulation: weight gradients are added to each weight's `main_grad` instead of `grad`.
        tp_group: process group, one-axis mesh or TPGroup; None for `tp_size` ranks that `set_tensor_parallel_group` names later.
        tp_size: ranks where `tp_group` is not known yet; more than one takes `device="meta"`, since a rank's slice is not known.
        get_rng_state_tracker: its result's `fork()` is entered while initial weights are drawn.
        init_method: fills a whole weight in place; None draws from a normal distribution of deviation 0.023.
        bias: the linear has one.
        normalization: "LayerNorm" or "RMSNorm".
        return_bias: the bias is not added but returned after the product.
        params_dtype: of the parameters; None for torch's default.
        parallel_mode: None, "column" or "row".
        return_layernorm_output: the norm's output is returned too, last, in x's dtype.
        return_layernorm_output_gathered: all ranks' rows of it, where the layer gathers them anyway.
        parameters_split: names of equal parts of the outputs, or names and sizes; each part is a Parameter, dealt by itself.
        zero_centered_gamma: the norm's weight is stored less one.
        device: of the parameters; None for torch's default, "meta" to draw nothing (`to_empty`, then `reset_parameters`).
        delay_wgrad_compute: weight gradients are computed by `backward_dw`.
        name: for messages.
        overlap: what moves while the layer multiplies, see overlap.py.

    Raises:
        PlanError: sizes, parts, modes or options that do not fit together.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        *,
        delay_wgrad_compute: bool = False,
        name: str | None = None,
        **overlap: Unpack[Overlap],
    ) -> None:
        super().__init__()
        self.full_name = name or type(self).__name__
        if normalization not in NORMS or parallel_mode not in MODES:
            raise PlanError(
                f"{self.full_name}: normalization is one of {NORMS} and parallel_mode one of {MODES}, "
                f"got {normalization!r} and {parallel_mode!r}"
            )
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.parallel_mode, self.fuse_wgrad_accumulation = parallel_mode, fuse_wgrad_accumulation
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered and return_layernorm_output
        self.get_rng_state_tracker, self.init_method = get_rng_state_tracker, init_method
        self.delay_wgrad_compute = delay_wgrad_compute
        set_options(self, overlap)
        self.pending: list[tuple[NormProduct, Product]] = []
        self._owns, self._laid, self._siblings = True, None, None
        self._run = outside_graphs() if fuse_wgrad_accumulation or delay_wgrad_compute else None
        self.reduce_dtype: torch.dtype | None = None
        self.tp = None if tp_group is None else resolve_group(tp_group)
        self.tp_size = check_size(self.tp, tp_size, self.full_name)
        self.sequence_parallel = sequence_parallel and self.tp_size > 1
        self._make_parameters(in_features, name_parts(parameters_split, out_features, self.full_name), bias, device, params_dtype)
        made_on = self.get_parameter(self.weight_names[0]).device
        if self.tp is None and self.tp_size == 1:
            self.tp = TPGroup(None, made_on)
        if made_on.type != "meta":
            self.reset_parameters()
        self._lay()

    @classmethod
    def from_modules(
        cls,
        norm: nn.Module,
        linears: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        *,
        normalization: str | None = None,
        eps: float | None = None,
        zero_centered_gamma: bool = False,
        **options: Any,
    ) -> Self:
        """One layer of a norm and the linears that read it; the Parameter objects are shared with them.

        Args:
            norm: an `nn.LayerNorm` or `nn.RMSNorm`; any other with `weight` and `bias`, where `normalization` and `eps` say what
                it computes.
            linears: `nn.Linear`s, or `LinearLayer`s of one group; with names for the parts, or one alone.
            options: of the constructor, for what the modules do not say (`sequence_parallel`, `return_bias`, `name`, ...).

        Raises:
            PlanError: modules that compute something else, or do not fit together.
        """
        named = name_linears(linears)
        group, shards = read_linears(named)
        kind, found_eps = read_norm(norm, normalization, eps)
        first = next(iter(named.values()))
        layer = cls(
            first.weight.shape[1],
            sum(shard.shape[0] for shard in shards.values()),
            found_eps,
            tp_group=group,
            bias=any(linear.bias is not None for linear in named.values()),
            normalization=kind,
            parallel_mode=None if group is None else "column",
            parameters_split=None if list(named) == [""] else {name: shard.shape[0] for name, shard in shards.items()},
            zero_centered_gamma=zero_centered_gamma,
            device="meta",
            **options,
        )
        if group is not None:
            shared = all(linear.siblings is first.siblings for linear in named.values())
            layer._siblings = first.siblings if shared and first.siblings.members == len(named) else None
            layer.reduce_dtype = first.siblings.reduce_dtype
        layer._take_over(norm, named)
        return layer

    # -- running --------------------------------------------------------------------------------------------------------

    def forward(self, inp: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        """y, then the bias under `return_bias`, then the norm output under `return_layernorm_output`.

        Args:
            inp: `[..., in_features]`, in the parameters' dtype or any under autocast.

        Raises:
            AutoTPError: another width or dtype, rows that can't be dealt, or no group yet.
        """
        inp = settle(inp)
        tp = self._check_input(inp)
        weights, biases = self._read_parameters(tp)
        added = [None] * len(biases) if self.return_bias else biases
        how, row = self._describe(tp), self.parallel_mode == "row"
        sink = None
        if self.fuse_wgrad_accumulation or self.delay_wgrad_compute:
            pending = self.pending if self.delay_wgrad_compute else None
            sink = Sink(self._full_names(), weights, self.fuse_wgrad_accumulation, pending, self._run)
        if row:
            h = self._normalise_columns(inp, tp)
            y, _ = multiply_normalised(how, h, None, None, weights, [None] * len(weights), sink, self._merge(weights, True))
            bias = join_biases(added, self.part_sizes, y.dtype)
            y = y if bias is None else y + bias
        else:
            merged = self._merge(weights, self.return_bias)
            y, h = multiply_normalised(how, inp, self.layer_norm_weight, self.layer_norm_bias, weights, added, sink, merged)
        if not (self.return_bias or self.return_layernorm_output):
            return y
        returned = [join_biases(biases, self.part_sizes, y.dtype)] if self.return_bias else []
        return (y, *returned, *([h] if self.return_layernorm_output else []))

    def _check_input(self, x: Tensor) -> TPGroup:
        tp, dtype = self._group(), getattr(self, self.weight_names[0]).dtype
        if x.shape[-1] != self.in_features:
            raise AutoTPError(f"{self.full_name} takes [..., {self.in_features}], and was given {list(x.shape)}")
        if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
            raise AutoTPError(f"{self.full_name} has {dtype} weights, and was given {x.dtype}: cast one of them, or use autocast")
        if self.sequence_parallel and x.dim() < 2:
            raise AutoTPError(
                f"{self.full_name}: sequence_parallel deals rows along dim 0, and the input {list(x.shape)} has none"
            )
        if self.sequence_parallel and self.parallel_mode == "row" and x.shape[0] % tp.tp_size:
            raise AutoTPError(f"{self.full_name}: dim 0 of {list(x.shape)} can't be dealt evenly to {tp.tp_size} ranks: pad it")
        if self.sequence_parallel and self.parallel_mode is not None and not watches_operations():
            check_rows(self, tp, x.numel() // x.shape[-1])
        return tp

    def _describe(self, tp: TPGroup) -> NormProduct:
        column, dealt = self.parallel_mode == "column", self.sequence_parallel
        kind = "layernorm" if self.normalization == "LayerNorm" else "rms1p" if self.zero_centered_gamma else "rms"
        give = "all" if self.return_layernorm_output_gathered and column and dealt else "own"
        return NormProduct(
            kind=None if self.parallel_mode == "row" else kind,
            eps=self.eps,
            group=tp,
            less_one=self.zero_centered_gamma and kind == "layernorm",
            gather_rows=column and dealt,
            own_rows=self.parallel_mode is None and dealt,
            sum_input=column and not dealt and tp.tp_size > 1,
            sum_output=self.parallel_mode == "row" and not dealt and tp.tp_size > 1,
            scatter_rows=self.parallel_mode == "row" and dealt,
            copied=self.copied,
            reduce_dtype=self.reduce_dtype,
            give=give if self.return_layernorm_output and self.parallel_mode != "row" else None,
            moves=read_moves(self),
            symmetric=read_symmetric(self),
            name=self.ub_name or self.full_name,
        )

    def _read_parameters(self, tp: TPGroup) -> tuple[list[Tensor], list[Tensor | None]]:
        """Weights and biases; the gradient of a bias that is added to rows dealt after the product is summed."""
        weights: list[Tensor] = [getattr(self, name) for name in self.weight_names]
        biases: list[Tensor | None] = [getattr(self, name) for name in self.bias_names]
        if self.sequence_parallel and (self.parallel_mode == "row" or (self.return_bias and self.parallel_mode is None)):
            biases = [None if bias is None else copy_to_group(bias, tp, widen(bias)) for bias in biases]
        elif self.return_bias:
            copied = self.copied[len(biases) :]
            biases = [b if b is None or s is None else sum_copies(b, tp, s) for b, s in zip(biases, copied, strict=True)]
        return weights, biases

    def _normalise_columns(self, x: Tensor, tp: TPGroup) -> Tensor:
        """h of this rank's columns, by statistics of all ranks'."""
        kind = "layernorm" if self.normalization == "LayerNorm" else "rms"
        gamma, width = self.layer_norm_weight, self.shards["layer_norm_weight"].shape[0]
        if self.zero_centered_gamma and gamma is not None:
            gamma = gamma.to(torch.promote_types(gamma.dtype, torch.float32)) + 1
        return normalise_over_group(x, tp, DealtNorm(kind, self.eps, width), gamma, self.layer_norm_bias).to(x.dtype)

    def _full_names(self) -> list[str]:
        return [f"{self.full_name}.{name}" for name in self.weight_names]

    def backward_dw(self) -> None:
        """Compute the weight gradients of the oldest backward that is pending, and add them to what is there.

        Nothing is pending without `delay_wgrad_compute`, or where all weights are frozen. They reach `grad` through autograd,
        so that hooks on the weights run; under `fuse_wgrad_accumulation` they are in `main_grad`, and `grad` gets zeros. With
        rows that are gathered, all ranks must call it.

        Raises:
            AutoTPError: every backward's gradients have been computed already.
        """
        weights = [self.get_parameter(name) for name in self.weight_names]
        if not self.delay_wgrad_compute or not any(weight.requires_grad for weight in weights):
            return
        if not self.pending:
            raise AutoTPError(f"{self.full_name}: no weight gradient is pending: call backward_dw once after each backward")
        how, product = self.pending.pop(0)
        grads = Sink(self._full_names(), weights, self.fuse_wgrad_accumulation).add(how, product)
        found = [(weight, grad) for weight, grad in zip(weights, grads, strict=True) if grad is not None]
        if found:
            torch.autograd.backward([weight for weight, _ in found], [grad.to(weight.dtype) for weight, grad in found])

    # -- state, and what is shown ---------------------------------------------------------------------------------------

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        """Takes TransformerEngine's keys; its `_extra_state` holds scales of 8-bit products, of which there are none here."""
        extra = state_dict.pop(f"{prefix}_extra_state", None)
        if isinstance(extra, Tensor) and extra.numel():
            warnings.warn(f"{prefix or self.full_name}: 8-bit scaling state in the checkpoint is not used", stacklevel=2)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        own = f"in_features={self.in_features}, out_features={self.out_features}, eps={self.eps}, {self.normalization}"
        own += f", parallel_mode={self.parallel_mode}, sequence_parallel={self.sequence_parallel}, "
        return own + (super().extra_repr() if self.tp is not None else f"tp=?/{self.tp_size}")
