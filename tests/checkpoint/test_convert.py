"""ConvertedSource: slices of what transformers stacks, concatenates, renames and transposes, bitwise what it loads."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, WeightConverter
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

from autotp.checkpoint import convert
from autotp.checkpoint.convert import ConvertedSource
from autotp.checkpoint.names import match_names
from autotp.checkpoint.source import SINGLE_NAME, SafetensorsSource
from autotp.errors import CheckpointError
from autotp.shard import Shard

CPU = torch.device("cpu")
SMALL = dict(
    hidden_size=16, intermediate_size=25, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=37
)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    """A model, and its checkpoint in the layout that is published: one tensor an expert, gate and up apart."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=5)).to(torch.bfloat16)
    path = tmp_path_factory.mktemp("mixtral")
    model.save_pretrained(path, max_shard_size="20KB")
    return model, path


def layouts(shape):
    """Cuts over 3 ranks of a tensor [experts, gate and up, hidden]: by experts, across the halves, in any order, by two dims."""
    experts = Shard.from_indices(shape, 0, [[4, 0], [2, 2, 3], [1]])
    rows = Shard.dealt(shape, 1, (9, 8, 8), parts=(25, 25)) if shape[1] == 50 else Shard.even(shape, 1, 3)
    order = Shard.from_indices(shape, 1, [list(range(shape[1] - 1, -1, -1)), [], [0, shape[1] // 2, 3]])
    both = Shard.from_indices(shape, 0, [[0, 1], [2], [3, 4]]).and_cut(Shard.whole(shape, 3))
    return [experts, rows, order, both, Shard.even(shape, 1, 3), Shard.even(shape, 2, 3)]


def test_experts_are_read_by_slices(mixtral):
    model, path = mixtral
    state = AutoModelForCausalLM.from_pretrained(path, dtype="auto").state_dict()
    with SafetensorsSource(path) as source:
        converted = ConvertedSource(model, source)
        assert match_names(model, converted).keys == {name: (name,) for name in state}
        stacked = [name for name in state if state[name].dim() == 3]
        assert len(stacked) == 2 and all(converted._made[name].tree is not None for name in stacked)
        for name, full in state.items():
            assert converted.shape(name) == tuple(full.shape) and converted.dtype(name) == full.dtype
            assert torch.equal(converted.read(name, None, 0, None, CPU), full)
            converted.check(name)
            assert converted.nbytes(name) == full.nbytes
        for name in stacked:
            for shard in layouts(tuple(state[name].shape)):
                for rank in range(3):
                    part = converted.read(name, shard, rank, torch.float32, CPU)
                    expected = shard.split(state[name], rank).float()
                    assert part.is_contiguous() and part.dtype == torch.float32 and torch.equal(part, expected)


def converted_llama(monkeypatch, tmp_path, state, *converters):
    monkeypatch.setattr(convert, "_find_conversions", lambda model: ([], list(converters), find_rename()))
    save_file(state, tmp_path / SINGLE_NAME)
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    return model, ConvertedSource(model, SafetensorsSource(tmp_path))


def find_rename():
    from transformers.core_model_loading import rename_source_key

    return rename_source_key


def test_other_conversions_are_cut_afterwards(monkeypatch, tmp_path):
    """One transposed, one made of parts along a negative dim, of which a part alone must not stay in the file's memory."""
    up, o = torch.randn(16, 25), torch.randn(16, 16)
    state = {"model.layers.0.mlp.up_proj.T": up, "model.layers.0.self_attn.o_left": o[:, :5].contiguous(),
             "model.layers.0.self_attn.o_right": o[:, 5:].contiguous()}  # fmt: skip
    _, source = converted_llama(
        monkeypatch, tmp_path, state,
        WeightConverter("mlp.up_proj.T", "mlp.up_proj.weight", [Transpose(0, 1)]),
        WeightConverter(["self_attn.o_left", "self_attn.o_right"], "self_attn.o_proj.weight", [Concatenate(-1)]),
    )  # fmt: skip
    shard = Shard.even((25, 16), 0, 3)
    name = "model.layers.0.mlp.up_proj.weight"
    assert all(torch.equal(source.read(name, shard, r, None, CPU), shard.split(up.t(), r)) for r in range(3))
    name, shard = "model.layers.0.self_attn.o_proj.weight", Shard.even((16, 16), 1, 4)
    for r in range(4):
        source.read(name, shard, r, None, CPU).fill_(7)
        assert torch.equal(source.read(name, shard, r, None, CPU), shard.split(o, r))


def test_what_cannot_be_converted_is_named(monkeypatch, tmp_path):
    state = {f"model.layers.0.mlp.up_proj.{i}.w": torch.randn(5, 16 + i) for i in range(2)}
    with pytest.raises(CheckpointError, match=r"up_proj.*converts while loading, which fails.*autotp\.parallelize"):
        converted_llama(monkeypatch, tmp_path, state, WeightConverter("up_proj.*.w", "up_proj.weight", [MergeModulelist(0)]))


def test_two_names_of_one_tensor(tmp_path):
    save_file({"norm.weight": torch.ones(16), "model.norm.weight": torch.ones(16)}, tmp_path / SINGLE_NAME)
    with pytest.raises(CheckpointError, match=r"'norm\.weight'.*both 'model\.norm\.weight'"):
        ConvertedSource(LlamaForCausalLM(LlamaConfig(**SMALL)), SafetensorsSource(tmp_path))
