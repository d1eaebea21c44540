"""Formats of few bits in which a linear's frozen weight is kept: bitsandbytes' and torchao's, by the libraries' own calls."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import AutoTPError

ONLY_ADAPTERS = (
    "the weights are quantised, and what they were is gone. Adapters are trained, saved and loaded as they are; for all else "
    "autotp.dequantize(model) gives plain weights of the quantised values, or load the model without quantization_config="
)


class Packed(nn.Linear):
    """A linear whose weight is kept in a format of few bits; its bias is plain.

    Attributes:
        plain: dtype and requires_grad of the weight that it was.
        state_names: attributes that the format keeps on the module.
    """

    plain: tuple[torch.dtype, bool]
    state_names: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def pack(weight: Tensor, **options: Any) -> tuple[nn.Parameter, dict[str, Any]]:
        """A weight `[N, K]` quantised on its device, and the module's attributes."""
        raise NotImplementedError

    def multiply_packed(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ w.T + b` in x's dtype: x `[..., K]`, result `[..., N]`; differentiable in x and the bias."""
        raise NotImplementedError

    def unpack(self) -> Tensor:
        """The weight's values, `[N, K]`."""
        raise NotImplementedError

    def keep_scales(self) -> None:
        """Note on the module what the library keeps beside its weight, which is about to become another Parameter (FSDP2's)."""

    def forward(self, input: Tensor) -> Tensor:
        return self.multiply_packed(input, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {type(self.weight).__name__}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)  # the same keys: not the library's beside them

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing: Any, *args: Any):
        own = f"{prefix}weight"
        if own in state_dict:
            raise AutoTPError(f"'{own}' can't be loaded into a quantised model: {ONLY_ADAPTERS}")
        nn.Module._load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, *args)


class FourBit(Packed):
    """bitsandbytes' NF4 and FP4: a scale for each block of 64 values, in the order in which they lie."""

    state_names = ("compute_dtype", "compute_type_is_set", "quant_state", "quant_storage")
    compute_dtype: torch.dtype | None
    quant_state: Any

    @staticmethod
    def pack(weight: Tensor, *, compute_dtype: torch.dtype | None = None, **options: Any) -> tuple[nn.Parameter, dict[str, Any]]:
        import bitsandbytes as bnb

        packed: Any = bnb.nn.Params4bit(weight, requires_grad=False, **options).to(weight.device)
        state = {"compute_dtype": compute_dtype, "compute_type_is_set": True, "quant_storage": packed.quant_storage}
        return packed, {**state, "quant_state": packed.quant_state}

    def multiply_packed(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        import bitsandbytes as bnb

        weight: Any = self.weight
        dtype = self.compute_dtype or x.dtype
        bias = None if bias is None else bias.to(dtype)
        return bnb.matmul_4bit(x.to(dtype), weight.t(), bias=bias, quant_state=self._find_scales()).to(x.dtype)

    def unpack(self) -> Tensor:
        import bitsandbytes as bnb

        return bnb.functional.dequantize_4bit(self.weight.data, self._find_scales())

    def keep_scales(self) -> None:
        self.quant_state = self._find_scales()

    def _find_scales(self) -> Any:
        """Of the weight, which may be another that a merge left; where FSDP2 made a plain one of it, what was noted."""
        return getattr(self.weight, "quant_state", None) or self.quant_state


class EightBit(Packed):
    """bitsandbytes' LLM.int8(): a scale for each output, and one for each row of inputs as it comes."""

    state_names = ("state", "index")
    state: Any

    @staticmethod
    def pack(weight: Tensor, *, threshold: float) -> tuple[nn.Parameter, dict[str, Any]]:
        import bitsandbytes as bnb

        state = bnb.MatmulLtState()
        state.threshold, state.has_fp16_weights, state.use_pool = threshold, False, threshold > 0
        make: Any = bnb.nn.Int8Params
        packed = make(weight.cpu(), requires_grad=False, has_fp16_weights=False)  # quantised as it leaves the CPU
        return packed.to(weight.device), {"state": state, "index": None}

    def multiply_packed(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        import bitsandbytes as bnb

        bias = None if bias is None else bias.to(x.dtype)
        return bnb.matmul(x, self.weight, bias=bias, state=self._find_state())

    def unpack(self) -> Tensor:
        import bitsandbytes as bnb

        return bnb.functional.int8_vectorwise_dequant(self.weight.data, self._find_state().SCB)

    def keep_scales(self) -> None:
        self._find_state()

    def _find_state(self) -> Any:
        """What bitsandbytes reads beside the weight, which may have moved, or be another that a merge left."""
        scales = getattr(self.weight, "SCB", None)
        if scales is not None:  # else FSDP2 made a plain Parameter of the weight, and they are noted
            self.state.SCB = scales
        self.state.CB, self.state.is_training = self.weight.data, self.training
        return self.state


class TensorClass(Packed):
    """torchao's formats: the weight is a tensor of a class of its own, which knows how it is multiplied."""

    @staticmethod
    def pack(weight: Tensor, *, config: Any) -> tuple[nn.Parameter, dict[str, Any]]:
        from torchao.quantization import quantize_

        holder = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        holder.weight = nn.Parameter(weight, requires_grad=False)
        quantize_(holder, config, filter_fn=lambda module, name: True)
        packed: Any = holder.weight
        if type(packed) is nn.Parameter:
            raise AutoTPError(f"torchao left a weight {list(weight.shape)} as it was: {config} does not fit its sizes")
        return packed.requires_grad_(False), {}

    def multiply_packed(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = nn.functional.linear(x, self.weight, bias)
        if x.requires_grad and torch.is_grad_enabled() and not y.requires_grad:
            raise AutoTPError(
                f"torchao's {type(self.weight).__name__} gives its input no gradient, so layers before it would not train: use a "
                f"weight-only format, as Int8WeightOnlyConfig() is"
            )
        return y

    def unpack(self) -> Tensor:
        return self.weight.dequantize()


def list_tensors(weight: Any) -> list[Tensor]:
    """The plain tensors that hold a weight of any format: its values, and the scales that lie inside or beside it."""
    if hasattr(weight, "__tensor_flatten__"):
        return [tensor for name in weight.__tensor_flatten__()[0] for tensor in list_tensors(getattr(weight, name))]
    state = getattr(weight, "quant_state", None)
    nested = getattr(state, "state2", None)
    scales = [getattr(state, "absmax", None), getattr(nested, "absmax", None), getattr(state, "offset", None)]
    return [each for each in (weight, *scales, getattr(weight, "SCB", None)) if isinstance(each, Tensor)]


class Format(NamedTuple):
    """`packed` is our part of a linear of this format; `linear` names the library's, which it is an instance of."""

    packed: type[Packed]
    linear: str


FORMATS = {
    "bitsandbytes_4bit": Format(FourBit, "bitsandbytes.nn.Linear4bit"),
    "bitsandbytes_8bit": Format(EightBit, "bitsandbytes.nn.Linear8bitLt"),
    "torchao": Format(TensorClass, "torch.nn.Linear"),
}
