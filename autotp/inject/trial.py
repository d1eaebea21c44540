"""Trying a module or a function out by itself: on random float64 numbers, its outputs and gradients against another's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

OWN = frozenset(vars(nn.Module()))  # what every module has, with its parameters, buffers, children and hooks
PLAIN = (bool, int, float, str, type(None))
TOLERANCE = 1e-5  # of a tensor's largest number: many norms compute in float32 whatever they are given


def make_twin(module: nn.Module, children: dict[str, nn.Module]) -> Any:
    """`module` with random parameters, copies of its buffers, other `children` and twins of the rest, without hooks.

    All else is shared with it.
    """
    twin = object.__new__(type(module))
    twin.__dict__ = {key: OrderedDict() if key.endswith("_hooks") else value for key, value in module.__dict__.items()}
    twin._parameters = {
        name: None if parameter is None else nn.Parameter(torch.randn(parameter.shape, dtype=torch.float64))
        for name, parameter in module._parameters.items()
    }
    twin._buffers = {name: None if buffer is None else buffer.clone() for name, buffer in module._buffers.items()}
    rest = {name: child for name, child in module._modules.items() if child is not None and name not in children}
    twin._modules = {**module._modules, **children, **{name: make_twin(child, {}) for name, child in rest.items()}}
    return twin


def number_kinds(model: nn.Module) -> dict[int, int]:
    """id of each module -> a number, the same for modules that `make_twin` makes the same twins of but for random numbers: of one
    class, with equal plain attributes, the very same other ones, parameters of one shape, and children of the same kinds."""
    numbers: dict[tuple, int] = {}
    kinds: dict[int, int] = {}

    def visit(module: nn.Module) -> int:
        if id(module) not in kinds:
            own = {key: value for key, value in vars(module).items() if key not in OWN}
            plain = tuple((key, repr(value) if isinstance(value, PLAIN) else id(value)) for key, value in own.items())
            shapes = tuple((key, None if p is None else (p.shape, p.dtype)) for key, p in module._parameters.items())
            buffers = tuple((key, id(buffer)) for key, buffer in module._buffers.items())
            children = tuple((key, None if child is None else visit(child)) for key, child in module._modules.items())
            kinds[id(module)] = numbers.setdefault((type(module), plain, shapes, buffers, children), len(numbers))
        return kinds[id(module)]

    visit(model)
    return kinds


class Answer(nn.Module):
    """Stands in for a linear: returns what it was given to return, and notes what it is called with."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.answer, self.calls = answer, []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls.append((args, kwargs))
        return self.answer


def agree(got: Sequence[Tensor], want: Sequence[Tensor], leaves: Sequence[Tensor]) -> bool:
    """Whether outputs, and the gradients of `leaves` from one random sum of them, are equal to rounding."""
    if len(got) != len(want) or any(a.shape != b.shape for a, b in zip(got, want, strict=True)):
        return False
    cotangents = [torch.randn_like(each) for each in want]
    pulled = [
        torch.autograd.grad(list(outputs), list(leaves), cotangents, retain_graph=True, allow_unused=True)
        for outputs in (got, want)
    ]
    return all(_close(a, b) for a, b in [*zip(got, want, strict=True), *zip(*pulled, strict=True)])


def _close(got: Tensor | None, want: Tensor | None) -> bool:
    if got is None or want is None:
        return got is want
    return bool((got - want).abs().max() <= TOLERANCE * want.abs().max().clamp_min(1e-30))
