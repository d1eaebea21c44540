"""Quantised base weights, each rank its parts, by the libraries themselves: beside a model of the values that they stand for."""

import copy
import warnings
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import autotp
from autotp.errors import AutoTPError, CheckpointError, PlanError
from autotp.generation.fingerprint import Fingerprint
from autotp.layers.packed import Packed
from tests.layers.test_adapters import LATENT, LINEARS, OPT, add, compare_gradients, train
from tests.models import batch, tiny

peft = pytest.importorskip("peft")
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 16}


def make_config(kind: str, **options) -> Any:
    if kind in ("nf4", "fp4"):
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, **options)
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, **options)
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup
    from transformers import TorchAoConfig

    if kind == "torchao int8":
        return TorchAoConfig(Int8WeightOnlyConfig(), **options)
    return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)), **options)


def need(kind):
    pytest.importorskip("torchao" if kind.startswith("torchao") else "bitsandbytes")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny("llama", **SIZES).save_pretrained(path)
    return str(path)


def packed_of(model) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Packed)}


def stand_for(model, plain):
    """`plain` with the values that the quantised weights of `model` stand for, joined from all ranks."""
    own = dict(plain.named_modules())
    for name, module in packed_of(model).items():
        values = module.unpack().to(module.plain[0])
        shards = getattr(module, "shards", {})
        own[name].weight.data = module.tp.all_gather(values, shards["weight"]) if "weight" in shards else values
    return plain


def read(path, group, kind, **options) -> Any:
    return autotp.from_pretrained(path, group, quantization_config=make_config(kind, **options))


def adapted(path, group, kind, **options) -> Any:
    """`(quantised over the ranks, unsharded of the same values)`, both with the same adapter, whose B is not zero."""
    model = read(path, group, kind)
    plain = stand_for(model, AutoModelForCausalLM.from_pretrained(path))
    model, plain = add(model, **options), add(plain, **options)
    torch.manual_seed(5)
    state = {n: torch.randn_like(p) * 0.1 for n, p in plain.named_parameters() if "lora_" in n}
    for each in (model, plain):
        each.load_state_dict(state, strict=False)
    return model, plain


def agree(model, plain, tolerance=2e-5):
    inputs = batch(plain)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(**inputs).logits, plain.eval()(**inputs).logits, rtol=0, atol=tolerance)


def run_reads(group, path, kind, tolerance):
    model = read(path, group, kind)
    names = {name.rpartition(".")[2] for name in packed_of(model)}
    assert names == set(LINEARS) and set(model.state_dict()) == set(tiny("llama", **SIZES).state_dict())
    plain = stand_for(model, AutoModelForCausalLM.from_pretrained(path))
    agree(model, plain, tolerance)
    if tolerance < 1e-3:
        prompt, settings = batch(plain)["input_ids"][:, :5], {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        assert torch.equal(model.generate(prompt, **settings), plain.generate(prompt, **settings))


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8", "torchao int8", "torchao int4"])
def test_reads(ranks, saved, kind):
    need(kind)
    # LLM.int8() rounds inputs, too.
    ranks.run(run_reads, saved, kind, 0.2 if kind == "int8" else 2e-5)


def run_equals_whole(group, path, kind):
    """Blocks that lie within a rank's rows and columns are the unsharded model's, bit for bit."""
    model, whole = read(path, group, kind), AutoModelForCausalLM.from_pretrained(path, quantization_config=make_config(kind))
    plain = stand_for(model, AutoModelForCausalLM.from_pretrained(path))
    for name in packed_of(model):
        unpacked = peft.utils.integrations.dequantize_module_weight(whole.get_submodule(name))
        assert torch.equal(plain.get_submodule(name).weight, unpacked.float()), name


@pytest.mark.parametrize("kind", ["nf4", "torchao int4"])
def test_aligned_blocks_are_those_of_the_whole(ranks, saved, kind):
    need(kind)
    ranks.run(run_equals_whole, saved, kind)


def run_trains(group, path, kind):
    model, plain = adapted(path, group, kind)
    inputs = batch(plain)
    compare_gradients(model, plain, inputs)
    torch.testing.assert_close(train(model, inputs), train(plain, inputs), rtol=1e-4, atol=1e-5)
    agree(model, plain)


@pytest.mark.parametrize("kind", ["nf4", "torchao int8", "torchao int4"])
def test_adapters_train(ranks, saved, kind):
    need(kind)
    ranks.run(run_trains, saved, kind)


def run_trains_in_place(group, family, options, sizes, targets):
    """Other families, quantised after they were parallelized; a quantised whole linear beside sharded ones in some."""
    plain: Any = tiny(family, **sizes)
    model = autotp.parallelize(copy.deepcopy(plain), group, **options)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    autotp.quantize(model, make_config("nf4"))
    moved = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.data_ptr() != before[name]}
    assert moved == set(packed_of(model))
    plain = stand_for(model, plain)
    inputs = batch(plain)
    agree(model, plain)
    model, plain = (add(each, target_modules=targets, bias="lora_only") for each in (model, plain))
    compare_gradients(model, plain, inputs)
    torch.testing.assert_close(train(model, inputs), train(plain, inputs), rtol=1e-4, atol=1e-5)


FAMILIES = {
    "dealt tokens": ("llama", {"sequence_parallel": True}, {}, "all-linear"),
    "biases": ("qwen2", {}, {}, "all-linear"),
    "packed": ("gpt_neox", {}, {}, "all-linear"),
    "row biases": ("phi", {}, {}, "all-linear"),
    "columns that enter": ("deepseek_v3", {}, LATENT, "all-linear"),
    "rows of the layer itself": ("opt", {"sequence_parallel": True}, OPT, ["q_proj", "out_proj", "fc2"]),
}


@pytest.mark.parametrize("case", FAMILIES)
def test_families_in_place(ranks, case):
    need("nf4")
    ranks.run(run_trains_in_place, *FAMILIES[case])


def run_round(group, path, directory, kind):
    """An adapter saved here loads in plain peft, on a model that was quantised whole, and here again."""
    model, plain = adapted(path, group, kind)
    model.save_pretrained(directory)
    whole = AutoModelForCausalLM.from_pretrained(path, quantization_config=make_config(kind))
    whole = peft.PeftModel.from_pretrained(whole, directory).train()  # bitsandbytes rounds more where nothing is trained
    inputs = batch(plain)
    with plain.disable_adapter():
        base = plain(**inputs).logits
    got, want = whole(**inputs).logits, plain(**inputs).logits
    # Scales of whole rows of inputs are not those of their parts; the adapter makes more of a difference.
    assert (got - want).norm() <= (1e-5 if kind == "nf4" else 0.05) * (want - base).norm()
    agree(peft.PeftModel.from_pretrained(read(path, group, kind), directory), plain)


@pytest.mark.parametrize("kind", ["nf4", "torchao int8"])
def test_saved_adapters_load_anywhere(ranks, saved, tmp_path, kind):
    need(kind)
    ranks.run(run_round, saved, str(tmp_path / "adapter"), kind)


def run_merges(group, path, directory, kind):
    """peft merges into quantised weights; dequantized, the model saves, gathers and unshards as any does."""
    model, plain = adapted(path, group, kind)
    with pytest.raises(AutoTPError, match="merge_and_unload"):
        autotp.dequantize(model)
    base, before = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer, copy.deepcopy(model)
    seen = Fingerprint(base)
    assert seen.holds(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, about rounding
        model.merge_adapter()
        assert not seen.holds(base)  # what was captured of it reads other memory
        model = before.merge_and_unload()
    merged = stand_for(model, AutoModelForCausalLM.from_pretrained(path))
    tolerance = 0.2 if kind == "int8" else 2e-5  # LLM.int8() rounds inputs, too
    agree(model, merged, tolerance)
    distance = merged.model.layers[1].mlp.down_proj.weight - plain.merge_and_unload().model.layers[1].mlp.down_proj.weight
    assert distance.abs().mean() < 0.02
    for use in (autotp.unshard, autotp.full_state_dict, lambda each: autotp.save_pretrained(each, directory)):
        with pytest.raises(AutoTPError, match="autotp\\.dequantize"):
            use(model)
    assert autotp.dequantize(model) is model and not packed_of(model) and not getattr(model, "is_quantized", False)
    agree(model, merged)
    assert model.model.layers[0].mlp.up_proj.weight.requires_grad  # as when it was quantised
    autotp.save_pretrained(model, directory)
    agree(model, AutoModelForCausalLM.from_pretrained(directory))
    agree(autotp.unshard(model), merged)


@pytest.mark.parametrize("kind", ["nf4", "int8", "torchao int8"])
def test_merged_and_dequantized(ranks, saved, tmp_path, kind):
    need(kind)
    ranks.run(run_merges, saved, str(tmp_path / "merged"), kind)


def run_prepares(group, path):
    """peft's preparation (norms and head in float32, checkpointing) and generating between steps; a copy goes its own way."""
    model = read(path, group, "nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="bfloat16")
    before = copy.deepcopy(model)
    model = peft.prepare_model_for_kbit_training(model)
    model = add(model, target_modules="all-linear")
    assert all(
        isinstance(m, peft.tuners.lora.bnb.Linear4bit) for m in model.modules() if isinstance(m, peft.tuners.lora.LoraLayer)
    )
    inputs = batch(before)
    losses = train(model, inputs, steps=4)[:-4]
    assert losses[-1] < losses[0]
    tokens = model.generate(input_ids=inputs["input_ids"][:, :4], max_new_tokens=3, do_sample=False)
    train(model, inputs)
    agree(before, stand_for(before, AutoModelForCausalLM.from_pretrained(path)), 0.1)
    return losses, tokens.tolist()


def test_prepared_for_training(ranks, saved):
    need("nf4")
    one, two = ranks.run(run_prepares, saved)
    assert one == two


def run_moves(group, path, kind):
    """Scripts call model.to(device) though it is there; a dtype changes what is plain."""
    model = read(path, group, kind)
    plain = stand_for(model, AutoModelForCausalLM.from_pretrained(path))
    agree(model.to("cpu"), plain)
    model, plain = add(model), add(plain)
    agree(model.to("cpu"), plain)
    compare_gradients(model, plain, batch(plain))
    if kind != "torchao int4":  # whose weights multiply in the dtype that they had
        agree(model.to(torch.bfloat16).float(), plain, 0.2)


@pytest.mark.parametrize("kind", ["nf4", "torchao int8", "torchao int4"])
def test_models_are_moved(ranks, saved, kind):
    need(kind)
    ranks.run(run_moves, saved, kind)


def run_resizes(group, path, kind):
    """Embeddings and head are plain: a vocabulary grows before the adapter comes, and shrinks beside it."""
    model = read(path, group, kind)
    plain = stand_for(model, AutoModelForCausalLM.from_pretrained(path))
    inputs = batch(plain)
    for rows in (140, 133):
        for each in (model, plain):
            torch.manual_seed(3)
            getattr(each, "get_base_model", lambda each=each: each)().resize_token_embeddings(rows, mean_resizing=False)
        agree(model, plain)
        assert model.config.vocab_size == rows
        if rows == 140:
            model, plain = (add(each, target_modules="all-linear") for each in (model, plain))
            compare_gradients(model, plain, inputs)


@pytest.mark.parametrize("kind", ["nf4", "torchao int8"])
def test_vocabularies_are_resized(ranks, saved, kind):
    need(kind)
    ranks.run(run_resizes, saved, kind)


def run_refuses(group, path):
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import GPTQConfig, TorchAoConfig

    plain: Any = tiny("llama")  # 64 inputs of o_proj, 96 of down_proj: 32 and 48 a rank
    model = autotp.parallelize(copy.deepcopy(plain), group)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    nf4 = make_config("nf4")
    refused = {
        r"down_proj: 48 inputs of 96 on TP rank 0 of 2 are no multiple of 32": make_config("torchao int4"),
        r"is a GPTQConfig: give a BitsAndBytesConfig": GPTQConfig(4),
        r"sets llm_int8_has_fp16_weight": make_config("int8", llm_int8_has_fp16_weight=True),
        r"sets include_input_output_embeddings": TorchAoConfig(Int8WeightOnlyConfig(), include_input_output_embeddings=True),
        r"other quantization_config= arguments": nf4 if torch.distributed.get_rank(group) else make_config("fp4"),
        r"no nn.Linear that could be quantised": make_config("nf4", llm_int8_skip_modules=["model.layers", "lm_head"]),
    }
    for message, config in refused.items():
        with pytest.raises(AutoTPError, match=message):
            autotp.quantize(model, config)
    with pytest.raises(PlanError, match="not parallelized"):
        autotp.quantize(plain, nf4)
    with pytest.raises(PlanError, match="nothing of this LlamaForCausalLM is quantised"):
        autotp.dequantize(model)
    with pytest.raises(PlanError, match="adapters already: quantize it first"):
        autotp.quantize(add(copy.deepcopy(model)), nf4)
    with pytest.raises(AutoTPError, match="precision= and quantization_config="):
        autotp.from_pretrained(path, group, quantization_config=nf4, precision="fp8")
    assert before == {name: p.data_ptr() for name, p in model.named_parameters()}
    autotp.quantize(model, nf4)
    state = {name: value for name, value in plain.state_dict().items() if "q_proj" in name}
    uses = {
        "quantize": lambda: autotp.quantize(model, nf4),
        "load_state_dict": lambda: model.load_state_dict(state, strict=False),
        "load_full_state_dict": lambda: autotp.load_full_state_dict(model, plain.state_dict()),
        "DoRA": lambda: add(model, use_dora=True),
        "weights read by an adapter": lambda: add(model, init_lora_weights="pissa"),
    }
    for use in uses.values():
        with pytest.raises(AutoTPError, match="the weights are quantised, and what they were is gone"):
            use()
    agree(model, stand_for(model, plain))


def test_what_does_not_fit_is_refused(ranks, saved):
    need("nf4")
    need("torchao")
    ranks.run(run_refuses, saved)


def run_counts(group, path, kind):
    """As transformers counts the unsharded model, however a format packs its values."""
    whole, model = AutoModelForCausalLM.from_pretrained(path, quantization_config=make_config(kind)), read(path, group, kind)
    for options in ({}, {"only_trainable": True}, {"exclude_embeddings": True}):
        assert model.num_parameters(**options) == whole.num_parameters(**options)


@pytest.mark.parametrize("kind", ["nf4", "int8", "torchao int8"])
def test_parameters_are_counted(ranks, saved, kind):
    need(kind)
    ranks.run(run_counts, saved, kind)


def run_says(group):
    """Experts that are stacked in one Parameter are no linears; what was asked to stay is not told."""
    model = autotp.parallelize(tiny("mixtral", num_local_experts=4), group)
    for config, told in ((make_config("nf4"), True), (make_config("nf4", llm_int8_skip_modules=["experts", "lm_head"]), False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            autotp.quantize(model, config)
        text = "4 stacks of experts' weights stay as they are, as they are no linears: model.layers.0.mlp.experts.gate_up_proj"
        assert any(text in str(each.message) for each in caught) is told
        assert not any("experts" in name for name in packed_of(model))
        autotp.dequantize(model)


def test_stacked_experts_are_told(ranks):
    need("nf4")
    ranks.run(run_says)


def run_dequantized(group, path):
    """What the errors name as ways out of a checkpoint that is quantised already."""
    with pytest.raises(CheckpointError, match=r"made from.*\.dequantize\(\)"):
        autotp.from_pretrained(path, group)
    whole = AutoModelForCausalLM.from_pretrained(path)
    with pytest.raises(PlanError, match=r"model\.dequantize\(\)"):
        autotp.parallelize(whole, group)
    plain = whole.dequantize()
    model = autotp.parallelize(copy.deepcopy(plain), group)
    agree(model, plain)
    autotp.quantize(model, make_config("nf4"))
    agree(model, stand_for(model, plain))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_checkpoint_that_is_quantised_is_made_plain_first(ranks, saved, tmp_path, kind):
    need(kind)
    AutoModelForCausalLM.from_pretrained(saved, quantization_config=make_config(kind)).save_pretrained(tmp_path)
    ranks.run(run_dequantized, str(tmp_path))


def run_needs_gradients(group, path):
    """A format that gives its input no gradient is refused where layers below would not train; it runs without."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig
    from transformers import TorchAoConfig

    config = TorchAoConfig(Int8DynamicActivationInt8WeightConfig())
    model = add(autotp.from_pretrained(path, group, quantization_config=config))
    with torch.no_grad():
        model(**batch(model.get_base_model()))
    with pytest.raises(AutoTPError, match="gives its input no gradient"):
        model(**batch(model.get_base_model()))


def test_formats_without_gradients_are_refused(ranks, saved):
    need("torchao")
    ranks.run(run_needs_gradients, saved)


def test_one_rank(ranks, saved):
    """A group of one quantises whole linears; the library's own class is theirs."""
    need("nf4")
    ranks.run(run_reads, saved, "nf4", 2e-5, size=1)


def run_goes_on(group, path, directory):
    """A training state holds the adapter and the optimizer, and no quantised weight: another run goes on from it."""
    rank = torch.distributed.get_rank(group)
    first, again = (add(read(path, group, "nf4")) for _ in range(2))
    inputs = batch(first.get_base_model())
    losses = []
    for turn, model in enumerate((first, again)):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        state = autotp.TrainingState(model, optimizer, dp=False)
        if turn:
            state.load(directory)
        for step in range(4):
            loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if not turn and step == 1:
                state.save(directory, 2)
    return losses if rank == 0 else None


def test_training_goes_on(ranks, saved, tmp_path):
    need("nf4")
    losses, _ = ranks.run(run_goes_on, saved, str(tmp_path / "state"))
    assert losses[4:6] == losses[2:4] != losses[:2]


def run_fp8_weights(group, path, directory):
    """Adapters beside weights that are kept in FP8: peft makes them in its dtype first."""

    def make():
        return autotp.from_pretrained(path, group, precision=autotp.Recipe("rowwise", weights_only=True, least=16))

    model = add(make())
    train(model, batch(model.get_base_model()))
    model.save_pretrained(directory)
    again = peft.PeftModel.from_pretrained(make(), directory)
    agree(again, model, 0)
    with again.disable_adapter(), pytest.raises(AssertionError):
        agree(again, model, 1e-4)


def test_adapters_of_fp8_weights_are_saved(ranks, saved, tmp_path):
    ranks.run(run_fp8_weights, saved, str(tmp_path / "adapter"))
