"""Whole weights out of shards, and shards out of whole weights.

| function | what appears | where |
|---|---|---|
| `GatherReplacedLayerParams` | the named parameters, whole, inside a `with` | on every rank |
| `iterate_full_tensors` | every tensor of the state dict, one at a time | on rank 0 |
| `full_state_dict` | all of them, on the CPU | on rank 0 |
| `load_full_state_dict` | shards of rank 0's whole tensors | on every rank |

All are collective. Arrival is agreed through the group's store before any collective, so a rank that stays away, rank 0
included, is named within the group's timeout instead of leaving the others waiting.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from ..comm import TPGroup
from ..errors import GatherError
from ..shard import Shard
from .base import TensorParallel_Layer, check_usable, holder_of, sharded_modules
from .digest import digest_tensors
from .fully import refuse_dealt
from .stream import (
    check_same_names,
    find_tied_names,
    full_state_dict,
    hash_names,
    is_gathered,
    iterate_full_tensors,
    load_full_state_dict,
    map_sharded,
)

__all__ = ["GatherReplacedLayerParams", "find_tied_names", "full_state_dict", "iterate_full_tensors", "load_full_state_dict"]

_BATCH_BYTES = 1 << 26  # of whole tensors that are gathered in one collective
_END = "the end of GatherReplacedLayerParams"
Place = tuple[nn.Module, str]  # a module and the name of one of its parameters or buffers


@dataclass
class _Whole:
    """One sharded tensor while it is whole: what it was, what it became, and where it sits."""

    tensor: Tensor
    name: str
    group: TPGroup
    shard: Shard
    local: Tensor
    places: list[Place]
    digest: int = 0
    version: int = 0


class _Gathered(set):
    """The names of a module's tensors that are whole now, and the instance forward to put back when none is."""

    def __init__(self, names: Iterable[str] = (), forward: Any = None) -> None:
        super().__init__(names)
        self.forward = forward


class GatherReplacedLayerParams:
    """Inside the `with`, the sharded tensors among `params` are whole on every rank.

    On exit the shards return to the storage they had (a flat-buffer optimizer keeps working on it). What the body changed
    is split into it again; every rank must make the same change. What it converted or moved (`model.half()`) is split into new
    storage, as a conversion outside makes it. An exception inside restores the shards and writes
    nothing back. `.grad` is left alone, state dicts taken inside stay valid, and contexts may be nested. A forward
    through a module whose tensors are whole raises.

    Args:
        params: one tensor, or an iterable of tensors; those that are not sharded are left as they are.
        module: the module they belong to; shards of other parallelized models are found too.
        enabled: False does nothing.
        read_only: nothing is written back. The whole tensors are not compared with what they were, and ranks do not wait for
            each other at the end: for looking at big models. A change that autograd counts is refused; one through `.data`
            is lost.

    Raises:
        GatherError: nothing was given for a module that has sharded parameters; a rank did not come, or gave other
            parameters; ranks changed a tensor differently, or gave it another shape, or changed it at all where it is read only.
        AutoTPError: FSDP2 shards them further.
    """

    def __init__(
        self, params: Tensor | Iterable[Tensor], module: nn.Module, enabled: bool = True, *, read_only: bool = False
    ) -> None:
        self.enabled = enabled
        self.read_only = read_only
        self._whole: list[_Whole] = []
        self._groups: list[TPGroup] = []
        self._entered = False
        if not enabled:
            return
        self._module = module
        self._params = [params] if isinstance(params, Tensor) else list(params)
        for param in self._params:
            if not isinstance(param, Tensor):
                raise GatherError(f"expected parameters, got {type(param).__name__}: pass module.parameters(), say")
        names = {id(tensor): name for name, tensor in module.named_parameters()}
        refuse_dealt(
            ((names.get(id(param), "a parameter"), param) for param in self._params),
            "GatherReplacedLayerParams",
            "read whole weights with autotp.full_state_dict(model), write them with autotp.load_full_state_dict",
        )
        if not self._params and any(layer.shards for _, layer in sharded_modules(module)):
            raise GatherError(
                f"no parameters were given for {type(module).__name__}, which has sharded parameters, so nothing would be "
                f"gathered. Pass module.parameters() (a used-up generator is empty, as is a container with recurse=False)."
            )

    def __enter__(self) -> GatherReplacedLayerParams:
        if not self.enabled:
            return self
        if self._entered:
            raise GatherError("this GatherReplacedLayerParams is entered already: make another one for the `with` inside")
        check_usable(self._module)
        self._whole = _find_sharded(self._params, self._module)
        self._groups = list(dict.fromkeys(whole.group for whole in self._whole))
        for group in self._groups:
            names = [whole.name for whole in self._whole if whole.group is group]
            check_same_names(group.arrive("GatherReplacedLayerParams", hash_names(names)), group, "GatherReplacedLayerParams")
        done: list[_Whole] = []
        try:
            for batch in _make_batches(self._whole):
                fulls = batch[0].group.all_gather_many([whole.local for whole in batch], [whole.shard for whole in batch])
                for whole, full in zip(batch, fulls, strict=True):
                    whole.tensor.data = full
                    done.append(whole)
                    _refuse_forwards(whole)
                    whole.version = whole.tensor._version
            if not self.read_only:
                for whole, digest in zip(self._whole, digest_tensors([whole.tensor for whole in self._whole]), strict=True):
                    whole.digest = digest
        except BaseException:
            for whole in done:
                _restore(whole)
            raise
        self._entered = True
        return self

    def __exit__(self, exc_type: Any, exc: BaseException | None, traceback: Any) -> None:
        wholes, groups = self._whole, self._groups
        self._whole, self._groups, self._entered = [], [], False
        if self.read_only:
            return _end_read_only(wholes, exc)
        values: list[Tensor] = []
        digests: list[int] = []
        try:
            if exc is None:
                values = [_current_value(whole) for whole in wholes]
                digests = digest_tensors(values)
        except BaseException as raised:
            exc = raised
            raise
        finally:
            for whole in wholes:
                _restore(whole)
            for group in groups if exc is not None else ():  # told, not waited for: the others may never get here
                group.arrive(_END, f"error {type(exc).__name__}: {exc}", wait=False)
        if exc is not None:
            return
        changed = {
            id(w): (v, d) for w, v, d in zip(wholes, values, digests, strict=True) if d != w.digest or _was_converted(w, v)
        }
        for group in groups:
            mine = [whole for whole in wholes if whole.group is group]
            note = ",".join(f"{i}:{_describe(*changed[id(w)])}" for i, w in enumerate(mine) if id(w) in changed)
            _check_same_changes(group.arrive(_END, note), mine)
        with torch.no_grad():
            for whole in wholes:
                if id(whole) in changed:
                    _write_back(whole, changed[id(whole)][0])


def _make_batches(wholes: Iterable[_Whole]) -> list[list[_Whole]]:
    """Neighbours of one group and device, of at most so many bytes together that they are gathered at once."""
    batches: list[list[_Whole]] = []
    size = 0
    for whole in wholes:
        own = prod(whole.shard.shape) * whole.local.element_size()
        last = batches[-1][-1] if batches else None
        if last is None or size + own > _BATCH_BYTES or (last.group, last.local.device) != (whole.group, whole.local.device):
            batches.append([])
            size = 0
        batches[-1].append(whole)
        size += own
    return batches


# -- finding what is sharded --------------------------------------------------------------------------------------------


def _find_sharded(params: Iterable[Tensor], module: nn.Module) -> list[_Whole]:
    """The sharded tensors among `params` that no outer context holds whole already, each once."""
    sharded = map_sharded(module)
    roots = [module]
    found: dict[int, _Whole] = {}
    for param in params:
        if id(param) not in sharded:
            held = holder_of(param)
            if held is not None and isinstance(held[0], TensorParallel_Layer):
                sharded.update(map_sharded(held[0]))
                roots.append(held[0])
        if id(param) in found or id(param) not in sharded or is_gathered(param, sharded):
            continue
        layer, name, full_name = sharded[id(param)]
        found[id(param)] = _Whole(param, full_name, layer.tp, layer.shards[name], param.data, [])
    for root in dict.fromkeys(roots):
        for child in root.modules():
            for table in (child._parameters, child._buffers):
                for name, tensor in table.items():
                    if id(tensor) in found and (child, name) not in found[id(tensor)].places:
                        found[id(tensor)].places.append((child, name))
    return list(found.values())


# -- making whole, and back ---------------------------------------------------------------------------------------------


def _raise_gathered(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise GatherError(
        f"'{name}' is whole inside GatherReplacedLayerParams, so its module can't run: its forward needs the shard. "
        f"Run the model after the `with` block."
    )


def _refuse_forwards(whole: _Whole) -> None:
    """Note on each module that holds the tensor that it is whole, and make its forward raise: no cost outside contexts."""
    for module, name in whole.places:
        gathered = module.__dict__.setdefault("gathered", _Gathered(forward=module.__dict__.get("forward")))
        gathered.add(name)
        if not isinstance(module, ParametrizationList):  # its forward computes a layer's weight from what it holds: the whole
            module.__dict__["forward"] = partial(_raise_gathered, whole.name)


def _end_read_only(wholes: list[_Whole], exc: BaseException | None) -> None:
    changed = [whole.name for whole in wholes if _was_changed(whole)]
    for whole in wholes:
        _restore(whole)
    if changed and exc is None:
        raise GatherError(
            f"'{changed[0]}' was changed inside GatherReplacedLayerParams(.., read_only=True), which writes nothing back: "
            f"leave read_only out. The shards are as they were."
        )


def _was_changed(whole: _Whole) -> bool:
    """Whether the body wrote into the tensor so that autograd knows, converted it, or put another in its place."""
    if _was_converted(whole, whole.tensor):
        return True
    moved = any(getattr(module, name, None) is not whole.tensor for module, name in whole.places)
    return moved or whole.tensor._version != whole.version


def _restore(whole: _Whole) -> None:
    """Put the tensor object, its shard and the modules' forwards back as they were."""
    whole.tensor.data = whole.local
    for module, name in whole.places:
        table = module._buffers if name in module._buffers else module._parameters
        table[name] = whole.tensor  # type: ignore[assignment]
        gathered = module.__dict__["gathered"]
        gathered.discard(name)
        if not gathered:
            del module.__dict__["gathered"]
            module.__dict__.pop("forward", None)
            if gathered.forward is not None:
                module.__dict__["forward"] = gathered.forward


def _was_converted(whole: _Whole, value: Tensor) -> bool:
    """Whether the body left another dtype or device than the shard has."""
    return (value.dtype, value.device) != (whole.local.dtype, whole.local.device)


def _describe(value: Tensor, digest: int) -> str:
    return f"{digest:x} {value.dtype} {value.device.type}"


def _write_back(whole: _Whole, value: Tensor) -> None:
    """Split `value` into the shard: through the Parameter, so that autograd notices, or as modules convert their tensors."""
    part = whole.shard.split(value, whole.group.tp_rank)
    if not _was_converted(whole, value):
        whole.tensor.copy_(part)
        return
    part = part.clone()
    for module, _ in whole.places:  # which lays the weights of siblings side by side again
        module._apply(lambda tensor: part if tensor is whole.tensor else tensor, recurse=False)


def _current_value(whole: _Whole) -> Tensor:
    """The whole value that the body leaves: the tensor's own, or that of another Parameter put in its place."""
    value = whole.tensor.detach()
    for module, name in whole.places:
        now = getattr(module, name, None)
        if now is not whole.tensor:
            if not isinstance(now, Tensor):
                raise GatherError(f"'{whole.name}' was removed inside GatherReplacedLayerParams: nothing can be split again")
            value = now.detach()
    if tuple(value.shape) != whole.shard.shape:
        raise GatherError(
            f"'{whole.name}' has shape {tuple(value.shape)} at the end of GatherReplacedLayerParams, but its shard describes "
            f"{whole.shard.shape}. Keep its shape, or resize the model before parallelizing it. The shards are as they were."
        )
    return value


# -- agreement ----------------------------------------------------------------------------------------------------------


def _check_same_changes(notes: list[str], wholes: list[_Whole]) -> None:
    """Raise if a rank failed, or if the ranks leave different values."""
    failed = [rank for rank, note in enumerate(notes) if note.startswith("error ")]
    if failed:
        raise GatherError(
            f"TP rank(s) {failed} left GatherReplacedLayerParams with {notes[failed[0]].removeprefix('error ')}; "
            f"the shards are as they were, and nothing was written back on any rank"
        )
    if all(note == notes[0] for note in notes):
        return
    changes = [dict(part.split(":") for part in note.split(",") if part) for note in notes]
    for i, whole in enumerate(wholes):
        seen = [change.get(str(i)) for change in changes]
        if any(value != seen[0] for value in seen):
            changed = [rank for rank, value in enumerate(seen) if value is not None]
            same = [rank for rank, value in enumerate(seen) if value is None]
            rest = f"rank(s) {same} did not" if same else "not to the same values"
            raise GatherError(
                f"TP rank(s) {changed} changed '{whole.name}' inside GatherReplacedLayerParams, {rest}. Make the same change on "
                f"every rank (broadcast it first, say). The shards are as they were."
            )
