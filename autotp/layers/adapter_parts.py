"""What the pieces of an adapter become that are neither a column nor a row linear: they stand in front of their own class.

| piece | why |
|---|---|
| `SummedPart` | whole, but each rank sees part of the work in it: its gradient is summed |
| `DealtDropout` | what it drops is dealt to the ranks: each draws its own |
| `DealtDora` | its norms and magnitudes are of a weight that is dealt |
| `DealtRows` | around a linear that scatters its sums: its pieces do too |
| `DealtDelta` | an embedding's adapter is whole, and merged into dealt rows |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..collectives import copy_to_group
from .base import TensorParallel_Layer
from .draws import find_generator
from .tokens import TokenStream


class SummedPart(TensorParallel_Layer):
    """A module whose parameters' gradients are summed over the ranks.

    Attributes:
        always: in each forward; otherwise only where `tokens` deals its rows.
        tokens: the stream of the row linear whose dealt output it reads.
    """

    always: bool
    tokens: TokenStream | None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        dealt = self.tokens is not None and self.tokens.scatters
        if not torch.is_grad_enabled() or not (self.always or dealt):
            return super().forward(*args, **kwargs)
        own = self._parameters
        self.__dict__["_parameters"] = {name: self._enter(p) for name, p in own.items()}
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.__dict__["_parameters"] = own

    def _enter(self, parameter: Tensor | None) -> Tensor | None:
        if parameter is None or not parameter.requires_grad:
            return parameter
        return copy_to_group(parameter, self.tp, torch.promote_types(parameter.dtype, torch.float32))


class DealtDropout(TensorParallel_Layer):
    """Dropout of columns that are dealt: what a rank draws follows from the default generator and its number.

    The default generators end alike on all ranks, and what is run again draws the same.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        seed, generator = int(torch.randint(2**62, ())), find_generator(input.device)
        state = generator.get_state()
        generator.manual_seed(seed + self.tp.tp_rank)
        try:
            return super().forward(input)
        finally:
            generator.set_state(state)


class DealtDora(SummedPart):
    """DoRA's magnitudes beside a weight that is dealt: `y = m / |W + s B A| * (W + s B A) x`, norms over the inputs.

    Attributes:
        row: the inputs are dealt, so that squared norms are summed; otherwise the outputs and the magnitudes are.
    """

    row: bool

    def forward(self, x: Tensor, *, base_layer: Any, base_result: Tensor | None = None, **kwargs: Any) -> Tensor:
        if base_result is None:  # dropout came between: the layer's own product is what sums over the ranks
            base_result = base_layer(x)
        return super().forward(x, base_layer=base_layer, base_result=base_result, **kwargs)

    def get_lora_weight(self, lora_A: Any, lora_B: Any, adapter_name: str | None = None) -> Tensor:
        return lora_B.weight @ lora_A.weight

    def get_weight_norm(self, weight: Tensor, lora_weight: Tensor, scaling: float, adapter_name: str | None = None) -> Tensor:
        weight = weight.T if self.fan_in_fan_out else weight
        total = (weight + scaling * lora_weight).detach()
        if not self.row:
            return torch.linalg.norm(total, dim=1).to(weight.dtype)
        squares = self.tp.all_reduce(total.float().square().sum(1))
        return squares.sqrt().to(weight.dtype)


class DealtRows(TensorParallel_Layer):
    """A LoRA layer around a row linear whose sums are scattered: all that it adds up are this rank's rows.

    Attributes:
        tokens: the linear's stream, by which the module around it knows that nothing stays whole.
    """

    tokens: TokenStream


class DealtDelta(TensorParallel_Layer):
    """An embedding's adapter: whole, but what it adds to the table on merging is this rank's part."""

    def get_delta_weight(self, adapter: str) -> Tensor:
        layer: Any = self
        return layer.get_base_layer().shards["weight"].split(super().get_delta_weight(adapter), self.tp.tp_rank)
