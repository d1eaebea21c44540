"""Checkpoints in other formats: `.bin` files by slices, old ones and GGUF through one reader that shares them out."""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from autotp.checkpoint import load
from autotp.checkpoint.load import fill_from_source
from autotp.checkpoint.open import open_checkpoint
from autotp.checkpoint.scatter import convert_source
from autotp.checkpoint.torch_files import BIN_INDEX_NAME, BIN_NAME, TorchFileSource
from autotp.comm import TPGroup
from autotp.errors import AutoTPError, CheckpointError
from tests.checkpoint.test_load import config, cut_llama, on_meta
from tests.train.test_setup import write_gguf
from tests.train.tiny import make_config

CPU = torch.device("cpu")


def save_bin(path, state, old=False):
    """Two files and their index, in torch's present format or in that before 1.6."""
    names = list(state)
    where = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        file = f"pytorch_model-{number}.bin"
        torch.save({name: state[name] for name in part}, path / file, _use_new_zipfile_serialization=not old)
        where |= dict.fromkeys(part, file)
    (path / BIN_INDEX_NAME).write_text(json.dumps({"weight_map": where}))


def fill(group, path, make_settings, expected):
    """Every parameter is this rank's part of `expected`; returns what the other ranks than 0 opened."""
    model = on_meta(make_settings())
    group = TPGroup(group, CPU)
    plan = cut_llama(model, group.tp_size)
    opened = []
    load, torch.load = torch.load, lambda *args, **kwargs: opened.append(args) or load(*args, **kwargs)
    try:
        with open_checkpoint(path) as source:
            fill_from_source(model, plan, source, group, dtype=torch.float32)
    finally:
        torch.load = load
    for name, value in model.state_dict().items():
        full = expected[name]
        assert torch.equal(value, plan.shards[name].split(full, group.tp_rank) if name in plan.shards else full), name
    return len(opened)


def model_of(settings):
    torch.manual_seed(1)
    return LlamaForCausalLM(settings)


@pytest.mark.parametrize("old", [False, True], ids=["mapped", "old"])
def test_bin_files(ranks, tmp_path, old):
    state = {name: t.to(torch.bfloat16) for name, t in model_of(config()).state_dict().items()}
    save_bin(tmp_path, state, old)
    with TorchFileSource(tmp_path) as source:
        assert source.one_reader == old
        assert all(torch.equal(source.read(n, None, 0, None, CPU), t) for n, t in state.items())
    opened = ranks.run(fill, str(tmp_path), config, {name: t.float() for name, t in state.items()}, size=3)
    assert (opened[1] == opened[2] == 0) == old


def test_gguf_is_shared_out(ranks, tmp_path):
    write_gguf(tmp_path)
    expected = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32).state_dict()
    model = on_meta(make_config())
    source = convert_source(model, open_checkpoint(tmp_path / "tiny.gguf"))
    assert all(torch.equal(source.read(name, None, 0, None, CPU), expected[name]) for name in source.names())
    ranks.run(fill, str(tmp_path), make_config, expected)


def stop_early(group, path):
    """Rank 1 runs out of memory at its third tensor: rank 0, which would send the fourth, hears of it."""
    group = TPGroup(group, CPU, timeout_s=20)
    model, place, count = on_meta(config()), load._place, 0

    def fail(*args):
        nonlocal count
        count += 1
        if count == 3 and group.tp_rank == 1:
            raise MemoryError("no more")
        place(*args)

    load._place = fail
    try:
        with open_checkpoint(path) as source:
            fill_from_source(model, cut_llama(model, group.tp_size), source, group)
    except (AutoTPError, MemoryError) as error:
        return str(error)
    finally:
        load._place = place
    return ""


def test_a_rank_that_stops_is_heard_of(ranks, tmp_path):
    save_bin(tmp_path, model_of(config()).state_dict(), old=True)
    first, second = ranks.run(stop_early, str(tmp_path))
    assert "rank(s) [1] stopped" in first and second == "no more"


class Evil:
    def __reduce__(self):
        return os.mkdir, ("/tmp/autotp-must-not-exist",)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("old", [False, True], ids=["zip", "old"])
def test_nothing_is_run(tmp_path, old):
    torch.save({"a": torch.ones(3), "b": Evil()}, tmp_path / BIN_NAME, _use_new_zipfile_serialization=not old)
    with pytest.raises(CheckpointError, match=f"{BIN_NAME} holds more than tensors"):
        TorchFileSource(tmp_path).names()
    (tmp_path / BIN_NAME).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=BIN_NAME):
        TorchFileSource(tmp_path).names()
    assert not os.path.exists("/tmp/autotp-must-not-exist")


@pytest.mark.parametrize("odd", [[1, 2], {"a": 3}, {"a": torch.ones(3).to_sparse()}, {"a": {"b": torch.ones(3)}}])
def test_what_is_no_table_of_tensors_is_named(tmp_path, odd):
    torch.save(odd, tmp_path / BIN_NAME)
    with pytest.raises(CheckpointError, match=BIN_NAME):
        TorchFileSource(tmp_path).names()


@pytest.mark.parametrize("keep", [0, 3, 100, -300])
def test_truncated_bin(tmp_path, keep):
    torch.save({"a": torch.ones(300)}, tmp_path / BIN_NAME)
    (tmp_path / BIN_NAME).write_bytes((tmp_path / BIN_NAME).read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=BIN_NAME):
        TorchFileSource(tmp_path).names()


def test_which_one_is_taken(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / BIN_NAME)
    assert isinstance(open_checkpoint(tmp_path), TorchFileSource)
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    assert not isinstance(open_checkpoint(tmp_path), TorchFileSource)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / BIN_INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "../pytorch_model.bin"}}))
    with pytest.raises(CheckpointError, match="not inside its directory"):
        open_checkpoint(tmp_path / "bad")
