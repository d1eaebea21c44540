"""The proof finds every wrong plan: one control for each thing that a plan says."""

from dataclasses import replace
from functools import cache

import pytest

import autotp
from autotp.inject.rules import make_plan
from autotp.inject.shadow import Shadow
from autotp.shard import Shard
from tests.models import tiny

MLA = dict(
    num_key_value_heads=8, head_dim=4, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, kv_lora_rank=16, q_lora_rank=24
)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
BUILD = {
    "deepseek_v3": dict(MLA, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32),
    "mixtral": EXPERTS,
    "gpt_oss": EXPERTS,
    "recurrent_gemma": dict(block_types=["recurrent"]),
    "gpt2": dict(n_embd=64, n_head=8, n_layer=2, n_positions=64),
    "bloom": dict(n_layer=2, n_head=8),
}


@cache
def build(family):
    return tiny(family, **BUILD.get(family, {}))


@cache
def find_plan(family, tp_size):
    """The plan of a family, which can be given back."""
    plan = make_plan(build(family), tp_size)
    assert plan.proof == "proved"
    assert make_plan(build(family), tp_size, plan=plan) == plan  # proved again
    return plan


def change(plan, ending, **fields):
    """`plan` with fields of the first module whose name ends so replaced; a callable is given the module plan."""
    module = next(m for m in plan.modules if m.name.endswith(ending))
    new = {key: value(module) if callable(value) else value for key, value in fields.items()}
    return replace(plan, modules=tuple(replace(m, **new) if m is module else m for m in plan.modules))


def recut(edit, name="weight"):
    """A change of a parameter's shard: `edit` takes and gives the ranks' lists of indices."""

    def make(module):
        shard = module.shards[name]
        (cut,) = shard.cuts
        indices = edit([cut.indices(rank).tolist() for rank in range(shard.tp_size)])
        return {**module.shards, name: Shard.from_indices(shard.shape, cut.dim, indices)}

    return make


def swap_two(indices):
    return [[ranks[1], ranks[0], *ranks[2:]] for ranks in indices]


def even(module):
    return {**module.shards, "weight": Shard.even(module.shards["weight"].shape, module.shards["weight"].cuts[0].dim, 2)}


def without_copies(indices):
    """Each index on its first holder alone, and another rank's where that leaves nothing."""
    seen, out = set(), []
    for ranks in indices:
        own = [i for i in ranks if i not in seen]
        seen |= set(ranks)
        out.append(own or indices[0])
    return out


CONTROLS = {
    "another rank's columns": ("llama", 2, "q_proj", {"shards": recut(lambda i: i[::-1])}),
    "another rank's rows": ("llama", 2, "down_proj", {"shards": recut(lambda i: i[::-1])}),
    "two columns swapped": ("llama", 2, "v_proj", {"shards": recut(swap_two)}),
    "two rows swapped": ("llama", 2, "o_proj", {"shards": recut(swap_two)}),
    "a pack cut in the middle": ("phi3", 2, "gate_up_proj", {"shards": even}),
    "a kv head of another group": ("llama", 8, "k_proj", {"shards": recut(without_copies)}),
    "a summed gradient dropped": ("qwen3", 2, "q_norm", {"summed": ()}),
    "an input not entered": ("llama", 2, "up_proj", {"siblings": None}),
    "columns that enter dropped": ("deepseek_v3", 2, "kv_a_proj_with_mqa", {"columns": ()}),
    "all columns enter": ("deepseek_v3", 2, "kv_a_proj_with_mqa", {"columns": ((0, 20),)}),
    "experts not reduced": ("mixtral", 2, "experts", {"outputs": ()}),
    "routing weights not entered": ("mixtral", 2, "experts", {"inputs": lambda m: m.inputs[:1]}),
    "a bias added on every rank": ("gpt_oss", 2, "experts", {"once": ()}),
    "an attribute not edited": ("gpt2", 2, "attn", {"attrs": {}}),
    "another value": ("bloom", 2, "self_attention", {"attrs": lambda m: {key: (2, 2) for key in m.attrs}}),
    "an argument left whole": ("bloom", 2, "self_attention", {"inputs": ()}),
    "a norm over its own columns": ("olmo2", 2, "q_norm", {"norm": None}),
    "an embedding not summed": ("llama", 2, "embed_tokens", {"style": "local_params"}),
    "another head's map": ("recurrent_gemma", 2, "rg_lru", {"shards": recut(lambda i: i[::-1], "input_gate_weight")}),
    "another epsilon": ("olmo2", 2, "q_norm", {"norm": lambda m: replace(m.norm, eps=1e-2)}),
}


@pytest.mark.parametrize("case", list(CONTROLS))
def test_a_wrong_plan_is_refused(case):
    family, tp_size, ending, fields = CONTROLS[case]
    model, plan = build(family), find_plan(family, tp_size)
    wrong = change(plan, ending, **fields)
    assert wrong != plan, "the control changes nothing"
    with pytest.raises(autotp.errors.ProofError):
        make_plan(model, tp_size, plan=wrong)


def test_a_head_of_another_style_is_refused():
    model = build("llama")
    wrong = change(find_plan("llama", 2), "lm_head", style="colwise")
    with pytest.raises(autotp.errors.PlanError, match="lm_head is the plan's head, which gathers"):
        make_plan(model, 2, plan=wrong)


def test_a_proof_reads_no_weight():
    """Weights on meta prove alike: no number of the model is looked at."""
    from autotp.inject.rules import build_on_meta

    model = tiny("llama")
    assert make_plan(build_on_meta(model.config), 2).shards == make_plan(model, 2).shards
    before = {name: value.clone() for name, value in model.state_dict().items()}
    make_plan(model, 2)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("tied", [True, False])
def test_big_parameters_get_no_numbers(monkeypatch, tied):
    """Neither discovery nor proof of a plain model fills a stand-in: not for a product, a lookup, a shape or a device."""
    filled = []
    fill = Shadow.fill
    monkeypatch.setattr(Shadow, "fill", lambda self, tensor: filled.append(self.find(tensor)) or fill(self, tensor))
    monkeypatch.setenv("AUTOTP_CACHE", "off")
    config = {"hidden_size": 64, "intermediate_size": 2048, "vocab_size": 2048, "num_hidden_layers": 1}
    model = tiny("llama", **config, tie_word_embeddings=tied)
    plan = make_plan(model, 2)
    assert plan.head == "lm_head" and "model.layers.0.mlp.up_proj.weight" in plan.shards
    assert filled == []
