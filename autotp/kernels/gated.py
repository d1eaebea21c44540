"""The gate of a gated MLP, `activation(gate) * up`, fused forward and backward; nothing but gate and up is saved.

| tensor | shape |
|---|---|
| gate, up | `[..., F]` of one dtype; columns of one buffer, or not |
| y, dy | `[..., F]` |
| dgate, dup | `[..., F]`, the halves of one buffer `[..., 2F]`, as a GEMM of both siblings wants them |

Computed in float32 (float64 for float64), rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import KernelUnsupported
from . import reference
from .dispatch import Problem, select

# How transformers' ACT2FN spells the activations of reference.ACTIVATIONS. Its variants of the tanh form differ by rounding.
SPELLINGS = {
    "swish": "silu",
    "linear": "identity",
    "quick_gelu": "gelu_quick",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
}


def gated_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`activation(gate) * up`, contiguous; not differentiable by autograd.

    Args:
        activation: a key of reference.ACTIVATIONS, or a name of the same in transformers' ACT2FN.

    Raises:
        KernelUnsupported: an unknown activation, gate and up that differ in shape or dtype, or a named backend that can't run.
    """
    activation = _check(gate, up, activation)
    return select(_problem("gated_forward", gate, activation))(gate, up, activation)


def gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, wanted: tuple[bool, bool] = (True, True)
) -> tuple[Tensor | None, Tensor | None]:
    """(dgate, dup): the halves of one contiguous buffer `[..., 2F]`; where only one is wanted, that one, contiguous, and None.

    Raises:
        KernelUnsupported: as `gated_forward`.
    """
    activation = _check(gate, up, activation)
    if not any(wanted):
        return None, None
    return select(_problem("gated_backward", gate, activation))(dy, gate, up, activation, wanted)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`gated_forward`, differentiable once; saves gate and up."""
    if torch.compiler.is_compiling():
        return reference.gated_forward(gate, up, _check(gate, up, activation))
    if not torch.is_grad_enabled() or not (gate.requires_grad or up.requires_grad):
        return gated_forward(gate, up, activation)
    return _Gated.apply(gate, up, activation)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, activation):
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return gated_forward(gate, up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        return *gated_backward(dy, gate, up, ctx.activation, ctx.needs_input_grad[:2]), None


def _problem(op: str, gate: Tensor, activation: str) -> Problem:
    width = gate.shape[-1]
    return Problem(op, gate.device.type, gate.dtype, activation, gate.numel() // max(width, 1), width)


def _check(gate: Tensor, up: Tensor, activation: str) -> str:
    """The activation's name here."""
    activation = SPELLINGS.get(activation, activation)
    if activation not in reference.ACTIVATIONS:
        known = ", ".join([*reference.ACTIVATIONS, *SPELLINGS])
        raise KernelUnsupported(f"gated: activation {activation!r} is none of {known}")
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise KernelUnsupported(
            f"gated: gate is {tuple(gate.shape)} {gate.dtype}, up {tuple(up.shape)} {up.dtype}; make them alike"
        )
    return activation
