"""fill_from_source: each rank's part of a checkpoint, bitwise, into a model on meta; faults before anything changes."""

import json
import os
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.initialization import no_init_weights

import autotp
from autotp.checkpoint.load import fill_from_source
from autotp.checkpoint.source import SINGLE_NAME, ModuleSource, SafetensorsSource
from autotp.comm import TPGroup
from autotp.errors import AutoTPError, CheckpointError
from autotp.inject.load import build_empty
from autotp.shard import Shard
from tests.jobs import run_job
from tests.layers.regions import Net, plan_of

CPU = torch.device("cpu")
SMALL = dict(hidden_size=16, intermediate_size=25, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


def config(**overrides) -> LlamaConfig:
    return LlamaConfig(**{**SMALL, "vocab_size": 37, **overrides})


def on_meta(settings: LlamaConfig) -> LlamaForCausalLM:
    """The model with its parameters on meta and its buffers real, as from_pretrained builds it."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False), no_init_weights():
        return LlamaForCausalLM(settings)


def cut_llama(model: nn.Module, tp_size: int) -> SimpleNamespace:
    """What `fill_from_source` needs of a plan: uneven cuts, the odd vocabulary's too."""
    shards = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.dim() == 2:
            dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
            shards[name] = Shard.even(tensor.shape, dim, tp_size)
    tied = (("model.embed_tokens.weight", "lm_head.weight"),) if model.config.tie_word_embeddings else ()
    return SimpleNamespace(shards=shards, tied=tied)


def check_filled(group, path, tied):
    """On each rank: every parameter is the rank's part of what the file holds, ties and requires_grad kept."""
    model = on_meta(config(tie_word_embeddings=tied))
    model.model.norm.weight.requires_grad_(False)
    plan, group = cut_llama(model, dist.get_world_size(group)), TPGroup(group, CPU)
    fill_from_source(model, plan, SafetensorsSource(path), group)
    stored = load_file(f"{path}/{SINGLE_NAME}")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    for name, value in model.state_dict(keep_vars=True).items():
        full = stored[name if name in stored else "model.embed_tokens.weight"]
        expected = plan.shards[name].split(full, group.tp_rank) if name in plan.shards else full
        assert isinstance(value, nn.Parameter) and not value.is_meta and torch.equal(value, expected), name
        assert value.is_contiguous() and value.requires_grad == (name != "model.norm.weight")
    return [tuple(model.lm_head.weight.shape), str(model.model.rotary_emb.inv_freq.device)]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_its_part(ranks, tmp_path, tied, size):
    LlamaForCausalLM(config(tie_word_embeddings=tied)).save_pretrained(tmp_path)
    shapes = ranks.run(check_filled, str(tmp_path), tied, size=size)
    assert [shape[0][0] for shape in shapes] == [19, 18] if size == 2 else [13, 12, 12]


def alone() -> TPGroup:
    return TPGroup(None, CPU)


def whole(tied=()) -> SimpleNamespace:
    return SimpleNamespace(shards={}, tied=tied)


def test_one_rank_is_the_plain_model(tmp_path):
    model = LlamaForCausalLM(config()).eval()
    model.save_pretrained(tmp_path)
    loaded = on_meta(config()).eval()
    fill_from_source(loaded, whole(), SafetensorsSource(tmp_path), alone())
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_from_a_module_in_memory():
    model, loaded = LlamaForCausalLM(config()), on_meta(config())
    fill_from_source(loaded, whole(), ModuleSource(model), alone())
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    assert loaded.lm_head.weight.data_ptr() != model.lm_head.weight.data_ptr()


def test_dtype_is_converted_while_reading(tmp_path):
    model = LlamaForCausalLM(config()).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    kept, halved = on_meta(config()), on_meta(config())
    halved._keep_in_fp32_modules_strict = {"norm"}
    fill_from_source(kept, whole(), SafetensorsSource(tmp_path), alone())
    fill_from_source(halved, whole(), SafetensorsSource(tmp_path), alone(), dtype=torch.bfloat16)
    assert kept.lm_head.weight.dtype == torch.float32 and torch.equal(kept.lm_head.weight, model.lm_head.weight.float())
    assert halved.lm_head.weight.dtype == torch.bfloat16 and torch.equal(halved.lm_head.weight, model.lm_head.weight)
    assert halved.model.norm.weight.dtype == torch.float32
    assert halved.model.layers[0].input_layernorm.weight.dtype == torch.bfloat16
    assert halved.model.rotary_emb.inv_freq.dtype == torch.float32


def test_what_transformers_keeps_in_float32_stays_there(tmp_path):
    settings = dict(d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=2, vocab_size=37)
    T5ForConditionalGeneration(T5Config(**settings)).save_pretrained(tmp_path)
    expected = T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
    with SafetensorsSource(tmp_path) as source:
        model = build_empty(source, torch.float16)
        fill_from_source(model, whole(), source, alone())
    assert model.shared.weight is model.encoder.embed_tokens.weight
    found = {name: value.dtype for name, value in model.state_dict().items()}
    assert found == {name: value.dtype for name, value in expected.state_dict().items()} and len({*found.values()}) == 2


class Buffered(nn.Module):
    """A parameter, a persistent buffer (one tensor under two names) and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.register_buffer("scale", torch.zeros(4))
        self.register_buffer("alias", self.scale)
        self.register_buffer("steps", torch.arange(4), persistent=False)


def test_persistent_buffers_are_read_and_keep_their_object(tmp_path):
    model = Buffered()
    model.linear.to("meta")
    state = {"linear.weight": torch.randn(4, 3), "linear.bias": torch.randn(4), "scale": torch.randn(4)}
    save_file(state, tmp_path / SINGLE_NAME)
    before = model.scale
    fill_from_source(model, whole(), SafetensorsSource(tmp_path), alone(), dtype=torch.bfloat16)
    assert model.scale is before and model.alias is before and torch.equal(before, state["scale"])
    assert model.steps.tolist() == [0, 1, 2, 3] and model.linear.weight.dtype == torch.bfloat16


def check_unchanged(model, source, plan, *words):
    with pytest.raises(CheckpointError) as caught:
        fill_from_source(model, plan, source, alone())
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    assert all(param.is_meta for param in model.parameters())


def test_faults_are_found_before_anything_changes(tmp_path):
    LlamaForCausalLM(config()).save_pretrained(tmp_path)
    source = SafetensorsSource(tmp_path)
    check_unchanged(on_meta(config(vocab_size=38)), source, whole(), "lm_head.weight", "[37, 16]", "[38, 16]")
    check_unchanged(nn.ModuleDict({"lm_head": nn.Linear(16, 37, device="meta")}), source, whole(), "lacks", "lm_head.bias")
    plan = whole()
    plan.shards["lm_head.weight"] = Shard.even((38, 16), 0, 1)
    check_unchanged(on_meta(config()), source, plan, "lm_head.weight", "[38, 16]", "[37, 16]")
    plan.shards = {"lm_tail.weight": Shard.even((38, 16), 0, 1)}
    check_unchanged(on_meta(config()), source, plan, "lm_tail.weight", "not there")
    model = on_meta(config())
    model.model.rotary_emb.to("meta")
    check_unchanged(model, source, whole(), "rotary_emb.inv_freq", "without values")


class Ruleless(LlamaForCausalLM):
    """Its constructor makes a parameter that `_init_weights` knows nothing of."""

    def __init__(self, settings):
        super().__init__(settings)
        self.odd = nn.Parameter(torch.ones(3))


def test_a_new_tensor_without_a_rule_is_named(tmp_path):
    LlamaForCausalLM(config()).save_pretrained(tmp_path)
    with no_init_weights():
        model = Ruleless(config()).to("meta")
    model.model.rotary_emb = LlamaForCausalLM(config()).model.rotary_emb
    check_unchanged(model, SafetensorsSource(tmp_path), whole(), "lacks 'odd'", "_init_weights")


def load_with_new(group, path, tied, expected):
    """A base model read into one with more layers and a head, of another vocabulary; ranks are seeded apart."""
    model = on_meta(config(num_hidden_layers=3, vocab_size=41, tie_word_embeddings=tied))
    group = TPGroup(group, CPU)
    plan = cut_llama(model, group.tp_size)
    torch.manual_seed(3 + group.tp_rank)
    before = torch.get_rng_state()
    info = fill_from_source(model, plan, SafetensorsSource(path), group, ignore_mismatched_sizes=True)
    assert torch.equal(before, torch.get_rng_state()) and not hasattr(model.lm_head, "_is_hf_initialized")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    for name, value in model.state_dict().items():
        full = expected[name]
        assert torch.equal(value, plan.shards[name].split(full, group.tp_rank) if name in plan.shards else full), name
    return info.to_dict()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_what_a_checkpoint_lacks_is_drawn_as_transformers_does(ranks, tmp_path, tied):
    LlamaForCausalLM(config()).model.save_pretrained(tmp_path)
    settings = config(num_hidden_layers=3, vocab_size=41, tie_word_embeddings=tied)
    torch.manual_seed(3)
    model, expected = LlamaForCausalLM.from_pretrained(
        tmp_path, config=settings, ignore_mismatched_sizes=True, output_loading_info=True
    )
    infos = ranks.run(load_with_new, str(tmp_path), tied, model.state_dict(), size=3)
    assert infos == [{**expected, "error_msgs": []}] * 3


def classify(group, path):
    model, info = autotp.from_pretrained(
        path,
        group,
        model_class=AutoModelForSequenceClassification,
        config=config(num_labels=3, pad_token_id=0),
        output_loading_info=True,
    )
    assert type(model).__name__ == "LlamaForSequenceClassification" and model.score.weight.shape[0] == 3
    assert info["missing_keys"] == {"score.weight"} and info["unexpected_keys"] == {"lm_head.weight"}
    return autotp.full_state_dict(model)


def test_another_class_of_a_checkpoint(ranks, tmp_path):
    model = LlamaForCausalLM(config())
    model.save_pretrained(tmp_path)
    full, _ = ranks.run(classify, str(tmp_path))
    assert all(torch.equal(full[name], value) for name, value in model.model.state_dict(prefix="model.").items())
    assert 0 < full["score.weight"].std() < 0.1


def test_tied_model_but_untied_checkpoint(tmp_path):
    LlamaForCausalLM(config()).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"ties .* different values .* tie_word_embeddings=false"):
        fill_from_source(on_meta(config(tie_word_embeddings=True)), whole(), SafetensorsSource(tmp_path), alone())


def fill_from_own_directory(group, paths):
    group = TPGroup(group, CPU)
    model = on_meta(config())
    try:
        fill_from_source(model, cut_llama(model, group.tp_size), SafetensorsSource(paths[group.tp_rank]), group)
    except AutoTPError as error:
        assert all(param.is_meta for param in model.parameters())
        return str(error)
    return ""


def test_a_fault_on_one_rank_raises_on_all(ranks, tmp_path):
    LlamaForCausalLM(config()).save_pretrained(tmp_path / "good")
    LlamaForCausalLM(config(vocab_size=38)).save_pretrained(tmp_path / "other")
    LlamaForCausalLM(config()).save_pretrained(tmp_path / "split", max_shard_size="8KB")
    good, other = ranks.run(fill_from_own_directory, [str(tmp_path / "good"), str(tmp_path / "other")])
    assert re.search(r"rank\(s\) \[1\].*lm_head", good) and "[38, 16]" in other
    messages = ranks.run(fill_from_own_directory, [str(tmp_path / "good"), str(tmp_path / "split")])
    assert all(re.search(r"rank\(s\) \[1\] see another checkpoint", message) for message in messages)


# -- memory ---------------------------------------------------------------------------------------------------------------


def read_anonymous_bytes() -> int:
    """Anonymous memory of this process: its heap, not the pages of files that it has mapped."""
    return int(re.search(r"Anonymous:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())[1]) * 1024  # type: ignore[index]


def measure_load(path: str) -> None:
    """One rank of two: load, and print the peak of anonymous memory over what the imported process had."""
    dist.init_process_group("gloo")
    before = peak = read_anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, read_anonymous_bytes())

    watcher = threading.Thread(target=watch, daemon=True)  # a failed load must end the process
    watcher.start()
    model = autotp.from_pretrained(path)
    done.set()
    watcher.join()
    held = sum(parameter.nbytes for parameter in model.parameters())
    print(json.dumps({"peak": max(peak, read_anonymous_bytes()) - before, "held": held}))


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs Linux's smaps_rollup")
def test_memory_is_what_is_copied_and_little_more(tmp_path):
    """Of a 470 MB model at TP=2: what is one run of a file's bytes stays there."""
    settings = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=8000,
    )
    with no_init_weights():
        model = LlamaForCausalLM(settings)
    total = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(tmp_path / "model")
    del model
    for said in run_job(__file__, tmp_path / "model", cwd=tmp_path):
        measured = json.loads(said.splitlines()[-1])
        copied = 63e6  # columns of o_proj and down_proj
        assert total * 0.49 < measured["held"] < total * 0.51
        assert measured["peak"] < copied + 240e6, measured  # buffers, and what planning takes


if __name__ == "__main__":
    measure_load(*sys.argv[1:])


def check_sharded_buffers(group):
    """A buffer that the checkpoint holds, and one that it does not, both dealt by heads."""
    whole, model, tp = Net(), Net(), TPGroup(group, CPU)
    whole.attn.slopes += 1
    for module in model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = None if parameter is None else nn.Parameter(parameter.detach().to("meta"))
    plan = plan_of(tp.tp_size)
    fill_from_source(model, plan, ModuleSource(whole), tp)
    tensors = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        shard = plan.shards.get(name)
        assert torch.equal(value, tensors[name] if shard is None else shard.split(tensors[name], tp.tp_rank)), name


def test_buffers_are_cut_too(ranks):
    ranks.run(check_sharded_buffers)
