"""The whole way: parallelize, train, save, load in plain transformers, load again over another number of ranks."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import autotp
from tests.models import batch, tiny


def train_and_save(group, family, directory):
    model = autotp.parallelize(tiny(family, tie_word_embeddings=True), group).train()
    model.model.layers[0].mlp.requires_grad_(False)
    model.register_buffer("extra", torch.arange(5.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for seed in range(2):
        model(**batch(model, seed)).loss.backward()
        autotp.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    whole = autotp.full_state_dict(model)
    with torch.no_grad():
        return whole, model.eval()(**batch(model)).logits


def load_again(group, directory, logits):
    model = autotp.from_pretrained(directory, group)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch(model)).logits, logits, rtol=1e-5, atol=1e-5)
    whole = autotp.full_state_dict(model)
    assert not model.training and model.lm_head.weight is model.model.embed_tokens.weight
    return whole


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_trained_weights_survive(ranks, tmp_path, family):
    (whole, logits), (others, _) = ranks.run(train_and_save, family, str(tmp_path))
    assert others == {} and torch.equal(whole["extra"], torch.arange(5.0))
    start = tiny(family, tie_word_embeddings=True).state_dict()
    assert torch.equal(whole["model.layers.0.mlp.up_proj.weight"], start["model.layers.0.mlp.up_proj.weight"])
    assert not torch.equal(whole["model.layers.1.mlp.up_proj.weight"], start["model.layers.1.mlp.up_proj.weight"])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(whole[name], value) for name, value in plain.state_dict().items())
    with torch.no_grad():
        torch.testing.assert_close(plain(**batch(plain)).logits, logits, rtol=1e-5, atol=1e-5)
    files = [f.name for f in tmp_path.iterdir()]
    assert "config.json" in files and "tp_size" not in (tmp_path / "config.json").read_text()
    plain.save_pretrained(tmp_path / "plain")  # without the extra buffer, which the class does not have
    again = ranks.run(load_again, str(tmp_path / "plain"), logits, size=3)[0]
    assert all(torch.equal(whole[name], value) for name, value in again.items())


def load_broken(group, directory):
    try:
        autotp.from_pretrained(directory, group)
    except autotp.AutoTPError as error:
        return str(error)
    return "nothing was raised"


def damage(directory: Path, kind: str) -> str:
    weights = directory / "model.safetensors"
    if kind == "missing":
        weights.unlink()
    elif kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif kind == "mis-shaped":
        config = (directory / "config.json").read_text()
        (directory / "config.json").write_text(config.replace('"intermediate_size": 96', '"intermediate_size": 80'))
        return "96"
    else:
        shutil.rmtree(directory)
    return str(directory)


@pytest.mark.parametrize("kind", ["missing", "truncated", "mis-shaped", "no directory"])
def test_a_damaged_checkpoint_is_refused_on_every_rank(ranks, tmp_path, kind):
    directory = tmp_path / "checkpoint"
    tiny("llama").save_pretrained(directory)
    word = damage(directory, kind)
    messages = ranks.run(load_broken, str(directory))
    assert all(word in message for message in messages), messages


def gather_leaf(group):
    model = autotp.parallelize(tiny("llama"), group)
    module = model.model.layers[0].mlp.up_proj
    before = module.weight.data_ptr()
    with autotp.GatherReplacedLayerParams(list(module.parameters(recurse=False)), module, enabled=True):
        state = module.state_dict()
    assert torch.equal(state["weight"], tiny("llama").model.layers[0].mlp.up_proj.weight)
    assert module.weight.data_ptr() == before and module.weight.shape[0] * dist.get_world_size(group) == 96
    with torch.no_grad(), autotp.GatherReplacedLayerParams(model.parameters(), model):
        for parameter in model.parameters():
            parameter.mul_(2)
    whole = autotp.full_state_dict(model)
    if dist.get_rank(group) == 0:
        assert all(torch.equal(whole[name], value * 2) for name, value in tiny("llama").named_parameters())
    autotp.load_full_state_dict(model, tiny("llama").state_dict() if dist.get_rank(group) == 0 else None)
    report = autotp.verify(model, batch(model))
    assert report.passed, str(report)


@pytest.mark.parametrize("size", [2, 3])
def test_gather_write_and_load_whole_weights(ranks, size):
    ranks.run(gather_leaf, size=size)
