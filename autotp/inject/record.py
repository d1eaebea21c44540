"""Runs a model on stand-ins for its weights and notes every site: what goes in, and a random value that comes out.

The graph is *cut* at each site: its output is a fresh leaf, so that what autograd then says of any other tensor is a direct
dependence, with no other site in between. No site's weight is read, so the big ones stay on meta: discovery runs at the
model's own width on any machine. All floating numbers are float64 inside, whatever the forward asks for.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .arguments import copy_arguments
from .draws import Draws
from .shadow import Shadow
from .sites import Operands, locate, read_site
from .smooth import SMOOTH

SiteKey = tuple[str, tuple[int, ...]]  # a Parameter's name and the dims of it that become output columns
NARROW = {torch.float32, torch.float16, torch.bfloat16}
COMPLEX = {torch.complex64, torch.complex32}


@dataclass
class Call:
    """One call of a site.

    Attributes:
        x, y: its input, attached to what came before, and its output, a leaf.
        x_axes, y_axes: axes of the columns, from the end; x_start, y_start: where they lie in the Parameter's dims.
        modules: names of the modules whose forward was running, outermost first.
    """

    x: Tensor
    y: Tensor
    x_axes: tuple[int, ...]
    y_axes: tuple[int, ...]
    x_start: int
    y_start: int
    modules: tuple[str, ...]


@dataclass
class Site:
    """A Parameter as a linear map: `in_dims` of it are contracted, `out_dims` become output columns.

    `readable` is False where the weight is no plain view of the Parameter: it is cut, but can take no role. `biases` are
    Parameters that its calls add, one number a column. `grouped`: the weight is many maps, each of a part of the input.
    """

    key: SiteKey
    shape: tuple[int, ...]
    in_dims: tuple[int, ...]
    kind: str
    readable: bool = True
    biases: set[str] = field(default_factory=set)
    grouped: bool = False
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


class Interceptor(TorchFunctionMode):
    """Shows every site to `respond`, which returns its output; everything else runs, in float64, on stand-ins with numbers."""

    def __init__(self, shadow: Shadow, respond: Callable[[Operands, str, Any, tuple, dict], Tensor]) -> None:
        super().__init__()
        self.shadow, self.respond, self.draws = shadow, respond, Draws()

    def __torch_function__(self, func, types_, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _FLOAT_CASTS:
            return args[0].double() if args[0].dtype != torch.float64 else args[0]
        operands = read_site(func, args, kwargs, self._is_weight)
        if operands is not None:
            name = self.shadow.find(operands.weight)
            assert name is not None
            if not self.shadow.is_transparent(name, operands):
                return self.respond(operands, name, func, args, kwargs)
        if func in SMOOTH and args and args[0].is_floating_point():
            return SMOOTH[func](*args, **kwargs)
        if func is F.batch_norm:
            return _batch_norm(*args, **kwargs)
        if (isinstance(func, types.FunctionType) and "has_torch_function" in func.__code__.co_names) or func in _COMPOSITES:
            return _open(func, self)(*args, **kwargs)
        view = self._view(func, args, kwargs)
        if view is not None:
            return view
        args, kwargs = _map(self._widen, args), {key: _map(self._widen, value) for key, value in kwargs.items()}
        return self.draws.run(func, args, kwargs)

    def _view(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """What `func` makes of a big Parameter, where that is a view of it (an expert, a transpose): it stays without numbers."""
        first = args[0] if args else None
        if not isinstance(first, Tensor) or not first.is_meta or self.shadow.find(first) is None:
            return None
        try:
            made = func(*_map(_widen_dtype, args), **{key: _map(_widen_dtype, value) for key, value in kwargs.items()})
        except (RuntimeError, NotImplementedError, TypeError):  # it mixes the Parameter with tensors that have numbers
            return None
        parts = list(flatten(made))
        return made if parts and all(self.shadow.find(part) is not None for part in parts) else None

    def _is_weight(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_floating_point() and self.shadow.find(value) is not None

    def _widen(self, value: Any) -> Any:
        value = _widen_dtype(value)
        if isinstance(value, Tensor) and value.is_meta and self.shadow.find(value) is not None:
            return self.shadow.fill(value)
        return value


class Recorder:
    """Fills a `Record` by running a shadow."""

    def __init__(self, shadow: Shadow, seed: int = 0, elementwise: Iterable[str] = ()) -> None:
        """`elementwise`: norms to be seen as a scale of each column by itself."""
        self.shadow, self.record, self.elementwise = shadow, Record(), set(elementwise)
        self.generator = torch.Generator().manual_seed(seed)
        self.stack: list[str] = []

    def run(self, call: dict[str, Any]) -> None:
        """One forward; its sites are added to the record.

        Raises:
            whatever the forward raises.
        """
        with keep_state(self.shadow.model), self._hooks(), running(), Interceptor(self.shadow, self._respond):
            output = self.shadow.model(**call)
        self.record.outputs += [t for t in flatten(output) if t.is_floating_point()]

    def _respond(self, op: Operands, name: str, func: Any, args: tuple, kwargs: dict) -> Tensor:
        parameter = self.shadow.parameters[name]
        out, inside = locate(op.weight, parameter, op.w_out), locate(op.weight, parameter, op.w_in)
        if (op.w_in and inside is None) or out is None:
            key: SiteKey = (name, ())
            out = inside = None
        else:
            assert out is not None
            key = (name, out.dims)
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
        site.calls.append(Call(op.x, y, op.x_axes, op.y_axes, *starts, tuple(self.stack)))
        return add_bias(y.clone(), op, self.shadow)

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

    def _enter(self, name: str, module: nn.Module, given_args: tuple, given_kwargs: dict) -> Any:
        self.stack.append(name)
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
        if name in self.elementwise:
            output = module.weight
            for x in self.record.module_calls[name][-1].arguments.values():
                output = output * x * torch.randn(x.shape, generator=self.generator, dtype=torch.float64)
            output = output + (0 if getattr(module, "bias", None) is None else module.bias)
        if output is not None:
            self.record.module_calls[name][-1].outputs = list(flatten(output))
        return output


# -- helpers ------------------------------------------------------------------------------------------------------------


@contextmanager
def keep_state(model: nn.Module) -> Iterator[None]:
    """What a forward stores on the modules (caches, states) is gone afterwards."""
    before = [(m, dict(vars(m)), dict(m._buffers)) for m in model.modules()]
    kept = [(value, dict(value)) for _, own, _ in before for key, value in own.items() if type(value) is dict and key[:1] != "_"]
    try:
        yield
    finally:
        for value, items in kept:  # caches by key
            value.clear()
            value.update(items)
        for module, attributes, buffers in before:
            for key in set(vars(module)) - set(attributes):
                del module.__dict__[key]
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


@contextmanager
def running() -> Iterator[None]:
    """float64 as the default dtype, no compilation, gradients on: how every forward on a shadow runs."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    eager = torch.compiler.set_stance("force_eager") if hasattr(torch.compiler, "set_stance") else nullcontext()
    try:
        with eager, torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)


def flatten(value: Any) -> Iterator[Tensor]:
    """The tensors in a nest of tuples, lists, dicts and model outputs, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from flatten(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from flatten(item)


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


def add_bias(y: Tensor, op: Operands, shadow: Shadow) -> Tensor:
    """`y` with the call's bias added: a tensor like any other, which the dependence tables then see."""
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
        return func(*_map(to_meta, args), **{k: _map(to_meta, v) for k, v in kwargs.items()}).shape


def _map(fn: Callable[[Any], Any], value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(_map(fn, item) for item in value)
    return fn(value)


def _widen_dtype(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value in NARROW else torch.complex128 if value in COMPLEX else value
    return value


def _size(shape: tuple[int, ...], dims: tuple[int, ...]) -> int:
    size = 1
    for dim in dims:
        size *= shape[dim]
    return size


def _batch_norm(x, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    """Evaluation's batch norm as arithmetic, so that its statistics are seen like Parameters."""
    if running_mean is None:
        dims = [d for d in range(x.ndim) if d != 1]
        running_mean, running_var = x.mean(dims), x.var(dims, unbiased=False)
    shape = [1, -1] + [1] * (x.ndim - 2)
    y = (x - running_mean.reshape(shape)) * torch.rsqrt(running_var.reshape(shape) + eps)
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def _depthwise(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """A convolution of each channel by itself as arithmetic, which float64 has no fast kernel for; None for any other."""
    dims = weight.ndim - 2
    alone = x.ndim == weight.ndim and tuple(weight.shape[:2]) == (groups, 1) and x.shape[1] == groups
    if groups < 2 or not alone or isinstance(padding, str):
        return None
    steps, pads, gaps = (([v] * dims if isinstance(v, int) else list(v) * (dims // len(v))) for v in (stride, padding, dilation))
    y = F.pad(x, [p for pad in reversed(pads) for p in (pad, pad)])
    for axis, (size, step, gap) in enumerate(zip(weight.shape[2:], steps, gaps, strict=True)):
        y = y.unfold(2 + axis, (size - 1) * gap + 1, step)[..., ::gap]
    y = (y * weight.reshape(groups, *[1] * dims, *weight.shape[2:])).sum(list(range(-dims, 0)))
    return y if bias is None else y + bias.reshape(-1, *[1] * dims)


_CONVOLUTIONS = {torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d}
_FLOAT_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}
_COMPOSITES = {F.multi_head_attention_forward}


@functools.lru_cache(maxsize=256)
def _opened(func: types.FunctionType) -> types.FunctionType:
    names = {name: _never for name in func.__code__.co_names if name.startswith("has_torch_function")}
    opened = types.FunctionType(func.__code__, {**func.__globals__, **names}, func.__name__, func.__defaults__, func.__closure__)
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened


def _never(*_: Any) -> bool:
    return False


def _open(func: Any, mode: TorchFunctionMode) -> Callable[..., Any]:
    """A Python function of torch whose own calls are intercepted too."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return _opened(func)(*args, **kwargs)

    return call
