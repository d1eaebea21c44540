"""Stacked experts recognised by what they compute, and the forward that runs them as grouped products.

As with everything in block.py, a module is tried out by itself: small random stand-ins for its two weights, random tokens and
choices, and outputs and gradients, the routing weights' too, must be equal in training and evaluation.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import permutations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.experts import LAYOUTS
from ..kernels.reference import ACTIVATIONS
from ..layers.experts import grouped_experts
from ..layers.pending import settle
from .forwards import differentiates_forward, is_as_tried
from .plan import Fusion
from .trial import HALVES, TOLERANCE, agree, agree_loosely, make_twin, run_twin

HIDDEN, INSIDE, TOKENS, CHOICES = 6, 5, 7, 2  # sizes of the trial; the number of experts stays, which forwards read elsewhere
# In training and in evaluation, tokens of the usual size, and so large that the limits of gates that are clamped are reached.
HOW = tuple(product((True, False), (1.0, 1e3)))
REPLACED = ("eager", "grouped_mm", None)  # transformers' implementations that ours stands for; who asks for another one gets it


class Form(NamedTuple):
    """How a module holds its experts.

    Attributes:
        up, down: names of the weights. x, index, weights: names of the arguments.
        activation, layout, transposed: as in grouped_experts.
    """

    up: str
    down: str
    x: str
    index: str
    weights: str
    activation: str
    layout: str
    transposed: bool

    def run(self, up: Tensor, down: Tensor, given: dict[str, Any]) -> Tensor:
        """The experts' output for the arguments `given`."""
        x, index, weights = given[self.x], given[self.index], given[self.weights]
        return grouped_experts(x, up, down, index, weights, self.activation, self.layout, self.transposed)


def find_experts(name: str, module: nn.Module) -> Fusion | None:
    """A module that holds nothing but two stacked weights, and is given tokens, their choices of experts and weights for them."""
    stacked = {key: parameter for key, parameter in module._parameters.items() if parameter is not None}
    if len(stacked) != 2 or any(p.ndim != 3 for p in stacked.values()) or any(True for _ in module.buffers()):
        return None
    arguments, children = _arguments(type(module).forward), list(module.children())
    if len(arguments) != 3 or any(True for child in children for _ in child.parameters()):
        return None
    if any(isinstance(child, nn.modules.dropout._DropoutNd) for child in children):  # p may be set later
        return None
    for form in _forms(stacked, arguments):
        with suppress(Exception):  # a forward given its arguments in the wrong places may fail in any way
            if (found := _find_activation(module, form, len(stacked[form.up]))) is not None:
                variant = f"{found.activation}, {found.layout}{', transposed' * found.transposed}"
                return Fusion(name, "experts", variant=variant, parts=found[:5])
    return None


def _find_activation(module: nn.Module, form: Form, experts: int) -> Form | None:
    twin = _make_small(module, form, experts)
    for activation in ACTIVATIONS:
        found = form._replace(activation=activation)
        if _computes(twin, found, True, 1.0, gradients=False) and all(_computes(twin, found, *how) for how in HOW):
            return found if all(_computes_in(twin, found, dtype) for dtype in HALVES) else None
    return None


def _arguments(forward: Callable[..., Any]) -> list[str]:
    """Names of the positional arguments of a method, without self; none where it takes any number of them."""
    kinds = {key: parameter.kind for key, parameter in inspect.signature(forward).parameters.items()}
    plain = [key for key, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return plain[1:] if len(plain) == len(kinds) else []


def _forms(stacked: dict[str, Any], arguments: list[str]) -> Iterator[Form]:
    """What the shapes allow, the activation still open."""
    x, *others = arguments
    for up, down in permutations(stacked):
        (experts, *first), (same, *second) = stacked[up].shape, stacked[down].shape
        for transposed, layout in ((t, layout) for t in (False, True) for layout in LAYOUTS):
            (out, into), (back, inside) = (first[::-1], second[::-1]) if transposed else (first, second)
            if experts == same and into == back and out == inside * (1 if layout == "ungated" else 2):
                for index, weights in permutations(others):
                    yield Form(up, down, x, index, weights, "", layout, transposed)


def _make_small(module: nn.Module, form: Form, experts: int) -> Any:
    """The module with small random float64 weights and transformers' plain loop as its implementation."""
    columns = INSIDE * (1 if form.layout == "ungated" else 2)
    shapes = {form.up: (columns, HIDDEN), form.down: (HIDDEN, INSIDE)}
    bare = copy.copy(module)
    bare.__dict__["_modules"] = copy.deepcopy(module._modules)  # whose mode is changed
    bare.__dict__["_parameters"] = {
        key: nn.Parameter(torch.empty(experts, *(shape[::-1] if form.transposed else shape), device="meta"))
        for key, shape in shapes.items()
    }
    config = getattr(module, "config", None)
    if hasattr(config, "_experts_implementation_internal"):
        bare.__dict__["config"] = copy.copy(config)
        object.__setattr__(bare.config, "_experts_implementation_internal", "eager")
    return make_twin(bare, {})


def _computes(twin: Any, form: Form, training: bool, scale: float, gradients: bool = True) -> bool:
    up, down = twin._parameters[form.up], twin._parameters[form.down]
    given = _draw_arguments(form, len(up), scale)
    with torch.set_grad_enabled(gradients):
        got, want = run_twin(twin.train(training), **given), form.run(up, down, given)
    if not isinstance(got, Tensor) or got.shape != want.shape:
        return False
    if gradients:
        return agree((got,), (want,), [given[form.x], given[form.weights], up, down])
    return bool((got - want).abs().max() <= TOLERANCE * want.abs().max())


def _computes_in(twin: Any, form: Form, dtype: torch.dtype) -> bool:
    """Whether it does in 16 bits as well, and keeps the dtype."""
    twin = make_twin(twin, {}, dtype)
    up, down = twin._parameters[form.up], twin._parameters[form.down]
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in _draw_arguments(form, len(up), 1.0).items()}
    with torch.no_grad():
        return agree_loosely((twin(**given),), (form.run(up, down, given),))


def _draw_arguments(form: Form, experts: int, scale: float) -> dict[str, Tensor]:
    index = torch.rand(TOKENS, experts).topk(min(CHOICES, experts)).indices
    x = (torch.randn(TOKENS, HIDDEN, dtype=torch.float64) * scale).requires_grad_()
    weights = torch.rand(index.shape, dtype=torch.float64).requires_grad_()
    return {form.x: x, form.index: index, form.weights: weights}


@functools.lru_cache(maxsize=256)
def experts_forward(own: Callable[..., Any], variant: str, *parts: str) -> Callable[..., Any]:
    """The forward of experts found as `Fusion(variant=variant, parts=parts)`; `own` is the one that it stands for.

    Weights are read by name at each call, so that adapters, and what is put in a parameter's place for one forward, are seen.
    """
    activation, layout, *transposed = variant.split(", ")
    form = Form._make([*parts, activation, layout, bool(transposed)])
    names = _arguments(own)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {name: settle(value) for name, value in (dict(zip(names, args, strict=False)) | kwargs).items()}
        up, down = getattr(self, form.up), getattr(self, form.down)
        if len(args) + len(kwargs) == len(given) == len(names) and _takes(self, form, up, down, given):
            return form.run(up, down, given)
        return own(self, *args, **kwargs)

    return forward


def _takes(module: Any, form: Form, up: Tensor, down: Tensor, given: dict[str, Any]) -> bool:
    """Whether a call is one that the experts were tried with; the module's own forward runs the others."""
    x, index, weights = (given.get(key) for key in (form.x, form.index, form.weights))
    return (
        not torch.compiler.is_compiling()
        and not differentiates_forward()
        and is_as_tried(module)
        and isinstance(x, Tensor)
        and isinstance(index, Tensor)
        and isinstance(weights, Tensor)
        and x.ndim == index.ndim == 2
        and index.shape == weights.shape
        and x.dtype is up.dtype is down.dtype
        and not torch.is_autocast_enabled(x.device.type)
        and getattr(getattr(module, "config", None), "_experts_implementation", None) in REPLACED
    )
