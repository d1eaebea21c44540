"""One architecture for each rule of discovery, over two ranks: its plan has the rule, and it trains as the unsharded model.

Outputs (with a loss where the model has one), every gradient and three AdamW steps are compared by `scripts/measures.py`.
"""

import copy

import pytest
import torch
import transformers
from measures import compare
from shrink import randomize, tiny_config, tiny_model

import autotp
from tests.models import batch


def indices(plan, module, parameter="weight", rank=0):
    """What `rank` holds of the parameter's one cut dimension: `(dim, indices)`."""
    (cut,) = plan[module].shards[parameter].cuts
    return cut.dim, cut.indices(rank).tolist()


def has_heads(plan):
    """Two all-reduces a layer, forward and backward: q, k and v enter once, so do gate and up."""
    return plan.collectives == (4, 4) and plan["model.layers.1.self_attn.q_proj"].siblings == (
        plan["model.layers.1.self_attn.k_proj"].siblings
    )


def has_summed_norms(plan):
    """A norm of each head: whole, its gradient summed."""
    return all(plan[f"model.layers.1.self_attn.{n}_norm"].summed == ("weight",) for n in "qk")


def has_mla(plan):
    """The latent projection stays whole; of its columns, those of the rotary key enter."""
    down = plan["model.layers.1.self_attn.kv_a_proj_with_mqa"]
    return not down.shards and down.columns == ((24, 32),) and has_experts(plan)


def has_experts(plan, layers=(1,), name="model.layers.{}.mlp.experts"):
    """Stacked experts are split inside each expert and reduced once, where they return."""
    found = [plan[name.format(i)] for i in layers]
    return all(e.outputs == (0,) and e.shards["down_proj"].cuts[0].dim > 0 and len(e.inputs) == 2 for e in found)


def has_sinks(plan):
    """Sinks go with their heads, gate and up of an expert alternate, and a bias is added by one rank."""
    experts = plan["model.layers.1.mlp.experts"]
    pairs = indices(plan, "model.layers.1.mlp.experts", "gate_up_proj_bias")
    sinks = indices(plan, "model.layers.1.self_attn", "sinks") == (0, [0, 1, 2, 3])
    return sinks and experts.once == ("down_proj_bias",) and experts.outputs == (0,) and pairs == (1, list(range(96)))


def has_gated_delta(plan):
    """Attributes and depthwise convolutions of a linear attention follow their heads; its norm is summed."""
    path = "model.layers.0.linear_attn"
    attrs, conv = plan[path].attrs, plan[f"{path}.conv1d"].attrs
    return attrs["num_v_heads"] == (4, 4) and conv == {"groups": (96, 96)} and plan[f"{path}.norm"].summed == ("weight",)


def has_multi_query(plan):
    """The one key and value are copied: every rank holds rows 64 to 80, and their gradient is summed."""
    held = plan["transformer.h.1.self_attention.query_key_value"].shards["weight"].holders
    return held == ((0, (0, 1), ((64, 16, 16, 1),)),)


def has_alibi(plan):
    """The bias `[batch * heads, 1, length]` that enters is narrowed to the rank's heads of every row."""
    (entry,) = plan["transformer.h.1.self_attention"].inputs
    return (entry.argument, entry.dim, entry.period) == ("alibi", 0, 8)


def has_position_bias(plan):
    """The table of position biases is cut by heads."""
    name = "{}.block.0.layer.0.SelfAttention.relative_attention_bias"
    return all(indices(plan, name.format(n)) == (1, [0, 1, 2, 3]) for n in ("encoder", "decoder"))


def has_state_space(plan):
    """The state's parameters are cut by channels; what every channel reads is reduced, and enters again."""
    path = "backbone.layers.1.mixer"
    cut = {"A_log", "D"} <= set(plan[path].shards) and plan[f"{path}.conv1d"].attrs == {"groups": (64, 64)}
    return cut and plan[f"{path}.x_proj"].style == "rowwise" and plan[f"{path}.x_proj"].columns == ((0, 80),)


def has_packed_scan(plan):
    """Five parts are packed in one projection: z, x, B, C and one number a head; their norm follows its groups."""
    path = "backbone.layers.1.mixer"
    rows = [*range(64), *range(128, 192), *range(256, 512), *range(768, 1024), *range(1280, 1284)]
    return indices(plan, f"{path}.in_proj") == (0, rows) and indices(plan, f"{path}.norm") == (0, list(range(64)))


def has_wide_norm(plan):
    """Norms over all of q and of k are distributed."""
    widths = {name: plan[f"model.layers.1.self_attn.{name}_norm"].norm.width for name in "qk"}
    return widths == {"q": 64, "k": 32} and plan["model.layers.1.self_attn.q_norm"].norm.kind == "rms"


def has_conv1d(plan):
    """Weights `[in, out]`: columns are dim 1, of each of q, k and v; rows are dim 0."""
    columns = (1, [*range(32), *range(64, 96), *range(128, 160)])
    path = "transformer.h.1.attn"
    return indices(plan, f"{path}.c_attn") == columns and indices(plan, f"{path}.c_proj") == (0, list(range(32)))


def has_permuted_heads(plan):
    """Four blocks `[q | v | k]`: a rank's heads are no three equal parts of the packed rows."""
    path = "transformer.h.1.attn"
    return indices(plan, f"{path}.qkv_proj") == (0, list(range(96))) and indices(plan, f"{path}.out_proj") == (1, list(range(32)))


def has_packed(plan):
    """q, k and v of one linear, of 64, 32 and 32 rows; and gate and up of another."""
    rows = [*range(32), *range(64, 80), *range(96, 112)]
    packed = indices(plan, "model.layers.1.self_attn.qkv_proj") == (0, rows)
    return packed and indices(plan, "model.layers.1.mlp.gate_up_proj") == (0, [*range(48), *range(96, 144)])


def has_cross_attention(plan):
    """All three attentions of an encoder and a decoder are split."""
    paths = ("encoder.layers.1.self_attn", "decoder.layers.1.self_attn", "decoder.layers.1.encoder_attn")
    styles = [[plan[f"model.{path}.{n}_proj"].style for n in ("q", "k", "v", "out")] for path in paths]
    return styles == [["colwise"] * 3 + ["rowwise"]] * 3


def has_patches(plan):
    """The convolution that makes patches is split by its channels, and gathered."""
    return plan["vit.embeddings.patch_embeddings.projection"].style == "colwise_gather_output" and has_no_head(plan)


def has_no_head(plan):
    return plan.head is None and plan["vit.layers.1.attention.o_proj"].style == "rowwise"


def has_both_towers(plan):
    rows = [
        plan[f"{tower}_model.encoder.layers.1.{n}"].style
        for tower in ("text", "vision")
        for n in ("self_attn.out_proj", "mlp.fc2")
    ]
    return rows == ["rowwise"] * 4


def has_convolutions(plan):
    """Two convolutions are a column and a row, beside three attentions."""
    styles = [plan[f"model.encoder.conv{i}"].style for i in (1, 2)]
    return styles == ["colwise", "rowwise"] and has_cross_attention(plan)


RULES = {
    "llama": ("causal", has_heads),
    "qwen3": ("causal", has_summed_norms),
    "deepseek_v3": ("causal", has_mla),
    "gpt_oss": ("causal", has_sinks),
    "qwen3_next": ("causal", has_gated_delta),
    "falcon": ("causal", has_multi_query),
    "bloom": ("causal", has_alibi),
    "t5": ("seq2seq", has_position_bias),
    "mixtral": ("causal", has_experts),
    "mamba": ("causal", has_state_space),
    "mamba2": ("causal", has_packed_scan),
    "olmo2": ("causal", has_wide_norm),
    "gpt2": ("causal", has_conv1d),
    "codegen": ("causal", has_permuted_heads),
    "phi3": ("causal", has_packed),
    "bart": ("seq2seq", has_cross_attention),
    "vit": ("vision", has_patches),
    "clip": ("both", has_both_towers),
    "whisper": ("audio", has_convolutions),
}


def make(family):
    if RULES[family][0] != "both":
        model = tiny_model(family, RULES[family][0])
        model.config.decoder_start_token_id = 2  # t5's default config has none
        return model
    torch.manual_seed(0)
    return randomize(transformers.CLIPModel._from_config(tiny_config("clip"))).eval()


def make_call(family, model):
    """One call with all that the loss needs."""
    kind, generator = RULES[family][0], torch.Generator().manual_seed(0)
    if kind == "vision":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator), "labels": torch.tensor([0, 1])}
    text = batch(model)
    if kind == "both":
        pictures = torch.randn(2, 3, 32, 32, generator=generator)
        return {"input_ids": text["input_ids"], "pixel_values": pictures, "return_loss": True}
    if kind == "audio":
        config = model.config
        frames = torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
        return {"input_features": frames, "labels": text["labels"]}
    return text


def check_architecture(group, family):
    reference = make(family)
    model = autotp.parallelize(copy.deepcopy(reference), group)
    assert RULES[family][1](model.autotp_plan), str(model.autotp_plan)
    call = make_call(family, reference)
    assert reference(**call).loss is not None
    row = compare(reference, model, [call])
    assert row["verdict"] == "pass", row
    return row


@pytest.mark.parametrize("family", list(RULES))
def test_its_rule_is_planned_and_trains_as_the_whole_model(ranks, family):
    row = ranks.run(check_architecture, family)[0]
    print(row)
