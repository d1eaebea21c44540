"""Does a parallelized model compute what the unsharded one does? Loss, logits, every gradient, and their norm."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..comm import TPGroup
from ..errors import AutoTPError
from ..inject.intercept import flatten
from ..inject.rewrite import unshard
from ..layers.base import find_group, index_parameters
from ..layers.clip import grad_norm
from ..layers.stream import map_sharded

# What the sums of another order cost, relative: float32, and everything narrower. In float32 the gradients of 30 layers of real
# weights were seen to be off by 1.4e-4; one reduction too few or too many is off by about 1.
_TOLERANCES = {True: {"loss": 1e-5, "logits": 1e-4, "gradient": 1e-3}, False: {"loss": 2e-2, "logits": 5e-2, "gradient": 1e-1}}
_NEGLIGIBLE = 1e-4  # a gradient this much smaller than the largest is compared on that scale: it may be 0 but for rounding


@dataclass(frozen=True)
class VerifyReport:
    """How far a parallelized model is from the unsharded one; the same on every rank.

    Attributes:
        loss, reference_loss: the two losses.
        errors: largest relative error over the ranks, by what was compared: "loss", "logits", "grad_norm", and each
            parameter's full name for its gradient.
        tolerances: the largest error allowed for "loss", "logits" and "gradient".
    """

    loss: float
    reference_loss: float
    errors: dict[str, float] = field(repr=False)
    tolerances: dict[str, float]

    def tolerance(self, name: str) -> float:
        """The largest error allowed for one entry of `errors`."""
        return self.tolerances.get(name, self.tolerances["gradient"])

    @property
    def worst_name(self) -> str:
        """What is furthest beyond, or nearest to, its tolerance."""
        return max(self.errors, key=lambda name: self.errors[name] / self.tolerance(name))

    @property
    def worst_error(self) -> float:
        """The relative error of `worst_name`."""
        return self.errors[self.worst_name]

    @property
    def passed(self) -> bool:
        """True if everything is within its tolerance."""
        return all(error <= self.tolerance(name) for name, error in self.errors.items())

    def __str__(self) -> str:
        others = ("loss", "logits", "grad_norm")
        gradients = [name for name in self.errors if name not in others]
        parts = [f"{name} {self.errors[name]:.2g}" for name in others if name in self.errors]
        over = [name for name, error in self.errors.items() if not error <= self.tolerance(name)]
        verdict = "passed" if self.passed else f"FAILED in {len(over)} of {len(self.errors)} comparisons"
        return (
            f"verify {verdict}: loss {self.loss:.6f}, unsharded {self.reference_loss:.6f}; relative errors: {', '.join(parts)}, "
            f"{len(gradients)} gradients; worst: {self.worst_name} {self.worst_error:.2g} (tolerance "
            f"{self.tolerance(self.worst_name):.2g})"
        )


def verify(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    reference: nn.Module | None = None,
    loss_tolerance: float | None = None,
    logits_tolerance: float | None = None,
    gradient_tolerance: float | None = None,
) -> VerifyReport:
    """Run one forward and backward on `model` and on an unsharded one, and compare.

    Collective over the TP group; every rank holds the whole model while it runs, so it is for models that fit. Dropout is
    off in both. The model's own gradients, mode and dropout are as before afterwards.

    Args:
        model: a parallelized model.
        batch: keyword arguments of its forward, equal on all ranks; labels are the `input_ids` if there are none, and none
            if they are None.
        reference: the unsharded model, loaded apart, on this rank's device; its gradients are overwritten. None for a copy
            of `model` whose weights are gathered, which can't tell whether the right ones were loaded.
        loss_tolerance, logits_tolerance, gradient_tolerance: relative errors allowed; by default what the order of sums
            costs in the model's dtype.

    Raises:
        AutoTPError: the model is not parallelized.
    """
    group = find_group(model)
    if group is None:
        raise AutoTPError(f"{type(model).__name__} is not parallelized, so there is nothing to compare: call parallelize first")
    batch = dict(batch)
    if "labels" not in batch and "input_ids" in batch:
        batch["labels"] = batch["input_ids"]
    elif batch.get("labels") is None:
        batch.pop("labels", None)
    wide = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters() if p.is_floating_point())
    given = {"loss": loss_tolerance, "logits": logits_tolerance, "gradient": gradient_tolerance}
    tolerances = {name: _TOLERANCES[wide][name] if value is None else value for name, value in given.items()}
    kept = {name: param.grad for name, param in model.named_parameters()}
    training = {module: module.training for module in model.modules()}
    try:
        for param in model.parameters():
            param.grad = None
        if reference is None:
            reference = unshard(copy.deepcopy(model))
        reference.zero_grad(set_to_none=True)
        with _without_dropout(model), _without_dropout(reference), _ExactCrossEntropy():
            expected, found = _run(reference, batch), _run(model, batch)
        errors = _compare(model, reference, found, expected, group)
    finally:
        for name, param in model.named_parameters():
            param.grad = kept[name]
        for module, mode in training.items():
            module.training = mode
    return VerifyReport(float(found["loss"]), float(expected["loss"]), errors, tolerances)


def _run(model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Whole logits of an eval forward; then the loss of a training forward, whose gradients stay on the parameters."""
    model.eval()
    with torch.no_grad():
        logits = read_logits(model(**{key: value for key, value in batch.items() if key != "labels"}))
    model.train()
    output = model(**batch)
    loss = _read(output, "loss")
    if loss is None:  # a model without a loss of its own
        loss = read_logits(output).float().pow(2).mean()
    loss.backward()
    return {"logits": logits, "loss": loss.detach()}


def read_logits(output: Any) -> Tensor:
    """The logits of a model's output, or else its first floating tensor.

    Raises:
        AutoTPError: it holds none.
    """
    logits = _read(output, "logits")
    found = logits if isinstance(logits, Tensor) else next((t for t in flatten(output) if t.is_floating_point()), None)
    if found is None:
        raise AutoTPError(f"the model returns a {type(output).__name__} without a floating tensor: nothing can be compared")
    return found


def _read(output: Any, name: str) -> Any:
    if isinstance(output, Tensor):
        return None
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Every dropout rate below `model` is 0 inside: they are floats of that name, or the `p` of a dropout module."""
    kept = []
    for module in model.modules():
        for name, value in list(module.__dict__.items()):
            dropout = "drop" in name or (name == "p" and isinstance(module, nn.modules.dropout._DropoutNd))
            if dropout and isinstance(value, float) and value > 0:
                kept.append((module, name, value))
                module.__dict__[name] = 0.0
    try:
        yield
    finally:
        for module, name, value in kept:
            module.__dict__[name] = value


class _ExactCrossEntropy(TorchFunctionMode):
    """`F.cross_entropy` in float64.

    On the CPU, torch sums the exponentials of a large vocabulary in float32 one after the other: at 49152 columns the loss is
    off by 2e-6 and gradients by 1e-3, while a rank's part of the columns is summed more exactly.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.cross_entropy:
            return func(*args, **kwargs)
        dtype = (args[0] if args else kwargs["input"]).dtype
        args, kwargs = tuple(map(_widen, args)), {name: _widen(value) for name, value in kwargs.items()}
        return func(*args, **kwargs).to(dtype)


def _widen(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _compare(
    model: nn.Module, reference: nn.Module, found: dict[str, Tensor], expected: dict[str, Tensor], group: TPGroup
) -> dict[str, float]:
    """Relative errors by name, the largest over the ranks."""
    errors = {name: _error(found[name], expected[name]) for name in ("loss", "logits")}
    index_parameters(model)
    norm, expected_norm = grad_norm(model.parameters()), grad_norm(reference.parameters())
    errors["grad_norm"] = _error(norm, expected_norm)
    sharded, whole = map_sharded(model), dict(reference.named_parameters())
    largest = max((float(p.grad.abs().max()) for p in whole.values() if p.grad is not None and p.grad.numel()), default=0.0)
    for name, param in model.named_parameters():
        grad, full = param.grad, whole[name].grad
        if full is None and grad is None:
            continue
        full = torch.zeros_like(whole[name]) if full is None else full
        grad = torch.zeros_like(param) if grad is None else grad
        scale = max(float(full.abs().max()) if full.numel() else 0.0, _NEGLIGIBLE * largest)
        if id(param) in sharded:
            layer, own, _ = sharded[id(param)]
            full = layer.shards[own].split(full, group.tp_rank)
        errors[name] = _error(grad, full, scale)
    every = group.gather_objects(errors)
    return {name: max((each[name] for each in every), key=lambda e: float("inf") if e != e else e) for name in errors}


def _error(value: Tensor, expected: Tensor, scale: float | None = None) -> float:
    """Largest difference, relative to the largest expected value (or `scale`); inf where the shapes differ."""
    if value.shape != expected.shape:
        return float("inf")
    if not value.numel():
        return 0.0
    difference = float((value.detach().double() - expected.detach().double().to(value.device)).abs().max())
    scale = float(expected.abs().max()) if scale is None else scale
    return difference if scale == 0 else difference / scale
