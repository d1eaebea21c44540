"""What is done to a model after it was parallelized: as to the unsharded one, or refused before anything changes."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.utils import parametrize, prune

import autotp
from autotp.errors import AutoTPError, CheckpointError, PlanError
from tests.models import batch, tiny


def compare(model, whole):
    """Loss, every weight and the gradients' norm."""
    found = autotp.full_state_dict(model)
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in found.items())
    inputs = batch(whole)
    inputs["input_ids"] = inputs["input_ids"] % whole.config.vocab_size
    inputs["labels"] = inputs["input_ids"]
    losses = [each(**inputs).loss for each in (model, whole)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)
    for loss in losses:
        loss.backward()
    norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0) for each in (model, whole)]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=1e-5)


def build(group, sequence_parallel=False, **overrides):
    whole = tiny("llama", **overrides).train()
    return whole, autotp.parallelize(copy.deepcopy(whole), group, sequence_parallel=sequence_parallel).train()


def check_resized(group, tied, rows, directory):
    whole, model = build(group, sequence_parallel=not tied, tie_word_embeddings=tied)
    model.generate(batch(whole)["input_ids"][:, :4], max_new_tokens=2, do_sample=False)
    for each in (whole, model):
        torch.manual_seed(0 if each is whole else dist.get_rank(group))  # rank 0's draws are taken
        assert each.resize_token_embeddings(rows).num_embeddings == rows
    assert model.lm_head.weight.shape[0] <= -(-rows // 2)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    compare(model, whole)
    for each in (whole, model):
        each.eval()
    ids = batch(whole)["input_ids"][:, :4] % rows
    expected = whole.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
    assert model.num_parameters() == whole.num_parameters()
    autotp.save_pretrained(model, directory)
    assert type(whole).from_pretrained(directory).get_input_embeddings().num_embeddings == rows
    with pytest.raises(PlanError, match="1 rows can't be dealt to 2 ranks"):
        model.resize_token_embeddings(1)
    autotp.unshard(model)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), whole.state_dict().values(), strict=True))


@pytest.mark.parametrize("tied, rows", [(True, 101), (False, 140)])
def test_embeddings_are_resized(ranks, tied, rows, tmp_path):
    ranks.run(check_resized, tied, rows, tmp_path)


def check_drawn(group):
    whole, model = build(group)
    for again in (
        lambda each: each.apply(each._init_weights),
        lambda each: [module.reset_parameters() for module in each.modules() if hasattr(module, "reset_parameters")],
        lambda each: nn.init.xavier_uniform_(each.model.layers[0].mlp.down_proj.weight),
    ):
        for each in (whole, model):
            torch.manual_seed(7)
            for parameter in each.parameters():
                parameter.__dict__.pop("_is_hf_initialized", None)
            again(each)
            each.zero_grad()
        compare(model, whole)


def test_weights_are_drawn_anew_as_in_the_unsharded_model(ranks):
    ranks.run(check_drawn)


def check_computed(group):
    whole, model = build(group)
    layer, keys = model.model.layers[0].mlp.down_proj, list(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for change in (
            lambda: parametrize.register_parametrization(layer, "weight", nn.Identity()),
            lambda: nn.utils.parametrizations.weight_norm(layer),
            lambda: nn.utils.parametrizations.orthogonal(layer),
            lambda: nn.utils.weight_norm(layer),
            lambda: nn.utils.spectral_norm(layer),
            lambda: prune.l1_unstructured(layer, "weight", 0.5),
            lambda: prune.global_unstructured([(layer, "weight")], prune.L1Unstructured, amount=0.5),
        ):
            with pytest.raises(AutoTPError, match=r"layers.0.mlp.down_proj.weight' is a shard of \(64, 96\).*before parallelize"):
                change()
    assert list(model.state_dict()) == keys and not layer._forward_pre_hooks
    compare(model, whole)
    for each in (whole, model):  # what every rank holds whole
        prune.l1_unstructured(each.model.norm, "weight", 0.5)
        prune.remove(each.model.norm, "weight")
        each.zero_grad()
    inputs = batch(whole)
    torch.testing.assert_close(model(**inputs).loss, whole(**inputs).loss, rtol=1e-4, atol=1e-5)


def test_weights_that_would_be_computed_from_a_part_are_refused(ranks):
    ranks.run(check_computed)


class Holder:
    """As torch.distributed.checkpoint takes it."""

    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return {"weights": self.model.state_dict()}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["weights"])


def check_saved_by_torch(group, directory):
    whole, model = build(group)
    for state in (model.state_dict(), {"app": Holder(model)}, {"optimizers": [model.model.layers[0].mlp.state_dict()]}):
        with pytest.raises(CheckpointError, match=r"shard of .* autotp\.TrainingState"):
            dcp.save(state, checkpoint_id=directory / "all", process_group=group)
    dcp.save(model.state_dict(), checkpoint_id=directory / f"own{dist.get_rank(group)}", no_dist=True)
    dcp.save(whole.state_dict(), checkpoint_id=directory / "whole", process_group=group)
    assert not (directory / "all").exists()


def test_torchs_checkpoints_of_plain_shards_are_refused(ranks, tmp_path):
    ranks.run(check_saved_by_torch, tmp_path)


def check_loaded(group):
    whole, model = build(group)
    other = copy.deepcopy(whole)
    for assign in (False, True):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.25)
        state = {name: value.clone() for name, value in other.state_dict().items()}
        shapes = {name: value.shape for name, value in state.items()}
        assert not any(model.load_state_dict(state, assign=assign))
        assert {name: value.shape for name, value in state.items()} == shapes
        other.zero_grad()
        model.zero_grad()
        compare(model, other)
    name = "model.layers.0.mlp.up_proj.weight"
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=f"Missing key.*{name}"):
        model.load_state_dict({key: value for key, value in before.items() if key != name})
    with pytest.raises(RuntimeError, match=rf"{name}: give the whole tensor \(96, 64\), or this rank's part \(48, 64\)"):
        model.load_state_dict({**before, name: before[name][:-1]})
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_whole_weights_are_loaded_by_load_state_dict(ranks):
    ranks.run(check_loaded)


def check_tools(group):
    whole, model = build(group, tie_word_embeddings=True)
    for options in ({}, {"exclude_embeddings": True}, {"only_trainable": True}):
        for each in (whole, model):
            each.model.layers[1].requires_grad_(not options.get("only_trainable"))
        assert model.num_parameters(**options) == whole.num_parameters(**options)
    shown = str(model)
    assert f"VocabParallelEmbedding(131, 64, padding_idx=0, tp={dist.get_rank(group)}/2" in shown
    assert "in_features=48, out_features=64, bias=False" in shown and "weight [64, 48] of [64, 96]" in shown
    seen, names = {}, ("embed_tokens", "layers.0", "layers.0.mlp.up_proj", "layers.0.mlp.down_proj")
    for name in names:
        model.model.get_submodule(name).register_forward_hook(lambda m, args, out, n=name: seen.update({n: out}))
    inputs = batch(whole)
    with autotp.profile_names(model), torch.profiler.profile() as profile:
        model(**inputs).loss.backward()
    hidden = whole.model.embed_tokens(inputs["input_ids"])
    assert torch.equal(seen["embed_tokens"], hidden) and seen["layers.0"].shape == hidden.shape
    assert seen["layers.0.mlp.up_proj"].shape[-1] == 48 and seen["layers.0.mlp.down_proj"].shape == hidden.shape
    events = {event.name: event for event in profile.events()}
    row = events["model.layers.0.mlp.down_proj LinearAllreduce tp=2"]
    inner, found = list(row.cpu_children), set()
    while inner:
        event = inner.pop()
        found.add(event.name)
        inner += event.cpu_children
    assert any("allreduce" in name for name in found), found
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_counts_prints_hooks_and_profiles(ranks):
    ranks.run(check_tools)


def check_unsharded(group):
    plain = tiny("llama", tie_word_embeddings=True)
    calls = []
    plain.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    plain.model.layers[0].mlp.gate_proj.weight.requires_grad_(False)
    plain.model.norm.eval()
    whole, notes = copy.deepcopy(plain), {}
    for name, module in plain.named_modules():
        notes[name] = type(module), module.training, set(module.__dict__), str(module)
    model = autotp.parallelize(plain, group, sequence_parallel=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(**batch(whole)).loss.backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="AdamW holds states of this rank's shards"):
        autotp.unshard(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autotp.unshard(autotp.parallelize(model, group))  # no optimizer of these shards took a step
    model.load_state_dict(whole.state_dict())
    for name, module in model.named_modules():
        assert (type(module), module.training, set(module.__dict__), str(module)) == notes[name], name
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in whole.parameters()]
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.config.to_dict() == whole.config.to_dict()
    ids, calls[:] = batch(whole)["input_ids"], []
    assert torch.equal(model.generate(ids, max_new_tokens=3), whole.generate(ids, max_new_tokens=3)) and calls


def test_unshard_gives_the_plain_modules_back(ranks):
    ranks.run(check_unsharded)
