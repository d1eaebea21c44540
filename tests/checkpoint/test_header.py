"""Headers and indexes of files that may come from anyone: every lie is named before a tensor is allocated."""

import json
import random
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from autotp.checkpoint.header import read_header, read_index
from autotp.checkpoint.source import INDEX_NAME, SINGLE_NAME, MappedFiles, SafetensorsSource
from autotp.checkpoint.writer import SafetensorsWriter, cut_files, plan_tensor
from autotp.errors import CheckpointError


def write_raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(shape, begin, stop, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, stop]}


BAD = {
    "overlap": {"a": entry([2], 0, 8), "b": entry([2], 4, 12)},
    "hole": {"a": entry([1], 0, 4), "b": entry([1], 8, 12)},
    "same place twice": {"a": entry([3], 0, 12), "b": entry([3], 0, 12)},
    "huge": {"a": entry([2**40, 2**40], 0, 12)},
    "wraps around 64 bits": {"a": entry([2**32, 2**32], 0, 12)},
    "negative shape": {"a": entry([-3], 0, 12)},
    "two negatives": {"a": entry([-3, -1], 0, 12)},
    "negative offset": {"a": entry([6], -12, 12)},
    "backwards": {"a": entry([3], 12, 0)},
    "fraction": {"a": entry([3.0], 0, 12)},
    "truth": {"a": entry([3, True], 0, 12)},
    "text": {"a": entry(["3"], 0, 12)},
    "65 dims": {"a": entry([1] * 64 + [3], 0, 12)},
    "dtype of its own": {"a": entry([12], 0, 12, "PICKLE")},
    "no dtype": {"a": {"shape": [3], "data_offsets": [0, 12]}},
    "dtype is no name": {"a": entry([3], 0, 12, ["F32"])},
    "a list": [1, 2, 3],
    "entries are numbers": {"a": 12},
    "metadata is a number": {"__metadata__": 7, "a": entry([3], 0, 12)},
    "offsets are one": {"a": {"dtype": "F32", "shape": [3], "data_offsets": [12]}},
    "twice": b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}',
    "deep": b"[" * 100_000,
    "no text": b"\xff\xfe{",
    "checksums of something else": {"__metadata__": {"autotp_crc32": "0 0"}, "a": entry([3], 0, 12)},
}


@pytest.mark.parametrize("kind", BAD)
def test_lies_are_named(tmp_path, kind):
    path = write_raw(tmp_path / SINGLE_NAME, BAD[kind], bytes(12))
    with pytest.raises(CheckpointError, match=str(path)):
        read_header(path)


def test_length_that_no_file_has(tmp_path):
    path = tmp_path / SINGLE_NAME
    path.write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_header(path)


def test_what_safetensors_writes_is_read(tmp_path):
    tensors = {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.0), "b": torch.ones(3, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / SINGLE_NAME, metadata={"format": "pt", "note": "mine"})
    found = read_header(tmp_path / SINGLE_NAME)
    assert {name: (t.shape, t.dtype) for name, t in found.items()} == {n: (tuple(t.shape), t.dtype) for n, t in tensors.items()}


@pytest.mark.parametrize(
    "file", ["/etc/passwd", "../other.safetensors", "a/../../b", "C:\\x", "..\\x", "\\\\host\\x", "", "a\0b"]
)
def test_index_that_leads_out(tmp_path, file):
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match="not inside its directory") as caught:
        SafetensorsSource(tmp_path)
    assert str(tmp_path / INDEX_NAME) in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"weight_map": [1]}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": {}}}'])
def test_index_that_is_none(tmp_path, text):
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match="not an index"):
        read_index(tmp_path / INDEX_NAME)


def write_file(path):
    tensors = {"w": torch.randn(40, 7), "h": torch.randn(33).to(torch.bfloat16), "n": torch.tensor(5), "e": torch.empty(0, 2)}
    (file,) = cut_files([plan_tensor(name, t.dtype, t.shape) for name, t in tensors.items()], 10**9)
    with SafetensorsWriter(path, file) as writer:
        for name in ("n", "w", "e", "h"):
            writer.write(name, tensors[name])
    return tensors


def check_all(path):
    files = MappedFiles()
    for name, stored in read_header(path).items():
        files.check(name, stored)


def test_writer_notes_checksums(tmp_path):
    path = tmp_path / SINGLE_NAME
    tensors = write_file(path)
    assert all(torch.equal(value, tensors[name]) for name, value in load_file(path).items())
    check_all(path)


def test_any_flipped_bit_is_named(tmp_path):
    """Of a file that autotp wrote: in its header when it is opened, in its data when it is read. Padding is no data."""
    path = tmp_path / SINGLE_NAME
    write_file(path)
    whole = path.read_bytes()
    padding = whole.index(b"}}", 8) + 2, 8 + int.from_bytes(whole[:8], "little")
    draw = random.Random(0)
    places = [8 * i + draw.randrange(8) for i in range(len(whole)) if not padding[0] <= i < padding[1]]
    for bit in places:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        if b'"format":"pt","autotp_crc32":' not in damaged:  # what no checksum is about, and where the checksums are
            continue
        path.write_bytes(damaged)
        try:
            check_all(path)
        except CheckpointError as error:
            assert str(path) in str(error)
        else:
            raise AssertionError(f"bit {bit} of {whole[bit // 8 - 20 : bit // 8 + 20]!r}")


def test_writer_takes_what_was_planned(tmp_path):
    (file,) = cut_files([plan_tensor("a", torch.float32, (3,)), plan_tensor("b", torch.float32, (3,))], 100)
    for name, full in [("a", torch.zeros(4)), ("a", torch.zeros(3).double()), ("c", torch.zeros(3))]:
        with pytest.raises(CheckpointError, match=f"'{name}' changed"), SafetensorsWriter(tmp_path / "x", file) as writer:
            writer.write(name, full)
    with pytest.raises(CheckpointError, match="'b' did not come"), SafetensorsWriter(tmp_path / "x", file) as writer:
        writer.write("a", torch.zeros(3))
    with pytest.raises(CheckpointError, match=r"'c' has dtype torch\.complex128"):
        plan_tensor("c", torch.complex128, (3,))
