"""A copy of a model that runs without its weights."""

from __future__ import annotations

import copy
import math
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import PlanError
from .reduce import Reduction
from .sites import Operands, locate

REAL_NUMEL = 1 << 16  # stand-ins of Parameters up to this size hold numbers from the start; larger ones when they are read
SHORT_CHUNK = 8
HUGE = 1 << 26  # elements


class Shadow:
    """A copy of a model's module tree whose Parameters are stand-ins: random numbers, or nothing (meta) where they are big.

    Attributes:
        model: the copy; names: storage -> full name of the Parameter or buffer that lives in it.
    """

    def __init__(
        self,
        model: nn.Module,
        seed: int = 0,
        buffers_need_grad: bool = True,
        reduction: Reduction | None = None,
        as_trained: bool = False,
    ) -> None:
        """`as_trained`: in training mode, and attention stays in the implementation that the model's config names."""
        generator = torch.Generator().manual_seed(seed)
        memo: dict[int, Any] = {}
        for name, parameter in model.named_parameters():
            kept = reduction is None or reduction.holds(name)
            memo.setdefault(id(parameter), nn.Parameter(_stand_in(name, parameter, generator, kept), parameter.requires_grad))
        computed = _compute_buffers(model)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            value = computed.get(name, buffer).detach().cpu()
            memo.setdefault(id(buffer), value.to(torch.float64 if value.is_floating_point() else value.dtype, copy=True))
            if buffers_need_grad and value.is_floating_point():
                memo[id(buffer)].requires_grad_()
        for module in model.modules():  # what an earlier forward left on a module may hang on its graph
            memo |= {id(v): v.detach() for v in vars(module).values() if isinstance(v, Tensor) and not v.is_leaf}
        if reduction is not None:
            memo |= {key: copy.deepcopy(member, memo) for key, member in reduction.hollow(model).items()}
        self.model = copy_model(model, memo).train(as_trained)
        if reduction is not None:
            reduction.apply(self.model)
        _prepare_config(self.model, as_trained)
        _shorten_scans(self.model)
        self.generator = generator
        self.real: dict[int, nn.Parameter] = {}
        self.transparent: set[str] = set()
        self.owners: dict[frozenset[str], str | None] = {}  # what a weight is computed from -> whose columns it has
        self.index()

    def index(self) -> None:
        """Note which storage belongs to which name; again after Parameters were replaced."""
        self.names: dict[int, str] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        for name, parameter in self.model.named_parameters():
            self.names[_storage(parameter)] = name
            self.parameters[name] = parameter
        self.buffers = {_storage(b): name for name, b in self.model.named_buffers() if b.numel()}

    def find(self, tensor: Any) -> str | None:
        """Name of the Parameter that `tensor` is, or is a view of."""
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            return None
        return self.names.get(_storage(tensor))

    def origin(self, tensor: Tensor) -> str | None:
        """Name of the Parameter or buffer that `tensor` is, or is a view of."""
        if tensor.layout != torch.strided:
            return None
        key = _storage(tensor)
        return self.names.get(key) or self.buffers.get(key)

    def fill(self, tensor: Tensor) -> Tensor:
        """The same view of a stand-in with numbers, for an operation that is no site."""
        name = self.names[_storage(tensor)]
        key = _storage(self.parameters[name])
        if key not in self.real:
            full = torch.randn(self.parameters[name].shape, generator=self.generator, dtype=torch.float64) * 0.5
            self.real[key] = nn.Parameter(full, self.parameters[name].requires_grad)
        return self.real[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def is_transparent(self, name: str, op: Operands) -> bool:
        """Whether a linear map is no site, its weight a Parameter like any other: asked for, or block by block in one dim."""
        if name in self.transparent:
            return True
        used = {*op.w_in, *op.w_out}
        rest = tuple(d for d in range(op.weight.ndim) if d not in used and op.weight.shape[d] > 1)
        if not rest or not op.w_in:
            return False
        places = [locate(op.weight, self.parameters[name], dims) for dims in (rest, op.w_in + op.w_out)]
        if None in places or not set(places[0].dims) & set(places[1].dims):  # type: ignore[union-attr]
            return False
        self.transparent.add(name)
        return True

    def leaf(self, name: str) -> Tensor:
        """The tensor that gradients of Parameter `name` arrive at."""
        parameter = self.parameters[name]
        return self.real.get(_storage(parameter), parameter)


def copy_model(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of `model`. Functions on its modules that close over parts of the model close over those of the copy there,
    where `deepcopy` keeps functions as they are."""
    made = copy.deepcopy(model, memo)
    for module in made.modules():
        for key, value in vars(module).items():
            if isinstance(value, types.FunctionType):
                module.__dict__[key] = _rebind(value, memo)
            elif key.endswith("_hooks") and isinstance(value, dict):
                value.update({k: _rebind(v, memo) for k, v in value.items() if isinstance(v, types.FunctionType)})
    return made


def _rebind(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    """`function` with what `memo` knows a copy of replaced in its closure and its defaults."""

    def copy_of(value: Any) -> Any:
        return memo.get(id(value), value)

    cells = [cell for cell in function.__closure__ or () if cell != types.CellType()]
    defaults = function.__defaults__ or ()
    if all(copy_of(value) is value for value in [*(cell.cell_contents for cell in cells), *defaults]):
        return function
    closure = tuple(types.CellType(copy_of(c.cell_contents)) if c in cells else c for c in function.__closure__ or ())
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, tuple(map(copy_of, defaults)) or None, closure or None
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    return made


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:  # inside vmap, where no Parameter is passed
        return 0


def _stand_in(name: str, parameter: Tensor, generator: torch.Generator, kept: bool) -> Tensor:
    """Random numbers, or nothing (meta) where there are many. A bias that outweighs what it is added to could close a ReLU."""
    dtype = torch.float64 if parameter.is_floating_point() else parameter.dtype
    if not kept or (parameter.numel() > REAL_NUMEL and parameter.ndim > 1):
        return torch.empty(parameter.shape, dtype=dtype, device="meta")
    numbers = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).mul_(0.5)
    if name.endswith("bias"):
        numbers.mul_(0.1)
    elif parameter.ndim == 1 and parameter.is_floating_point():
        numbers += 0.25 * numbers.sign()
    return numbers.to(dtype)


class _HugeOnMeta(TorchFunctionMode):
    """`torch.empty` of what no machine may have room for gives a tensor on meta, where an empty model's Parameters end anyway."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = kwargs or {}
        if func is torch.empty and "device" not in made:
            sizes = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
            if all(isinstance(n, int) for n in sizes) and math.prod(sizes) > HUGE:
                made = {**made, "device": "meta"}
        return func(*args, **made)


@contextmanager
def empty_weights() -> Iterator[None]:
    """Models built inside have their Parameters on meta and their buffers, which hold numbers, on the CPU."""
    with init_empty_weights(include_buffers=False), _HugeOnMeta():
        yield


def _compute_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Values of buffers that are on meta, as the model's constructor computes them.

    Raises:
        PlanError: there is no config to construct it from.
    """
    missing = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if not missing:
        return {}
    if getattr(model, "config", None) is None:
        raise PlanError(f"buffer {missing[0]} is on meta: build the model with its buffers on the CPU (they are small)")
    with empty_weights():
        twin = type(model)(copy.deepcopy(model.config))
    return dict(twin.named_buffers(remove_duplicate=False))


def _prepare_config(model: nn.Module, own_attention: bool) -> None:
    """Eager attention and eager experts, so that every rank's arithmetic is plain to see; on the copy's own configs."""
    seen: set[int] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is None or id(config) in seen:
            continue
        seen.add(id(config))
        for key in ("_attn_implementation_internal", "_experts_implementation_internal")[own_attention:]:
            if hasattr(config, key):
                object.__setattr__(config, key, "eager")


def _shorten_scans(model: nn.Module) -> None:
    """Chunked scans pad a few tokens to a whole chunk: on the copy, chunks are short."""
    for module in model.modules():
        size = module.__dict__.get("chunk_size")
        if type(size) is int and size > SHORT_CHUNK:
            module.__dict__["chunk_size"] = SHORT_CHUNK
