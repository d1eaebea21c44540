"""peft's adapters on parallelized models, beside the same adapters on the unsharded ones."""

import copy
import importlib
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file
from torch import nn

import autotp
from autotp.errors import AutoTPError
from autotp.layers.base import sharded_modules
from autotp.layers.token_modules import TokenModule, find_wrapped
from tests.models import batch, tiny

peft = pytest.importorskip("peft")

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOLERANCE = 1e-5


def add(model: Any, seed=0, adapter="default", **options) -> Any:
    """`model` with a LoRA adapter of random values, B's and magnitudes' too; the values are the same for every rank count."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": LINEARS, "task_type": "CAUSAL_LM", **options})
    if isinstance(model, peft.PeftModel):
        model.add_adapter(adapter, config)
    else:
        model = peft.get_peft_model(model, config, adapter)
    return model


def whole_state(model):
    """What a plain model would have: `{name: tensor}` on every rank."""
    group = autotp.layers.base.find_group(model)
    return group.broadcast_object(autotp.full_state_dict(model)) if group else model.state_dict()


def stir(model, plain):
    """Small random numbers added to what is trained, alike in both."""
    torch.manual_seed(5)
    state, trained = whole_state(model), [name for name, p in plain.named_parameters() if p.requires_grad]
    with torch.no_grad():
        for name in trained:
            own = dict(plain.named_parameters())[name]
            torch.testing.assert_close(state[name], own, msg=lambda text, name=name: f"{name} as it was made: {text}")
            own.add_(torch.randn_like(own) * 0.05)
    group = autotp.layers.base.find_group(model)
    autotp.load_full_state_dict(model, plain.state_dict() if group.tp_rank == 0 else None)


def train(model, inputs, steps=2):
    """Losses of AdamW steps with clipping, in two micro-batches each."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, eps=1e-3, weight_decay=0.1)
    losses, norms = [], []
    for _ in range(steps):
        for part in (slice(0, 1), slice(1, 2)):
            loss = model(**{key: value[part] for key, value in inputs.items()}).loss / 2
            loss.backward()
            losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return losses + norms


def compare_gradients(model, plain, inputs):
    """This rank's part of every gradient; an error may be 1e-4 of the parameter's largest entry, 1e-7 of the largest of all."""
    shards = {f"{n}.{p}": (m.tp.tp_rank, s) for n, m in sharded_modules(model) for p, s in m.shards.items()}
    for each in (model, plain):
        each.train()(**inputs).loss.backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    mine = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(mine) == set(expected)
    largest = max(grad.abs().max().item() for grad in expected.values())
    for name, grad in expected.items():
        rank, shard = shards.get(name, (0, None))
        error = (mine[name] - (grad if shard is None else shard.split(grad, rank))).abs().max().item()
        assert error <= 1e-4 * grad.abs().max().item() + 1e-7 * largest, (name, error, grad.abs().max().item())
    for each in (model, plain):
        each.zero_grad()


def compare(model, plain, inputs):
    compare_gradients(model, plain, inputs)
    torch.testing.assert_close(train(model, inputs), train(plain, inputs), rtol=1e-4, atol=TOLERANCE)
    state = whole_state(model)
    assert set(state) == set(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


def make(group, family="llama", before=False, plan="auto", sequence_parallel=False, model_options=(), **options) -> Any:
    """`(the sharded model with an adapter, the unsharded one, a batch)`."""
    plain = tiny(family, **dict(model_options))
    inputs = batch(plain)
    model = copy.deepcopy(plain)
    if before:
        model = autotp.parallelize(add(model, **options), group, sequence_parallel=sequence_parallel, plan=plan)
    else:
        model = add(autotp.parallelize(model, group, sequence_parallel=sequence_parallel, plan=plan), **options)
    plain = add(plain, **options)
    stir(model, plain)
    return model, plain, inputs


def check_scatters(model):
    """No adapter makes the module around it sum whole rows, of which it would deal each rank its own."""
    for module in model.modules():
        if isinstance(module, TokenModule):
            names = (*module.autotp_tokens.scatters, *module.autotp_tokens.inside)
            around = find_wrapped(module, module.autotp_tokens, names).values()
            assert not any(isinstance(each, peft.tuners.lora.LoraLayer) for each in around), module.full_name


def run_trains(group, family, options):
    model, plain, inputs = make(group, family, **options)
    if options.get("sequence_parallel"):
        assert any(isinstance(module, TokenModule) for module in model.modules())
        check_scatters(model)
    compare(model, plain, inputs)
    if options.get("sequence_parallel"):
        autotp.unshard(model.get_base_model())
        agree(model, plain, inputs)


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
THIRDS = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4,
    "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 32,
    "num_key_value_heads": 8,
}  # fmt: skip
EXPERTS = {"target_modules": ["q_proj", "gate"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
ENDS = {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "model_options": {"tie_word_embeddings": False}}
OPT = {"do_layer_norm_before": True, "dropout": 0.0, "attention_dropout": 0.0}
CASES = {
    "all linears, their biases": (
        "llama",
        2,
        {"target_modules": "all-linear", "bias": "all", "use_rslora": True, "alpha_pattern": {"q_proj": 3}},
    ),
    "packed, 3 ranks": ("phi3", 3, {"target_modules": "all-linear", "before": True, "model_options": THIRDS}),
    "Conv1D, biases of its own": (
        "gpt2",
        2,
        {"target_modules": ["c_attn", "c_proj", "c_fc"], "lora_bias": True, "model_options": GPT2},
    ),
    "embedding and head": ("llama", 2, ENDS),
    "DoRA, behind dropout": ("qwen2", 2, {"use_dora": True, "lora_dropout": 1e-12}),
    "DoRA, before, 3 ranks": ("llama", 3, {"use_dora": True, "before": True, "model_options": {**THIRDS, "head_dim": 8}}),
    "drawn from the weights": ("llama", 2, {"init_lora_weights": "pissa"}),
    "dealt tokens": ("llama", 2, {"sequence_parallel": True, "use_dora": True}),
    "dealt tokens, copies, before": (
        "llama",
        2,
        {
            "sequence_parallel": True,
            "before": True,
            "target_modules": ["q_proj", "o_proj"],
            "modules_to_save": ["input_layernorm", "down_proj", "lm_head"],
        },
    ),
    "dealt tokens, rows of the layer itself": (
        "opt",
        2,
        {"sequence_parallel": True, "target_modules": ["q_proj", "out_proj", "fc2"], "lora_bias": True, "model_options": OPT},
    ),
    "stacked experts": ("mixtral", 2, EXPERTS),
    "stacked experts, before": ("mixtral", 2, {**EXPERTS, "before": True}),
    "columns that enter": ("deepseek_v3", 2, {"target_modules": "all-linear", "model_options": LATENT}),
    "entered at itself": ("falcon", 2, {"target_modules": ["query_key_value"]}),
}


@pytest.mark.parametrize(("family", "size", "options"), CASES.values(), ids=CASES)
def test_trains_as_unsharded(ranks, family, size, options):
    ranks.run(run_trains, family, options, size=size)


def logits(model, inputs):
    with torch.no_grad():
        return model.eval()(inputs["input_ids"]).logits


def agree(model, plain, inputs):
    torch.testing.assert_close(logits(model, inputs), logits(plain, inputs), rtol=1e-4, atol=1e-4)


def run_goes_around(group, directory, family, options):
    """Saved, loaded elsewhere and here, merged; several adapters; generation."""
    rank = torch.distributed.get_rank(group)
    model, plain, inputs = make(group, family, **options)
    model.save_pretrained(f"{directory}/ours")
    if rank == 0:
        plain.save_pretrained(f"{directory}/plain")
    group_of = autotp.layers.base.find_group(model)
    group_of.arrive("saved")
    ours, theirs = (load_file(f"{directory}/{name}/adapter_model.safetensors") for name in ("ours", "plain"))
    assert set(ours) == set(theirs)
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=0, msg=lambda text, key=key: f"{key}: {text}")
    again = peft.PeftModel.from_pretrained(tiny(family, **dict(options.get("model_options", ()))), f"{directory}/ours")
    agree(again, plain, inputs)

    base = autotp.parallelize(tiny(family, **dict(options.get("model_options", ()))), group)
    loaded = peft.PeftModel.from_pretrained(base, f"{directory}/plain", is_trainable=True)
    agree(loaded, plain, inputs)
    with loaded.disable_adapter(), plain.disable_adapter():
        agree(loaded, plain, inputs)
    other = {**options, "r": 3, "seed": 9, "adapter": "other"}
    other.pop("model_options", None)
    loaded, plain = add(loaded, **other), add(plain, **other)
    for each in (loaded, plain):
        each.set_adapter("other")
    stir(loaded, plain)
    agree(loaded, plain, inputs)
    compare_gradients(loaded, plain, inputs)
    loaded.save_pretrained(f"{directory}/two", selected_adapters=["other"])
    loaded.load_adapter(f"{directory}/two/other", "third", low_cpu_mem_usage=True)
    for each, name in ((loaded, "third"), (plain, "other")):
        each.set_adapter(name)
    agree(loaded, plain, inputs)
    loaded.delete_adapter("third")
    loaded.set_adapter("default")
    plain.set_adapter("default")
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    # Two DoRA adapters don't merge in peft 0.20.
    both = not options.get("modules_to_save") and not (options.get("use_dora") and Version(peft.__version__) < Version("0.21"))
    for each in (loaded, plain):
        each.base_model.set_adapter(["default", "other"]) if both else None
    tokens = [each.eval().generate(inputs["input_ids"], **settings) for each in (loaded, plain)]
    assert torch.equal(*tokens)
    loaded.merge_adapter()
    agree(loaded, plain, inputs)
    loaded.unmerge_adapter()
    agree(loaded, plain, inputs)
    merged, expected = loaded.merge_and_unload(), plain.merge_and_unload()
    state = whole_state(merged)
    assert set(state) == set(expected.state_dict())
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    agree(merged, expected, inputs)
    autotp.unshard(merged)
    agree(merged, expected, inputs)


AROUND = {
    "LoRA and copies": ("llama", {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "Conv1D": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "model_options": GPT2}),
    "DoRA": ("qwen2", {"use_dora": True}),
    "stacked experts": ("mixtral", {**EXPERTS, "target_modules": ["q_proj"]}),
}


@pytest.mark.parametrize(("family", "options"), AROUND.values(), ids=AROUND)
def test_goes_around(ranks, tmp_path, family, options):
    ranks.run(run_goes_around, str(tmp_path), family, options)


def run_refuses(group):
    """What has no dealt form is refused, and the model is as it was."""
    plain = tiny(tie_word_embeddings=False)
    inputs, model = batch(plain), autotp.parallelize(copy.deepcopy(plain), group)
    rank = torch.distributed.get_rank(group)
    refused = [
        (peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "IA3Model"),
        (peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1]), "trainable_token_indices"),
        (peft.LoraConfig(target_modules=["q_proj"], init_lora_weights="corda"), "corda"),
        (peft.LoraConfig(target_modules=["q_proj", "embed_tokens"], use_dora=True), "embed_tokens"),
        (peft.LoraConfig(target_modules=["q_proj", "lm_head"], use_dora=True), "lm_head"),
        (peft.LoraConfig(target_modules=["q_proj"], r=2 + rank), r"TP rank\(s\) \[1\]"),
    ]
    names = [name for name, _ in model.named_modules()]
    for config, text in refused:
        with pytest.raises(AutoTPError, match=text):
            peft.get_peft_model(model, config)
        assert [name for name, _ in model.named_modules()] == names
    agree(model, plain, inputs)
    agree(add(model), plain, inputs)
    with pytest.raises(AutoTPError, match="IA3"):
        autotp.parallelize(peft.get_peft_model(tiny(), refused[0][0]), group)
    quantised = tiny()
    quantised.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.zeros(96, 64, dtype=torch.int8), requires_grad=False)
    with pytest.raises(AutoTPError, match=r"layers\.0\.mlp\.up_proj\.weight.*autotp\.quantize"):
        autotp.parallelize(quantised, group)


def test_what_has_no_form_is_refused(ranks):
    ranks.run(run_refuses)


def run_drops(group):
    """Dropout before a column linear's adapter is alike on all ranks, before a row's each rank's own; generators end alike."""
    model: Any = add(autotp.parallelize(tiny(), group), lora_dropout=0.5).train()
    layer = model.base_model.model.model.layers[0]
    drops = [part.lora_dropout["default"] for part in (layer.self_attn.q_proj, layer.self_attn.o_proj)]
    torch.manual_seed(3)
    masks = [drop(torch.ones(64, 64)) for drop in drops]
    return [mask.tolist() for mask in masks], torch.get_rng_state().tolist()


def test_dropout_is_drawn_where_it_stands(ranks):
    (one, state), (two, other) = ranks.run(run_drops)
    assert one[0] == two[0] and one[1] != two[1] and state == other


def run_quantised(group):
    """Each rank quantises its parts: the model is the one whose weights are the parts' values, joined."""
    quantization: Any = importlib.import_module("torchao.quantization")

    plain: Any = tiny()
    inputs, model = batch(plain), autotp.parallelize(copy.deepcopy(plain), group)
    layers: Any = dict(model.model.layers.named_modules())
    quantization.quantize_(
        model.model.layers, quantization.Int8WeightOnlyConfig(), filter_fn=lambda module, name: isinstance(module, nn.Linear)
    )
    for name, module in plain.model.layers.named_modules():
        if isinstance(module, nn.Linear):
            part: Any = layers[name]
            module.weight.data = part.tp.all_gather(part.weight.dequantize(), part.shards["weight"])
    agree(model, plain, inputs)
    model, plain = add(model), add(plain)
    compare_gradients(model, plain, inputs)
    torch.testing.assert_close(train(model, inputs), train(plain, inputs), rtol=1e-4, atol=TOLERANCE)


def test_quantised_after_parallelize(ranks):
    pytest.importorskip("torchao")
    ranks.run(run_quantised)
