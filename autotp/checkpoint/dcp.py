"""`torch.distributed.checkpoint` without collectives and without trust: plans that ranks exchange, files that each writes alone.

Only tensors go through it (what else there is lies in `state.json`), so nothing that is read back is a pickle but the list of
tensors, `.metadata`, and of that only the classes that such a list is made of are let in.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from enum import EnumMeta
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..errors import CheckpointError
from .chunks import Box

METADATA = ".metadata"
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex", "StorageMeta"),
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
    "torch.serialization": ("_get_layout",),
}
Note = list[list[Any]]  # of each tensor that a rank wrote: key, offsets, file, first byte, bytes


# -- writing --------------------------------------------------------------------------------------------------------------


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        """Nothing: where it was written is no part of a checkpoint."""
        return StorageMeta()


class TensorWriter:
    """Writes one rank's share of tensors, of which copies on other ranks are written once.

    The file is written here and not by torch's writer, which keeps all of it in the CPU's memory until it is done.

    Args:
        directory: where to; it need not exist before `write`.
        tensors: this rank's, by key: `chunk_to_save`'s.
    """

    def __init__(self, directory: Path, tensors: dict[str, Tensor]) -> None:
        self.directory = directory
        self.planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.planner.set_up_planner(tensors, StorageMeta(), True)
        self.plan = self.planner.create_local_plan()
        self.metadata, self.rank = Metadata({}), 0
        self.staged: dict[MetadataIndex, Tensor] | None = None

    def agree(self, plans: list[SavePlan], rank: int) -> None:
        """Settle who writes what, from every rank's `plan`; the same on every rank, so nothing need be sent back.

        Raises:
            ValueError: the ranks' tensors do not fit together.
        """
        plans, self.metadata = self.planner.create_global_plan(plans)
        self.plan, self.rank = self.planner.finish_plan(plans[rank]), rank

    def total_bytes(self) -> int:
        """Of the tensors that all ranks write."""
        tensors = [each for each in self.metadata.state_dict_metadata.values() if isinstance(each, TensorStorageMetadata)]
        return sum(prod(each.size) * each.properties.dtype.itemsize for each in tensors)

    def stage(self) -> None:
        """Copy what this rank will write to the CPU: the tensors may change from now on."""
        self.staged = {item.index: self._resolve(item).to("cpu", copy=True) for item in self.plan.items}

    def _resolve(self, item: WriteItem) -> Tensor:
        data: Any = self.planner.resolve_data(item)
        return data.detach()

    def write(self) -> Note:
        """Write the file, through to the disk, one tensor after another."""
        note, name = [], f"__{self.rank}_0.distcp"
        with open(self.directory / name, "wb") as file:
            for item in self.plan.items:
                data = self._resolve(item).cpu() if self.staged is None else self.staged.pop(item.index)
                if data.untyped_storage().nbytes() != data.nbytes:  # all of its storage would be written
                    data = data.clone(memory_format=torch.contiguous_format)
                first = file.tell()
                _save_summed(data, file)
                note.append([item.index.fqn, list(item.index.offset or ()), name, first, file.tell() - first])
            file.flush()
            os.fsync(file.fileno())
        return note

    def finish(self, notes: list[Note]) -> None:
        """Write the list of tensors; on one rank, with the notes of all."""
        results = [
            WriteResult(MetadataIndex(key, offsets), length, _StorageInfo(file, first, length))
            for note in notes
            for key, offsets, file, first, length in note
        ]
        writer = _Writer(self.directory)
        writer.set_up_storage_writer(True)
        writer.finish(self.metadata, [results])


def _save_summed(tensor: Tensor, file: IO[bytes]) -> None:
    """`torch.save`, with the checksums that a process may have switched off."""
    summed = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(tensor, file)
    finally:
        torch.serialization.set_crc32_options(summed)


# -- reading --------------------------------------------------------------------------------------------------------------


def _find_member(kind: Any, name: Any) -> Any:
    """A member of an Enum, which Pythons before 3.11.4 pickle as `getattr(kind, name)`; of nothing else."""
    if not isinstance(kind, EnumMeta) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"it holds an attribute {name!r} of {kind!r}, which a list of tensors has no use for")
    return kind[name]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _find_member
        raise pickle.UnpicklingError(f"it holds a {module}.{name}, which a list of tensors has no use for")


class _Reader(FileSystemReader):
    """Reads each saved chunk once, however many boxes it has a part in, and only what its list promises."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_chunk: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            by_chunk.setdefault(item.storage_index, []).append(item)
        places = sorted(by_chunk, key=lambda index: (self.storage_data[index].relative_path, self.storage_data[index].offset))
        for index in places:
            chunk = self._read_chunk(index)
            for item in by_chunk[index]:
                target = planner.resolve_tensor(item).detach()
                box = Box(tuple(item.storage_offsets), tuple(item.lengths), tuple(item.storage_offsets))
                target.copy_(box.view(chunk))
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_chunk(self, index: MetadataIndex) -> Tensor:
        info, about = self.storage_data[index], self.metadata.state_dict_metadata[index.fqn]
        with open(Path(self.path) / info.relative_path, "rb") as file:
            file.seek(info.offset)
            data = io.BytesIO(file.read(info.length))
        damaged = zipfile.ZipFile(data).testzip()  # torch.save notes checksums, torch.load does not compare them
        if damaged is not None:
            place = f"{Path(self.path) / info.relative_path}"
            raise CheckpointError(f"'{index.fqn}' in {place} is not what was saved: its CRC-32 differs, the file is damaged")
        data.seek(0)
        chunk = torch.load(data, map_location="cpu", weights_only=True)
        sizes = next(each.sizes for each in about.chunks if each.offsets == index.offset)
        if not isinstance(chunk, Tensor) or chunk.shape != sizes or chunk.dtype != about.properties.dtype:
            raise CheckpointError(f"'{index.fqn}' in {self.path} is not the tensor that {METADATA} promises: the file is damaged")
        return chunk


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"'{read_item.dest_index.fqn}' is a pickle, not a tensor: it is not loaded")

    def create_local_plan(self) -> LoadPlan:
        """Refuses what would leave a part of some tensor unread."""
        plan = super().create_local_plan()
        needed = {key: _count_elements(tensor) for key, tensor in self.state_dict.items()}
        for item in plan.items:
            if item.type == LoadItemType.TENSOR:
                needed[item.dest_index.fqn] -= prod(item.lengths)
        lacking = [key for key, left in needed.items() if left]
        if lacking:
            raise CheckpointError(f"{METADATA} does not say where all of {lacking[:5]} lies: the state is damaged")
        return plan


def _count_elements(tensor: Tensor) -> int:
    boxes = getattr(tensor, "boxes", None)
    return tensor.numel() if boxes is None else sum(prod(box.sizes) for box in boxes)


def read_metadata(directory: Path, sizes: Mapping[str, int]) -> Metadata:
    """The list of the tensors in `directory`, whose files have `sizes` bytes; it is not trusted.

    Raises:
        CheckpointError: it can't be read, holds anything else, or points outside the files.
    """
    try:
        with open(directory / METADATA, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        tensors, places = metadata.state_dict_metadata, metadata.storage_data
        for key, about in tensors.items():
            if not isinstance(key, str) or not isinstance(about, TensorStorageMetadata):
                raise CheckpointError(f"{key!r} is not a tensor")
            if not 0 <= prod(about.size) * about.properties.dtype.itemsize <= sum(sizes.values()):
                raise CheckpointError(f"'{key}' has shape {tuple(about.size)}, more than the files hold")
        for index, info in places.items():
            end = sizes.get(info.relative_path, -1)
            if not 0 <= info.offset <= info.offset + info.length <= end:
                raise CheckpointError(f"'{index.fqn}' lies outside the files, in {info.relative_path!r} at byte {info.offset}")
        for key, about in tensors.items():
            for chunk in about.chunks:
                if MetadataIndex(key, chunk.offsets) not in places:
                    raise CheckpointError(f"'{key}' is not in the files")
    except Exception as error:  # a file that is damaged, or made to deceive, may fail in any way
        raise CheckpointError(f"{directory / METADATA} can't be read: {error}") from error
    return metadata


def read_tensors(directory: Path, metadata: Metadata, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors`, or the boxes of this rank's part, from `directory`; each rank reads for itself.

    Raises:
        CheckpointError: the files can't be read, or are not what their list says.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # no collective is wanted
            dcp.load(tensors, storage_reader=_Reader(directory, metadata), planner=_LoadPlanner(), no_dist=True)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise CheckpointError(f"can't read {directory}: {_first_cause(error)}") from error


def _first_cause(error: BaseException) -> str:
    """What a rank said, without torch's traceback of it."""
    failures = getattr(error, "failures", None)
    inner = next(iter(failures.values()))[0] if failures else error
    return f"{type(inner).__name__}: {inner}"
