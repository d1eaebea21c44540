"""A gate and the linear beside it in one launch while decoding: both weights are read, the gated output alone is written."""

from __future__ import annotations

from typing import Any

import torch.nn.modules.module as module_globals
from torch import Tensor

from ..kernels import few_rows
from ..kernels.decode import is_decoding
from .linear import LinearLayer


def multiply_gated(gate: Any, up: Any, x: Any, activation: str) -> Tensor | None:
    """`activation(gate(x)) * up(x)` of x `[..., K]`, of few rows; None where the modules must be called.

    Args:
        gate, up: linears that read x; up is None where gate holds both, the gate's rows first.
        activation: a key of kernels.reference.ACTIVATIONS.
    """
    if not is_decoding() or not _is_bare(gate) or not (up is None or _is_bare(up)):
        return None
    if up is None:
        weight, bias, scale = gate.weight, gate.bias, gate._buffers.get("weight_scale")
        if gate.place >= 0 and gate.siblings.members > 1:
            return None
    else:
        siblings = gate.siblings
        laid = None if siblings is None or siblings is not up.siblings or siblings.members != 2 else siblings.find_laid()
        if laid is None or not laid.holds((gate.weight, up.weight), (gate.bias, up.bias)):
            return None
        (weight, bias), scale = laid.merge(), gate.siblings.stored_scale()
    fits = few_rows.fits(x, weight, bias, scaled=scale is not None)
    return few_rows.linear_gated(x, weight, bias, activation, scale) if fits else None


def _is_bare(module: Any) -> bool:
    """Whether calling `module` is its product and nothing else: no hook, no adapter, no other forward."""
    if getattr(type(module), "forward", None) is not LinearLayer.forward or "forward" in module.__dict__ or module.gather_output:
        return False
    return not (module._forward_hooks or module._forward_pre_hooks or module_globals._has_any_global_hook())
