"""FP8 products of a layer, or of siblings as one: whose scales agree over the ranks, and weights quantised once a step.

What is quantised of a weight is kept until the weight changes. A version counter does not say so of every change (`.data` has
one of its own), so it is kept no longer than this:

| what happens | what is kept |
|---|---|
| an edit that counts, other data, a step of any `torch.optim.Optimizer` | nothing |
| a backward, or one more forward, where no optimizer that has stepped holds the weight itself | nothing |
| a forward without gradient | is neither read nor written |
| a forward, or its optimizer's step, that a CUDA graph captures, and all after it | the same: replays may change weights unseen |

Of the second kind are weights with masters elsewhere, FSDP's, frozen ones, and those of `w.data -= lr * w.grad`.
The first that finds its weight changed has all others' quantised with it, see fp8_together.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..comm import TPGroup
from ..errors import AutoTPError
from ..kernels import few_rows
from ..kernels.autocast import autocast_dtype
from ..kernels.fp8 import Recipe, multiply, quantise
from ..kernels.fp8_product import Scaled, multiply_fp8
from ..kernels.fp8_scaled import LIMITS, Operands, Quantised, Share, why_not_fp8
from ..kernels.fp8_traced import multiply_traced
from ..kernels.product import ProductSpec
from ..row_collectives import pad_rows
from .fp8_kept import Kept, is_captured, steps
from .fp8_together import Together

OPERANDS = ("inputs", "weights", "gradients")


class Scaling:
    """How a layer, or siblings as one, make their products in FP8.

    Args:
        recipe: scalings and formats; name: of the layer, for messages.
        group: the ranks, and cut: 0 where they have parts of the outputs, 1 of the inputs; None where they have all of it.
        transposed: weights are `[K, N]`.
        together: of the model, what quantises all weights at once.

    Attributes:
        bad: int32 `[3]`, scales that were not finite; None before the first product.
        captured: whether a CUDA graph was captured that trains with it, or steps its weights.
    """

    def __init__(
        self,
        recipe: Recipe,
        name: str,
        group: TPGroup | None = None,
        cut: int | None = None,
        transposed: bool = False,
        together: Together | None = None,
    ) -> None:
        self.recipe, self.name, self.group, self.cut, self.transposed = recipe, name, group, cut, transposed
        self.together = together or Together()
        self.bad: Tensor | None = None
        self.captured = False
        self._counts: tuple[Tensor, ...] = ()
        self.kept = Kept((recipe, group))

    def __deepcopy__(self, memo: dict[int, Any]) -> Scaling:
        together = copy.deepcopy(self.together, memo)
        twin = memo[id(self)] = Scaling(self.recipe, self.name, self.group, self.cut, self.transposed, together)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "bad": None, "captured": False, "_counts": (), "kept": Kept((self.recipe, self.group))}

    def multiply(
        self,
        spec: ProductSpec,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        whole: Tensor | None = None,
        gather_rows: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """`x @ w.T + b` for each weight, as autograd sees it.

        Args:
            whole: all weights as one, where they lie side by side.
            gather_rows: of output gradients, see Scaled.

        Raises:
            AutoTPError: a GPU without FP8 products.
        """
        if torch.compiler.is_compiling():  # it would keep the first weights that it sees
            return _multiply_uncompiled(self, spec, x, weights, biases, whole, gather_rows)
        if self.bad is None or self.bad.device != x.device:
            if why_not := why_not_fp8(x.device, self.recipe.scaling):
                raise AutoTPError(f"{self.name}: precision='fp8': {why_not}; leave precision= out there")
            with torch.inference_mode(False):  # it is counted on outside of it, too
                self.bad = torch.zeros(len(OPERANDS), dtype=torch.int32, device=x.device)
                self._counts = tuple(self.bad[place] for place in range(len(OPERANDS)))
        keeps, share = torch.is_grad_enabled(), self._share()
        read = partial(self._read, weights, whole, keeps, share)
        note = partial(self._note_backward, weights)
        scaled = Scaled(self.recipe, read, self.cut, share, self._counts, note, gather_rows, keeps)
        return multiply_fp8(spec, scaled, x, weights, biases)

    def multiply_scattered(self, spec: ProductSpec, x: Tensor, weight: Tensor, dtype: torch.dtype | None) -> Tensor:
        """This rank's rows `[R, N]` of the ranks' sum of `x @ w.T`, x `[M, K]`, added up in `dtype`; their gradients are gathered
        in 8 bits. Of a tensorwise recipe whose scales agree alone.
        """
        group = self.group
        assert group is not None

        def scatter(y: Tensor) -> Tensor:
            return group.reduce_scatter_rows(pad_rows(y, group.tp_size), dtype)

        def gather(values: Tensor) -> Tensor:
            return group.gather_rows(values.view(torch.uint8))[: len(x)].view(values.dtype)

        return self.multiply(spec._replace(sum_output=scatter), x, (weight,), (None,), gather_rows=gather)[0]

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ w.T + b` of one weight, of nothing but this rank's part."""
        if self.is_traced:
            y = multiply_traced(x, weight.t() if self.transposed else weight, self.recipe, self.cut, self._share())
            return y if bias is None else y + bias.to(y.dtype)
        return self.multiply(ProductSpec(transposed=self.transposed), x, (weight,), (bias,))[0]

    def multiply_stored(self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ (weight * scale).T + b`, weight `[N, K]` in E4M3, scale `[N, 1]`; x is rounded if it has many rows."""
        if weight.dtype not in LIMITS:
            raise AutoTPError(
                f"{self.name}: its weight, kept in FP8, was cast to {weight.dtype} without its scale: load it again"
            )
        if few_rows.fits(x, weight, bias, scaled=True):
            return few_rows.linear_scaled(x, weight, scale, bias)
        dtype = autocast_dtype(x) or x.dtype
        if torch.is_grad_enabled() and x.requires_grad:
            return F.linear(x, (weight.float() * scale).to(dtype), bias)
        rows, _ = quantise(x.reshape(-1, x.shape[-1]), "rowwise", columns=False)
        assert rows is not None
        y = multiply(rows, Quantised(weight, scale, "rowwise"), dtype, fast=True).view(*x.shape[:-1], -1)
        return y if bias is None else y.add_(bias.to(dtype))

    @property
    def is_traced(self) -> bool:
        """Whether a compiler reads plain operations now: it is interrupted elsewhere."""
        if not torch.compiler.is_compiling():
            return False
        return self.recipe.scaling != "blockwise" and not torch._C._is_any_autocast_enabled()

    @property
    def gathers_values(self) -> bool:
        """Whether rows of one scale over all ranks can be gathered in 8 bits."""
        return self.recipe.scaling == "tensorwise" and self._share() is not None

    def _note_backward(self, weights: Sequence[Tensor]) -> None:
        self.together.forget_unread()
        if not all(map(steps.holds, weights)):  # who changes them now may not be seen
            self.kept.forget()

    def _share(self) -> Share | None:
        group = self.group
        return None if group is None or group.tp_size == 1 or not self.recipe.agree else partial(group.all_reduce, op="max")

    def _read(self, weights: Sequence[Tensor], whole: Tensor | None, keeps: bool, share: Share | None, turned: bool) -> Operands:
        """The operands of all weights, `|w.T|` where `turned`."""
        steps.watch()
        if keeps and not self.captured and (is_captured(weights[0]) or any(map(steps.replays, weights))):
            self.captured = True
            self.together.drop(self.kept)
            self.kept.forget()
        if not keeps or self.captured:
            return self._quantise(weights, whole, share, turned)
        kept, forward = self.kept, torch._C._current_graph_task_id() == -1  # and not one that a backward computes again
        if forward and self.recipe.scaling == "tensorwise" and not self.transposed:
            self.together.note(kept, weights, turned, self._counts[1])
        stale = kept.is_stale(weights, turned)
        if stale and forward:
            stale = not self.together.quantise(kept, share)
        if stale or (forward and kept.used and not all(map(steps.holds, weights))):
            kept.forget()
            kept.hold(weights, self._quantise(weights, whole, share, turned))
        kept.used |= forward
        return kept.operands

    def _quantise(self, weights: Sequence[Tensor], whole: Tensor | None, share: Share | None, turned: bool) -> Operands:
        """`_read` afresh, outside of autograd as all that a Function's forward calls."""
        if whole is None:
            whole = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        whole = whole.t() if self.transposed else whole
        how: Any = dict(columns=turned, cut=self.cut, share=share, bad=self._counts[1])
        return quantise(whole, self.recipe.weight_scaling, **how)


_multiply_uncompiled: Callable[..., Any] = torch.compiler.disable(Scaling.multiply)


@torch.no_grad()
def store_weight(layer: Any, weight: Tensor) -> None:
    """Keep `layer`'s weight `[N, K]` in E4M3 alone, with a scale for each row as its buffer `weight_scale`."""
    stored, _ = quantise(weight, "rowwise", columns=False)
    assert stored is not None
    layer._parameters["weight"] = nn.Parameter(stored.values, requires_grad=False)
    layer.register_buffer("weight_scale", stored.scale)
    layer.register_load_state_dict_pre_hook(_refuse_wide)
    layer.__dict__["only_runs"] = (
        "precision='fp8-weights' keeps weights in FP8 alone, and what they were is gone: load the model without it to train, "
        "save, gather or unshard it"
    )


def _refuse_wide(layer: Any, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Raise before a weight of more bits would be cast into one that has a scale."""
    weight = state_dict.get(f"{prefix}weight")
    if weight is not None and weight.dtype is not layer.weight.dtype:
        raise AutoTPError(f"{prefix}weight is {weight.dtype}: {layer.__dict__['only_runs']}")


class ScaledLinear(nn.Linear):
    """A whole linear whose products are FP8.

    Attributes:
        scaling: how.
    """

    scaling: Scaling

    def forward(self, input: Tensor) -> Tensor:
        scale = self._buffers.get("weight_scale")
        if scale is not None:
            return self.scaling.multiply_stored(input, self.weight, scale, self.bias)
        return self.scaling.run(input, self.weight, self.bias)


def scalings_of(model: nn.Module) -> dict[str, list[Scaling]]:
    """Name of each linear below `model` whose products are FP8 -> its own Scaling, and that of its siblings."""
    found: dict[str, list[Scaling]] = {}
    for name, module in model.named_modules():
        own = module.__dict__.get("scaling")
        if isinstance(own, Scaling):
            shared = getattr(module.__dict__.get("siblings"), "scaling", None)
            found[name] = [own] if shared is None else [own, shared]
    return found


def fp8_report(model: nn.Module, reset: bool = False) -> dict[str, dict[str, int]]:
    """Where scales of FP8 operands were not finite so far, so that results were not: name -> inputs, weights, gradients -> count.

    A scale is of a tensor, a row or a block, as the recipe says; siblings that are multiplied as one share their counts.
    Reading them waits for the GPU. Empty where all was finite.

    Args:
        reset: begin to count anew.
    """
    found: dict[str, dict[str, int]] = {}
    for name, scalings in scalings_of(model).items():
        counted = [scaling.bad for scaling in scalings if scaling.bad is not None]
        totals = torch.stack([each.cpu() for each in counted]).sum(0).tolist() if counted else [0, 0, 0]
        if any(totals):
            found[name] = dict(zip(OPERANDS, totals, strict=True))
    for scaling in {id(s): s for each in scalings_of(model).values() for s in each}.values():
        if reset and scaling.bad is not None:
            scaling.bad.zero_()
    return found
