"""Plans kept on disk: found again, discovered anew when anything they follow from has changed, and proved whenever read."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import autotp.inject.rules as rules
from autotp.inject.assemble import read_versions
from autotp.inject.cache import find_directory, make_key, read_plan, write_plan
from autotp.inject.rules import make_plan


def llama(**changes):
    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4)
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "num_key_value_heads": 2, **changes}))


def key_of(model, tp_size=2, head="auto"):
    return make_key(model, tp_size, head, read_versions())


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The directory of the cache, empty."""
    monkeypatch.setenv("AUTOTP_CACHE", str(tmp_path / "plans"))
    return tmp_path / "plans"


@pytest.fixture
def discoveries(monkeypatch):
    """Grows by one at each discovery."""
    made, discover = [], rules.discover_plan
    monkeypatch.setattr(rules, "discover_plan", lambda *args: made.append(args) or discover(*args))
    return made


def test_second_plan_is_read(kept, discoveries):
    first, second = make_plan(llama(), 2), make_plan(llama(), 2)
    assert len(discoveries) == 1 and first == second and second.proof == "proved" and second.shards
    assert [path.suffix for path in kept.iterdir()] == [".plan"]


@pytest.mark.parametrize(
    "other",
    [
        lambda: make_plan(llama(hidden_act="gelu"), 2),
        lambda: make_plan(llama(num_attention_heads=2), 2),
        lambda: make_plan(llama(tie_word_embeddings=True), 2),
        lambda: make_plan(llama().bfloat16(), 2),
        lambda: make_plan(llama(), 4),
        lambda: make_plan(llama(), 2, head="whole"),
    ],
    ids=["activation", "heads", "tied", "dtype", "tp_size", "head"],
)
def test_anything_else_is_discovered(kept, discoveries, other):
    make_plan(llama(), 2)
    other()
    assert len(discoveries) == 2 and len(list(kept.iterdir())) == 2


def test_key_sees_the_live_tree_not_where_it_came_from():
    model = llama()
    key = key_of(model)
    model.config._name_or_path = "/somewhere/else"
    assert key_of(model.train()) == key == key_of(llama().eval())
    model.model.layers[0].self_attn.head_dim = 8
    assert key_of(model) != key
    model = llama()
    model.model.layers[0].mlp.act_fn = nn.GELU()
    assert key_of(model) != key
    assert make_key(model, 2, "auto", {**read_versions(), "torch": "0"}) != key_of(model)
    assert key_of(nn.Linear(2, 2)) != key_of(nn.Linear(2, 2).requires_grad_(False))


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-9], lambda b: b.replace(b"colwise", b"rowwise", 1), lambda b: b"\xff\xfe", lambda b: b""]
)
def test_damaged_file_is_replaced(kept, discoveries, damage):
    made = make_plan(llama(), 2)
    (file,) = kept.iterdir()
    intact = file.read_bytes()
    file.write_bytes(damage(intact))
    assert read_plan(key_of(llama())) is None
    assert make_plan(llama(), 2) == made
    assert len(discoveries) == 2 and file.read_bytes() == intact


def test_plan_that_no_longer_proves_is_replaced(kept, discoveries):
    model = llama()
    made = make_plan(model, 2)
    unpaired = tuple(module for module in made.modules if not module.name.endswith("o_proj"))
    write_plan(key_of(model), replace(made, modules=unpaired))
    assert make_plan(model, 2) == made
    assert len(discoveries) == 2 and read_plan(key_of(model)) == made


def test_plan_of_another_model_is_replaced(kept, discoveries):
    other = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2))
    write_plan(key_of(llama()), make_plan(other, 2))
    assert make_plan(llama(), 2).model == "LlamaForCausalLM" and len(discoveries) == 2


@pytest.mark.parametrize("value", ["off", "OFF", ""])
def test_off(value, tmp_path, monkeypatch, discoveries):
    monkeypatch.setenv("AUTOTP_CACHE", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    make_plan(llama(), 2), make_plan(llama(), 2)
    assert len(discoveries) == 2 and find_directory() is None and not list(tmp_path.iterdir())


def test_home_is_the_default(tmp_path, monkeypatch):
    monkeypatch.delenv("AUTOTP_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_directory() == tmp_path / ".cache" / "autotp"


def test_only_what_is_discovered_from_made_calls_is_kept(kept):
    model, ids = llama(), torch.arange(12).view(2, 6)
    make_plan(model, 2, inputs={"input_ids": ids})
    make_plan(model, 2, plan="hf")
    make_plan(model, 1)
    assert not kept.exists()


def test_directory_that_cannot_be_written_warns(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOTP_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="can't be kept"):
        assert make_plan(llama(), 2).shards


def test_file_is_a_digest_and_json(kept):
    made = make_plan(llama(), 2)
    (file,) = kept.iterdir()
    digest, text = file.read_text().split("\n", 1)
    assert len(digest) == 64 and json.loads(text)["tp_size"] == made.tp_size
