"""Checkpoints cut for a number of ranks, and put together again, without ranks: one part of one tensor is in memory at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..shard import Shard
from .place import move_files, name_files, parse_size, put_in_place, write_aside, write_index
from .sharded import MANIFEST_NAME, ShardedSource, rank_files
from .source import WeightSource
from .writer import PlannedTensor, SafetensorsWriter, cut_files, place_tensors, plan_tensor

_CPU = torch.device("cpu")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_TEMPLATES = "additional_chat_templates"  # the directory that transformers keeps a tokenizer's further templates in


def shard_checkpoint(
    source: WeightSource,
    directory: Path,
    names: Mapping[str, str],
    shards: Mapping[str, Shard],
    tp_size: int,
    plan: Any = None,
    beside: Path | None = None,
) -> None:
    """Write what each of `tp_size` ranks holds into a file of its own, for `ShardedSource` to read.

    Args:
        source: the whole tensors.
        directory: made if it is not there; it must not hold a checkpoint.
        names: of the tensors to write, in order and a tied one once, and what `source` calls them.
        shards: of those that are split; the others are written once.
        plan: what the shards follow from, as JSON data, for whoever loads them.
        beside: a directory whose config and tokenizer files are copied.

    Raises:
        CheckpointError: the directory holds a checkpoint or can't be written to, the disk has no room, or the source is damaged.
    """
    check_free(directory)
    files = _plan_parts(source, names, shards, tp_size)
    with write_aside(directory, sum(tensor.nbytes for file in files for tensor in file)) as partial:
        with ExitStack() as stack:
            paths = [partial / name for name in rank_files(tp_size)]
            writers = [stack.enter_context(SafetensorsWriter(path, file)) for path, file in zip(paths, files, strict=True)]
            for name, key in names.items():
                source.check(key)
                for rank, writer in enumerate(writers if name in shards else writers[:1]):
                    writer.write(name, source.read(key, shards.get(name), rank, None, _CPU))
        cuts = {name: shards[name].to_json() for name in names if name in shards}
        manifest = {"format": 1, "tp_size": tp_size, "names": list(names), "shards": cuts, "plan": plan}
        (partial / MANIFEST_NAME).write_text(json.dumps(manifest) + "\n", encoding="utf-8")
        _copy_beside(beside, partial)
        move_files(partial, directory, rank_files(tp_size), MANIFEST_NAME)


def _plan_parts(
    source: WeightSource, names: Mapping[str, str], shards: Mapping[str, Shard], tp_size: int
) -> list[list[PlannedTensor]]:
    """What each rank's file will hold."""
    files: list[list[PlannedTensor]] = [[] for _ in range(tp_size)]
    for name, key in names.items():
        shard = shards.get(name)
        for rank in range(1 if shard is None else tp_size):
            shape = source.shape(key) if shard is None else shard.local_shape(rank)
            files[rank].append(plan_tensor(name, source.dtype(key), shape))
    return [place_tensors(file) for file in files]


def merge_checkpoint(source: ShardedSource, directory: Path, max_shard_size: int | str = "5GB") -> None:
    """Write the plain checkpoint that `source` was cut from, which transformers loads; the weights in the model's own layout.

    Args:
        source: a sharded checkpoint.
        directory: made if it is not there; it must not hold a checkpoint.
        max_shard_size: bytes in one file, as in `save_pretrained`.

    Raises:
        CheckpointError: as `shard_checkpoint`.
    """
    check_free(directory)
    tensors = [plan_tensor(name, source.dtype(name), source.shape(name)) for name in source.ordered_names()]
    files = cut_files(tensors, parse_size(max_shard_size))
    with write_aside(directory, sum(tensor.nbytes for tensor in tensors)) as partial:
        names = name_files(directory, len(files))
        for file_name, file in zip(names, files, strict=True):
            with SafetensorsWriter(partial / file_name, file) as writer:
                for tensor in file:
                    source.check(tensor.name)
                    writer.write(tensor.name, source.read(tensor.name, None, 0, None, _CPU))
        write_index(partial, names, files)
        _copy_beside(source.directory, partial)
        put_in_place(partial, directory, names)


def check_free(directory: Path) -> None:
    """Refuse a directory that holds weights: one kind of checkpoint would hide the other.

    Raises:
        CheckpointError: with the files that it holds.
    """
    if not directory.is_dir():
        return
    found = sorted(p.name for p in directory.iterdir() if p.name.endswith(_WEIGHTS) or p.name == MANIFEST_NAME)
    if found:
        raise CheckpointError(
            f"{directory} holds a checkpoint already ({', '.join(found[:4])}{', ..' if len(found) > 4 else ''}): "
            f"name another directory, or remove it first"
        )


def _copy_beside(directory: Path | None, partial: Path) -> None:
    """All files but weights: configs, the tokenizer's whatever they are called, processors, the model's own code, a licence."""
    for path in sorted(directory.iterdir()) if directory is not None and directory.is_dir() else ():
        hidden = path.name.startswith(".") or path.name == MANIFEST_NAME
        if path.is_file() and not hidden and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, partial / path.name)
    if directory is not None and (directory / _TEMPLATES).is_dir():
        shutil.copytree(directory / _TEMPLATES, partial / _TEMPLATES)
