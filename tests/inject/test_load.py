"""What a checkpoint's config may name: classes of transformers, and code of its own only where that is asked for."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from autotp.checkpoint.open import open_checkpoint
from autotp.errors import CheckpointError
from autotp.inject.load import build_empty, find_dtype, read_config, read_kept_plan
from tests.models import tiny_config

CODE = """
import os
from transformers import LlamaConfig, LlamaForCausalLM

os.environ["AUTOTP_TEST_CODE_RAN"] = "1"

class OwnConfig(LlamaConfig):
    model_type = "own-llama"

class OwnLlama(LlamaForCausalLM):
    config_class = OwnConfig
"""


def write_checkpoint(path, **changes):
    config = tiny_config("llama").to_dict() | changes
    (path / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(3, dtype=torch.int64)}, path / "model.safetensors")
    return open_checkpoint(path)


@pytest.mark.parametrize("name", ["pipeline", "AutoModelForCausalLM", "LlamaConfig", "utils", "__name__", "NoSuchModel", 7])
def test_only_model_classes_are_built(tmp_path, name):
    source = write_checkpoint(tmp_path, architectures=[name])
    with pytest.raises(CheckpointError, match="transformers does not have"):
        build_empty(source, None)


def test_own_code_runs_only_where_it_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOTP_TEST_CODE_RAN", "0")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "own.py").write_text(CODE)
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnLlama"}
    source = write_checkpoint(tmp_path, model_type="own-llama", architectures=["OwnLlama"], auto_map=auto_map)
    with pytest.raises(CheckpointError, match=r"from_pretrained\(path, trust_remote_code=True\)"):
        build_empty(source, None)

    assert os.environ["AUTOTP_TEST_CODE_RAN"] == "0"
    model = build_empty(source, torch.float16, trust_remote_code=True)
    assert type(model).__name__ == "OwnLlama" and isinstance(model, LlamaForCausalLM) and model.lm_head.weight.is_meta
    assert model.dtype == torch.float16 and os.environ["AUTOTP_TEST_CODE_RAN"] == "1"


def test_dtype(tmp_path):
    source = write_checkpoint(tmp_path, dtype=None)
    assert isinstance(read_config(source), LlamaConfig)
    assert find_dtype(source, "auto") == torch.bfloat16 and find_dtype(source, None) is None
    assert find_dtype(source, "float16") == find_dtype(source, torch.float16) == torch.float16
    assert find_dtype(write_checkpoint(tmp_path, dtype="float64"), "auto") == torch.float64
    assert read_kept_plan(LlamaForCausalLM(tiny_config("llama")), source, 2) is None


def test_no_config(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"the config of {tmp_path} can't be read"):
        build_empty(open_checkpoint(tmp_path), None)
