"""Which linears a plan multiplies in FP8, what it says of the others, and the way back."""

import copy

import pytest
import torch

import autotp
from autotp.comm import TPGroup
from autotp.errors import PlanError
from tests.models import batch, tiny

RECIPE = autotp.Recipe("rowwise", least=16)


def reasons(plan):
    return {product.name.removeprefix("model.layers."): (product.recipe, product.why) for product in plan.products}


def test_the_plan_says_which_and_why_not():
    model = tiny("llama", intermediate_size=48)
    plan = autotp.make_plan(model, 2, precision={"*": RECIPE, "layers.1.self_attn.o_proj": "bf16"})
    found = reasons(plan)
    assert found["0.self_attn.o_proj"] == (RECIPE, "") and found["1.self_attn.o_proj"] == (None, "as asked")
    assert found["lm_head"][0] is None and "first and last" in found["lm_head"][1]
    assert found["0.mlp.down_proj"][0] is None and "64 x 24" in found["0.mlp.down_proj"][1]
    assert found["0.mlp.gate_proj"][0] is None and found["0.self_attn.q_proj"] == (RECIPE, "")
    assert "FP8, rowwise" in str(plan) and "64 x 24" in str(plan)
    again = autotp.Plan.from_json(plan.to_json())
    assert again == plan and autotp.make_plan(model, 2, again) == plan
    small = reasons(autotp.make_plan(model, 2, precision="fp8"))
    assert "fewer than 256" in small["0.self_attn.o_proj"][1]
    apart = autotp.make_plan(model, 2, precision={"*": RECIPE, "*.k_proj": "bf16"})
    assert reasons(apart)["0.self_attn.q_proj"][0] is None and "k_proj" in reasons(apart)["0.self_attn.q_proj"][1]
    assert autotp.make_plan(model, 2).products == ()


@pytest.mark.parametrize("size", [1, 2])
def test_experts_are_listed_with_the_reason(size):
    model = tiny("mixtral")
    plan = autotp.make_plan(model, size, precision=RECIPE)
    found = reasons(plan)
    experts = {name for name, module in model.named_modules() if type(module).__name__ == "MixtralExperts"}
    assert {f"model.layers.{name}" for name, (_, why) in found.items() if "stacked experts" in why} == experts and experts
    assert all(found[name.removeprefix("model.layers.")][0] is None for name in experts) and "stacked experts" in str(plan)
    assert autotp.make_plan(model, size, autotp.Plan.from_json(plan.to_json())) == plan
    assert not any("experts" in name for name in reasons(autotp.make_plan(model, size, precision={"*.q_proj": "bf16"})))
    group = TPGroup(None, torch.device("cpu"))
    if size == 1:
        with torch.no_grad():
            assert autotp.parallelize(model, group, plan=plan)(**batch(model)).logits.isfinite().all()


@pytest.mark.parametrize("precision", ["fp4", {"*": 8}, {"*.no_such": "fp8"}, {"*.norm": "fp8"}])
def test_what_is_no_precision_is_refused(precision):
    model = tiny("llama")
    with pytest.raises(PlanError, match="precision="):
        autotp.make_plan(model, 2, precision=precision)
    with pytest.raises(PlanError, match="scaling"):
        autotp.Recipe("columnwise")


def test_one_rank_multiplies_in_fp8_and_is_plain_again():
    model = tiny("llama")
    inputs, before = batch(model), {name: p.clone() for name, p in model.state_dict().items()}
    with torch.no_grad():
        expected = model(**inputs).logits
        autotp.parallelize(model, TPGroup(None, torch.device("cpu")), precision=RECIPE)
        found = model(**inputs).logits
        difference = (found - expected).norm() / expected.norm()
        assert 1e-4 < difference < 0.2
        assert {name: tuple(p.shape) for name, p in model.state_dict().items()} == {n: tuple(p.shape) for n, p in before.items()}
        autotp.unshard(model)
        assert torch.equal(model(**inputs).logits, expected)


def stored_run(group, path, expected):
    """Logits of few and of many rows, and generated tokens, of weights that are kept in FP8."""
    recipe = autotp.Recipe("rowwise", least=16, weights_only=True)
    model = autotp.from_pretrained(path, group, precision=recipe)
    layer = model.model.layers[0].mlp.up_proj
    assert layer.weight.dtype is torch.float8_e4m3fn and layer.weight_scale.shape == (layer.weight.shape[0], 1)
    whole = autotp.make_plan(tiny("llama"), 2)
    for name in ("gate_proj", "down_proj"):
        weight = model.get_submodule(f"model.layers.1.mlp.{name}")
        full = whole.shards[f"model.layers.1.mlp.{name}.weight"].split(expected[name], model.autotp_group.tp_rank)
        assert ((weight.weight.float() * weight.weight_scale - full).abs() <= full.abs() / 15 + 1e-3).all()
    for use in (autotp.unshard, autotp.full_state_dict, lambda model: autotp.save_pretrained(model, path)):
        with pytest.raises(autotp.AutoTPError, match="fp8-weights"):
            use(model)
    state = model.state_dict()
    model.load_state_dict(state)
    wide = {name: value.float() if value.dtype is torch.float8_e4m3fn else value for name, value in state.items()}
    with pytest.raises(autotp.AutoTPError, match="float32: precision='fp8-weights'"):
        model.load_state_dict(wide)
    few, many = torch.arange(1, 9).view(1, 8), torch.arange(1, 41).view(2, 20)
    with torch.no_grad():
        found = [model(input_ids=ids, logits_to_keep=1).logits for ids in (few, many)]
    embedded = model.model.embed_tokens(few).detach().requires_grad_()
    model(inputs_embeds=embedded).logits.sum().backward()  # adapters train on such weights
    with pytest.raises(autotp.AutoTPError, match="without its scale"):
        copy.deepcopy(layer).bfloat16()(torch.zeros(1, 64, dtype=torch.bfloat16))
    return *found, model.generate(few, max_new_tokens=6, do_sample=False), embedded.grad


def test_weights_kept_in_fp8_alone(ranks, tmp_path):
    plain = tiny("llama").eval()
    plain.save_pretrained(tmp_path)
    mlp = plain.model.layers[1].mlp
    expected = {"gate_proj": mlp.gate_proj.weight.detach(), "down_proj": mlp.down_proj.weight.detach()}
    found = ranks.run(stored_run, str(tmp_path), expected)
    with torch.no_grad():
        for ids, logits in zip((torch.arange(1, 9).view(1, 8), torch.arange(1, 41).view(2, 20)), found[0][:2], strict=True):
            own = plain(input_ids=ids, logits_to_keep=1).logits
            assert (logits - own).norm() < 0.2 * own.norm()
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert found[0][2].shape == (1, 14) and found[0][3].any()
