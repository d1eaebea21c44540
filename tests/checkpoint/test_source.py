"""SafetensorsSource: bitwise slices of any layout, and every fault of the files found when it is opened."""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, LlamaModel, MixtralConfig, MixtralForCausalLM

from autotp.checkpoint.convert import ConvertedSource, rename_keys
from autotp.checkpoint.names import match_names, tie_names
from autotp.checkpoint.source import INDEX_NAME, SINGLE_NAME, ModuleSource, SafetensorsSource
from autotp.errors import CheckpointError
from autotp.shard import Shard

CPU = torch.device("cpu")
SMALL = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=37
)


def tiny_llama(**overrides) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **overrides}))


@pytest.fixture(params=["50GB", "8KB"], ids=["single", "index"])
def saved(request, tmp_path):
    """A llama as transformers saves it, in one file and in several."""
    model = tiny_llama()
    model.save_pretrained(tmp_path, max_shard_size=request.param)
    assert (tmp_path / INDEX_NAME).is_file() == (request.param == "8KB")
    return model, tmp_path


def test_reads_whole_and_slices(saved):
    model, path = saved
    state = model.state_dict()
    with SafetensorsSource(path) as source:
        assert source.names() == set(state)
        for name, full in state.items():
            assert source.shape(name) == tuple(full.shape) and source.dtype(name) == full.dtype
            assert torch.equal(source.read(name, None, 0, None, CPU), full)
            for dim in range(full.dim()):
                shard = Shard.even(full.shape, dim, 3)
                for rank in range(3):
                    part = source.read(name, shard, rank, None, CPU)
                    assert part.is_contiguous() and torch.equal(part, shard.split(full, rank))


def test_odd_layouts_and_dtypes(tmp_path):
    full = torch.randn(12, 6)
    tensors = {
        str(i): full.to(dtype) for i, dtype in enumerate((torch.bfloat16, torch.float16, torch.int8, torch.float64, torch.bool))
    }
    save_file({**tensors, "scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)}, tmp_path / SINGLE_NAME)
    source = SafetensorsSource(tmp_path)
    rows = Shard.from_indices((12, 6), 0, [[0, 2, 4, 6, 8, 10, 1], [11, 9, 7, 5, 3, 3]])
    shard = rows.and_cut(Shard.from_indices((12, 6), 1, [[5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5]]))
    for name, value in tensors.items():
        for rank in range(2):
            assert torch.equal(source.read(name, shard, rank, None, CPU), shard.split(value, rank))
    assert source.read("scalar", None, 0, None, CPU) == 3 and source.read("empty", None, 0, None, CPU).shape == (0, 4)
    converted = source.read("0", shard, 1, torch.float32, CPU)
    assert converted.dtype == torch.float32 and torch.equal(converted, shard.split(tensors["0"].float(), 1))


def test_what_is_read_is_ours(saved):
    """Writing into a part reaches neither the file nor what others read, and no part holds on to more than itself."""
    model, path = saved
    name = "lm_head.weight"
    full = model.state_dict()[name]
    layouts = [None, *(Shard.even(full.shape, dim, 2) for dim in (0, 1)), Shard.dealt(full.shape, 1, (1, 1), (8, 8))]
    for source in (SafetensorsSource(path), ModuleSource(model)):
        for shard in layouts:
            for dtype in (None, torch.float64):
                part = source.read(name, shard, 1, dtype, CPU)
                assert part.untyped_storage().nbytes() == part.nbytes and part.storage_offset() == 0
    for shard in layouts:
        SafetensorsSource(path).read(name, shard, 1, None, CPU).fill_(7)
        ModuleSource(model).read(name, shard, 1, None, CPU).fill_(7)
        assert torch.equal(SafetensorsSource(path).read(name, None, 0, None, CPU), model.lm_head.weight)


def test_what_is_read_outlives_its_file(saved):
    """Files are replaced, as every save does, and removed, while a model lives that was read from them."""
    model, path = saved
    state, source = model.state_dict(), SafetensorsSource(path)
    read = {name: source.read(name, None, 0, None, CPU) for name in state}
    source.close()
    for file in path.glob("*.safetensors"):
        (path / "other").write_bytes(bytes(file.stat().st_size))
        (path / "other").replace(file)
        file.unlink()
    assert all(torch.equal(read[name], full) for name, full in state.items())


def test_module_source():
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    source = ModuleSource(module)
    assert source.names() == set(module.state_dict()) and source.shape("0.weight") == (6, 4)
    assert source.dtype("1.num_batches_tracked") == torch.int64
    part = source.read("0.weight", Shard.even((6, 4), 0, 4), 3, torch.float64, CPU)
    assert torch.equal(part, module[0].weight.detach()[5:].double())


def test_digest_tells_checkpoints_apart(saved, tmp_path):
    _, path = saved
    assert SafetensorsSource(path).digest() == SafetensorsSource(path).digest()
    other = tmp_path / "other"
    tiny_llama(vocab_size=38).save_pretrained(other)
    assert SafetensorsSource(path).digest() != SafetensorsSource(other).digest()


def test_digest_tells_steps_of_one_training_apart(saved, tmp_path):
    """Of the same names, shapes and files, without checksums: ranks of two machines could hold one each."""
    _, path = saved
    other = tmp_path / "other"
    shutil.copytree(path, other, ignore=lambda *_: ["other"])
    for file in other.glob("*.safetensors"):
        save_file({name: value + 1e-3 for name, value in load_file(file).items()}, file, {"format": "pt"})
    assert SafetensorsSource(path).digest() != SafetensorsSource(other).digest()


def shard_files(path):
    return sorted(p for p in path.iterdir() if p.suffix == ".safetensors")


def check_refused(path, *words):
    with pytest.raises(CheckpointError) as caught:
        SafetensorsSource(path)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def test_missing_file(saved):
    _, path = saved
    gone = shard_files(path)[-1]
    gone.unlink()
    check_refused(path, "no model.safetensors" if gone.name == SINGLE_NAME else f"{gone} is missing")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file(saved, keep):
    _, path = saved
    file = shard_files(path)[0]
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    check_refused(path, str(file), "again")


def test_file_that_is_too_long_or_no_file_at_all(saved):
    _, path = saved
    file = shard_files(path)[0]
    data = file.read_bytes()
    file.write_bytes(data + b"x")
    check_refused(path, str(file), "longer than its tensors")
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    check_refused(path, str(file), "not a safetensors file")


def test_header_that_lies(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (tmp_path / SINGLE_NAME).write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    check_refused(tmp_path, "'a'", "8 bytes", "(3,)")
    header = json.dumps({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (tmp_path / SINGLE_NAME).write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    check_refused(tmp_path, "'a'", "F4", "parallelize")


def test_index_and_files_of_different_saves(tmp_path):
    tiny_llama().save_pretrained(tmp_path, max_shard_size="8KB")
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    index["weight_map"]["model.extra.weight"] = shard_files(tmp_path)[0].name
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    check_refused(tmp_path, "model.extra.weight", "different saves")
    (tmp_path / INDEX_NAME).write_text("{}")
    check_refused(tmp_path, INDEX_NAME, "not an index")


def test_no_checkpoint_there(tmp_path):
    check_refused(tmp_path / "nowhere", "does not exist")
    (tmp_path / "file").write_text("")
    check_refused(tmp_path / "file", "is not a directory")
    check_refused(tmp_path, "there are no weights in it")
    (tmp_path / "pytorch_model.bin").write_text("")
    check_refused(tmp_path, "pytorch_model.bin", "transformers")


# -- which tensor is which ------------------------------------------------------------------------------------------------


def match(model, path):
    """The checkpoint's names for each tensor of the model."""
    source = ConvertedSource(model, SafetensorsSource(path))
    return {name: tuple(key for n in found for key in source.keys(n)) for name, found in match_names(model, source).keys.items()}


def test_names_of_a_matching_checkpoint(saved):
    model, path = saved
    assert match(model, path) == {name: (name,) for name in model.state_dict()}


def test_base_model_prefix_is_added_and_removed(tmp_path):
    model = tiny_llama(tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path / "base")
    names = match(model, tmp_path / "base")
    assert names["model.norm.weight"] == ("norm.weight",) and names["lm_head.weight"] == ("embed_tokens.weight",)
    model.save_pretrained(tmp_path / "full")
    base = LlamaModel(model.config)
    names = match(base, tmp_path / "full")
    assert names["norm.weight"] == ("model.norm.weight",)


def test_tied_names_may_be_absent_or_there_twice(tmp_path):
    model = tiny_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    names = match(model, tmp_path)
    assert names[embed] == names[head] == (embed,)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    save_file(state, tmp_path / SINGLE_NAME)
    assert set(match(model, tmp_path)[embed]) == {embed, head}
    del state[embed]
    save_file(state, tmp_path / SINGLE_NAME)
    assert match(model, tmp_path)[embed] == (head,)
    assert tie_names(model)[head] == (embed, head)
    untied = tiny_llama()
    assert tie_names(untied, [(embed, head)])[head] == (embed, head) and tie_names(untied)[head] == (head,)


def test_missing_unexpected_and_mis_shaped_are_named(tmp_path):
    model = tiny_llama()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    del state["model.layers.1.mlp.up_proj.weight"]
    state["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2)
    state["model.norm.weight"] = torch.zeros(17)
    save_file(state, tmp_path / SINGLE_NAME)
    with pytest.raises(CheckpointError) as caught:
        match(model, tmp_path)
    for word in ("layers.1.mlp.up_proj", "layers.7.mlp.up_proj", "'model.norm.weight' has shape [17]", "[16]", str(tmp_path)):
        assert word in str(caught.value)


def test_what_is_beyond_the_model_is_named_and_not_read(tmp_path):
    model = tiny_llama()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    save_file({**state, "model.extra.weight": torch.zeros(2)}, tmp_path / SINGLE_NAME)
    assert match(model, tmp_path).keys() == state.keys()
    info = match_names(model, ConvertedSource(model, SafetensorsSource(tmp_path))).info
    assert info.unexpected == ("model.extra.weight",) and not info.missing


def test_old_buffers_are_ignored(tmp_path):
    model = tiny_llama()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    save_file({**state, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}, tmp_path / SINGLE_NAME)
    match(model, tmp_path)


def test_gpt2_without_its_prefix(tmp_path):
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=31, n_positions=8))
    state = {k.removeprefix("transformer."): v.clone() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file({**state, "h.0.attn.bias": torch.zeros(1, 1, 8, 8)}, tmp_path / SINGLE_NAME)
    assert match(model, tmp_path)["lm_head.weight"] == ("wte.weight",)


def test_the_models_own_layout_needs_no_conversion():
    model = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=2))
    state = model.state_dict()
    assert rename_keys(model, state, state) == {name: (name, None, None) for name in state}


def test_quantized_checkpoints_are_refused(saved):
    model, path = saved
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(CheckpointError, match="quantized"):
        match(model, path)
