"""shard, reshard and merge: bitwise, without ranks, and what they write is loaded over the same number of ranks or another."""

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import autotp
from autotp.checkpoint.load import find_shards, order_names
from autotp.checkpoint.offline import merge_checkpoint, shard_checkpoint
from autotp.checkpoint.open import open_checkpoint
from autotp.checkpoint.sharded import MANIFEST_NAME, ShardedSource, rank_files
from autotp.errors import CheckpointError
from autotp.inject import rewrite
from autotp.shard import Shard
from tests.command import run_cli
from tests.models import tiny

CPU = torch.device("cpu")
BESIDE = ("tokenizer.json", "qwen.tiktoken", "tokenizer.model.v3", "LICENSE", "additional_chat_templates/tool_use.jinja")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A tied model of odd vocabulary, 4 kv heads."""
    path = tmp_path_factory.mktemp("plain")
    model = tiny("llama", tie_word_embeddings=True)
    model.save_pretrained(path)
    (path / "additional_chat_templates").mkdir()
    for name in BESIDE:
        (path / name).write_text("{}")
    (path / "optimizer.pt").write_text("")
    return model, path


def cut(model, path, out, tp_size, shards=None):
    """Every matrix cut by rows over `tp_size` ranks, unevenly where they do not divide it; kv heads with copies."""
    with open_checkpoint(path) as source:
        whole, names = order_names(model, source)
        if shards is None:
            shards = {name: Shard.even(t.shape, 0, tp_size) for name, t in model.state_dict().items() if t.dim() == 2}
        shards = find_shards(model, names, shards)
        shard_checkpoint(whole, out, names, shards, tp_size, None, path)
    return shards


def check_equal(path, model):
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    state = model.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())


def copies(model, tp_size):
    """Packed parts, columns, copied kv heads, a permuted order; the rest is whole."""
    layer, state = "model.layers.0.", {name: tuple(t.shape) for name, t in model.state_dict().items()}
    kv = f"{layer}self_attn.k_proj.weight"
    heads = [[*range(8 * (r * 4 // tp_size), 8 * (r * 4 // tp_size) + 8)] for r in range(tp_size)]
    up, o = f"{layer}mlp.up_proj.weight", f"{layer}self_attn.o_proj.weight"
    order = [list(range(63 - r, -1, -tp_size)) for r in range(tp_size)]
    return {
        up: Shard.dealt(state[up], 0, [6] * tp_size, parts=(48, 48)), o: Shard.from_indices(state[o], 1, order),
        kv: Shard.from_indices(state[kv], 0, heads),
    }  # fmt: skip


def test_cut_and_put_together(plain, tmp_path):
    model, path = plain
    cut(model, path, tmp_path / "8", 8, copies(model, 8))
    with ShardedSource(tmp_path / "8") as source:
        for name, shard in source.shards.items():
            full, thirds = model.state_dict()[name], Shard.even(model.state_dict()[name].shape, 1, 3)
            for rank in range(8):  # of its own file, as float64, too
                part = source.read(name, shard, rank, torch.float64, CPU)
                assert torch.equal(part, shard.split(full, rank).double())
            assert all(torch.equal(source.read(name, thirds, r, None, CPU), thirds.split(full, r)) for r in range(3))
            with ShardedSource(tmp_path / "8") as other:
                other.read(name, shard, 0, None, CPU).fill_(3)
            assert torch.equal(source.read(name, None, 0, None, CPU), full)
        merge_checkpoint(source, tmp_path / "merged", "100KB")
    check_equal(tmp_path / "merged", model)
    assert all((tmp_path / "merged" / name).read_text() == "{}" for name in BESIDE)
    assert not any((tmp_path / "merged" / name).exists() for name in (MANIFEST_NAME, "optimizer.pt"))
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 2
    cut(model, tmp_path / "8", tmp_path / "3", 3)
    with ShardedSource(tmp_path / "3") as source:
        merge_checkpoint(source, tmp_path / "again")
    check_equal(tmp_path / "again", model)


def test_a_directory_with_weights_is_left_alone(plain, tmp_path):
    model, path = plain
    with pytest.raises(CheckpointError, match=r"holds a checkpoint already \(model\.safetensors, optimizer\.pt\)"):
        cut(model, path, path, 2)
    cut(model, path, tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"holds a checkpoint already \(autotp"):
        cut(model, path, tmp_path, 2)


def break_manifest(path, change):
    data = json.loads((path / MANIFEST_NAME).read_text())
    change(data, next(iter(data["shards"].values())))
    (path / MANIFEST_NAME).write_text(json.dumps(data))


LIES = {
    "huge": lambda data, shard: shard.update(shape=[2**50, 64]),
    "nothing": lambda data, shard: shard.update(shape=[2**50, 0]),
    "other ranks": lambda data, shard: shard.update(tp_size=3),
    "no numbers": lambda data, shard: shard.update(shape=["131", 64]),
    "runs": lambda data, shard: shard["cuts"][0]["runs"][0][0].__setitem__(1, 2**40),
    "fractions": lambda data, shard: shard["cuts"][0]["runs"][0][0].__setitem__(1, 0.5),
    "no cuts": lambda data, shard: shard.pop("cuts"),
    "no name": lambda data, shard: data["names"].append("model.extra"),
    "no ranks": lambda data, shard: data.update(tp_size=0),
    "many ranks": lambda data, shard: data.update(tp_size=10**9),
    "a later format": lambda data, shard: data.update(format=2),
    "names are numbers": lambda data, shard: data.update(names=[1]),
}


@pytest.fixture(scope="module")
def halves(plain, tmp_path_factory):
    path = tmp_path_factory.mktemp("halves") / "cut"
    cut(*plain, path, 2)
    return path


@pytest.mark.parametrize("kind", LIES)
def test_lies_of_the_manifest_are_named(halves, tmp_path, kind):
    for file in filter(Path.is_file, halves.iterdir()):
        os.link(file, tmp_path / file.name) if file.name != MANIFEST_NAME else (tmp_path / file.name).write_text(file.read_text())
    break_manifest(tmp_path, LIES[kind])
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        ShardedSource(tmp_path)


def test_missing_and_damaged_parts_are_named(plain, tmp_path):
    cut(*plain, tmp_path, 2)
    second = tmp_path / rank_files(2)[1]
    data = bytearray(second.read_bytes())
    data[-1] ^= 1
    second.write_bytes(data)
    with ShardedSource(tmp_path) as source:
        with pytest.raises(CheckpointError, match=f"{second} is not what was saved"):
            for name in source.ordered_names():
                source.check(name)
    second.unlink()
    with pytest.raises(CheckpointError, match=f"{second} is missing"):
        ShardedSource(tmp_path)


def load_cut(group, path):
    """The weights of every rank's model joined again, and whether a plan was looked for."""
    made, make_plan = [], rewrite.make_plan
    rewrite.make_plan = lambda *args, **kwargs: made.append(1) or make_plan(*args, **kwargs)
    try:
        model = autotp.from_pretrained(path, group)
    finally:
        rewrite.make_plan = make_plan
    return autotp.full_state_dict(model), len(made)


@pytest.mark.parametrize("command", [("merge",), ("reshard", "--tp", 2)], ids=["merge", "reshard"])
def test_a_directory_that_was_not_cut_is_named(plain, tmp_path, capsys, command):
    said = run_cli(command[0], plain[1], tmp_path / "out", *command[1:], code=2, capsys=capsys)
    assert f"{plain[1]} is not a directory that `autotp shard` made" in said.err and not (tmp_path / "out").exists()


def test_commands_and_loading(ranks, plain, tmp_path, capsys):
    model, path = plain
    said = run_cli("shard", path, tmp_path / "2", "--tp", 2, capsys=capsys).out
    assert "20 tensors over 2 ranks, 15 of them split" in said
    (whole, made), _ = ranks.run(load_cut, str(tmp_path / "2"))
    assert made == 0 and all(torch.equal(whole[name], value) for name, value in model.state_dict().items())
    (whole, made), *_ = ranks.run(load_cut, str(tmp_path / "2"), size=3)
    assert made == 1 and all(torch.equal(whole[name], value) for name, value in model.state_dict().items())
    run_cli("merge", tmp_path / "2", tmp_path / "plain")
    check_equal(tmp_path / "plain", model)
    run_cli("reshard", path, tmp_path / "3", "--tp", 3, code=2, capsys=capsys)
    run_cli("merge", path, tmp_path / "other", code=2)
    assert "is not a directory that `autotp shard` made" in capsys.readouterr().err
