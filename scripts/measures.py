"""Measures of a sharded model against the unsharded one: outputs, gradients, steps, and how much of it is split."""

from __future__ import annotations

import copy
from typing import Any

import torch
from shrink import tiny_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autotp.inject.examples import make_examples
from autotp.inject.intercept import keep_state
from autotp.layers.base import sharded_modules

OUTPUTS, GRADIENTS, STEPS, SHARE = 1e-4, 1e-3, 5e-2, 0.8  # bars of the verdict
MARGIN = 10  # rounding noise may come to this many times the one measurement of it
LR = 1e-3

# -- running a model ---------------------------------------------------------------------------------------------------


def floats(value: Any) -> list[Tensor]:
    """The float tensors of a model's output, in order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return [tensor for part in inside for tensor in floats(part)]


def run_call(model: nn.Module, call: dict[str, Any]) -> list[Tensor]:
    """The float outputs of one call, whole. Random numbers that the model draws are the same in every run."""
    torch.manual_seed(0)
    dtype = next(model.parameters()).dtype
    call = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in call.items()}
    return [out.full_tensor() if isinstance(out, DTensor) else out for out in floats(model(**call))]


def loss_of(model: nn.Module, calls: list[dict[str, Any]]) -> Tensor:
    """Every finite output times fixed random numbers, scaled as a mean of so many numbers is."""
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros(())
    for call in calls:
        for out in run_call(model, call):
            weights = torch.randn(out.shape, generator=generator).to(out.dtype)
            if out.requires_grad:
                finite = torch.where(out.isfinite() & (out.abs() < 1e30), out, 0.0)
                total = total + (finite * weights).sum() / max(1, out.numel()) ** 0.5
    return total


def whole(tensors: dict[str, Tensor], model: nn.Module) -> tuple[dict[str, Tensor], float]:
    """Whole tensors from this rank's, and how far copies that several ranks hold lie apart."""
    shards = {f"{n}.{p}".removeprefix("."): (m.tp, s) for n, m in sharded_modules(model) for p, s in m.shards.items()}
    full, apart = {}, 0.0
    for name, local in tensors.items():
        if isinstance(local, DTensor):
            full[name] = local.full_tensor()
        elif name in shards:
            tp, shard = shards[name]
            full[name] = tp.all_gather(local, shard)
            apart = max(apart, (shard.split(full[name], tp.tp_rank) - local).abs().max().item() if local.numel() else 0.0)
        else:
            full[name] = local
    return full, apart


def gradients(model: nn.Module, calls: list[dict[str, Any]]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs of every call, and each parameter's own gradient of the loss over all of them."""
    with keep_state(model):
        with torch.no_grad():
            outputs = [out.detach() for call in calls for out in run_call(model, call)]
        model.zero_grad()
        loss_of(model, calls).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.numel()}
    model.zero_grad()
    return outputs, found


def train(model: nn.Module, calls: list[dict[str, Any]], eps: float, steps: int = 3) -> dict[str, Tensor]:
    """The parameters after AdamW steps. A large `eps` keeps Adam from making steps of rounding noise."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=eps, foreach=False)
    for _ in range(steps):
        loss_of(model, calls).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def prepare(kind: str, model_type: str) -> tuple[nn.Module, list[dict[str, Any]], dict[str, Any]]:
    """The tiny model, its example calls, and what building and running it alone showed."""
    model = tiny_model(model_type, kind)
    row: dict[str, Any] = {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())}
    with torch.no_grad():
        calls = make_examples(model, run=lambda call: run_call(model, call))
    try:
        grads = gradients(model, calls)[1]
    except AssertionError:  # a few have no backward in evaluation
        model.train()
        grads = gradients(model, calls)[1]
    trained = [n for n, p in model.named_parameters() if p.requires_grad and p.numel()]
    row["calls"] = [sorted(call) for call in calls]
    row["unrun"] = [n for n in trained if n not in grads]
    row["verdict"] = "built"
    return model, calls, row


# -- measures ------------------------------------------------------------------------------------------------------------


def owner_of(model: nn.Module, prefix: str) -> nn.Module:
    """The layer whose parameters the module at `prefix` holds: weight_norm keeps the parts of a weight in a module."""
    return model.get_submodule(prefix.partition(".parametrizations.")[0])


def sort_parameters(model: nn.Module, grads: dict[str, Tensor]) -> dict[str, str]:
    """What each parameter with a gradient is: "linear", "conv" (of a kernel above 1), "embedding" or "other"."""
    kinds: dict[str, str] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}".removeprefix(".")
            if full not in grads or full in kinds:
                continue
            owner = owner_of(model, prefix)
            kernel = getattr(owner, "kernel_size", (1,))
            looked_up = isinstance(owner, nn.Embedding) or any(w in name for w in ("embed", "_token", "latents", "position"))
            if max(kernel if isinstance(kernel, tuple) else (kernel,)) > 1:
                kinds[full] = "conv"
            elif looked_up:
                kinds[full] = "embedding"
            else:
                kinds[full] = "linear" if parameter.ndim > 1 else "other"
    return kinds


def shares(model: nn.Module, sharded: nn.Module, grads: dict[str, Tensor]) -> dict[str, Any]:
    """How much of the counted bytes is split, is split only where outputs are gathered, is in linear maps; what is unsplit."""
    kinds = sort_parameters(model, grads)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    local = {n: (p.to_local() if isinstance(p, DTensor) else p).numel() for n, p in sharded.named_parameters()}
    counted = [n for n, kind in kinds.items() if kind in ("linear", "other")]
    total = max(1, sum(sizes[n] for n in counted))
    all_maps = total + sum(sizes[n] for n, kind in kinds.items() if kind == "conv")
    split = [n for n in counted if local.get(n, sizes[n]) < sizes[n]]
    gathered = only_gathered(sharded)
    unsplit = sorted((n for n in counted if local.get(n) == sizes[n]), key=lambda n: -sizes[n])
    return {
        "share": round(sum(sizes[n] for n in split) / total, 4),
        "gathered": round(sum(sizes[n] for n in split if n in gathered) / total, 4),
        "linear": round(sum(sizes[n] for n, kind in kinds.items() if kind == "linear") / all_maps, 4),
        "unsplit": unsplit[:5],
    }


def only_gathered(sharded: nn.Module) -> set[str]:
    """Names of the parameters that only layers hold whose output is gathered."""
    inside, outside = set(), set()
    for prefix, module in sharded.named_modules():
        gathers = getattr(owner_of(sharded, prefix), "gather_output", False)
        (inside if gathers else outside).update(map(id, module.parameters(recurse=False)))
    return {name for name, parameter in sharded.named_parameters() if id(parameter) in inside - outside}


def rounding(model: nn.Module, calls: list[dict[str, Any]], grads: dict[str, Tensor]) -> dict[str, float]:
    """How far rounding alone may move each gradient: `MARGIN` times what lies between float32's and float64's.

    Where float64's gradient is smaller than that difference, float32's is noise alone, and another order of summing makes
    other noise: of as much as float32's last bit of the largest gradient. Never more than 4e-5 of the largest. A model that
    names float32 somewhere does not run in float64, or to no numbers: a change of each parameter's last bit stands in for it.
    """
    largest = max(g.abs().max().item() for g in grads.values())
    last_bit = torch.finfo(torch.float32).eps * largest
    other = copy.deepcopy(model).double()
    try:
        exact = gradients(other, calls)[1]
        assert all(bool(g.isfinite().all()) for g in exact.values())
    except Exception:
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1 + torch.finfo(torch.float32).eps * (torch.rand_like(parameter) - 0.5))
        exact = gradients(other, calls)[1]
    found = {n: ((grads[n] - exact[n]).abs().max().item(), exact[n].abs().max().item()) for n in grads}
    noise = {n: max(apart, last_bit) if size <= apart else apart for n, (apart, size) in found.items()}
    return {n: min(MARGIN * value, 4e-5 * largest) for n, value in noise.items()}


def compare(reference: nn.Module, sharded: nn.Module, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of outputs, gradients and steps of `sharded` against `reference`, and their verdict."""
    outputs, grads = gradients(reference, calls)
    largest = max(g.abs().max().item() for g in grads.values())
    noise = rounding(reference, calls, grads)
    row: dict[str, Any] = shares(reference, sharded, grads)
    got_outputs, local = gradients(sharded, calls)
    got, apart = whole(local, sharded)
    row["output_error"] = max(map(output_error, got_outputs, outputs)) if len(outputs) == len(got_outputs) else float("inf")
    worst = ("", 0.0)
    for name, grad in grads.items():
        error = (got[name] - grad).abs().max().item() if name in got else float("inf")
        size = grad.abs().max().item()
        relative = error / max(size, 1e-6 * largest)
        lost = size < noise[name] / GRADIENTS and error <= noise[name]  # no error that rounding does not explain
        if not lost and not relative <= worst[1]:
            worst = (name, relative)
    row["gradient_error"], row["worst_gradient"], row["copies_apart"] = worst[1], worst[0], apart / largest
    real = [n for n, g in grads.items() if g.abs().max().item() > 1e-4 * largest]
    eps = 1e-2 * largest
    expected = train(reference, calls, eps)
    moved = whole(train(sharded, calls, eps), sharded)[0]
    row["step_error"] = max((moved[n] - expected[n]).abs().max().item() for n in real) / (3 * LR)
    return row | {"verdict": verdict(row)}


def output_error(got: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest finite output."""
    if got.shape != expected.shape or not torch.equal(got.isfinite(), expected.isfinite()):
        return float("inf")
    keep = expected.isfinite() & (expected.abs() < 1e30)
    if not keep.any():
        return 0.0
    return ((got - expected)[keep].abs().max() / expected[keep].abs().max().clamp(min=1e-6)).item()


def verdict(row: dict[str, Any]) -> str:
    errors = (row["output_error"] <= OUTPUTS, row["gradient_error"] <= GRADIENTS, row["copies_apart"] <= GRADIENTS)
    if not all(errors) or not row["step_error"] <= STEPS:
        return "wrong"
    if row["linear"] < 0.2:
        return "linear-poor"
    return "pass" if row["share"] >= SHARE else "partly"


def passes_ungathered(row: dict[str, Any]) -> bool:
    """Whether a type passes without what is split only in layers whose output is gathered."""
    return row["verdict"] == "pass" and round(row["share"] - row.get("gathered", row["share"]), 4) >= SHARE
