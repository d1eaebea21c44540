"""Trying a module or a function out by itself: on random float64 numbers, its outputs and gradients against another's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.dispatch import ignore_setting

OWN = frozenset(vars(nn.Module()))  # what every module has, with its parameters, buffers, children and hooks
PLAIN = (bool, int, float, str, type(None))
TOLERANCE = 1e-5  # of a tensor's largest number: many norms compute in float32 whatever they are given
HALVES = (torch.bfloat16, torch.float16)
LOOSE = 0.05  # of the largest number, in 16 bits: they tell what is done for a dtype alone, not how it is rounded


@contextmanager
def trying() -> Iterator[None]:
    """Within it what is tried out has gradients, on the CPU, whatever the caller's modes, default device and AUTOTP_BACKEND."""
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"), ignore_setting():
        yield


def make_twin(module: nn.Module, children: dict[str, nn.Module], dtype: torch.dtype = torch.float64) -> Any:
    """`module` with random parameters, copies of its buffers, other `children` and twins of the rest, without hooks.

    All else is shared with it.
    """
    twin = object.__new__(type(module))
    twin.__dict__ = {key: OrderedDict() if key.endswith("_hooks") else value for key, value in module.__dict__.items()}
    twin._parameters = {
        name: None if parameter is None else nn.Parameter(torch.randn(parameter.shape, dtype=dtype))
        for name, parameter in module._parameters.items()
    }
    twin._buffers = {name: None if buffer is None else buffer.clone() for name, buffer in module._buffers.items()}
    rest = {name: child for name, child in module._modules.items() if child is not None and name not in children}
    twin._modules = {**module._modules, **children, **{name: make_twin(child, {}, dtype) for name, child in rest.items()}}
    return twin


def run_twin(twin: Any, *args: Any, **kwargs: Any) -> Any:
    """What `twin` returns.

    Raises:
        ValueError: it drew random numbers, or keeps something of the call: it does more than what it returns tells.
    """
    states, drawn = [_state(module) for module in twin.modules()], torch.get_rng_state()
    result = twin(*args, **kwargs)
    if states != [_state(module) for module in twin.modules()] or not torch.equal(drawn, torch.get_rng_state()):
        raise ValueError(f"{type(twin).__name__} draws random numbers or keeps something")
    return result


def _state(module: nn.Module) -> dict[str, Any]:
    """What a forward might change: attributes and buffers, by identity and by length or version."""
    if isinstance(module, Answer):
        return {}
    own = {k: (id(v), len(v) if isinstance(v, list | dict | set) else 0) for k, v in vars(module).items() if k not in OWN}
    return own | {key: (id(buffer), 0 if buffer is None else buffer._version) for key, buffer in module._buffers.items()}


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


def agree_loosely(got: Sequence[Any], want: Sequence[Tensor]) -> bool:
    """Whether outputs in 16 bits are of the same dtypes and about equal."""
    alike = len(got) == len(want) and all(
        isinstance(a, Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(got, want, strict=True)
    )
    return alike and all(
        bool((a.double() - b.double()).abs().max() <= LOOSE * b.double().abs().max()) for a, b in zip(got, want, strict=True)
    )


def _close(got: Tensor | None, want: Tensor | None) -> bool:
    if got is None or want is None:
        return got is want
    return bool((got - want).abs().max() <= TOLERANCE * want.abs().max().clamp_min(1e-30))
