"""parallelize and unshard: what stays, what is refused before anything changes, and models side by side."""

import copy

import pytest
import torch
import torch.distributed as dist

import autotp
from autotp.layers.base import find_group
from tests.inject.test_families import full_gradients, run_once
from tests.models import batch, tiny, tiny_config
from tests.ranks import grid


def refusal(call, *args, **kwargs):
    """The message of the AutoTPError that a call raises."""
    try:
        call(*args, **kwargs)
    except autotp.AutoTPError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def snapshot(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


# -- what stays ---------------------------------------------------------------------------------------------------------


def check_identity(group):
    model = tiny("llama", tie_word_embeddings=True)
    before, keys, cls = snapshot(model), list(model.state_dict()), type(model)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    drawn = torch.get_rng_state()
    autotp.parallelize(model, group)
    assert torch.equal(drawn, torch.get_rng_state())  # on every rank: those after rank 0 have other things to do
    assert type(model) is cls and list(model.state_dict()) == keys
    assert all(parameters[name] is p for name, p in model.named_parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.layers[0].mlp.up_proj.weight.shape == (96 // dist.get_world_size(group), 64)
    assert f"weight [{96 // dist.get_world_size(group)}, 64] of [96, 64]" in repr(model.model.layers[0].mlp.up_proj)
    model.train()(**batch(model)).loss.backward()
    optimizer.step()
    again = autotp.parallelize(autotp.unshard(copy.deepcopy(model)), group)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    fresh = autotp.unshard(autotp.parallelize(tiny("llama", tie_word_embeddings=True), group))
    assert all(torch.equal(fresh.state_dict()[name], value) for name, value in before.items())
    assert find_group(fresh) is None and type(fresh.lm_head) is torch.nn.Linear and fresh.lm_head.out_features == 131
    assert type(fresh.model.embed_tokens) is torch.nn.Embedding and "_tp_size" not in fresh.__dict__
    with torch.no_grad():
        plain = tiny("llama", tie_word_embeddings=True)(**batch(model)).logits
        assert torch.equal(fresh(**batch(model)).logits, plain)


@pytest.mark.parametrize("size", [2, 3])
def test_objects_survive_and_unshard_is_bitwise(ranks, size):
    ranks.run(check_identity, size=size)


def check_one(group):
    reference = tiny("phi")
    model = autotp.parallelize(copy.deepcopy(reference), group)
    inputs = batch(reference)
    logits, grads = run_once(reference, inputs)
    got_logits, got = run_once(model, inputs)
    assert torch.equal(logits, got_logits) and all(torch.equal(grads[name], got[name]) for name in grads)


def test_one_rank_is_the_unsharded_model_bit_for_bit(ranks):
    ranks.run(check_one, size=1)


def check_two_models(group, small):
    wide = autotp.parallelize(tiny("llama"), group)
    narrow_group = grid()["tp"].get_group()
    narrow = autotp.parallelize(tiny("qwen2"), narrow_group)
    assert (find_group(wide).tp_size, find_group(narrow).tp_size) == (4, 2)
    for model, family in ((wide, "llama"), (narrow, "qwen2"), (wide, "llama")):
        reference = tiny(family)
        logits, grads = run_once(reference, batch(reference))
        got, _ = run_once(model, batch(reference))
        torch.testing.assert_close(got, logits, rtol=1e-5, atol=1e-5)
        for name, grad in full_gradients(model).items():
            torch.testing.assert_close(grad, grads[name], rtol=1e-4, atol=1e-5)
        model.zero_grad()


def test_two_models_of_two_sizes_in_one_process(ranks):
    ranks.run(check_two_models, None, size=4)


def check_mesh_and_json(group):
    plan = autotp.make_plan(tiny_config("qwen3"), dist.get_world_size(group))
    again = autotp.Plan.from_json(plan.to_json())
    assert again == plan and again.digest() == plan.digest()
    mesh = dist.DeviceMesh.from_group(group, "cpu")
    model = autotp.parallelize(tiny("qwen3"), mesh, plan=again)
    torch.testing.assert_close(model(**batch(model)).logits, tiny("qwen3")(**batch(model)).logits, rtol=1e-5, atol=1e-5)


def test_a_mesh_and_a_plan_from_json(ranks):
    ranks.run(check_mesh_and_json)


def check_copies(group):
    reference = tiny("gemma2").double()
    model = autotp.parallelize(tiny("gemma2"), group)
    twin = copy.deepcopy(model).to(torch.float64)
    logits, grads = run_once(reference, batch(reference))
    got, _ = run_once(twin, batch(reference))
    torch.testing.assert_close(got, logits, rtol=1e-6, atol=1e-6)  # the config's float32 norms stay float32
    for name, grad in full_gradients(twin).items():
        torch.testing.assert_close(grad, grads[name], rtol=1e-5, atol=1e-6)
    assert all(p.grad is None for p in model.parameters())


def test_deepcopy_and_to_stay_right(ranks):
    ranks.run(check_copies)


def check_checkpointing(group, reentrant):
    for family in ("llama", "qwen3", "gemma2"):
        reference = tiny(family)
        model = autotp.parallelize(tiny(family), group)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        logits, grads = run_once(reference, batch(reference))
        for _ in range(2):
            model.zero_grad()
            got, _ = run_once(model, batch(reference))
            torch.testing.assert_close(got, logits, rtol=1e-5, atol=1e-5)
            for name, grad in full_gradients(model).items():
                torch.testing.assert_close(grad, grads[name], rtol=1e-4, atol=1e-5, msg=f"{family} {name}")


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(ranks, reentrant):
    ranks.run(check_checkpointing, reentrant)


def check_data_parallel(group):
    """Stock DDP over the data axis, TP over the other: the gradient of the whole batch."""
    mesh = grid()
    reference = tiny("qwen3")
    inputs = batch(reference, rows=4)
    reference.train()(**inputs).loss.backward()
    model = autotp.parallelize(tiny("qwen3"), mesh["tp"]).train()
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    mine = {name: value.chunk(2)[mesh["dp"].get_local_rank()] for name, value in inputs.items()}
    wrapped(**mine).loss.backward()
    for name, grad in full_gradients(model).items():
        torch.testing.assert_close(grad, reference.get_parameter(name).grad, rtol=1e-4, atol=1e-6, msg=name)


def test_ddp_over_the_data_axis(ranks):
    ranks.run(check_data_parallel, size=4)


def check_generation(group):
    reference = tiny("llama", num_attention_heads=9, num_key_value_heads=3, hidden_size=72)
    model = autotp.parallelize(copy.deepcopy(reference), group)
    ids = batch(reference)["input_ids"]
    kwargs = dict(max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids))
    assert torch.equal(model.generate(ids, **kwargs), reference.generate(ids, **kwargs))
    return model.model.layers[0].self_attn.k_proj.weight.shape[0]


@pytest.mark.parametrize("size", [2, 3])
def test_generate_with_a_cache(ranks, size):
    assert sum(ranks.run(check_generation, size=size)) == 24


# -- refusals, before anything changes ----------------------------------------------------------------------------------

UP_DOWN = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}
PAIR = {"model.layers.*.mlp.gate_proj": "colwise", **UP_DOWN}
BAD = {
    "matches nothing": ({"plan": {**PAIR, "model.layers.*.mlp.upproj": "colwise"}}, ["model.layers.*.mlp.up_proj"]),
    "unknown style": ({"plan": {"model.layers.*.mlp.up_proj": "columwise"}}, ["'columwise'", "colwise"]),
    "half a column pair": ({"plan": {"model.layers.*.mlp.up_proj": "colwise"}}, ["half a pair", "mlp.up_proj", "rowwise"]),
    "half a row pair": ({"plan": {"model.layers.*.mlp.down_proj": "rowwise"}}, ["half a pair", "mlp.down_proj"]),
    "a sibling is missing": ({"plan": UP_DOWN}, ["does not compute", "sibling"]),
    "unit": ({"plan": {k: {"style": v, "unit": 64} for k, v in PAIR.items()}}, ["96", "unit of 64"]),
    "unknown key": ({"plan": {"model.layers.*.mlp.up_proj": {"style": "colwise", "units": 2}}}, ["'units'"]),
    "no such mode": ({"sequence_parallel": "always"}, ["sequence_parallel", "'auto'"]),
    "no precision": ({"precision": "fp4"}, ["precision", "fp4"]),
    "logits": ({"logits": "none"}, ["logits"]),
    "head": ({"head": "half"}, ["head"]),
    "plan word": ({"plan": "automatic"}, ["automatic"]),
}


def check_refused(group, kwargs, words):
    model = tiny("llama")
    before = snapshot(model)
    message = refusal(autotp.parallelize, model, group, **kwargs)
    assert all(word in message for word in words), message
    assert find_group(model) is None and all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    model = autotp.parallelize(model, group)  # still possible
    torch.testing.assert_close(model(**batch(model)).logits, tiny("llama")(**batch(model)).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", list(BAD))
def test_is_refused_before_anything_changes(ranks, case):
    ranks.run(check_refused, *BAD[case])


def check_heads(group):
    model = tiny("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    assert "2 unit(s)" in refusal(autotp.parallelize, model, group, plan="hf")


def test_more_ranks_than_kv_heads_is_refused_with_the_numbers(ranks):
    """A Hugging Face plan can't say that ranks hold copies; a discovered one can."""
    ranks.run(check_heads, size=3)


def check_differing(group):
    rank = dist.get_rank(group)
    model = tiny("llama", seed=rank)
    assert "other weights" in refusal(autotp.parallelize, model, group)
    same = tiny("llama")
    plan = "auto" if rank == 0 else PAIR
    assert "other plan= arguments" in refusal(autotp.parallelize, same, group, plan=plan)
    bad = "auto" if rank == 0 else {"nowhere": "colwise"}
    message = refusal(autotp.parallelize, same, group, plan=bad)
    assert "nowhere" in message, message
    from autotp.inject import checks

    real = checks.read_versions
    checks.read_versions = lambda: {**real(), "torch": f"2.{rank}"}
    try:
        assert "library versions" in refusal(autotp.parallelize, same, group)
    finally:
        checks.read_versions = real
    autotp.parallelize(same, group)
    assert "already" in refusal(autotp.parallelize, same, group)


def test_ranks_that_differ_are_named(ranks):
    ranks.run(check_differing)


def test_no_group_and_no_torchrun_is_one_readable_line():
    with pytest.raises(autotp.AutoTPError, match="torchrun"):
        autotp.parallelize(tiny("llama"))


def check_broken(group):
    from autotp.inject import rewrite

    model = tiny("llama")
    real, rewrite.finish_rewrite = rewrite.finish_rewrite, None
    try:
        autotp.parallelize(model, group)
    except TypeError:
        pass
    finally:
        rewrite.finish_rewrite = real
    assert "half way" in refusal(autotp.parallelize, model, group)
    assert "half way" in refusal(model, **batch(model))


def test_a_fault_after_the_first_change_marks_the_model_broken(ranks):
    ranks.run(check_broken)


# -- other layouts through the caller's dict ----------------------------------------------------------------------------


def check_plan(group, family, plan, overrides):
    reference = tiny(family, **overrides)
    model = autotp.parallelize(copy.deepcopy(reference), group, plan=plan)
    logits, grads = run_once(reference, batch(reference))
    got, _ = run_once(model, batch(reference))
    torch.testing.assert_close(got, logits, rtol=1e-5, atol=2e-5)
    for name, grad in full_gradients(model).items():
        torch.testing.assert_close(grad, grads[name], rtol=1e-3, atol=1e-5 * max(1.0, float(grads[name].abs().max())), msg=name)
    whole = autotp.full_state_dict(model)
    if dist.get_rank(group) == 0:
        assert all(torch.equal(whole[name], value) for name, value in reference.state_dict().items())
    return model.__dict__["autotp_plan"].split_share


GPT2 = {
    "transformer.h.*.attn.c_attn": {"style": "colwise", "parts": 3, "unit": 8},
    "transformer.h.*.attn.c_proj": {"style": "rowwise", "unit": 8},
    "transformer.h.*.attn": {"attrs": {"split_size": [32, 32], "num_heads": [4, 4]}},
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
}
PHI3 = {"layers.*.mlp.gate_up_proj": {"style": "packed_colwise"}, "layers.*.mlp.down_proj": "rowwise"}


@pytest.mark.parametrize(
    "family, plan, overrides, least",
    [
        ("gpt2", GPT2, {"n_embd": 64, "n_layer": 2, "n_head": 8, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, 0.5),
        ("phi3", PHI3, {}, 0.4),
        ("llama", {"model.embed_tokens": "embedding_colwise", **PAIR}, {}, 0.3),
        ("llama", {**PAIR, "lm_head": "colwise_gather_output"}, {}, 0.3),
        ("gpt_oss", "hf", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}, 0.1),
        (
            "deepseek_v3",
            "hf",
            dict(
                q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4,
                num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32, first_k_dense_replace=1,
                num_key_value_heads=8,
            ),
            0.1,
        ),
        ("qwen3_moe", "hf", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, 0.1),
    ],
)  # fmt: skip
def test_other_layouts_and_what_is_not_built(ranks, family, plan, overrides, least):
    shares = ranks.run(check_plan, family, plan, overrides)
    assert shares[0] > least
