"""What a training state is of, on one rank: model, masters, optimizer and schedule, as tensors by key and plain values.

| key in `.metadata` | tensor |
|---|---|
| `model.NAME` | a parameter or persistent buffer, a tied one under its first name |
| `masters.NAME` | what the optimizer updates in its place |
| `optimizer.NAME.KEY` | the state that the optimizer calls KEY |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from ..errors import CheckpointError
from ..layers.base import find_group, mark_broken
from ..layers.fully import Part, find_part
from ..layers.quantised import list_packed
from ..layers.stream import is_gathered, map_sharded
from ..shard import Shard
from .chunks import ChunkedTensor, Order, PickedTensor, check_order, chunk_to_save, find_order, held_boxes
from .dcp import read_tensors
from .optimizer_state import NamedOptimizer
from .plain import decode_plain, encode_plain

ORDERED = "@ordered"  # ends the key of a tensor that is not saved in its own order


class StateParts:
    """The tensors and values of one rank; see `TrainingState` for the arguments.

    Raises:
        CheckpointError: something of the model can't be in a state, or the optimizer's tensors are not the model's.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, scheduler: Any, masters: Mapping[str, Tensor]) -> None:
        self.model, self.scheduler, self.masters = model, scheduler, dict(masters)
        self.group = find_group(model)
        sharded = map_sharded(model)
        names: dict[int, str] = {}
        frozen = list_packed(model)  # they are what the checkpoint was quantised to, when the model is made again, too
        self.tensors: dict[str, Tensor] = {}
        self.dealt: dict[str, Shard] = {}  # over the TP group
        for name, tensor in model.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor):
                kind = type(tensor).__name__
                raise CheckpointError(f"'{name}' of {type(model).__name__} is a {kind}, not a tensor: no state can hold it")
            if id(tensor) in names or name in frozen:
                continue
            names[id(tensor)] = name
            self.tensors[name] = tensor
            if id(tensor) in sharded:
                if is_gathered(tensor, sharded):
                    raise CheckpointError(
                        f"'{name}' is whole inside GatherReplacedLayerParams: save and load after the `with` block"
                    )
                layer, own, _ = sharded[id(tensor)]
                self.dealt[name] = layer.shards[own]
        found = {name: self._find_part(name, tensor) for name, tensor in self.tensors.items()}
        self.shards = {name: part.shard for name, part in found.items() if part.shard is not None}
        self.ranks = {name: part.rank for name, part in found.items()}
        names |= {id(master): name for name, master in self.masters.items()}
        self.optimizer = None if optimizer is None else NamedOptimizer(optimizer, names, self.shards)

    def _find_part(self, name: str, tensor: Tensor) -> Part:
        return find_part(tensor.detach(), self.dealt.get(name), self.group)

    def _own_tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """`(key, name, tensor)` of model and masters; the name says how the tensor is sharded."""
        yield from ((f"model.{name}", name, tensor) for name, tensor in self.tensors.items())
        yield from ((f"masters.{name}", name, tensor) for name, tensor in self.masters.items())

    def _key(self, key: str, name: str) -> str:
        return key + ORDERED if name in self.shards and find_order(self.shards[name]) else key

    # -- saving -------------------------------------------------------------------------------------------------------

    def tensors_to_save(self) -> dict[str, Tensor]:
        """For `TensorWriter`."""
        found = list(self._own_tensors())
        if self.optimizer is not None:
            found += [(f"optimizer.{name}.{key}", name, tensor) for name, key, tensor in self.optimizer.iterate_tensors()]
        # What lies beside each element of a parameter is dealt as it is; all else is alike on all ranks.
        parts = {self._key(key, name): (self._find_part(name, tensor), name) for key, name, tensor in found}
        return {key: chunk_to_save(part.local, self.shards.get(name), self.ranks[name]) for key, (part, name) in parts.items()}

    def describe(self) -> dict[str, Any]:
        """All but the tensors, for JSON; equal on all ranks."""
        orders = {name: order for name, shard in self.shards.items() if (order := find_order(shard))}
        about: dict[str, Any] = {"model": type(self.model).__name__, "orders": orders, "optimizer": None, "scheduler": None}
        about["masters"] = sorted(self.masters)
        if self.optimizer is not None:
            about["optimizer"] = self.optimizer.describe()
        if self.scheduler is not None:
            name = type(self.scheduler).__name__
            about["scheduler"] = {"class": name, "state": encode_plain(self.scheduler.state_dict(), f"the state of {name}")}
        return about

    # -- loading ------------------------------------------------------------------------------------------------------

    def check(self, about: dict[str, Any], metadata: Metadata) -> None:
        """Refuse a state that is not of these parts; nothing is changed.

        Raises:
            CheckpointError: naming what differs.
        """
        problems = self._compare_tensors(about, metadata) or [*self._compare_optimizers(about, metadata)]
        saved = "no schedule" if about["scheduler"] is None else about["scheduler"]["class"]
        now = "no schedule" if self.scheduler is None else type(self.scheduler).__name__
        if saved != now:
            problems.append(f"the state has {saved}, this run {now}")
        if problems:
            more = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
            raise CheckpointError(f"it does not fit {type(self.model).__name__}: {'; '.join(problems[:4])}{more}")
        for name, order in about["orders"].items():
            check_order(_as_order(order), self._full_shape(name), name)

    def _full_shape(self, name: str) -> tuple[int, ...]:
        return self.shards[name].shape if name in self.shards else tuple(self.tensors[name].shape)

    def _compare_tensors(self, about: dict[str, Any], metadata: Metadata) -> list[str]:
        saved, orders = metadata.state_dict_metadata, about["orders"]
        wanted = {_saved_key(key, name, orders): (name, tensor.dtype) for key, name, tensor in self._own_tensors()}
        there = {key for key in saved if key.startswith(("model.", "masters."))}
        problems = [f"the state lacks {key}" for key in wanted if key not in there]
        problems += [f"the state has {key}, which is not here" for key in sorted(there - wanted.keys())]
        for key, (name, dtype) in wanted.items():
            if key in there:
                other: Any = saved[key]
                if tuple(other.size) != self._full_shape(name):
                    problems.append(f"{key} has shape {tuple(other.size)} in the state and {self._full_shape(name)} here")
                elif other.properties.dtype != dtype:
                    problems.append(f"{key} is {other.properties.dtype} in the state and {dtype} here")
        return problems

    def _compare_optimizers(self, about: dict[str, Any], metadata: Metadata) -> Iterator[str]:
        saved = about["optimizer"]
        if (saved is None) != (self.optimizer is None):
            yield "the state has no optimizer" if saved is None else f"the state has {saved['class']}, and no optimizer was given"
        if saved is None or self.optimizer is None:
            return
        problems = self.optimizer.find_problems(saved)
        yield from problems
        for name, keys in saved["tensors"].items() if not problems else ():
            for key in keys:
                other: Any = metadata.state_dict_metadata.get(_saved_key(f"optimizer.{name}.{key}", name, about["orders"]))
                if other is None:
                    yield f"the state lacks optimizer.{name}.{key}"
                elif name in self.shards and tuple(other.size) != self.shards[name].shape:
                    yield f"optimizer.{name}.{key} has shape {tuple(other.size)} in the state, not {self.shards[name].shape}"

    def load(self, directory: Path, about: dict[str, Any], metadata: Metadata) -> None:
        """Go on from a state that `check` let pass.

        Raises:
            CheckpointError: the files can't be read; the model is marked broken then, as half of it may be written.
        """
        orders = about["orders"]
        reads = [(_saved_key(key, name, orders), name, tensor) for key, name, tensor in self._own_tensors()]
        made: dict[tuple[str, str], Tensor] = {}
        if self.optimizer is not None:
            for name, keys in about["optimizer"]["tensors"].items():
                for key in keys:
                    saved_key = _saved_key(f"optimizer.{name}.{key}", name, orders)
                    other: Any = metadata.state_dict_metadata[saved_key]
                    made[name, key] = self.optimizer.make_tensor(name, other.size, other.properties.dtype)
                    reads.append((saved_key, name, made[name, key]))
        try:
            self._read(directory, metadata, reads, orders)
            if self.optimizer is not None:
                self.optimizer.load(about["optimizer"], made)
            if self.scheduler is not None:
                self.scheduler.load_state_dict(decode_plain(about["scheduler"]["state"]))
        except BaseException:
            mark_broken(self.model, f"only a part of {directory} could be read into it")
            raise

    def _read(self, directory: Path, metadata: Metadata, reads: list[tuple[str, str, Tensor]], orders: dict[str, Any]) -> None:
        whole: dict[str, Tensor] = {}
        for key, name, tensor in reads:
            order = _as_order(orders.get(name, ()))
            local = self._find_part(name, tensor).local
            shard, rank = self.shards.get(name, Shard.whole(tuple(local.shape), 1)), self.ranks[name]
            boxes = held_boxes(shard, rank, order)
            if boxes is None:
                picked = PickedTensor(local, shard, rank, order)
                read_tensors(directory, metadata, {key: picked.chunked})
                picked.finish()
            else:
                whole[key] = ChunkedTensor(local, shard.shape, boxes)
        read_tensors(directory, metadata, whole)


def _saved_key(key: str, name: str, orders: Mapping[str, Any]) -> str:
    return key + ORDERED if name in orders else key


def _as_order(data: Any) -> Order:
    return tuple((dim, tuple(tuple(run) for run in runs)) for dim, runs in data)
