"""save_pretrained: bitwise what transformers would load, written so that no fault can cost the checkpoint that was there."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from autotp.checkpoint import place
from autotp.checkpoint.load import fill_from_source
from autotp.checkpoint.place import parse_size
from autotp.checkpoint.save import plan_tensors, save_pretrained
from autotp.checkpoint.source import INDEX_NAME, SINGLE_NAME, SafetensorsSource
from autotp.checkpoint.writer import SafetensorsWriter, cut_files
from autotp.comm import TPGroup
from autotp.errors import AutoTPError, CheckpointError, GatherError
from autotp.layers.base import TensorParallel_Layer, insert_class
from autotp.shard import Shard
from tests.ranks import grid

CPU = torch.device("cpu")
SMALL = dict(hidden_size=16, intermediate_size=25, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


class Held(TensorParallel_Layer):
    """Holds shards and computes as before: enough for what moves weights."""


class BufferedLlama(LlamaForCausalLM):
    """A llama with persistent buffers, one of them an integer, and with one that is not saved."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.model.register_buffer("scale", torch.randn(5, dtype=torch.float64))
        self.model.register_buffer("seen", torch.tensor(3))
        self.model.register_buffer("scratch", torch.zeros(2), persistent=False)


def make_model(tied: bool, seed: int = 0, vocab_size: int = 37) -> BufferedLlama:
    torch.manual_seed(seed)
    model = BufferedLlama(LlamaConfig(**SMALL, vocab_size=vocab_size, tie_word_embeddings=tied))
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    model.model.layers[1].self_attn.q_proj.to(torch.bfloat16)
    model.generation_config.max_new_tokens = 11
    return model


def shard_model(model: nn.Module, group) -> nn.Module:
    """`model` with every matrix cut, unevenly where the ranks do not divide it, as a rewrite leaves it."""
    group = group if isinstance(group, TPGroup) else TPGroup(group, CPU, timeout_s=20)
    cut: dict[int, Shard] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2:
            continue
        dim = 1 if name.endswith(("o_proj", "down_proj")) else 0
        if id(weight) not in cut:
            cut[id(weight)] = Shard.even(weight.shape, dim, group.tp_size)
            weight.data = cut[id(weight)].split(weight.data, group.tp_rank).clone()
        insert_class(module, Held)
        module.tp, module.shards, module.full_name = group, {"weight": cut[id(weight)]}, name
    return model


def save_sharded(group, path, tied, options):
    save_pretrained(shard_model(make_model(tied), group), path, **options)


def check_loads(path, expected: nn.Module) -> nn.Module:
    """Plain transformers loads it with nothing missing or left over, and every tensor is bitwise equal."""
    loaded, info = BufferedLlama.from_pretrained(path, output_loading_info=True, dtype="auto")
    assert not any(info.values()), info
    state = expected.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    with SafetensorsSource(path) as stored:
        for name, value in state.items():
            own = name if name in stored.names() else "model.embed_tokens.weight"
            read = stored.read(own, None, 0, None, CPU)
            assert read.dtype == value.dtype and torch.equal(read, value), name
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, state[name].to(value.dtype)), name
    return loaded


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("size, options", [(2, {}), (3, {"max_shard_size": "6KB"})], ids=["2-one-file", "3-many-files"])
def test_round_trip_is_bitwise(ranks, tmp_path, tied, size, options):
    ranks.run(save_sharded, str(tmp_path), tied, options, size=size)
    model = make_model(tied)
    loaded = check_loads(tmp_path, model)
    names = SafetensorsSource(tmp_path).names()
    assert ("lm_head.weight" in names) != tied and {"model.scale", "model.seen"} < names and "model.scratch" not in names
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert loaded.generation_config.max_new_tokens == 11
    model.save_pretrained(tmp_path / "plain")
    for name in ("config.json", "generation_config.json"):  # no trace of having been parallel
        assert (tmp_path / name).read_text() == (tmp_path / "plain" / name).read_text()
    assert names == SafetensorsSource(tmp_path / "plain").names() and not (tmp_path / ".autotp-partial").exists()
    if options:
        index = json.loads((tmp_path / INDEX_NAME).read_text())
        files = sorted(set(index["weight_map"].values()))
        assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
        sizes = [sum(p.nbytes for p in file) for file in cut_files(plan_tensors(model), 6000)]
        assert index["metadata"]["total_size"] == sum(sizes) and len(sizes) == len(files)
        with safe_open(tmp_path / files[0], "pt") as file:
            assert file.metadata()["format"] == "pt"


def load_and_save(group, source, target):
    """TP checkpoint -> TP model -> TP checkpoint, at another number of ranks."""
    group = TPGroup(group, CPU)
    model = BufferedLlama(LlamaConfig(**SMALL, vocab_size=37, tie_word_embeddings=True))
    shards = {n: Shard.even(t.shape, 0, group.tp_size) for n, t in model.named_parameters() if t.dim() == 2}
    model.model.layers[1].self_attn.q_proj.to(torch.bfloat16)
    plan = SimpleNamespace(shards=shards, tied=(("model.embed_tokens.weight", "lm_head.weight"),))
    fill_from_source(model, plan, SafetensorsSource(source), group)
    for name, module in model.named_modules():
        own = shards.get(f"{name}.weight", shards["model.embed_tokens.weight"] if name == "lm_head" else None)
        if own is not None:
            insert_class(module, Held)
            module.tp, module.shards, module.full_name = group, {"weight": own}, name
    save_pretrained(model, target)


def test_saved_at_3_read_at_2_and_saved_again(ranks, tmp_path):
    ranks.run(save_sharded, str(tmp_path / "three"), True, {"max_shard_size": "6KB"}, size=3)
    ranks.run(load_and_save, str(tmp_path / "three"), str(tmp_path / "two"), size=2)
    check_loads(tmp_path / "two", make_model(True))


@pytest.mark.parametrize("before", ["4KB", "5GB"])
@pytest.mark.parametrize("after", ["4KB", "5GB"])
def test_replaces_an_older_checkpoint(tmp_path, before, after):
    """What belonged to the old one goes, what is the user's stays; a plain model is saved the same way."""
    save_pretrained(make_model(False, seed=1), tmp_path, max_shard_size=before)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model-of-mine.safetensors").write_text("")
    save_pretrained(make_model(False, seed=2), tmp_path, max_shard_size=after)
    check_loads(tmp_path, make_model(False, seed=2))
    there = {path.name for path in tmp_path.iterdir()}
    weights = set(json.loads((tmp_path / INDEX_NAME).read_text())["weight_map"].values()) if after == "4KB" else {SINGLE_NAME}
    index = {INDEX_NAME} if after == "4KB" else set()
    mine = {"tokenizer.json", "model-of-mine.safetensors", "config.json", "generation_config.json"}
    assert there == weights | index | mine


@pytest.mark.parametrize("size", ["4KB", "5GB"])
def test_a_crash_at_any_step_leaves_a_whole_checkpoint(tmp_path, monkeypatch, size):
    """Die at each rename in turn: the directory holds all of the old weights or all of the new ones."""
    old, new = make_model(False, seed=1), make_model(False, seed=2)
    replace = os.replace
    for step in range(100):
        path = tmp_path / str(step)
        save_pretrained(old, path, max_shard_size=size)
        left = step

        def crash(source, target):
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt  # what a killed process runs is less than this
            left -= 1
            replace(source, target)

        monkeypatch.setattr(place.os, "replace", crash)
        try:
            save_pretrained(new, path, max_shard_size=size)
            break
        except KeyboardInterrupt:
            check_loads(path, old)
        finally:
            monkeypatch.setattr(place.os, "replace", replace)
    assert step >= 3
    check_loads(path, new)


def save_to_a_full_disk(group, path, fail_at):
    """The last rank's disk fills up at its `fail_at`-th tensor; afterwards the same model is saved elsewhere."""
    model, write, count = shard_model(make_model(True, seed=2), group), SafetensorsWriter.write, 0
    last = dist.get_world_size(group) - 1

    def fill_up(writer, name, full):
        nonlocal count
        count += 1
        if count == fail_at and dist.get_rank(group) == last:
            raise OSError(28, "No space left on device")
        write(writer, name, full)

    SafetensorsWriter.write = fill_up
    try:
        save_pretrained(model, path, max_shard_size="8KB")
        raise AssertionError("was saved")
    except CheckpointError as error:
        message = str(error)
    finally:
        SafetensorsWriter.write = write
    save_pretrained(model, f"{path}-again")
    return message


@pytest.mark.parametrize("fail_at", [1, 4, 9], ids=["first", "middle", "last"])
def test_a_full_disk_raises_on_every_rank(ranks, tmp_path, fail_at):
    path = tmp_path / "model"
    save_pretrained(make_model(True, seed=1), path)
    messages = ranks.run(save_to_a_full_disk, str(path), fail_at)
    assert all("No space left on device" in message and "rank 1" in message for message in messages)
    check_loads(path, make_model(True, seed=1))
    check_loads(f"{path}-again", make_model(True, seed=2))


def save_into_a_file(group, path):
    model = shard_model(make_model(True), group)
    with pytest.raises(AutoTPError, match="can't be written to"):
        save_pretrained(model, path)
    with pytest.raises(AutoTPError, match="max_shard_size"):
        save_pretrained(model, f"{path}-other", max_shard_size="many")
    save_pretrained(model, f"{path}-other", is_main_process=dist.get_rank(group) == 0)


def test_a_bad_directory_or_size_raises_on_every_rank(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    ranks.run(save_into_a_file, str(tmp_path / "file"))
    check_loads(f"{tmp_path}/file-other", make_model(True))


def save_on_rank_0_only(group, path):
    tp = TPGroup(group, CPU, timeout_s=1)
    model = shard_model(make_model(True), tp)
    if tp.tp_rank == 0:
        with pytest.raises(GatherError, match=r"rank\(s\) \[1\] did not come"):
            save_pretrained(model, path)
    dist.barrier(group)


def test_a_rank_that_stays_away_is_named(ranks, tmp_path):
    ranks.run(save_on_rank_0_only, str(tmp_path / "model"))
    assert not (tmp_path / "model").exists()


def save_without_writing(group, path):
    save_pretrained(shard_model(make_model(True), group), path, is_main_process=False)


def test_other_replicas_take_part_without_writing(ranks, tmp_path):
    ranks.run(save_without_writing, str(tmp_path / "model"))
    assert not (tmp_path / "model").exists()


def save_both_copies(group, path):
    tp = TPGroup(grid()["tp"].get_group(), CPU)
    for seed in range(4):
        save_pretrained(shard_model(make_model(True, seed=seed), tp), path, max_shard_size=2000)


def test_replicas_that_save_at_once_take_turns(ranks, tmp_path):
    """Neither removes what the other is writing, whatever the moment; nothing is left of the first one's files."""
    ranks.run(save_both_copies, str(tmp_path), size=4)
    check_loads(tmp_path, make_model(True, seed=3))
    assert not (tmp_path / place.PARTIAL).exists()


def test_a_directory_that_is_written_to_is_not_waited_for_forever(tmp_path):
    with place.write_aside(tmp_path, 0), pytest.raises(CheckpointError, match="something else writes to"):
        with place.write_aside(tmp_path, 0, wait_s=0.05):
            pass
    with place.write_aside(tmp_path, 0) as partial:
        assert partial.is_dir()


def test_plain_module_and_odd_tensors(tmp_path):
    module = nn.Module()
    module.register_buffer("mask", torch.tensor([True, False, True]))
    module.register_buffer("empty", torch.empty(0, 3))
    module.weight = nn.Parameter(torch.randn(4, 6).t())
    module.eights = nn.Parameter(torch.randn(3).to(torch.float8_e4m3fn), requires_grad=False)
    module.pair = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    save_pretrained(module, Path(tmp_path))
    source = SafetensorsSource(tmp_path)
    for name, value in module.state_dict().items():
        read = source.read(name, None, 0, None, CPU)
        assert read.dtype == value.dtype and read.shape == value.shape
        assert torch.equal(
            read.view(torch.uint8) if read.dtype.itemsize == 1 else read,
            value.view(torch.uint8) if read.dtype.itemsize == 1 else value,
        )
    assert sorted(os.listdir(tmp_path)) == [SINGLE_NAME]


def test_sizes():
    assert [parse_size(s) for s in (17, "17", "5GB", "2 GiB", "1.5MB", "3kb")] == [17, 17, 5 * 10**9, 2 * 2**30, 1_500_000, 3000]
    for bad in ("", "GB", "0", "5 parsecs", -1):
        with pytest.raises(CheckpointError, match="max_shard_size"):
            parse_size(bad)
