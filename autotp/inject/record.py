"""Runs a model on stand-ins for its weights and notes every site: what goes in, and a random value that comes out.

The graph is *cut* at each site: its output is a fresh leaf, so that what autograd then says of any other tensor is a direct
dependence, with no other site in between. No site's weight is read, so the big ones stay on meta: discovery runs at the
model's own width on any machine. All floating numbers are float64 inside, whatever the forward asks for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import copy_arguments
from .derived import adds_up, draw_mix, find_sources, mix_weight, place_derived
from .drawing import Drop, Rate, naming_rates
from .intercept import Interceptor, flatten, keep_state, map_nested, running
from .shadow import Shadow
from .sites import Operands, locate

SiteKey = tuple[str, tuple[int, ...]]  # a Parameter's name and the dims of it that become output columns


@dataclass
class Call:
    """One call of a site.

    Attributes:
        x, y: its input, attached to what came before, and its output, a leaf.
        x_axes, y_axes: axes of the columns, from the end; x_start, y_start: where they lie in the Parameter's dims.
        modules: names of the modules whose forward was running, outermost first.
        op: its operands, where the weight is computed from Parameters; mix: coefficients by which `y` depends on it.
    """

    x: Tensor
    y: Tensor
    x_axes: tuple[int, ...]
    y_axes: tuple[int, ...]
    x_start: int
    y_start: int
    modules: tuple[str, ...]
    op: Operands | None = None
    mix: Tensor | None = None


@dataclass
class Site:
    """A Parameter as a linear map: `in_dims` of it are contracted, `out_dims` become output columns.

    `readable` is False where the weight's columns are not the Parameter's: it is cut, but can take no role. `biases` are
    Parameters that its calls add, one number a column. `grouped`: the weight is many maps, each of a part of the input.
    `sources`: what its weight is computed from, if it is no view of the Parameter; `in_dims` are none where each column of
    the weight takes more than the Parameter's column, or where parts of the output can't be added up later.
    """

    key: SiteKey
    shape: tuple[int, ...]
    in_dims: tuple[int, ...]
    kind: str
    readable: bool = True
    biases: set[str] = field(default_factory=set)
    grouped: bool = False
    sources: set[str] = field(default_factory=set)
    calls: list[Call] = field(default_factory=list)

    @property
    def parameter(self) -> str:
        return self.key[0]

    @property
    def out_dims(self) -> tuple[int, ...]:
        return self.key[1]

    @functools.cached_property
    def in_size(self) -> int:
        return _size(self.shape, self.in_dims)

    @functools.cached_property
    def out_size(self) -> int:
        return _size(self.shape, self.out_dims)


@dataclass
class ModuleCall:
    """One call of a module: its tensor arguments by name (`name` or position in `*args`), and its flattened output.

    `sources` holds the leaf behind an argument that came without a gradient and was given one for the record.
    """

    arguments: dict[str, Tensor]
    constants: dict[str, Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Any]


@dataclass
class Record:
    """What one or several forwards did."""

    sites: dict[SiteKey, Site] = field(default_factory=dict)
    order: list[tuple[SiteKey, int]] = field(default_factory=list)
    module_calls: dict[str, list[ModuleCall]] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    numbers: list[Tensor] = field(default_factory=list)  # that Python read or compared
    drawn: list[Drop] = field(default_factory=list)


class Recorder:
    """Fills a `Record` by running a shadow."""

    def __init__(self, shadow: Shadow, seed: int = 0, elementwise: Iterable[str] = ()) -> None:
        """`elementwise`: norms to be seen as a scale of each column by itself."""
        self.shadow, self.record, self.elementwise = shadow, Record(), set(elementwise)
        self.generator = torch.Generator().manual_seed(seed)
        self.stack: list[str] = []
        self.behind: list[str | None] = []  # for each of them, the module that returned last in it
        self.inside: list[tuple[Site, Call]] = []  # computed weights that modules which still run have used

    def run(self, call: dict[str, Any]) -> None:
        """One forward; its sites are added to the record.

        Raises:
            whatever the forward raises.
        """
        with (
            keep_state(self.shadow.model),
            self._hooks(),
            running(),
            naming_rates(self.shadow.model),
            Interceptor(self.shadow, self._respond, self.record.numbers.append, self._drop),
        ):
            output = self.shadow.model(**call)
        self.record.outputs += [t for t in flatten(output) if t.is_floating_point()]

    def _drop(self, drawn: Tensor, rate: Any, drops: bool) -> None:
        behind, source = self.behind[-1] if self.behind else None, rate.source if isinstance(rate, Rate) else None
        self.record.drawn.append(Drop(tuple(self.stack), behind, len(self.record.order), drawn.shape, source, drops))

    def _respond(self, op: Operands, name: str, func: Any, args: tuple, kwargs: dict) -> Tensor:
        parameter = self.shadow.parameters[name]
        derived = self.shadow.find(op.weight) is None
        if derived:
            out, inside = place_derived(self.shadow, op, name)
        else:
            out, inside = locate(op.weight, parameter, op.w_out), locate(op.weight, parameter, op.w_in)
        if (op.w_in and inside is None and not derived) or out is None:
            out = inside = None
        key: SiteKey = (name, out.dims if out else ())
        kind = "embedding" if not op.x_axes else "linear"
        in_dims = inside.dims if inside and op.w_in else ()
        site = self.record.sites.setdefault(key, Site(key, tuple(parameter.shape), in_dims, kind, out is not None))
        bias = self.shadow.find(op.bias)
        if bias is not None and self.shadow.parameters[bias].shape == (site.out_size,):
            site.biases.add(bias)
        rest = [n for d, n in enumerate(op.weight.shape) if d not in op.w_in and d not in op.w_out]
        kernel = "conv" in func.__name__  # whose other dims are positions
        site.grouped |= bool(op.w_in) and max(rest, default=1) > 1 and not kernel
        shape = output_shape(func, args, kwargs)
        y = torch.randn(shape, generator=self.generator, dtype=torch.float64).requires_grad_()
        starts = (inside.start if inside else 0, out.start if out else 0)
        self.record.order.append((key, len(site.calls)))
        call = Call(op.x, y, op.x_axes, op.y_axes, *starts, tuple(self.stack))
        site.calls.append(call)
        if derived:
            call.op, call.mix = op, draw_mix(op, self.generator)
            self.inside.append((site, call))
            site.sources |= find_sources(self.shadow, op.weight) or set()
        return add_terms(y.clone(), op, self.shadow, call.mix)

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        handles = []
        for name, module in self.shadow.model.named_modules():
            handles.append(module.register_forward_pre_hook(functools.partial(self._enter, name), with_kwargs=True))
            handles.append(module.register_forward_hook(functools.partial(self._leave, name), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.stack.clear()
            self.behind.clear()

    def _enter(self, name: str, module: nn.Module, given_args: tuple, given_kwargs: dict) -> Any:
        self.stack.append(name)
        self.behind.append(None)
        arguments, constants = {}, {}
        args, kwargs = list(given_args), dict(given_kwargs)
        given: dict[int, tuple[Tensor, Tensor]] = {}  # one tensor passed twice stays one
        for key, value in bind_names(module, args, kwargs):
            if isinstance(value, Tensor) and value.is_floating_point():
                if not value.requires_grad and torch.is_grad_enabled():
                    if id(value) not in given:
                        leaf = value.detach().double().requires_grad_()
                        given[id(value)] = (leaf, leaf.clone())
                    constants[key], value = given[id(value)]
                    if isinstance(key, str) and key in kwargs:
                        kwargs[key] = value
                    else:
                        args[_position(module, key)] = value
                arguments[key] = value
        own_args, own_kwargs = copy_arguments((tuple(args), kwargs))
        call = ModuleCall(arguments, constants, own_args, own_kwargs, [])
        self.record.module_calls.setdefault(name, []).append(call)
        return tuple(args), kwargs

    def _leave(self, name: str, module: nn.Module, args: tuple, output: Any) -> Any:
        self.stack.pop()
        self.behind.pop()
        if self.behind:
            self.behind[-1] = name
        if name in self.elementwise:
            output = module.weight
            for x in self.record.module_calls[name][-1].arguments.values():
                output = output * x * torch.randn(x.shape, generator=self.generator, dtype=torch.float64)
            output = output + (0 if getattr(module, "bias", None) is None else module.bias)
        if output is not None:
            outputs = self.record.module_calls[name][-1].outputs = list(flatten(output))
            while self.inside and self.inside[-1][1].modules == (*self.stack, name):
                site, call = self.inside.pop()
                if site.in_dims and not adds_up(outputs, call.y):  # the ranks' parts
                    site.in_dims = ()
        return output


# -- helpers ------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _forward_names(forward: Any) -> tuple[tuple[str, ...], bool]:
    try:
        parameters = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        return (), True
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple(names[1:]), False  # without self, whatever it is called


def bind_names(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """`(name, value)` of the arguments of a module's forward; a positional one that has no name is called by its position."""
    names, _ = _forward_names(type(module).forward)
    bound = [(names[i] if i < len(names) else str(i), value) for i, value in enumerate(args)]
    return bound + list(kwargs.items())


def bind_position(module: nn.Module, name: str) -> int | None:
    """Place of an argument when it is passed positionally; None if it never is."""
    names, _ = _forward_names(type(module).forward)
    return names.index(name) if name in names else int(name) if name.isdigit() else None


def _position(module: nn.Module, key: str) -> int:
    names, _ = _forward_names(type(module).forward)
    return names.index(key) if key in names else int(key)


def columns(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    """`tensor` as `[rows, columns]`, the columns running over `axes` in their order."""
    if not axes:
        return tensor.reshape(-1, 1)
    rest = [d - tensor.ndim for d in range(tensor.ndim) if d - tensor.ndim not in axes]
    moved = tensor.permute(*rest, *axes)
    width = 1
    for axis in axes:
        width *= tensor.shape[axis]
    return moved.reshape(-1, width)


def add_terms(y: Tensor, op: Operands, shadow: Shadow, mix: Tensor | None) -> Tensor:
    """`y` with the call's bias added, a tensor like any other, which the dependence tables then see; and a computed weight."""
    if mix is not None:
        y = mix_weight(y, op, mix)
    if not isinstance(op.bias, Tensor):
        return y
    bias = shadow.fill(op.bias) if op.bias.is_meta else op.bias
    if bias.ndim == 1 and op.y_axes != (-1,):
        bias = bias.reshape([-1] + [1] * (-op.y_axes[0] - 1))
    return y + bias


def output_shape(func: Any, args: tuple, kwargs: dict) -> torch.Size:
    """Shape of what a call returns, found on meta."""

    def to_meta(value: Any) -> Any:
        if isinstance(value, Tensor):
            dtype = value.dtype if not value.is_floating_point() else torch.float64
            return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device="meta")
        return value

    with torch.no_grad():
        return func(*map_nested(to_meta, args), **{k: map_nested(to_meta, v) for k, v in kwargs.items()}).shape


def _size(shape: tuple[int, ...], dims: tuple[int, ...]) -> int:
    size = 1
    for dim in dims:
        size *= shape[dim]
    return size
