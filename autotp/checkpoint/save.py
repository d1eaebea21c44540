"""Saving a parallelized model as the checkpoint that plain transformers loads."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from ..comm import TPGroup
from ..errors import CheckpointError
from ..layers.base import check_usable, find_group, sharded_modules
from ..layers.gather import find_tied_names, iterate_full_tensors
from .source import DTYPES, INDEX_NAME, SINGLE_NAME

_PARTIAL = ".autotp-partial"  # subdirectory in which a save is written before its files are put in place
_SHARD_FILE = re.compile(r"model(-\d+)?-\d{5}-of-\d{5}\.safetensors")
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_UNITS = {"": 1, "B": 1}
_UNITS |= {unit + "B": 1000**power for power, unit in enumerate("KMGT", 1)}
_UNITS |= {unit + "IB": 1024**power for power, unit in enumerate("KMGT", 1)}


def save_pretrained(
    model: nn.Module, directory: str | os.PathLike, *, max_shard_size: int | str = "5GB", is_main_process: bool = True
) -> None:
    """Write `model` as plain transformers would write the unsharded one: weights, config.json, generation_config.json.

    Collective over the TP group; rank 0 writes. Whole tensors are streamed one at a time, so one tensor is all the extra
    memory it takes. Persistent buffers and frozen parameters are included, a tied tensor once. The weights keep the
    model's own names and layout (transformers' `save_original_format=False`).

    The files are written aside and put in place at the end, the one that makes them the checkpoint last: a crash or a
    full disk leaves what the directory held before. Files of an older checkpoint are removed after that.

    Args:
        model: a parallelized model, or a plain one.
        directory: made if it is not there; other files in it are left alone.
        max_shard_size: bytes in one file, as a number or "5GB", "500MB", "2GiB"; a larger tensor gets a file of its own.
        is_main_process: False on TP rank 0 takes part without writing: for all data-parallel replicas but one.

    Raises:
        CheckpointError: on all ranks, if it could not be written.
        GatherError: a rank of the group did not come.
    """
    group = find_group(model) or TPGroup(None, torch.device("cpu"))
    writes = group.tp_rank == 0 and is_main_process
    group.arrive("save_pretrained")
    with group.together(f"saving to {directory}"):  # what can be known before the first gather
        check_usable(model)
        files = plan_files(model, parse_size(max_shard_size)) if writes else []
        partial = _make_room(Path(directory), files) if writes else None
    error: Exception | None = None
    try:
        with closing(iterate_full_tensors(model)) as stream:
            if partial is None:
                for _ in stream:
                    pass
            else:
                _write_checkpoint(model, partial, files, stream)
    except Exception as caught:  # told to the other ranks, whatever its type
        error = caught
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
    note = "" if error is None else f"{type(error).__name__}: {error}"
    notes = group.arrive("the end of save_pretrained", note)
    failed = [rank for rank, text in enumerate(notes) if text]
    if failed:
        raise CheckpointError(
            f"the model was not saved to {directory}; TP rank {failed[0]} said: {notes[failed[0]]}. "
            f"The checkpoint that was there is whole."
        ) from error


# -- which tensor goes to which file --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedTensor:
    """A whole tensor to be written: its dtype and shape, and where its bytes lie behind the header of its file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


def parse_size(size: int | str) -> int:
    """Bytes of a size such as 5000000, "5GB" or "2GiB".

    Raises:
        CheckpointError: it is no such size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    value = int(float(found[1]) * _UNITS[found[2].upper()]) if found and found[2].upper() in _UNITS else 0
    if value <= 0:
        raise CheckpointError(f"max_shard_size {size!r} is not a number of bytes, nor one with a unit such as '5GB' or '500MiB'")
    return value


def plan_files(model: nn.Module, max_bytes: int) -> list[list[PlannedTensor]]:
    """The whole tensors in state-dict order, cut into files of at most `max_bytes`; known before one is gathered."""
    full_shapes = {
        id(getattr(layer, name)): shard.shape for _, layer in sharded_modules(model) for name, shard in layer.shards.items()
    }
    ignored = {*find_tied_names(model), *_ignored_names(model)}
    files: list[list[PlannedTensor]] = [[]]
    size = 0
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or name in ignored:
            continue
        if tensor.dtype not in _DTYPE_NAMES:
            raise CheckpointError(
                f"'{name}' has dtype {tensor.dtype}, which safetensors files can't hold: convert the model first"
            )
        planned = PlannedTensor(name, tensor.dtype, full_shapes.get(id(tensor), tuple(tensor.shape)))
        if files[-1] and size + planned.nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(planned)
        size += planned.nbytes
    return [_place_tensors(file) for file in files]


def _place_tensors(file: Sequence[PlannedTensor]) -> list[PlannedTensor]:
    """The same tensors with their offsets: wide dtypes first, so that every tensor lies at a multiple of its item size."""
    begin, begins = 0, {}
    for tensor in sorted(file, key=lambda t: -t.dtype.itemsize):
        begins[tensor.name] = begin
        begin += tensor.nbytes
    return [PlannedTensor(t.name, t.dtype, t.shape, begins[t.name]) for t in file]


def _ignored_names(model: nn.Module) -> Iterable[str]:
    return getattr(model, "_keys_to_ignore_on_save", None) or ()


# -- writing --------------------------------------------------------------------------------------------------------------


def _make_room(directory: Path, files: list[list[PlannedTensor]]) -> Path:
    """Make the subdirectory that everything is written into first, after seeing that the disk has room for it.

    Raises:
        CheckpointError: it has not, or the directory can't be written to.
    """
    partial = directory / _PARTIAL
    try:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)  # left by a crash
        partial.mkdir()
    except OSError as error:
        raise CheckpointError(f"{directory} can't be written to ({error}): name a directory that can be") from error
    needed, free = sum(tensor.nbytes for file in files for tensor in file), shutil.disk_usage(directory).free
    if needed > free:
        partial.rmdir()
        raise CheckpointError(
            f"{directory} has {free:,} bytes free, the checkpoint needs {needed:,} beside the one that is there. "
            f"Make room, or name another directory."
        )
    return partial


def _write_checkpoint(model: nn.Module, partial: Path, files: list[list[PlannedTensor]], stream: Any) -> None:
    """Write everything into `partial`, then put it in place and remove what it replaces."""
    directory = partial.parent
    names = _name_files(directory, len(files))
    for name, file in zip(names, files, strict=True):
        _write_file(partial / name, file, stream)
    for _ in stream:  # what is not saved: the other ranks wait for its end
        pass
    _write_configs(model, partial)
    if len(files) > 1:
        tensors = [tensor for file in files for tensor in file]
        metadata = {"total_parameters": sum(prod(t.shape) for t in tensors), "total_size": sum(t.nbytes for t in tensors)}
        weight_map = {tensor.name: name for name, file in zip(names, files, strict=True) for tensor in file}
        index = {"metadata": metadata, "weight_map": weight_map}
        (partial / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    _put_in_place(partial, directory, names)


def _name_files(directory: Path, count: int) -> list[str]:
    """transformers' names; with a number in them where the directory's present checkpoint uses those, so it stays whole."""
    if count == 1:
        return [SINGLE_NAME]
    tag, number = "", 1
    while True:
        names = [f"model{tag}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        if not any((directory / name).exists() for name in names):
            return names
        number += 1
        tag = f"-{number}"


def _write_file(path: Path, file: Sequence[PlannedTensor], stream: Any) -> None:
    """One safetensors file, its tensors taken from `stream` as they come and written straight to their place."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor in sorted(file, key=lambda t: t.begin):
        offsets = [tensor.begin, tensor.begin + tensor.nbytes]
        header[tensor.name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in file:
            full = _next_named(stream, tensor)
            out.seek(8 + len(text) + tensor.begin)
            _write_bytes(out, full)
        out.truncate(8 + len(text) + sum(tensor.nbytes for tensor in file))
        out.flush()
        os.fsync(out.fileno())


def _next_named(stream: Any, planned: PlannedTensor) -> Tensor:
    """The next tensor of the stream that is saved, which must be `planned`."""
    for name, full in stream:
        if name == planned.name:
            if full.dtype != planned.dtype or tuple(full.shape) != planned.shape:
                raise CheckpointError(f"'{name}' changed while it was saved: {planned.shape} became {tuple(full.shape)}")
            return full
    raise CheckpointError(f"'{planned.name}' did not come: the model was changed while it was saved")


def _write_bytes(out: BinaryIO, full: Tensor) -> None:
    flat = full.detach().to("cpu").contiguous().reshape(-1)
    if flat.numel():
        out.write(flat.view(torch.uint8).numpy().data)


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


def _put_in_place(partial: Path, directory: Path, names: list[str]) -> None:
    """Move the files over; the index, or the single file, is last: it decides which checkpoint the directory holds."""
    last = SINGLE_NAME if len(names) == 1 else INDEX_NAME
    shards = [name for name in names if name != last]
    others = [path.name for path in partial.iterdir() if path.name != last and path.name not in shards]
    for name in [*shards, *others, last]:
        os.replace(partial / name, directory / name)
    if last == INDEX_NAME:  # transformers prefers a single file to an index
        (directory / SINGLE_NAME).unlink(missing_ok=True)
    else:
        (directory / INDEX_NAME).unlink(missing_ok=True)
    for path in directory.iterdir():
        if _SHARD_FILE.fullmatch(path.name) and path.name not in names:
            path.unlink()
