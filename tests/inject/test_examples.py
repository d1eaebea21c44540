"""Example calls made from a model's signature and config: that they run, and that together they run every parameter."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers import models as hf

from autotp.errors import PlanError
from autotp.inject.examples import candidate_calls, make_examples
from autotp.inject.record import Recorder
from autotp.inject.runs import record_runs
from tests.models import tiny

TEXT: dict[str, Any] = dict(vocab_size=131, hidden_size=64, num_hidden_layers=2, num_attention_heads=8, intermediate_size=96)
SEQ2SEQ: dict[str, Any] = dict(
    **dict(vocab_size=131, d_model=64, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=96, decoder_ffn_dim=96),
    **dict(encoder_attention_heads=8, decoder_attention_heads=8, max_position_embeddings=64),
)
IMAGE: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8, image_size=32, patch_size=8
)


def gpt2():
    return AutoModelForCausalLM.from_config(hf.gpt2.GPT2Config(vocab_size=131, n_embd=64, n_layer=2, n_head=8))


def bert():
    return AutoModelForMaskedLM.from_config(hf.bert.BertConfig(**TEXT))


def layoutlm():
    return hf.layoutlm.LayoutLMModel(hf.layoutlm.LayoutLMConfig(**TEXT, max_2d_position_embeddings=32))


def t5():
    config = hf.t5.T5Config(vocab_size=131, d_model=64, d_kv=8, d_ff=96, num_layers=2, num_heads=8)
    return hf.t5.T5ForConditionalGeneration(config)


def bart():
    return hf.bart.BartForConditionalGeneration(hf.bart.BartConfig(**SEQ2SEQ))


def bart_decoder():
    decoder: dict[str, Any] = dict(SEQ2SEQ, is_decoder=True, add_cross_attention=True)
    return hf.bart.BartForCausalLM(hf.bart.BartConfig(**decoder))


def mixtral():
    return tiny("mixtral", num_local_experts=4)


def whisper():
    wide: dict[str, Any] = dict(num_mel_bins=16, max_source_positions=30, max_target_positions=32)
    small = {key: value for key, value in SEQ2SEQ.items() if key != "max_position_embeddings"}
    special: dict[str, Any] = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    return hf.whisper.WhisperForConditionalGeneration(hf.whisper.WhisperConfig(**small, **wide, **special))


def wav2vec2():
    config = hf.wav2vec2.Wav2Vec2Config(
        **TEXT, conv_dim=(16, 16), conv_kernel=(10, 3), conv_stride=(5, 2), num_conv_pos_embeddings=8, apply_spec_augment=False
    )
    return hf.wav2vec2.Wav2Vec2ForCTC(config)


def vit():
    return hf.vit.ViTForImageClassification(hf.vit.ViTConfig(**IMAGE))


def clip():
    vision = dict(IMAGE, projection_dim=64)
    text = dict(TEXT, projection_dim=64, eos_token_id=2)
    return AutoModel.from_config(hf.clip.CLIPConfig(text_config=text, vision_config=vision, projection_dim=64))


def timesformer():
    return hf.timesformer.TimesformerModel(hf.timesformer.TimesformerConfig(**IMAGE, num_frames=2))


def gemma3():
    text = dict(TEXT, num_key_value_heads=4, head_dim=8, sliding_window=16)
    config = hf.gemma3.Gemma3Config(
        text_config=text, vision_config=dict(IMAGE, vision_use_head=False), mm_tokens_per_image=4, image_token_index=130
    )
    return hf.gemma3.Gemma3ForConditionalGeneration(config)


MODELS = [gpt2, bert, layoutlm, t5, bart, bart_decoder, mixtral, whisper, wav2vec2, vit, clip, timesformer, gemma3]
UNREACHED = {  # read in training only, or constant
    "wav2vec2": {"wav2vec2.masked_spec_embed"},
    "clip": set(),
}


def outputs(value):
    if isinstance(value, torch.Tensor):
        return [value] if value.requires_grad else []
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return [tensor for part in inside for tensor in outputs(part)]


def not_run(model, calls):
    """Names of trained parameters that no output of any call depends on."""
    for call in calls:
        sum(out.sum() for out in outputs(model(**call))).backward()
    return {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_runs_every_parameter(make):
    torch.manual_seed(0)
    model = make().eval()
    calls = make_examples(model, run=lambda call: model(**call))
    assert not_run(model, calls) == UNREACHED.get(make.__name__, set())


@pytest.mark.parametrize("make", [gpt2, bart, gemma3], ids=lambda make: make.__name__)
def test_obeys_sizes_and_seed(make):
    torch.manual_seed(0)
    model = make().eval()
    first = make_examples(model, 3, 7, seed=1, run=lambda call: model(**call))
    again = make_examples(model, 3, 7, seed=1, run=lambda call: model(**call))
    other = make_examples(model, 3, 7, seed=2, run=lambda call: model(**call))
    assert first[0]["input_ids"].shape == (3, 7)
    assert torch.equal(first[0]["input_ids"], again[0]["input_ids"])
    assert not torch.equal(first[0]["input_ids"], other[0]["input_ids"])


def test_text_holds_no_special_ids():
    model = gemma3()
    ids = make_examples(model, 8, 32, run=lambda call: model(**call))[0]["input_ids"]
    assert not torch.isin(ids, torch.tensor([0, 1, 2, 130])).any()


def test_reads_no_weights():
    with torch.device("meta"):
        model = whisper()
    calls = candidate_calls(model)
    assert calls[0]["input_features"].shape == (2, 16, 60)
    assert make_examples(model)[0].keys() == calls[0].keys()


def test_refuses_what_has_no_config():
    with pytest.raises(PlanError, match="inputs="):
        make_examples(nn.Linear(2, 2), run=print)


def test_says_why_no_call_runs():
    def run(call):
        raise RuntimeError("no such kernel")

    with pytest.raises(PlanError, match=r"GPT2LMHeadModel.*no such kernel.*inputs="):
        make_examples(gpt2(), run=run)


@pytest.mark.parametrize(("complete", "lengths"), [(True, [9]), (False, [9, 36])])
def test_a_longer_call_is_made_where_experts_had_no_token(complete, lengths):
    model = tiny("mixtral")
    calls = make_examples(model, run=lambda call: model(**call), is_complete=lambda: complete)
    assert [call["input_ids"].shape[1] for call in calls] == lengths


def test_experts_in_one_parameter_need_no_longer_call(monkeypatch):
    shapes = []
    run = Recorder.run
    monkeypatch.setattr(Recorder, "run", lambda self, call: shapes.append(call["input_ids"].shape[1]) or run(self, call))
    record_runs(tiny("mixtral", num_local_experts=64))
    assert max(shapes) <= 9
    sizes: dict[str, Any] = dict(d_model=32, d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=131)
    sparse: dict[str, Any] = dict(num_experts=64, num_sparse_encoder_layers=2, num_sparse_decoder_layers=2)
    record_runs(hf.SwitchTransformersForConditionalGeneration(hf.SwitchTransformersConfig(**sizes, **sparse)))
    assert max(shapes) > 9
