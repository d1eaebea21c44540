"""Options of parallelize, and encoders through a caller's dict: each against the unsharded model."""

import copy

import pytest
import torch
import torch.distributed as dist
from transformers import BertConfig, BertForMaskedLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import autotp
from tests.inject.test_families import full_gradients
from tests.models import batch, tiny, tiny_config


def compare(model, reference, inputs, rtol=1e-4):
    expected, got = reference(**inputs), model(**inputs)
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=1e-6)
    expected.loss.backward()
    got.loss.backward()
    whole = full_gradients(model)
    assert set(whole) == {name for name, p in reference.named_parameters() if p.grad is not None}
    for name, grad in whole.items():
        torch.testing.assert_close(grad, reference.get_parameter(name).grad, rtol=rtol, atol=1e-6, msg=name)
    return got


def check_option(group, family, options, kwargs):
    reference = tiny(family).train()
    model = autotp.parallelize(tiny(family), group, **options).train()
    got = compare(model, reference, {**batch(reference), **kwargs})
    vocab = reference.config.vocab_size
    size = {"full": vocab, "sharded": model.lm_head.weight.shape[0]}.get(options.get("logits", "auto"))
    if options.get("head") == "whole":
        size = vocab
        assert model.lm_head.weight.shape[0] == vocab
    assert (got.logits is None) if size is None else (got.logits.shape[-1] == size)


MLP = {"layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize(
    "options, kwargs",
    [
        ({}, {"num_items_in_batch": torch.tensor(7)}),
        ({"logits": "full"}, {}),
        ({"logits": "sharded"}, {}),
        ({"head": "whole"}, {}),
        ({"plan": MLP, "head": "whole"}, {}),
    ],
)
def test_options_keep_loss_and_gradients(ranks, family, options, kwargs):
    ranks.run(check_option, family, options, kwargs)


BERT = {
    "*.attention.self.query": "colwise",
    "*.attention.self.key": "colwise",
    "*.attention.self.value": "colwise",
    "*.attention.output.dense": "rowwise",
    "*.intermediate.dense": "colwise",
    "encoder.layer.*.output.dense": "rowwise",
}


def check_bert(group):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=8, intermediate_size=96, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    reference = BertForMaskedLM(config).train()
    twin = copy.deepcopy(reference)
    edits = {"*.attention.self": {"attrs": {"all_head_size": [32, 32]}}}
    model = autotp.parallelize(twin, group, plan={**BERT, **edits})
    compare(model, reference, batch(reference))
    whole = autotp.full_state_dict(model)
    if dist.get_rank(group) == 0:
        assert all(torch.equal(whole[name], value) for name, value in reference.state_dict().items())
    plain = autotp.unshard(model)
    assert plain.bert.encoder.layer[0].attention.self.all_head_size == 64


def test_an_encoder_through_a_dict(ranks):
    ranks.run(check_bert)


def check_loading_whole(group):
    model = autotp.parallelize(tiny("llama", seed=1), group)
    model.load_state_dict(tiny("llama", seed=0).state_dict())
    inputs = batch(model)
    torch.testing.assert_close(model(**inputs).logits, tiny("llama", seed=0)(**inputs).logits, rtol=1e-5, atol=1e-5)


def test_load_state_dict_takes_whole_weights(ranks):
    ranks.run(check_loading_whole)


def check_autocast(group):
    reference, model = tiny("llama").train(), autotp.parallelize(tiny("llama"), group).train()
    inputs = batch(reference)
    exact = reference(**inputs).loss.item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, got = reference(**inputs).loss, model(**inputs).loss
    assert abs(got.item() - exact) <= 2 * abs(expected.item() - exact) + 1e-2
    got.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_autocast(ranks):
    ranks.run(check_autocast)


def check_accumulation_and_freezing(group):
    reference, model = tiny("qwen3").train(), autotp.parallelize(tiny("qwen3"), group).train()
    for frozen in (True, False):
        for m in (reference, model):
            m.model.layers[0].self_attn.q_norm.requires_grad_(not frozen)
            m.model.layers[1].mlp.up_proj.weight.requires_grad_(not frozen)
        for seed in range(3):  # accumulated over three micro-batches
            for m in (reference, model):
                m(**batch(reference, seed)).loss.backward()
    for name, grad in full_gradients(model).items():
        torch.testing.assert_close(grad, reference.get_parameter(name).grad, rtol=1e-4, atol=1e-5, msg=name)


def test_accumulation_freezing_and_unfreezing(ranks):
    ranks.run(check_accumulation_and_freezing)


ONE_SIDED = [
    {"model.embed_tokens": "whole", "lm_head": "colwise_gather_output"},
    {"model.embed_tokens": "embedding_rowwise", "lm_head": "whole"},
]


def check_one_sided(group, plan):
    model = tiny("llama", tie_word_embeddings=True)
    with pytest.raises(autotp.PlanError, match=r"embed_tokens.*tied|lm_head.*tied"):
        autotp.parallelize(model, group, plan=plan)
    assert model.lm_head.weight.shape == (131, 64) and model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("plan", ONE_SIDED)
def test_a_tied_tensor_planned_two_ways_is_refused(ranks, plan):
    ranks.run(check_one_sided, plan)


def check_tied_checkpoint(group, directory, head):
    model, reference = autotp.from_pretrained(directory, group, head=head), tiny("llama", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.__dict__["autotp_plan"].tied == (("model.embed_tokens.weight", "lm_head.weight"),)
    compare(model.train(), reference.train(), batch(reference))


@pytest.mark.parametrize("head", ["auto", "whole"])
def test_a_tied_checkpoint_stays_tied(ranks, tmp_path, head):
    tiny("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    ranks.run(check_tied_checkpoint, str(tmp_path), head)


def check_meta_source(group):
    model = autotp.parallelize(tiny("llama"), group)
    before = autotp.full_state_dict(model)
    state = tiny("llama", seed=1).state_dict()
    state["model.norm.weight"] = state["model.norm.weight"].to("meta")
    with pytest.raises(autotp.GatherError, match=r"model.norm.weight.*meta"):
        autotp.load_full_state_dict(model, state if dist.get_rank(group) == 0 else None)
    after = autotp.full_state_dict(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_whole_weights_on_meta_are_refused_on_every_rank(ranks):
    ranks.run(check_meta_source)


def check_gradients_are_cut(group):
    reference, model = tiny("llama").train(), tiny("llama").train()
    for m in (reference, model):
        m(**batch(m, 0)).loss.backward()
    autotp.parallelize(model, group)  # between two micro-batches: what was accumulated stays
    for m in (reference, model):
        m(**batch(m, 1)).loss.backward()
    for name, grad in full_gradients(model).items():
        torch.testing.assert_close(grad, reference.get_parameter(name).grad, rtol=1e-4, atol=1e-6, msg=name)


def test_gradients_that_are_there_are_cut_too(ranks):
    ranks.run(check_gradients_are_cut)


class Normed(torch.nn.Module):
    """A pair at the model's root, with a norm of the sharded columns' units between."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = torch.nn.Linear(6, 16), torch.nn.LayerNorm(4), torch.nn.Linear(16, 6)

    def forward(self, x):
        return self.down(self.norm(self.up(x).unflatten(-1, (-1, 4))).flatten(-2))


def check_root(group):
    torch.manual_seed(0)
    reference = Normed()
    plan = {
        "up": {"style": "colwise", "unit": 4},
        "norm": "replicated_with_grad_allreduce",
        "down": {"style": "rowwise", "unit": 4},
    }
    model = autotp.parallelize(copy.deepcopy(reference), group, plan=plan)
    for m in (reference, model):
        m(torch.arange(12.0).view(2, 6)).pow(2).sum().backward()
    for name, grad in full_gradients(model).items():
        torch.testing.assert_close(grad, reference.get_parameter(name).grad, rtol=1e-4, atol=1e-4, msg=name)


def test_summed_gradients_of_a_pair_at_the_root(ranks):
    ranks.run(check_root)


needs_sinks = pytest.mark.skipif("granite_swa" not in CONFIG_MAPPING, reason="this transformers has no plan with attention sinks")


@needs_sinks
def test_sinks_bound_the_units_of_their_attention():
    """One entry a head: no rank gets half of one."""
    plan = autotp.make_plan(tiny_config("granite_swa"), 2, plan="hf")
    shards = {name: shard for name, shard in plan.shards.items() if name.endswith("sinks")}
    assert len(shards) == 2 and all(shard.local_shape(0) == (4,) for shard in shards.values())


def check_sinks(group):
    reference, model = tiny("granite_swa").train(), autotp.parallelize(tiny("granite_swa"), group).train()
    compare(model, reference, batch(reference))
    assert reference.model.layers[0].self_attn.sinks.grad.abs().max() > 0


@needs_sinks
def test_sinks_are_cut_with_their_heads(ranks):
    ranks.run(check_sinks)
