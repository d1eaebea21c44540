"""Turns accumulation of weight gradients into `main_grad` on and off; what happens then is in kernels/main_grad.py."""

from __future__ import annotations

from torch import nn

from ..errors import AutoTPError
from .base import sharded_modules
from .fully import refuse_dealt


def enable_main_grad(model: nn.Module, enabled: bool = True) -> None:
    """Add the weight and bias gradients of `model`'s sharded linears to `parameter.main_grad`, in the weight-gradient GEMM.

    The caller gives every trained parameter of a sharded linear a `main_grad` (float32, of the shard's shape) before backward.
    Such a parameter's `.grad` then holds zeros and `grad_added_to_main_grad` is True; every other parameter (embeddings, norms,
    the output embedding, linears left whole) gets its gradient in `.grad` as always, and no such mark.

    Args:
        model: a parallelized model, or a layer of one.
        enabled: False gives all gradients to `.grad` again.

    Raises:
        AutoTPError: there is no sharded linear, or the weight of one is computed from other parameters, or sharded by FSDP2.
    """
    layers = [(name, layer) for name, layer in sharded_modules(model) if layer.can_accumulate]
    if not layers and enabled:
        raise AutoTPError(f"{type(model).__name__} has no sharded linears, so no gradient would go into main_grad")
    computed = [name for name, layer in layers if "weight" not in layer._parameters]
    if computed and enabled:
        raise AutoTPError(
            f"the weights of {computed[:4]} are computed from other parameters, so their gradients are no product to accumulate: "
            f"remove the parametrization first"
        )
    if enabled:
        refuse_dealt(model.named_parameters(), "main_grad", "leave the gradients in .grad, with reduce_dtype=torch.float32 there")
    for _, layer in layers:
        layer.accumulate_into_main_grad = enabled
