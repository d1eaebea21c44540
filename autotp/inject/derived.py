"""Weights that a forward computes from Parameters: weight norm, masks and scales, merged low-rank updates, normalised rows.

What a tensor was computed from is noted on it: names of Parameters and buffers, as long as no activation came in. A linear
map of such a weight is a site of the Parameter whose columns the weight's columns are. As a site's output is cut from its
inputs, it is given a term that depends on the weight column by column: so dependence tables, slices and gradients see the
Parameters behind it. The proof compares each rank's weight with its part of the whole one, so nothing rests on these notes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .indices import project
from .sites import Operands, Place, read_site

if TYPE_CHECKING:
    from .shadow import Shadow

Sources = frozenset[str]  # empty: of constants alone
_NOTE = "autotp_sources"
_WRITES = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}


# -- what a tensor was computed from ------------------------------------------------------------------------------------------


def find_sources(shadow: Shadow, tensor: Tensor) -> Sources | None:
    """Names of the Parameters and buffers that `tensor` was computed from; None where an activation came in."""
    name = shadow.origin(tensor)
    return frozenset((name,)) if name is not None else getattr(tensor, _NOTE, None)


def note_sources(shadow: Shadow, func: Any, args: tuple, kwargs: dict[str, Any], made: Any) -> None:
    """Note on the results of a call what they were computed from."""
    name = getattr(func, "__name__", "")
    writes = name in _WRITES or (name[-1:] == "_" and name[-2:] != "__")
    written = _tensors((args[:1] if writes else (), kwargs.get("out")))
    results = _tensors(made)
    if not written and not results:  # a shape, a number
        return
    found: set[str] = set()
    for tensor in _tensors((args, kwargs)):
        sources = find_sources(shadow, tensor)
        if sources is None:
            for changed in written:
                setattr(changed, _NOTE, None)
            return
        found |= sources
    for tensor in (*results, *written):
        if shadow.origin(tensor) is None:
            setattr(tensor, _NOTE, frozenset(found))


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a nest of lists, tuples and dicts."""
    found: list[Tensor] = []
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            left += item
        elif isinstance(item, dict):
            left += item.values()
    return found


# -- linear maps of such a weight ---------------------------------------------------------------------------------------------


def read_derived(shadow: Shadow, func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Operands, str] | None:
    """A call as a linear map of an activation with a computed weight, and the Parameter that the weight's columns belong to."""

    def is_weight(value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_floating_point() and bool(find_sources(shadow, value))

    operands = read_site(func, args, kwargs, is_weight)
    if operands is None or shadow.find(operands.weight) is not None:
        return None
    weight = operands.weight
    if len(operands.w_in) != 1 or len(operands.w_out) != 1 or (weight.ndim > 2 and "conv" not in func.__name__):
        return None
    sources = find_sources(shadow, weight)
    assert sources
    if sources not in shadow.owners:
        shadow.owners[sources] = _find_owner(shadow, operands, sources)
    owner = shadow.owners[sources]
    return None if owner is None else (operands, owner)


def _find_owner(shadow: Shadow, op: Operands, sources: Sources) -> str | None:
    """The Parameter whose columns are the weight's; None if there is none, or no gradient goes there."""
    if not op.weight.requires_grad:
        return None
    shape = _long(op.weight.shape)
    fitting = [n for n in shadow.parameters if n in sources and len(_long(shadow.parameters[n].shape)) == len(shape)]
    fitting = [n for n in fitting if shadow.parameters[n].numel() >= op.weight.numel()]
    fitting.sort(key=lambda n: sorted(_long(shadow.parameters[n].shape)) != sorted(shape))
    return next((n for n in fitting if place_derived(shadow, op, n)[0] is not None), None)


def _long(shape: Iterable[int]) -> list[int]:
    return [n for n in shape if n > 1]


def place_derived(shadow: Shadow, op: Operands, name: str) -> tuple[Place | None, Place | None]:
    """Where the weight's output columns lie in Parameter `name`, and its input columns; None where one takes more of it.

    Where a dim of the weight follows one of the Parameter's, any part of it depends on just that part of the Parameter.
    """
    leaf = shadow.leaf(name)
    if not leaf.requires_grad:  # nothing shows that it follows: the proof decides
        same = leaf.shape == op.weight.shape
        return (Place(op.w_out, 0) if same else None), None
    return _follow(op.weight, leaf, op.w_out[0]), _follow(op.weight, leaf, op.w_in[0])


def _follow(weight: Tensor, leaf: Tensor, dim: int) -> Place | None:
    size = weight.shape[dim]
    if size < 2 or not weight.requires_grad:
        return None
    generator = torch.Generator().manual_seed(size)
    part = torch.rand(size, generator=generator) < 0.5
    part[0], part[int(torch.randint(1, size, (), generator=generator))] = True, False
    cotangent = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    cotangent = cotangent * part.to(weight.dtype).reshape([-1 if d == dim else 1 for d in range(weight.ndim)])
    (grad,) = torch.autograd.grad(weight, leaf, cotangent, retain_graph=True, allow_unused=True)
    hits = [] if grad is None else project(grad)
    for d, hit in enumerate(hits):
        start = int(hit.nonzero()[0]) if bool(hit.any()) else len(hit)
        if int(hit.sum()) == int(part.sum()) and hit[start : start + size].equal(part):
            return Place((d,), start)
    for d, hit in enumerate(hits):  # some of it is masked out
        if len(hit) == size and not bool((hit & ~part).any()) and 2 * int(hit.sum()) > int(part.sum()):
            return Place((d,), 0)
    return None


# -- the term by which a site's output depends on its weight ------------------------------------------------------------------


def draw_mix(op: Operands, generator: torch.Generator) -> Tensor:
    """Random coefficients for each number of a call's weight, small beside a site's output when summed over a column."""
    scale = (op.weight.shape[op.w_out[0]] / op.weight.numel()) ** 0.5
    return torch.randn(op.weight.shape, generator=generator, dtype=torch.float64) * (0.5 * scale)


def mix_weight(y: Tensor, op: Operands, mix: Tensor) -> Tensor:
    """`y` plus, in each column, the sum of its weights times their coefficients `mix`, of the weight's shape."""
    out = op.w_out[0]
    term = (op.weight * mix).sum([d for d in range(op.weight.ndim) if d != out])
    return y + term.reshape([-1] + [1] * (-op.y_axes[0] - 1))


def adds_up(outputs: Iterable[Tensor], y: Tensor) -> bool:
    """Whether what a module returns is a sum of what it would return for the parts of `y`, up to a constant."""
    generator = torch.Generator().manual_seed(0)

    def pull(targets: Iterable[Tensor], again: bool) -> list[Tensor]:
        grads = []
        for target in targets:
            if target.requires_grad:
                cotangent = torch.randn(target.shape, generator=generator, dtype=target.dtype)
                grads += torch.autograd.grad(target, y, cotangent, retain_graph=True, create_graph=again, allow_unused=True)
        return [grad for grad in grads if grad is not None]

    slopes = pull([t for t in outputs if t.is_floating_point()], True)
    return bool(slopes) and not any(bool(grad.ne(0).any()) for grad in pull(slopes, False))
