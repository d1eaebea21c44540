"""Real architectures whose plans need more than pairs of linears, with plans made by hand, against the unsharded models."""

import copy

import pytest
import torch
import torch.distributed as dist

import autotp
from autotp.inject.plan import InputPlan, ModulePlan, NormPlan, Plan, Region
from autotp.shard import Cut, Shard, compress_indices
from tests.inject.test_families import full_gradients, run_once
from tests.models import batch, tiny


def heads_of(heads, kv, size):
    """Query heads and kv heads of each rank; kv heads are copied where ranks outnumber them."""
    each = heads // size
    own = [list(range(rank * each, rank * each + each)) for rank in range(size)]
    return own, [sorted({head * kv // heads for head in mine}) for mine in own]


def columns(units, width):
    return [[unit * width + i for unit in own for i in range(width)] for own in units]


def column(model, name, indices, siblings):
    module = model.get_submodule(name)
    shards = {key: Shard.from_indices(p.shape, 0, indices) for key, p in module.named_parameters(recurse=False)}
    return ModulePlan(name, "colwise", shards, siblings=siblings)


def row(model, name, indices, style="rowwise"):
    return ModulePlan(name, style, {"weight": Shard.from_indices(model.get_submodule(name).weight.shape, 1, indices)})


def attention(model, path, size, heads, kv, width, **attrs):
    """q, k, v and o of one attention, and what its module needs beside."""
    q, k = (columns(units, width) for units in heads_of(heads, kv, size))
    linears = [column(model, f"{path}.{name}_proj", k if name in "kv" else q, path) for name in "qkv"]
    linears.append(row(model, f"{path}.o_proj", q))
    region = Region(path, tuple(m.name for m in linears[:3]), (linears[3].name,), (), (linears[3].name,), (1,) * size)
    return linears, region, q, k


def olmo2(model, size):
    """Norms over all of q and of k; at 4 ranks each kv head is held by two."""
    modules, regions = [], []
    for i in range(2):
        path = f"model.layers.{i}.self_attn"
        linears, region, q, k = attention(model, path, size, 8, 2, 8)
        regions.append(region)
        modules += linears
        for name, own in (("q_norm", q), ("k_norm", k)):
            norm = model.get_submodule(f"{path}.{name}")
            width = norm.weight.shape[0]
            shards = {"weight": Shard.from_indices((width,), 0, own)}
            modules.append(
                ModulePlan(f"{path}.{name}", "local_params", shards, norm=NormPlan("rms", norm.variance_epsilon, width))
            )
        groups = tuple(len(mine) // len(theirs) for mine, theirs in zip(*heads_of(8, 2, size), strict=True))
        modules.append(ModulePlan(path, "replicate", attrs={"num_key_value_groups": groups}))
    return Plan(size, "Olmo2ForCausalLM", tuple(modules), tuple(regions))


def gpt_oss(model, size):
    """Attention sinks, and stacked experts that are reduced once, at the experts' output."""
    modules, regions = [], []
    for i in range(2):
        path = f"model.layers.{i}.self_attn"
        linears, region, _, _ = attention(model, path, size, 8, 4, 8)
        regions.append(region)
        sinks = {"sinks": Shard.even((8,), 0, size)}
        modules += [*linears, ModulePlan(path, "local_params", sinks)]
        experts = model.get_submodule(f"model.layers.{i}.mlp.experts")
        half = Shard.even((experts.intermediate_size,), 0, size).cuts[0]
        both = Cut(0, tuple(compress_indices([2 * j + k for j in half.indices(r).tolist() for k in (0, 1)]) for r in range(size)))
        cuts = {"gate_up_proj": (2, both), "gate_up_proj_bias": (1, both), "down_proj": (1, half)}
        shards = {
            name: Shard(tuple(getattr(experts, name).shape), size, (Cut(dim, cut.runs),)) for name, (dim, cut) in cuts.items()
        }
        inputs = (InputPlan("hidden_states", 0, True), InputPlan("routing_weights", 2, True))
        name = f"model.layers.{i}.mlp.experts"
        modules.append(ModulePlan(name, "local_params", shards, once=("down_proj_bias",), inputs=inputs, outputs=(0,)))
    return Plan(size, "GptOssForCausalLM", tuple(modules), tuple(regions))


def bloom(model, size):
    """Packed heads, and an argument `[batch * heads, 1, length]` of which each rank takes its heads of every row."""
    modules, regions = [], []
    heads, _ = heads_of(8, 8, size)
    runs = tuple(compress_indices(own) for own in heads)
    for i in range(2):
        path = f"transformer.h.{i}.self_attention"
        name, dense = f"{path}.query_key_value", f"{path}.dense"
        modules += [column(model, name, columns(heads, 24), path), row(model, dense, columns(heads, 8))]
        alibi = InputPlan("alibi", 2, True, 0, 8, runs)
        modules.append(ModulePlan(path, "replicate", attrs={"num_heads": tuple(map(len, heads))}, inputs=(alibi,)))
        regions.append(Region(path, (name,), (dense,), (), (dense,), (1,) * size))
    return Plan(size, "BloomForCausalLM", tuple(modules), tuple(regions))


MODELS = {
    "olmo2": (olmo2, {"num_key_value_heads": 2}),
    "gpt_oss": (gpt_oss, {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}),
    "bloom": (bloom, {"n_layer": 2, "n_head": 8, "hidden_size": 64, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
}


def check_model(group, family):
    make, overrides = MODELS[family]
    reference = tiny(family, **overrides)
    model = autotp.parallelize(copy.deepcopy(reference), group, plan=make(reference, dist.get_world_size(group)))
    inputs = batch(reference)
    logits, grads = run_once(reference, inputs)
    got, _ = run_once(model, inputs)
    torch.testing.assert_close(got, logits, rtol=1e-4, atol=2e-5)
    for name, grad in full_gradients(model).items():
        torch.testing.assert_close(grad, grads[name], rtol=1e-3, atol=1e-5 * max(1.0, float(grads[name].abs().max())), msg=name)
    assert all(p.grad is not None for p in model.parameters())
    generated = [m.generate(inputs["input_ids"], max_new_tokens=6, do_sample=False, pad_token_id=0) for m in (reference, model)]
    assert torch.equal(*generated)
    autotp.unshard(model)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in reference.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, reference(**inputs).logits)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", list(MODELS))
def test_is_the_unsharded_model(ranks, family, size):
    ranks.run(check_model, family, size=size)
