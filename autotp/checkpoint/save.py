"""Saving a parallelized model as the checkpoint that plain transformers loads."""

from __future__ import annotations

import copy
import os
import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import TPGroup
from ..errors import CheckpointError, GatherError
from ..layers.base import check_usable, find_group, sharded_modules, unwrap
from ..layers.fully import find_data_group
from ..layers.gather import find_tied_names, iterate_full_tensors
from ..layers.stream import StoppedError
from .background import BackgroundWriter
from .place import PARTIAL, name_files, parse_size, put_in_place, write_aside, write_index
from .writer import PlannedTensor, cut_files, plan_tensor

_TOKEN = ".token"  # in the directory of a save: by its text a rank knows that it sees the directory that rank 0 made


def save_pretrained(
    model: nn.Module, directory: str | os.PathLike, *, max_shard_size: int | str = "5GB", is_main_process: bool = True
) -> None:
    """Write `model` as plain transformers would write the unsharded one: weights, config.json, generation_config.json.

    Collective over the TP group. The ranks that see the directory share the files: whole tensors are streamed, each to the
    rank that writes it, while it writes what came before. A rank needs host memory for the tensor that comes and for what is
    being written, 256 MB or one tensor, and GPU memory for one tensor. Persistent buffers and frozen parameters are included,
    a tied tensor once. The weights keep the model's own names and layout (transformers' `save_original_format=False`). Each
    file notes checksums of its tensors, which `from_pretrained` compares.

    The files are written aside and put in place at the end, the one that makes them the checkpoint last: a crash or a
    full disk leaves what the directory held before. Files of an older checkpoint are removed after that.

    Args:
        model: a parallelized model, or a plain one; what wraps it for data parallelism is left off.
        directory: made if it is not there; other files in it are left alone.
        max_shard_size: bytes in one file, as a number or "5GB", "500MB", "2GiB"; a larger tensor gets a file of its own.
        is_main_process: False on TP rank 0: this group writes nothing. For all data-parallel replicas but one. Where FSDP2 shards
            the model further, all its data ranks call this, and the first of them write.

    Raises:
        CheckpointError: on all ranks, if it could not be written.
        GatherError: a rank of the group did not come.
    """
    model = unwrap(model)
    group = find_group(model) or TPGroup(None, torch.device("cpu"))
    data = find_data_group(model) or TPGroup(None, torch.device("cpu"))
    group.arrive("save_pretrained")
    with data.together(f"saving to {directory}"), ExitStack() as stack:
        _save(model, Path(directory), max_shard_size, any(data.gather_objects(is_main_process)), group, data, stack)


def _save(
    model: nn.Module,
    directory: Path,
    max_shard_size: int | str,
    is_main_process: bool,
    group: TPGroup,
    data: TPGroup,
    stack: ExitStack,
) -> None:
    """Decide what is written, and gather and write it; data ranks but the first only take part in gathering."""
    with data.together(f"saving to {directory}"), group.together(f"saving to {directory}"):  # what can be known before
        check_usable(model)
        tensors = plan_tensors(model)
        main = group.tp_rank == data.tp_rank == 0 and is_main_process
        begun = _begin(directory, tensors, max_shard_size, stack, group.timeout_s / 2) if main else None
    save = data.broadcast_object(group.broadcast_object(begun))
    if save is None:
        return
    seen = group.gather_objects(save.is_seen(directory))
    writers = data.broadcast_object([rank for rank, sees in enumerate(seen) if sees])
    files = cut_files(tensors, save.max_bytes)
    if data.tp_rank > 0:
        for _ in iterate_full_tensors(model, order_tensors(files, deal_files(files, writers))):
            pass
        return
    error = _try(lambda: _write_files(model, directory / PARTIAL, save, files, writers, group.tp_rank))
    _agree(group, "writing", directory, error)
    if begun is not None:
        error = _try(lambda: _finish(model, directory, save, files))
    _agree(group, "the end of save_pretrained", directory, error)


def _try(work: Any) -> Exception | None:
    """What `work` raises, whatever its type: the other ranks are told of it."""
    try:
        work()
    except Exception as error:
        return error
    return None


def _agree(group: TPGroup, what: str, directory: Path, error: Exception | None) -> None:
    """Raise on all ranks if one has an error: the one that failed first is quoted, not those that heard of it."""
    if isinstance(error, GatherError) and not isinstance(error, StoppedError):  # a rank is gone: it would not come here either
        raise error
    notes = group.arrive(what, "" if error is None else f"{type(error).__name__}: {error}")
    failed = [rank for rank, note in enumerate(notes) if note]
    if failed:
        told = next((rank for rank in failed if not notes[rank].startswith("StoppedError")), failed[0])
        raise CheckpointError(
            f"the model was not saved to {directory}; TP rank {told} said: {notes[told]}. The checkpoint that was there is whole."
        ) from error


# -- which tensor goes to which file, and which file to which rank --------------------------------------------------------


@dataclass(frozen=True)
class _Save:
    """What rank 0 decides for all: file names, the size of a file, and the text that marks the directory."""

    names: tuple[str, ...]
    max_bytes: int
    token: str

    def is_seen(self, directory: Path) -> bool:
        """Whether this rank sees the directory that rank 0 made."""
        try:
            return (directory / PARTIAL / _TOKEN).read_text() == self.token
        except OSError:
            return False


def _begin(
    directory: Path, tensors: Sequence[PlannedTensor], max_shard_size: int | str, stack: ExitStack, wait_s: float
) -> _Save:
    max_bytes = parse_size(max_shard_size)
    partial = stack.enter_context(write_aside(directory, sum(tensor.nbytes for tensor in tensors), wait_s))
    save = _Save(tuple(name_files(directory, len(cut_files(tensors, max_bytes)))), max_bytes, secrets.token_hex(8))
    (partial / _TOKEN).write_text(save.token)
    return save


def plan_tensors(model: nn.Module) -> list[PlannedTensor]:
    """The whole tensors that are saved, in state-dict order; known before one is gathered."""
    full_shapes = {
        id(getattr(layer, name)): shard.shape for _, layer in sharded_modules(model) for name, shard in layer.shards.items()
    }
    ignored = {*find_tied_names(model), *_ignored_names(model)}
    return [
        plan_tensor(name, tensor.dtype, full_shapes.get(id(tensor), tuple(tensor.shape)))
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor) and name not in ignored
    ]


def _ignored_names(model: nn.Module) -> Iterable[str]:
    return getattr(model, "_keys_to_ignore_on_save", None) or ()


def deal_files(files: Sequence[Sequence[PlannedTensor]], writers: Sequence[int]) -> list[int]:
    """The rank that writes each file, so that each of `writers` gets about as many bytes."""
    held, ranks = dict.fromkeys(writers, 0), []
    for file in files:
        ranks.append(min(writers, key=lambda rank: held[rank]))
        held[ranks[-1]] += 1 + sum(tensor.nbytes for tensor in file)
    return ranks


def order_tensors(files: Sequence[Sequence[PlannedTensor]], ranks: Sequence[int]) -> dict[str, int]:
    """Tensor name -> the rank that writes it, in the order in which they are sent: by turns, so that all ranks write at once."""
    queues: dict[int, deque[PlannedTensor]] = {rank: deque() for rank in ranks}
    for file, rank in zip(files, ranks, strict=True):
        queues[rank].extend(file)
    owners: dict[str, int] = {}
    sent = dict.fromkeys(queues, 0)
    while any(queues.values()):
        rank = min((rank for rank in queues if queues[rank]), key=lambda rank: sent[rank])
        tensor = queues[rank].popleft()
        owners[tensor.name] = rank
        sent[rank] += 1 + tensor.nbytes
    return owners


# -- writing --------------------------------------------------------------------------------------------------------------


def _write_files(
    model: nn.Module, partial: Path, save: _Save, files: Sequence[Sequence[PlannedTensor]], writers: Sequence[int], rank: int
) -> None:
    """This rank's part of gathering and writing."""
    ranks = deal_files(files, writers)
    mine = {partial / name: file for name, file, owner in zip(save.names, files, ranks, strict=True) if owner == rank}
    owners = order_tensors(files, ranks)
    with BackgroundWriter(mine) as writer, closing(iterate_full_tensors(model, owners)) as stream:
        for name, full in stream:
            try:
                if full is not None:
                    writer.put(name, full)
            except BaseException:
                _drain(model, stream)
                raise


def _drain(model: nn.Module, stream: Iterable[Any]) -> None:
    """Take part in gathering what comes, where the model's data ranks would wait for it."""
    if find_data_group(model) is not None:
        deque(stream, maxlen=0)


def _finish(model: nn.Module, directory: Path, save: _Save, files: Sequence[Sequence[PlannedTensor]]) -> None:
    """Write what is small, then put everything in place and remove what it replaces."""
    partial = directory / PARTIAL
    (partial / _TOKEN).unlink()
    _write_configs(model, partial)
    write_index(partial, save.names, files)
    put_in_place(partial, directory, save.names)


def _write_configs(model: nn.Module, partial: Path) -> None:
    """config.json and generation_config.json of the unsharded model."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    dtype = getattr(model, "dtype", None)
    if isinstance(dtype, torch.dtype):
        config.dtype = str(dtype).removeprefix("torch.")
    config.__dict__.pop("distributed_config", None)
    if getattr(model, "is_remote_code", lambda: False)():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, partial, config=config)
    config.save_pretrained(partial)
    if getattr(model, "can_generate", lambda: False)() and getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(partial)  # type: ignore[union-attr]
