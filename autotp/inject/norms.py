"""Norms over a width that could be split, recognised by what they compute.

Such a norm makes every column depend on every other, and hides the region behind it. Seen as an elementwise scale instead,
it lets the region appear; it then becomes a norm whose statistics are summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .intercept import Interceptor, running
from .module_plan import NormPlan
from .record import SiteKey
from .shadow import Shadow
from .tables import Tables

KINDS: dict[str, Callable[[Tensor, Tensor, Tensor | None, float], Tensor]] = {
    "rms": lambda x, w, b, eps: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w,
    "rms1p": lambda x, w, b, eps: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + w),
    "rms_gated": lambda x, w, b, eps: KINDS["rms"](x[0] * torch.nn.functional.silu(x[1]), w, b, eps),
    "layernorm": lambda x, w, b, eps: torch.nn.functional.layer_norm(x, x.shape[-1:], w, b, eps),
}


def find_norms(tables: Tables) -> dict[str, NormPlan]:
    """Norms that stand between sites and the one row site that they feed, over the sites' whole width; by module name."""
    shadow, found = tables.shadow, {}
    for name, module in shadow.model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.ndim != 1 or next(module.children(), None) is not None:
            continue
        width = weight.numel()
        if _stands_before_one_row(tables, name, width):
            plan = recognise(module, shadow, width)
            if plan is not None:
                found[name] = plan
    return found


def _stands_before_one_row(tables: Tables, name: str, width: int) -> bool:
    sources: set[SiteKey] = set()
    for record in tables.records:
        for call in record.module_calls.get(name, []):
            inputs = [t for t in call.arguments.values() if t.requires_grad]
            if not inputs or any(t.shape[-1] != width for t in inputs):
                return False
            leaves = [(key, c) for key, site in record.sites.items() for c in site.calls]
            grads = tables.pull(record, inputs, [tables.random_like(t) for t in inputs], [c.y for _, c in leaves])
            sources |= {key for (key, _), grad in zip(leaves, grads, strict=True) if grad is not None and bool(grad.ne(0).any())}
    if not sources or any(key in tables.outputs for key in sources):
        return False
    rows = {row for key in sources for row in tables.consumers[key]}
    sizes = {tables.sites[key].out_size for key in sources} | {tables.sites[row].in_size for row in rows}
    return len(rows) == 1 and width in sizes


def recognise(module: nn.Module, shadow: Shadow, width: int) -> NormPlan | None:
    """What norm a module computes, found by comparing its output on random numbers; None if it is none of `KINDS`."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, width, generator=generator, dtype=torch.float64)
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    assert weight is not None
    epsilons = [v for v in vars(module).values() if isinstance(v, float) and 0 < v < 1e-2] + [1e-5, 1e-6]
    gated = _run(module, shadow, x[0], x[1])
    actual = gated if gated is not None else _run(module, shadow, x[0])
    if actual is None:
        return None
    for eps in epsilons:
        for kind in ("rms_gated",) if gated is not None else ("rms", "rms1p", "layernorm"):
            if bias is not None and kind != "layernorm":
                continue
            expected = KINDS[kind](x if kind == "rms_gated" else x[0], weight, bias, eps)
            if torch.allclose(expected, actual, rtol=1e-9, atol=1e-9):
                return NormPlan(kind, eps, width)
    return None


def _run(module: nn.Module, shadow: Shadow, *inputs: Tensor) -> Tensor | None:
    """The module's output for `inputs`; None if it does not take them, or gives anything but one tensor like the first."""
    with running(), torch.no_grad():
        try:
            with Interceptor(shadow, _refuse):
                actual = module(*inputs)
        except Exception:  # whatever it needs beside them
            return None
    return actual if isinstance(actual, Tensor) and actual.shape == inputs[0].shape else None


def _refuse(*_: object) -> Tensor:
    raise TypeError("a norm holds no linear map")
