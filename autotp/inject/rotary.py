"""Calls of a function that rotates queries and keys by position, found by what the function computes, and run fused.

Only the calls in a module's own source are changed, in a subclass for that module; the function stays what it is for all others.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.rotary import fits, rotary
from .forwards import differentiates_forward
from .plan import Fusion
from .reach import find_calls
from .recompile import rewrite_methods
from .source import Rewrite
from .trial import HALVES, agree, agree_loosely

VARIANTS = ("half", "interleaved")
WHOLE, PARTIAL = (8, 8), (8, 4)  # columns of a head, and how many of them are rotated


def find_rotary(name: str, module: nn.Module) -> Fusion | None:
    """The calls of `f(q, k, cos, sin)` in the methods of `module` whose function is a rotary embedding of one variant."""
    calls = _rotary_calls(type(module))
    return Fusion(name, "rotary", parts=tuple(text for text, _, _ in calls), variant=calls[0][1]) if calls else None


def rewrite_rotary(module: nn.Module, fusion: Fusion) -> None:
    """Give `module` a class whose methods call the fused rotary embedding instead."""
    module.__class__ = _rewritten(type(module), fusion.variant)


@functools.lru_cache(maxsize=256)
def _rewritten(cls: type, variant: str) -> type:
    rewrites = [rewrite for _, own, rewrite in _rotary_calls(cls) if own == variant]
    methods = rewrite_methods(cls, rewrites)
    added = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "plain_class": cls}
    return type(cls.__name__, (cls,), {**added, "replaced_by": (variant,), **methods})


@functools.lru_cache(maxsize=256)
def _rotary_calls(cls: type) -> tuple[tuple[str, str, Rewrite], ...]:
    """`(text, variant, how to change it)` of each call; those of one variant alone, the first one's."""
    found: list[tuple[str, str, Rewrite]] = []
    for call in find_calls(cls):
        node = call.node
        if len(node.args) != 4 or node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
            continue
        variant = find_variant(call.callee)
        if variant is not None and variant in (found[0][1] if found else variant):
            change = functools.partial(_put, function=fused(call.callee, variant))
            found.append((call.text, variant, Rewrite(call.function, call.span, call.text, change)))
    return tuple(found)


def _put(node: Any, give: Callable[[Any], ast.expr], function: Callable[..., Any]) -> bool:
    """`f(q, k, cos, sin)` -> `rotate(f, q, k, cos, sin)`: another function given that name later is called itself."""
    node.args = [node.func, *node.args]
    node.func = ast.copy_location(give(function), node.func)
    return True


@functools.lru_cache(maxsize=256)
def fused(own: FunctionType, variant: str) -> Callable[..., Any]:
    """What stands for the function `own` in a call: the kernel for what `own` was tried with, and else `own` itself."""
    interleaved, partial = variant == "interleaved", _takes_partial(own, variant)

    def rotate(now: Callable[..., Any], q: Any, k: Any, cos: Any, sin: Any) -> Any:
        if now is not own or torch.compiler.is_compiling() or differentiates_forward():
            return now(q, k, cos, sin)
        alike = q.dtype is k.dtype is cos.dtype is sin.dtype and fits(q, k, cos, sin) and not cos.requires_grad
        if alike and (partial or cos.shape[-1] == q.shape[-1]):
            return rotary(q, k, cos, sin, interleaved)
        return own(q, k, cos, sin)

    return rotate


@functools.lru_cache(maxsize=256)
def find_variant(function: FunctionType) -> str | None:
    """The variant of rotary embedding that `function(q, k, cos, sin)` computes, whole and partial; None if it is none."""
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) < 4 or any(p.default is p.empty for p in parameters[4:] if p.kind is p.POSITIONAL_OR_KEYWORD):
        return None
    for variant in VARIANTS:
        with suppress(Exception):  # whatever it makes of arguments that it was not made for
            if _rotates(function, variant, *WHOLE):
                return variant
    return None


@functools.lru_cache(maxsize=256)
def _takes_partial(function: FunctionType, variant: str) -> bool:
    with suppress(Exception):
        return _rotates(function, variant, *PARTIAL)
    return False


def _rotates(function: FunctionType, variant: str, columns: int, rotated: int) -> bool:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = draw(2, 3, 5, columns).requires_grad_(), draw(2, 1, 5, columns).requires_grad_()
    cos, sin = draw(2, 5, rotated), draw(2, 5, rotated)
    if variant == "interleaved":
        cos, sin = (x[..., ::2].repeat_interleave(2, -1) for x in (cos, sin))
    interleaved = variant == "interleaved"
    if not agree(function(q, k, cos, sin), rotary(q, k, cos, sin, interleaved), [q, k]):
        return False
    halves = [[x.detach().to(dtype) for x in (q, k, cos, sin)] for dtype in HALVES]
    return all(agree_loosely(function(*each), rotary(*each, interleaved=interleaved)) for each in halves)
