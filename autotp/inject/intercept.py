"""Runs a forward on a shadow: every site is answered by another, and all else runs in float64, in arithmetic that shows through.

Python composites of torch are opened, a norm over the batch and depthwise convolutions are written out, and activations are
smooth: what a tensor depends on is then all in autograd's graph.
"""

from __future__ import annotations

import functools
import itertools
import math
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .derived import note_sources, read_derived
from .draws import DRAWING, Draws
from .shadow import Shadow
from .sites import READERS, Operands, read_site
from .smooth import SMOOTH

NARROW = {torch.float32, torch.float16, torch.bfloat16}


COMPLEX = {torch.complex64, torch.complex32}
HOOKS = {"_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"}
HOOKS |= {"_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"}


_NUMBERS = {Tensor.item, Tensor.__float__, Tensor.__bool__, Tensor.__int__, Tensor.tolist}
_NUMBERS |= {Tensor.__gt__, Tensor.__ge__, Tensor.__lt__, Tensor.__le__, torch.gt, torch.ge, torch.lt, torch.le}
_NUMBERS |= {Tensor.gt, Tensor.ge, Tensor.lt, Tensor.le}


class Interceptor(TorchFunctionMode):
    """Shows every site to `respond`, which returns its output; everything else runs, in float64, on stand-ins with numbers."""

    def __init__(
        self,
        shadow: Shadow,
        respond: Callable[[Operands, str, Any, tuple, dict], Tensor],
        note: Callable[[Tensor], None] = lambda number: None,
        drop: Callable[[Tensor, Any, bool], None] = lambda drawn, rate, drops: None,
    ) -> None:
        """`note` is shown every number of floating kind that Python reads, or compares: a branch may hang on it.

        `drop` is called where the model draws: with what it drops and the rate, whatever that is, for nothing is dropped here;
        or with what it has drawn.
        """
        super().__init__()
        self.shadow, self.respond, self.note, self.drop, self.draws = shadow, respond, note, drop, Draws()

    def __torch_function__(self, func, types_, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _NUMBERS and isinstance(args[0], Tensor) and args[0].is_floating_point() and args[0].numel() == 1:
            self.note(args[0].detach())
        site = self._read(func, args, kwargs)
        if site is not None and not self.shadow.is_transparent(site[1], site[0]):
            return self.respond(*site, func, args, kwargs)
        made = self._compute(func, args, kwargs)
        note_sources(self.shadow, func, args, kwargs, made)
        return made

    def _read(self, func: Any, args: tuple, kwargs: dict) -> tuple[Operands, str] | None:
        """The call as a linear map, and its Parameter."""
        if func not in READERS:
            return None
        operands = read_site(func, args, kwargs, self._is_weight)
        if operands is None:
            return read_derived(self.shadow, func, args, kwargs)
        name = self.shadow.find(operands.weight)
        assert name is not None
        return operands, name

    def _compute(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """What a call that is no site returns, in float64."""
        if func in _FLOAT_CASTS:
            return args[0].double() if args[0].dtype != torch.float64 else args[0]
        if func in SMOOTH and args and args[0].is_floating_point():
            return SMOOTH[func](*args, **kwargs)
        if func in _DROPOUTS:
            x = args[0] if args else kwargs["input"]
            self.drop(x, args[1] if len(args) > 1 else kwargs.get("p", 0.5), True)
            return x
        if func is F.scaled_dot_product_attention:
            rate = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
            self.drop(args[0] if args else kwargs["query"], rate, True)
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        if func is F.batch_norm:
            return _batch_norm(*args, **kwargs)
        if _is_composite(func):
            return _open(func, self)(*args, **kwargs)
        view = self._view(func, args, kwargs)
        if view is not None:
            return view
        args, kwargs = map_nested(self._widen, args), {key: map_nested(self._widen, value) for key, value in kwargs.items()}
        if func in _CONVOLUTIONS and (made := _depthwise(*args, **kwargs)) is not None:
            return made
        made = self.draws.run(func, args, kwargs)
        if func in DRAWING and isinstance(made, Tensor):
            self.drop(made, None, False)
        return made

    def _view(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """What `func` makes of a big Parameter, where that takes no numbers: a view (an expert, a transpose), a shape, a type."""
        first = args[0] if args else None
        if not isinstance(first, Tensor) or not first.is_meta or self.shadow.find(first) is None:
            return None
        try:
            made = func(
                *map_nested(_widen_dtype, args), **{key: map_nested(_widen_dtype, value) for key, value in kwargs.items()}
            )
        except (RuntimeError, NotImplementedError, TypeError):  # it mixes the Parameter with tensors that have numbers
            return None
        if isinstance(made, torch.device):
            return torch.device("cpu")  # where its numbers would be
        return made if all(self.shadow.find(part) is not None for part in flatten(made)) else None

    def _is_weight(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_floating_point() and self.shadow.find(value) is not None

    def _widen(self, value: Any) -> Any:
        value = _widen_dtype(value)
        if isinstance(value, Tensor) and value.is_meta and self.shadow.find(value) is not None:
            return self.shadow.fill(value)
        return value


@contextmanager
def keep_state(model: nn.Module) -> Iterator[None]:
    """What a forward stores on the modules (caches, states, hooks) is gone afterwards."""
    before = [(m, dict(vars(m)), dict(m._buffers)) for m in model.modules()]
    buffers = [(b, b.detach().clone(), b._version) for b in model.buffers()]
    owned = [(key, value) for _, own, _ in before for key, value in own.items()]
    kept = [(value, dict(value)) for key, value in owned if type(value) is dict and key[:1] != "_"]
    kept += [(value, dict(value)) for key, value in owned if key in HOOKS]
    try:
        yield
    finally:
        for buffer, value, version in buffers:
            if buffer._version != version:  # running means, counters
                buffer.data.copy_(value)
        for value, items in kept:  # caches by key, hooks by number
            value.clear()
            value.update(items)
        for module, attributes, own in before:
            for key in set(vars(module)) - set(attributes):
                del module.__dict__[key]
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(own)


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


def map_nested(fn: Callable[[Any], Any], value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(map_nested(fn, item) for item in value)
    return fn(value)


def _widen_dtype(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value in NARROW else torch.complex128 if value in COMPLEX else value
    return value


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
    """A convolution of each channel by itself as one product a tap, since float64 has no kernel but channel after channel; None
    for any other."""
    dims, kernel = weight.ndim - 2, weight.shape[2:]
    alone = x.ndim == weight.ndim and tuple(weight.shape[:2]) == (groups, 1) and x.shape[1] == groups
    if not alone or isinstance(padding, str) or math.prod(kernel) >= groups:
        return None
    steps, pads, gaps = (([v] * dims if isinstance(v, int) else list(v) * (dims // len(v))) for v in (stride, padding, dilation))
    x = F.pad(x, [p for pad in reversed(pads) for p in (pad, pad)])
    spans = [(size - 1) * gap for size, gap in zip(kernel, gaps, strict=True)]
    sizes = [(size - span - 1) // step + 1 for size, span, step in zip(x.shape[2:], spans, steps, strict=True)]
    if min(sizes) < 1:
        return None
    y = None if bias is None else bias.reshape(-1, *[1] * dims)
    for tap in itertools.product(*map(range, kernel)):
        seen = x
        for axis, (at, gap, step, size) in enumerate(zip(tap, gaps, steps, sizes, strict=True)):
            seen = seen.narrow(2 + axis, at * gap, (size - 1) * step + 1)
            seen = seen if step == 1 else seen[(slice(None),) * (2 + axis) + (slice(None, None, step),)]
        part = seen * weight[(slice(None), 0, *tap)].reshape(-1, *[1] * dims)
        y = part if y is None else y + part
    return y


_CONVOLUTIONS = {torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d}


_FLOAT_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}


_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout}


_COMPOSITES = {F.multi_head_attention_forward}


def _is_composite(func: Any) -> bool:
    """Whether `func` is Python code of torch that can be opened: it looks for overriding by a global name, replaced in `_opened`.

    A few (`torch._assert`, the arithmetic of symbolic integers) look through a module: those run as they are.
    """
    if not isinstance(func, types.FunctionType):
        return False
    return func in _COMPOSITES or ("has_torch_function" in func.__code__.co_names and "has_torch_function" in func.__globals__)


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
