"""Several ranks' tensors through torch's format, the ranks one after another in one process."""

import io
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from autotp.checkpoint.chunks import ChunkedTensor, PickedTensor, chunk_to_save, find_order, held_boxes
from autotp.checkpoint.dcp import TensorWriter, _MetadataUnpickler, read_metadata, read_tensors
from autotp.errors import CheckpointError
from autotp.shard import Shard
from tests.checkpoint.test_chunks import SHARDS


def write(directory, full, shard, copies=1):
    """The files of `copies` models of all ranks, who hold a whole vector too; each rank's plan and note."""
    ranks = [rank for _ in range(copies) for rank in range(shard.tp_size)]
    whole = torch.arange(3.0)
    tensors = [{"w": chunk_to_save(shard.split(full, rank), shard, rank), "v": whole, "n": torch.tensor(2)} for rank in ranks]
    writers = [TensorWriter(directory, each) for each in tensors]
    plans = [writer.plan for writer in writers]
    for number, writer in enumerate(writers):
        writer.agree(plans, number)
        writer.stage()
    full.zero_()  # what is staged is a copy
    notes = [writer.write() for writer in writers]
    writers[0].finish(notes)
    assert writers[0].total_bytes() == full.nbytes + whole.nbytes + 8
    return notes


def read(directory, shard, rank, order):
    part = torch.full(shard.local_shape(rank), -1.0)
    boxes = held_boxes(shard, rank, order)
    picked = PickedTensor(part, shard, rank, order) if boxes is None else None
    chunked = ChunkedTensor(part, shard.shape, boxes) if picked is None else picked.chunked
    tensors = {"w": chunked, "v": torch.zeros(3), "n": torch.tensor(0)}
    metadata = read_metadata(directory, {path.name: path.stat().st_size for path in directory.iterdir()})
    read_tensors(directory, metadata, tensors)
    assert tensors["v"].tolist() == [0, 1, 2] and tensors["n"] == 2
    if picked is not None:
        picked.finish()
    return part


@pytest.mark.parametrize("name", ["uneven", "copied heads", "experts x columns", "columns in turn, copied", "a vector"])
def test_ranks_write_once_and_others_read(tmp_path, name):
    shard = SHARDS[name]
    full = torch.randn(shard.shape)
    expected, order = full.clone(), find_order(shard)
    notes = write(tmp_path, full, shard, copies=2)
    written = [(key, tuple(offsets)) for note in notes for key, offsets, *_ in note]
    assert len(set(written)) == len(written) and sum(bool(note) for note in notes) > 1  # copies once, by several
    others = [shard, Shard.whole(shard.shape, 1), Shard.even(shard.shape, 0, 3)]
    for other in others:
        for rank in range(other.tp_size):
            assert torch.equal(read(tmp_path, other, rank, order), other.split(expected, rank))


def test_files_that_are_not_what_their_list_says(tmp_path):
    shard = SHARDS["uneven"]
    write(tmp_path, torch.randn(shard.shape), shard)
    metadata = read_metadata(tmp_path, {path.name: path.stat().st_size for path in tmp_path.iterdir()})
    metadata.state_dict_metadata["v"].properties.dtype = torch.float64
    with pytest.raises(CheckpointError, match=r"can't read .*'v' in .* is not the tensor that .metadata promises"):
        read_tensors(tmp_path, metadata, {"v": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="Missing key in checkpoint state_dict: u"):
        read_tensors(tmp_path, metadata, {"u": torch.zeros(3)})


class Attribute:
    """Pickled as Pythons before 3.11.4 pickle members of an Enum."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def test_members_of_an_enum_are_read_however_they_are_pickled():
    read = lambda value: _MetadataUnpickler(io.BytesIO(pickle.dumps(value))).load()  # noqa: E731
    for member in _MEM_FORMAT_ENCODING:
        assert read(Attribute(_MEM_FORMAT_ENCODING, member.name)) is member and read(member) is member
    for owner, name in ((_MEM_FORMAT_ENCODING, "__class__"), (Metadata, "__init__")):
        with pytest.raises(pickle.UnpicklingError, match=f"an attribute '{name}'"):
            read(Attribute(owner, name))
