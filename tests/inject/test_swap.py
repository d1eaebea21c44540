"""Real architectures whose plans need more than pairs of linears, with plans made by hand, against the unsharded models."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D

import autotp
from autotp.errors import PlanError
from autotp.index_runs import compress_indices
from autotp.inject.module_plan import InputPlan, ModulePlan, NormPlan
from autotp.inject.plan import Plan, Region
from autotp.layers.base import find_group
from autotp.shard import Cut, Shard
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


# -- attributes ---------------------------------------------------------------------------------------------------------


def edited(model, size, **attrs):
    """A plan of llama's MLPs, and edits of its first attention."""
    shard, rows = Shard.even((96, 64), 0, size), Shard.even((64, 96), 1, size)
    modules = [ModulePlan("model.layers.0.self_attn", "replicate", attrs=attrs)]
    for i in range(2):
        modules += [
            ModulePlan(f"model.layers.{i}.mlp.{n}_proj", "colwise", {"weight": shard}, siblings=f"{i}") for n in ("gate", "up")
        ]
        modules.append(ModulePlan(f"model.layers.{i}.mlp.down_proj", "rowwise", {"weight": rows}))
    return Plan(size, "LlamaForCausalLM", tuple(modules))


def check_view(group, directory):
    model, size, rank = tiny("llama"), dist.get_world_size(group), dist.get_rank(group)
    live = model.config
    edits = {
        "config.num_attention_heads": (4, 5),
        "config.rope_parameters": ("a", "b"),
        "attention_dropout": (0.5, 0.25),
        "sizes": ([1], [2]),
    }
    model.model.layers[0].self_attn.sizes = [0]
    autotp.parallelize(model, group, plan=edited(model, size, **edits))
    for owner in (model, twin := copy.deepcopy(model)):
        module, config = owner.model.layers[0].self_attn, owner.config
        view = module.config
        assert isinstance(view, type(live)) and view is not config and owner.model.layers[1].self_attn.config is config
        assert view.num_attention_heads == 4 + rank and config.num_attention_heads == 8
        assert view.rope_parameters == "ab"[rank] and module.attention_dropout == (0.5, 0.25)[rank] and module.sizes == [1 + rank]
        assert view.hidden_size == 64 and view.get_text_config().num_attention_heads == 8 and not hasattr(view, "nothing")
        owner.set_attn_implementation("eager")
        assert view._attn_implementation == config._attn_implementation == "eager"
        owner.set_attn_implementation("sdpa")
        assert view._attn_implementation == "sdpa"
        config.hidden_act, view.attention_dropout = "gelu", 0.25
        assert view.hidden_act == "gelu" and config.attention_dropout == 0.25 and "num_attention_heads" in repr(view)
        view.num_attention_heads = 3
        assert view.num_attention_heads == 3 and config.num_attention_heads == 8 and view == config
        config.attention_dropout = 0.0
    assert twin.config is not live and copy.copy(view).hidden_size == 64
    autotp.save_pretrained(model, directory)
    saved = type(live).from_pretrained(directory)
    assert saved.num_attention_heads == 8 and saved.rope_parameters == live.rope_parameters
    for owner in (autotp.unshard(model), autotp.unshard(twin)):
        module = owner.model.layers[0].self_attn
        assert module.config is owner.config and module.sizes == [0] and module.attention_dropout == 0.0
        assert type(module.config) is type(live)


def test_a_module_sees_its_edits_and_the_live_config(ranks, tmp_path):
    ranks.run(check_view, str(tmp_path))


def check_refusals(group):
    size = dist.get_world_size(group)
    shards = {"weight": Shard.even((64,), 0, size)}
    attention, norm, up, down = (
        "model.layers.0.self_attn",
        "model.norm",
        "model.layers.0.mlp.up_proj",
        "model.layers.0.mlp.down_proj",
    )
    overlapping = Shard.from_indices((64, 96), 1, [range(60), range(36, 96)])
    repeated = Shard.from_indices((96, 64), 0, [range(60), [60, 60, *range(60, 96)]])
    vocabulary = Shard.from_indices((131, 64), 0, [range(70), range(60, 131)])
    bad = {
        "the plan edits nothing": ModulePlan(attention, "replicate", attrs={"nothing": (1, 2)}),
        "config.nothing": ModulePlan(attention, "replicate", attrs={"config.nothing": (1, 2)}),
        "no colwise form": ModulePlan(norm, "colwise", shards),
        "no parameter 'bias'": ModulePlan(norm, "replicate", summed=("bias",)),
        "none of rms": ModulePlan(norm, "local_params", shards, norm=NormPlan("l2", 1e-6, 64)),
        "over 128 dealt columns": ModulePlan(norm, "local_params", shards, norm=NormPlan("rms", 1e-6, 128)),
        "added twice": ModulePlan(down, "rowwise", {"weight": overlapping}),
        "cut on dim": ModulePlan(down, "rowwise", {"weight": Shard.even((64, 96), 0, size)}),
        "twice: the gradients": ModulePlan(up, "colwise", {"weight": repeated}),
        "'hidden' at place": ModulePlan(attention, "replicate", inputs=(InputPlan("hidden", 0, True),)),
        "place 3 with": ModulePlan(attention, "replicate", inputs=(InputPlan("attention_mask", 3, True),)),
        "with 0 ranks' parts": ModulePlan(attention, "replicate", inputs=(InputPlan("attention_mask", 2, False, 1, 8),)),
        "some are held twice": ModulePlan("model.embed_tokens", "embedding_rowwise", {"weight": vocabulary}),
        "at once": ModulePlan(up, "colwise", {"weight": Shard.even((96, 64), 0, size)}, columns=((0, 1),)),
        "nn.Embedding has": ModulePlan(up, "embedding_colwise_local", {"weight": Shard.even((96, 64), 1, size)}),
        "of its own, where": ModulePlan("model", "replicate", outputs=(0,)),
    }
    for words, entry in bad.items():
        model = tiny("llama")
        model.model.shards = "its own"
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(PlanError, match=words):
            autotp.parallelize(model, group, plan=Plan(size, "LlamaForCausalLM", (entry,)))
        assert find_group(model) is None and type(model.model.norm) is type(tiny("llama").model.norm), words
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items()), words


def test_a_plan_that_a_module_can_not_follow_is_refused_before_anything_changes(ranks):
    ranks.run(check_refusals)


# -- the other layers ---------------------------------------------------------------------------------------------------


class Columns(nn.Module):
    """Conv1D's and convolutions of two dimensions, whose rows are reduced with the module."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = Conv1D(10, 6), Conv1D(6, 10)
        self.wide, self.narrow = nn.Conv2d(6, 8, (3, 1), padding="same", padding_mode="circular"), nn.Conv2d(8, 6, 1, stride=1)

    def forward(self, x, *, other=None):
        image = x.transpose(1, 2).unsqueeze(-1)
        y = self.narrow(torch.tanh(self.wide(image))).squeeze(-1).transpose(1, 2)
        return {"first": self.down(torch.tanh(self.up(x if other is None else other))) + y, "second": 1}


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.whole = Columns(), Conv1D(6, 6)

    def forward(self, x, name="x"):
        h = self.whole(x)
        return self.inner(h)["first"] if name == "x" else self.inner(x=h, other=h * 2)["first"]


def columns_plan(size, partial):
    up, wide = Shard.even((10,), 0, size), Shard.even((8,), 0, size)

    def cut(shape, dim, like):
        return Shard(shape, size, (Cut(dim, like.cuts[0].runs),))

    style = "rowwise_partial" if partial else "rowwise"
    keys = (None, None) if partial else ("a", "b")
    entries = (InputPlan("x", 0, True), InputPlan("other", None, True)) if partial else ()
    inner = ModulePlan("inner", "replicate", inputs=entries, outputs=(0,) if partial else ())
    modules = (
        inner,
        ModulePlan("inner.up", "colwise", {"weight": cut((6, 10), 1, up), "bias": up}, siblings=keys[0]),
        ModulePlan("inner.down", style, {"weight": cut((10, 6), 0, up)}),
        ModulePlan("inner.wide", "colwise", {"weight": cut((8, 6, 3, 1), 0, wide), "bias": wide}, siblings=keys[1]),
        ModulePlan("inner.narrow", style, {"weight": cut((6, 8, 1, 1), 1, wide)}),
    )
    return Plan(size, "Outer", modules)


def check_columns(group, partial):
    whole, size = Outer(), dist.get_world_size(group)
    mine = autotp.parallelize(copy.deepcopy(whole), group, plan=columns_plan(size, partial))
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))
    for name in ("x", "other"):
        for model in (mine, whole):
            model.zero_grad()
        got, want = mine(x, name), whole(x, name)
        torch.testing.assert_close(got, want)
        for y in (got, want):
            y.square().sum().backward()
        for key, grad in full_gradients(mine).items():
            torch.testing.assert_close(grad, whole.get_parameter(key).grad, rtol=1e-4, atol=1e-5, msg=f"{name} {key}")
    assert (mine.inner.up.nf, mine.inner.down.nx) == (len(mine.inner.up.bias),) * 2 and mine.inner.up.nf < 10
    assert (mine.inner.wide.out_channels, mine.inner.narrow.in_channels) == (len(mine.inner.wide.bias),) * 2
    autotp.unshard(mine)
    assert repr(mine) == repr(whole) and torch.equal(mine(x), whole(x))


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_conv1ds_and_convolutions(ranks, size, partial):
    ranks.run(check_columns, partial, size=size)
