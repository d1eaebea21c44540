"""Plans as data: JSON and back, the table a reader sees, and bytes that add up."""

import dataclasses
import json
from functools import cache

import pytest
import torch
from torch import nn

import autotp
from autotp.errors import PlanError
from autotp.inject.callsites import ShapeFix
from autotp.inject.describe import fold_name
from autotp.inject.module_plan import InputPlan, ModulePlan, NormPlan, TokenPlan
from autotp.inject.plan import Chain, Plan
from tests.models import tiny, tiny_config

FAMILIES = ["llama", "qwen3", "gemma2", "gpt_neox", "phi3"]


@cache
def plan_of(family, size, **overrides):
    try:
        return autotp.make_plan(tiny_config(family, **overrides), size)
    except PlanError as error:
        pytest.skip(f"this transformers' plan of {family}: {error}")


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_json_gives_an_equal_plan(family, size):
    plan = plan_of(family, size)
    again = Plan.from_json(plan.to_json(indent=2))
    assert again == plan and again.digest() == plan.digest() and again.to_json() == plan.to_json()
    assert again.shards == plan.shards and str(again) == str(plan)
    json.loads(plan.to_json())


def test_json_keeps_every_field():
    shard = autotp.Shard.from_indices((6, 4), 0, [[0, 2, 4], [1, 3, 5]])
    module = ModulePlan(
        "a.0.q",
        "colwise",
        {"weight": shard},
        2,
        (3, 3),
        "a.0:q",
        ("scale",),
        ((1, 4), (6, 7)),
        {"heads": (2, 3), "config.sizes": ([1, 2], (3, 4))},
        "float32",
        "caller",
        "why",
        once=("bias",),
        copied=("inner.bias",),
        inputs=(InputPlan("alibi", 2, True, 0, 4, (((0, 2, 2, 1),), ((2, 2, 2, 1),))), InputPlan("mask", None, False)),
        outputs=(0, 2),
        norm=NormPlan("rms", 1e-6, 6),
        forward="attention",
        overlap={"ub_overlap_rs": True, "ub_name": "q"},
        fixes=(
            ShapeFix("m:A.forward", (3, 3, 8, 40), "shape", "x.view(b, c)", {1: (2, 3), "dim": (4, 5)}, {1: 5}),
            ShapeFix("m:A.forward", (4, 4, 8, 40), "split", sections=((1, 2), (3, 4))),
            ShapeFix("m:f", (5, 5, 8, 40), "narrow", operand="left", dim=-3, size=4, runs=(((0, 2, 2, 1),), ((2, 2, 2, 1),))),
        ),
        tokens=TokenPlan("layers", (("x", 0), ("mask", None)), "slice", ("norm.weight",), True),
    )
    for part in dataclasses.fields(ModulePlan):  # nothing above is a default, so nothing is compared in vain
        default = part.default if part.default is not dataclasses.MISSING else None
        assert getattr(module, part.name) != default
    plan = Plan(2, "Probe", (module,), tied=(("a", "b"),), head="a", loss="whole", param_bytes={"a": 8}, versions={"torch": "2"})
    chain = Chain("layers", ("layers.0", "layers.1"), "x", 0, "norm", ("x", None))
    plan = dataclasses.replace(plan, sequence_parallel="auto", chains=(chain,), tokens="not dealt")
    assert Plan.from_json(plan.to_json()) == plan
    assert dataclasses.replace(plan, loss="other").digest() != plan.digest()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "3", '{"modules": [{"name": "a"}]}', '{"modules": [], "regions": [], "whole": []}']
)
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(PlanError, match="not a plan"):
        Plan.from_json(text)


def test_an_unknown_field_is_refused():
    data = json.loads(plan_of("llama", 2).to_json())
    data["colour"] = "red"
    with pytest.raises(PlanError, match="colour"):
        Plan.from_json(json.dumps(data))


def bytes_of(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())  # a tied tensor once


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("head", ["auto", "whole"])
def test_bytes_of_the_ranks_add_up(tied, size, head):
    model = tiny("llama", tie_word_embeddings=tied)
    plan = autotp.make_plan(model, size, head=head)
    assert plan.full_bytes == bytes_of(model)
    assert bool(plan.tied) == tied
    shards = plan.shards
    whole = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if name not in shards)
    assert sum(plan.bytes_of_rank(rank) for rank in range(size)) == plan.full_bytes + (size - 1) * whole
    assert plan.split_share == pytest.approx(1 - whole / plan.full_bytes)
    for rank in range(size):
        held = sum(
            shards[name].local_numel(rank) * p.element_size() if name in shards else p.numel() * p.element_size()
            for name, p in model.named_parameters()
        )
        assert plan.bytes_of_rank(rank) == held


def test_bytes_count_the_dtype():
    model = tiny("llama", tie_word_embeddings=True).bfloat16()
    model.model.norm.float()
    plan = autotp.make_plan(model, 2)
    assert plan.full_bytes == bytes_of(model)
    assert plan.bytes_of_rank(0) < plan.full_bytes


def check_held_bytes(group, tied):
    model = autotp.parallelize(tiny("llama", tie_word_embeddings=tied), group)
    plan = model.__dict__["autotp_plan"]
    assert plan.bytes_of_rank(torch.distributed.get_rank(group)) == bytes_of(model)


@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_holds_the_bytes_its_plan_says(ranks, tied):
    ranks.run(check_held_bytes, tied, size=3)


def line_with(text, start):
    found = [line for line in text.splitlines() if line.startswith(start)]
    assert len(found) == 1, (start, text)
    return found[0]


def test_describe_says_what_is_split_and_what_is_not():
    plan = plan_of("llama", 3, tie_word_embeddings=False, num_hidden_layers=2)
    text = plan.describe(2)
    assert text.startswith("LlamaForCausalLM over 3 ranks: ") and f"{plan.split_share:.1%}" in text and "on rank 2" in text
    up = line_with(text, "model.layers.*.mlp.up_proj (2x)").split()
    assert up[2:5] == ["colwise", "96x64", "32x64"]
    down = line_with(text, "model.layers.*.mlp.down_proj (2x)").split()
    assert down[2:5] == ["rowwise", "64x96", "64x32"]
    assert "43x64" in line_with(text, "model.embed_tokens")  # 131 rows over 3 ranks: 44, 44 and 43
    assert "44x64" in line_with(plan.describe(), "model.embed_tokens")
    norm = line_with(text, "model.layers.*.input_layernorm.weight")
    assert "128" in norm  # 2 layers of 64 elements
    assert all(entry.reason in text for entry in plan.whole)
    forward, backward = plan.collectives
    assert (forward, backward) == (
        4,
        4,
    ) and "collectives of activations between embedding and head: 4 forward, 4 backward" in text
    assert "loss and logits: " in text and plan.loss in text
    assert all(len(line) < 200 for line in text.splitlines())


def test_every_parameter_is_split_or_explained():
    for family in FAMILIES:
        model, plan = tiny(family), plan_of(family, 2)
        named = {name for name, _ in model.named_parameters()}
        explained = {entry.name for entry in plan.whole}
        assert named <= set(plan.shards) | explained and not explained & set(plan.shards), family
        assert all(entry.reason and entry.numel == model.get_parameter(entry.name).numel() for entry in plan.whole)


def test_planning_touches_nothing():
    model = tiny("llama")
    before = {name: (p.data_ptr(), p._version) for name, p in model.named_parameters()}
    state = {name: dict(module.__dict__) for name, module in model.named_modules()}
    autotp.make_plan(model, 2)
    assert before == {name: (p.data_ptr(), p._version) for name, p in model.named_parameters()}
    assert state == {name: dict(module.__dict__) for name, module in model.named_modules()}
    assert autotp.make_plan(model, 2).digest() == autotp.make_plan(model.config, 2).digest()


def test_names_fold_by_whole_numbers_only():
    assert fold_name("model.layers.10.mlp.w1") == "model.layers.*.mlp.w1"
    assert fold_name("h.0") == "h.*" and fold_name("a.b2.c") == "a.b2.c" and fold_name("7b.x") == "7b.x"


def test_a_plan_of_a_bare_module_has_no_edge():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    plan = autotp.make_plan(model, 2, {"0": "colwise", "2": "rowwise"})
    assert plan.head is None and plan.collectives == (1, 1) and plan["0"].shards["bias"].local_shape(0) == (3,)
    assert Plan.from_json(plan.to_json()) == plan and plan.describe()


def check_bare(group):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    x = torch.randn(3, 4)
    expected = model(x)
    row = {"style": "rowwise", "ub_overlap_rs": False, "ub_name": "down"}
    autotp.parallelize(model, group, plan={"0": "colwise", "2": row})
    assert model[0].weight.shape == (3, 4)
    assert (model[2].ub_overlap_rs, model[2].ub_name, model[0].ub_overlap_rs) == (False, "down", None)
    torch.testing.assert_close(model(x), expected)
    with pytest.raises(PlanError, match=r"plan\['0'\]: \['ub_bulk_wgrad'\] are about sharded linears, .* 'replicate'"):
        autotp.make_plan(nn.Sequential(nn.Linear(4, 6)), 2, {"0": {"ub_bulk_wgrad": True}})
    autotp.unshard(model)
    assert not {"ub_overlap_rs", "ub_name"} & set(model[2].__dict__)


def test_a_region_at_the_root_is_rewritten(ranks):
    ranks.run(check_bare)
