"""A residual sum and the norm that reads it, in one kernel: found in a layer's source, run while the layer is what it was.

The sum's expression computes the norm as well and leaves it with the norm module, which gives it out when it is called with that
very tensor, and computes it itself with any other. So hooks and adapters see what they would, and checkpoints recompute it.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.norm import add_norm
from ..layers.pending import PendingSum
from .forwards import differentiates_forward, is_as_tried
from .plan import Fusion
from .reach import find_functions, place_of
from .recompile import rewrite_methods
from .source import Rewrite


def find_residual(name: str, module: nn.Module, norms: set[str]) -> Fusion | None:
    """The sums in `module`'s forward that one of its children `norms` reads next."""
    found = tuple(child for child, _ in _sums(type(module)) if child in norms)
    return Fusion(name, "add_norm", parts=found) if found else None


def rewrite_residual(module: nn.Module, fusion: Fusion) -> None:
    """Give `module` a class whose sums also compute the norms of `fusion.parts`."""
    module.__class__ = _rewritten(type(module), fusion.parts)


@functools.lru_cache(maxsize=256)
def _rewritten(cls: type, norms: tuple[str, ...]) -> type:
    methods = rewrite_methods(cls, [rewrite for child, rewrite in _sums(cls) if child in norms])
    added = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "plain_class": cls}
    return type(cls.__name__, (cls,), {**added, "replaced_by": norms, **methods})


@functools.lru_cache(maxsize=256)
def _sums(cls: type) -> tuple[tuple[str, Rewrite], ...]:
    """`(child, how the sum that it reads is rewritten)` for `a = b + c`, then `.. self.child(a)`, in what the forward runs."""
    found = []
    for function, tree in ((each.function, each.node) for each in find_functions(cls)):
        arguments = getattr(tree, "args", None)
        own = arguments.args[0].arg if arguments is not None and arguments.args else ""
        for child, node in _pairs(tree, own):
            label, span = place_of(function, node)
            found.append((child, Rewrite(label, span, ast.unparse(node), functools.partial(_put, own=own, child=child))))
    return tuple(found)


def _pairs(tree: Any, own: str) -> Iterator[tuple[str, ast.BinOp]]:
    """A sum and the child that reads it next, nothing but other names being given to it in between."""
    for block in ast.walk(tree):
        sums: dict[str, ast.BinOp] = {}
        for statement in block.body if isinstance(getattr(block, "body", None), list) else []:
            value = statement.value if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name) else None
            for call in ast.walk(statement):
                child = _reads(call, own)
                if child and (node := sums.get(call.args[0].id)) is not None:  # type: ignore[attr-defined]
                    yield child, node
            names = [n for n in ast.walk(statement) if isinstance(n, ast.Name)]
            stored = {n.id for n in names if isinstance(n.ctx, ast.Store)}
            read = {n.id for n in names if isinstance(n.ctx, ast.Load)}
            if isinstance(value, ast.Name) and value.id in sums:
                sums |= dict.fromkeys(stored, sums[value.id])
                continue
            touched = {id(sums[name]) for name in read if name in sums}
            sums = {name: node for name, node in sums.items() if id(node) not in touched and name not in stored}
            if len(stored) == 1 and isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
                sums |= dict.fromkeys(stored, value)


def _reads(call: ast.AST, own: str) -> str:
    """The child called, for `self.child(name)`; else nothing."""
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and len(call.args) == 1 and not call.keywords):
        return ""
    by_self = isinstance(call.func.value, ast.Name) and call.func.value.id == own
    return call.func.attr if by_self and isinstance(call.args[0], ast.Name) else ""


def _put(node: Any, give: Callable[[Any], ast.expr], own: str, child: str) -> bool:
    """`b + c` -> `add(self.child, b, c)`."""
    norm = ast.Attribute(ast.Name(own, ast.Load()), child, ast.Load())
    operands = [norm, node.left, node.right]
    node.__class__ = ast.Call
    node.func, node.args, node.keywords = give(add_before), operands, []
    return True


def add_before(norm: Any, a: Any, b: Any) -> Any:
    """`a + b`; where `norm` is one of ours and they are alike, its output is computed with it and left there."""
    how = getattr(getattr(type(norm), "forward", None), "fused_norm", None)
    if how is None or torch.compiler.is_compiling() or not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return a + b
    if isinstance(a, PendingSum) or isinstance(b, PendingSum):
        return a + b  # the norm is computed with the sum over the ranks, when it is called
    if norm._forward_pre_hooks or "forward" in norm.__dict__ or differentiates_forward() or not is_as_tried(norm):
        return a + b  # hooks may bring its weight, or change its input
    weight = norm.weight
    if a.shape != b.shape or not a.dtype is b.dtype is weight.dtype or a.is_inference() or b.is_inference():
        return a + b
    if torch.is_inference_mode_enabled() or torch.is_autocast_enabled(a.device.type):
        return a + b  # tensors without versions; another dtype
    y, total = add_norm(a, b, weight, read_shift(norm, how[0]), how[1], how[0])
    norm.__dict__["ready"] = (total, total._version, torch.is_grad_enabled(), y)
    return total


def read_shift(norm: Any, kind: str) -> Tensor | None:
    """The bias of a norm of a kind, which layernorms alone were found to have: to look for what is not there takes long."""
    return getattr(norm, "bias", None) if kind == "layernorm" else None
