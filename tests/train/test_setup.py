"""What a run starts from: GGUF files, what accelerate was configured for, models that can't be trained."""

import pytest
import torch
from transformers import LlamaForCausalLM

from autotp.errors import AutoTPError
from autotp.train.run import train
from tests.train.tiny import make_config, make_options, make_tokenizer, run_ranks


def write_gguf(directory):
    """The tiny model as a GGUF file, beside its tokenizer."""
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(3)
    make_tokenizer().save_pretrained(directory)
    model = LlamaForCausalLM(make_config())
    writer = gguf.GGUFWriter(directory / "tiny.gguf", "llama")
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_trains_as_what_transformers_makes_of_it(ranks, source, tmp_path):
    (tmp_path / "gguf").mkdir()
    write_gguf(tmp_path / "gguf")
    read = LlamaForCausalLM.from_pretrained(tmp_path / "gguf", gguf_file="tiny.gguf", dtype=torch.float32)
    same = LlamaForCausalLM(make_config())
    same.load_state_dict(read.state_dict())
    same.save_pretrained(tmp_path / "same")
    make_tokenizer().save_pretrained(tmp_path / "same")
    expected = train(make_options(tmp_path / "same", tmp_path / "out", data=f"{source}/texts", tp=1, steps=2)).losses
    for number, model in enumerate(("gguf", "gguf/tiny.gguf")):
        options = make_options(tmp_path / model, tmp_path / f"out{number}", data=f"{source}/texts", steps=2)
        assert ranks.run(run_ranks, options)[0][0].losses == pytest.approx(expected, rel=1e-5)
    assert LlamaForCausalLM.from_pretrained(tmp_path / "out1").dtype == torch.float32
    (tmp_path / "gguf" / "other.gguf").write_bytes(b"")
    with pytest.raises(AutoTPError, match=r"holds 2 GGUF files, other\.gguf, tiny\.gguf: name one"):
        train(make_options(tmp_path / "gguf", tmp_path / "no", data=f"{source}/texts", tp=1))


def test_what_accelerate_was_configured_for_is_heard(source, tmp_path, monkeypatch):
    from accelerate.state import AcceleratorState

    def refused(**environment):
        AcceleratorState._reset_state(reset_partial_state=True)
        with monkeypatch.context() as patch, pytest.raises(AutoTPError) as info:
            for name, value in environment.items():
                patch.setenv(f"ACCELERATE_{name}", value)
            train(make_options(source, tmp_path / "out", tp=1))
        return str(info.value)

    assert "for mixed precision fp16: use --dtype float16" in refused(MIXED_PRECISION="fp16")
    assert "for 3 gradient accumulation steps, and --grad-accum is 1" in refused(GRADIENT_ACCUMULATION_STEPS="3")
    AcceleratorState._reset_state(reset_partial_state=True)
    with monkeypatch.context() as patch:
        patch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        mixed = train(make_options(source, tmp_path / "mixed", tp=1)).losses
    AcceleratorState._reset_state(reset_partial_state=True)
    full = train(make_options(source, tmp_path / "full", tp=1)).losses
    assert mixed != full and mixed == pytest.approx(full, rel=1e-2)


def test_models_that_predict_no_next_token_are_refused(source, tmp_path):
    from transformers import BertConfig, BertForMaskedLM

    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    BertForMaskedLM(BertConfig(vocab_size=320, **sizes)).save_pretrained(tmp_path / "bert")
    make_tokenizer().save_pretrained(tmp_path / "bert")
    options = make_options(tmp_path / "bert", tmp_path / "out", data=f"{source}/texts", tp=1)
    with pytest.raises(AutoTPError, match=r"BertForMaskedLM.* does not predict the next token"):
        train(options)
