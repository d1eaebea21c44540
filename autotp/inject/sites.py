"""Reads one torch call as a linear map of an activation with a Parameter: a *site*, whatever function it is written with.

`linear`, `matmul` and its kin with the weight on either side, `einsum`, `tensordot`, convolutions without groups and
`embedding` all come out as an `Operands`: which tensor is the activation, which the weight, and along which axes the
columns of input and output lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IsWeight = Callable[[Any], bool]


@dataclass(frozen=True)
class Operands:
    """One call of a linear map.

    Attributes:
        x, weight, bias: the operands; bias is None where the call adds none.
        x_axes, y_axes: axes of the input's and the output's columns, counted from the end (negative).
        w_in, w_out: dims of `weight` that are contracted, and that become the output's columns, in the axes' order.
    """

    x: Tensor
    weight: Tensor
    bias: Any
    x_axes: tuple[int, ...]
    y_axes: tuple[int, ...]
    w_in: tuple[int, ...]
    w_out: tuple[int, ...]


def read_linear(is_weight: IsWeight, input: Any, weight: Any, bias: Any = None) -> Operands | None:
    if is_weight(weight) and weight.ndim == 2 and not is_weight(input):
        return Operands(input, weight, bias, (-1,), (-1,), (1,), (0,))
    return None


def read_matmul(is_weight: IsWeight, input: Any, other: Any, *, out: Any = None, bias: Any = None) -> Operands | None:
    left, right = is_weight(input), is_weight(other)
    if right and not left and isinstance(input, Tensor) and other.ndim >= 2 and input.ndim >= 1:
        n = other.ndim
        return Operands(input, other, bias, (-1,), (-1,), (n - 2,), (n - 1,))
    if left and not right and isinstance(other, Tensor) and input.ndim >= 2 and other.ndim >= 2:
        n = input.ndim
        return Operands(other, input, bias, (-2,), (-2,), (n - 1,), (n - 2,))
    return None


def read_addmm(is_weight: IsWeight, input: Any, mat1: Any, mat2: Any, **scales: Any) -> Operands | None:
    if any(scales.get(key, 1) != 1 for key in ("alpha", "beta")):
        return None
    return read_matmul(is_weight, mat1, mat2, bias=input)


def read_conv(is_weight: IsWeight, input: Any, weight: Any, bias: Any = None, *rest: Any, **options: Any) -> Operands | None:
    return _convolution(is_weight, input, weight, bias, options.get("groups", rest[3] if len(rest) > 3 else 1), (1,), (0,))


def read_conv_transpose(
    is_weight: IsWeight, input: Any, weight: Any, bias: Any = None, *rest: Any, **options: Any
) -> Operands | None:
    return _convolution(is_weight, input, weight, bias, options.get("groups", rest[3] if len(rest) > 3 else 1), (0,), (1,))


def _convolution(
    is_weight: IsWeight, input: Any, weight: Any, bias: Any, groups: int, w_in: tuple[int, ...], w_out: tuple[int, ...]
) -> Operands | None:
    """A convolution is a linear map of channels, whatever its kernel, if it has no groups."""
    if groups != 1 or not is_weight(weight) or is_weight(input):
        return None
    axis = 1 - weight.ndim
    return Operands(input, weight, bias, (axis,), (axis,), w_in, w_out)


def read_embedding(is_weight: IsWeight, input: Any, weight: Any, *args: Any, **kwargs: Any) -> Operands | None:
    if not is_weight(weight) or not isinstance(input, Tensor):
        return None
    return Operands(input, weight, None, (), (-1,), (), (1,))


def read_einsum(is_weight: IsWeight, equation: Any, *operands: Any) -> Operands | None:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if len(operands) != 2 or not isinstance(equation, str) or is_weight(operands[0]) == is_weight(operands[1]):
        return None
    terms, arrow, result = equation.replace(" ", "").partition("->")
    inputs = terms.split(",")
    if len(inputs) != 2 or not arrow:
        return None
    which = 1 if is_weight(operands[1]) else 0
    w_term, x_term, weight, x = inputs[which], inputs[1 - which], operands[which], operands[1 - which]
    if "." in w_term or len(set(w_term)) != len(w_term) or not isinstance(x, Tensor):
        return None
    contracted = [c for c in w_term if c in x_term and c not in result]
    free = [c for c in w_term if c in result and c not in x_term]
    lost = [c for c in w_term if c not in x_term and c not in result]
    if not contracted or not free or lost:
        return None
    ends = {id(x_term): len(x_term), id(result): len(result)}

    def axis(term: str, label: str) -> int:
        """Counted from the end; an ellipsis has to stand before the label."""
        return term.index(label) - ends[id(term)]

    if any("." in term[term.index(c) :] for term, labels in ((x_term, contracted), (result, free)) for c in labels):
        return None
    return Operands(
        x,
        weight,
        None,
        tuple(axis(x_term, c) for c in contracted),
        tuple(axis(result, c) for c in free),
        tuple(w_term.index(c) for c in contracted),
        tuple(w_term.index(c) for c in free),
    )


def read_tensordot(is_weight: IsWeight, a: Any, b: Any, dims: Any = 2, out: Any = None) -> Operands | None:
    if not is_weight(b) or is_weight(a):
        return None
    if isinstance(dims, int):
        a_dims, b_dims = list(range(a.ndim - dims, a.ndim)), list(range(dims))
    elif isinstance(dims, (list, tuple)) and len(dims) == 2:
        a_dims, b_dims = ([d] if isinstance(d, int) else list(d) for d in dims)
    else:
        return None
    a_dims, b_dims = [d % a.ndim for d in a_dims], [d % b.ndim for d in b_dims]
    free = [d for d in range(b.ndim) if d not in b_dims]
    if a_dims != list(range(a.ndim - len(a_dims), a.ndim)) or not free:
        return None
    y_axes = tuple(range(-len(free), 0))
    return Operands(a, b, None, tuple(d - a.ndim for d in a_dims), y_axes, tuple(b_dims), tuple(free))


READERS: dict[Any, Callable[..., Operands | None]] = {
    F.linear: read_linear,
    torch.matmul: read_matmul,
    torch.mm: read_matmul,
    torch.bmm: read_matmul,
    Tensor.matmul: read_matmul,
    Tensor.mm: read_matmul,
    Tensor.bmm: read_matmul,
    Tensor.__matmul__: read_matmul,
    torch.addmm: read_addmm,
    torch.baddbmm: read_addmm,
    Tensor.addmm: read_addmm,
    torch.einsum: read_einsum,
    torch.functional.einsum: read_einsum,
    torch.tensordot: read_tensordot,
    torch.conv1d: read_conv,
    torch.conv2d: read_conv,
    torch.conv3d: read_conv,
    F.conv1d: read_conv,
    F.conv2d: read_conv,
    F.conv3d: read_conv,
    F.conv_transpose1d: read_conv_transpose,
    F.conv_transpose2d: read_conv_transpose,
    F.embedding: read_embedding,
}


def read_site(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_weight: IsWeight) -> Operands | None:
    """The call as a linear map, or None if it is none that can be read."""
    reader = READERS.get(func)
    if reader is None:
        return None
    try:
        return reader(is_weight, *args, **kwargs)
    except TypeError:  # an argument that no reader knows: not a plain linear map
        return None


@dataclass(frozen=True)
class Place:
    """Where a view lies in its Parameter: dims of the Parameter for some dims of the view, and the first index along them."""

    dims: tuple[int, ...]
    start: int


def locate(view: Tensor, parameter: Tensor, view_dims: tuple[int, ...]) -> Place | None:
    """Which dims of `parameter` the `view_dims` of one of its views run over, by their strides; None if it is no plain view.

    A view dim may run over several neighbouring dims of the Parameter (`w.view(d, heads * head_dim)`).
    """
    found: list[int] = []
    for dim in view_dims:
        size, stride = view.shape[dim], view.stride(dim)
        if size == 1:  # its stride says nothing
            last = next((j for j in range(parameter.ndim) if parameter.shape[j] == 1 and j not in found), None)
        else:
            last = next((j for j in range(parameter.ndim) if parameter.stride(j) == stride and parameter.shape[j] > 1), None)
        if last is None:
            return None
        dims, width = [last], parameter.shape[last]
        while size > width and dims[0] > 0:
            dims.insert(0, dims[0] - 1)
            width *= parameter.shape[dims[0]]
        if size > width:
            return None
        found += dims
    if len(set(found)) != len(found):
        return None
    offset = int(view.storage_offset()) - int(parameter.storage_offset())
    index: dict[int, int] = {}
    for j in sorted(range(parameter.ndim), key=lambda j: -parameter.stride(j)):
        if parameter.shape[j] > 1:
            index[j], offset = divmod(offset, int(parameter.stride(j)))
    starts = [index.get(j, 0) for j in found]
    if any(starts[1:]):
        return None
    if not found:
        return Place((), 0)
    inner = 1
    for j in found[1:]:
        inner *= parameter.shape[j]
    return Place(tuple(found), starts[0] * inner)
