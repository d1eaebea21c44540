"""Tiny random models of real architectures, and batches for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from autotp.layers.base import sharded_modules

# Families whose configs carry a dense tensor-parallel plan.
DENSE = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "olmo",
    "olmo2",
    "olmo3",
    "granite",
    "starcoder2",
    "cohere",
    "smollm3",
    "helium",
    "glm",
    "gpt_neox",
    "ernie4_5",
    "arcee",
    "nemotron",
    "exaone4",
]

_SMALL = dict(
    vocab_size=131,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    sliding_window=16,
)


def tiny_config(family: str, **overrides):
    """A small config of `family`: 2 layers, hidden 64, 8 heads over 4 kv heads, a vocabulary of 131."""
    cls = CONFIG_MAPPING[family]
    known = {k: v for k, v in _SMALL.items() if k in cls().to_dict() or k in ("pad_token_id", "bos_token_id", "eos_token_id")}
    if family == "gpt_neox":
        known.pop("num_key_value_heads", None)
        known.pop("head_dim", None)
    return cls(**{**known, **overrides})


def tiny(family: str = "llama", seed: int = 0, **overrides) -> PreTrainedModel:
    """A tiny random float32 model of `family`, with every parameter random (norms and biases too)."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def batch(model: PreTrainedModel, seed: int = 0, rows: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    """Random `input_ids` and `labels` (some ignored), int64 `[rows, length]`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, model.config.get_text_config().vocab_size, (rows, length), generator=generator)
    labels = ids.clone()
    labels[:, :2] = -100
    return {"input_ids": ids, "labels": labels}


def gradient_of(parameter: nn.Parameter) -> torch.Tensor | None:
    return parameter.grad


def compare_slices(model: nn.Module, path: str, tolerance: float = 1e-4, read: Callable = gradient_of) -> None:
    """This rank's slice of every gradient against the whole gradients in the safetensors file `path`.

    `read` may be another function of a parameter. An error may be `tolerance` of the parameter's largest entry, and 1e-7 of the
    largest of all.
    """
    shards = {f"{n}.{p}": (m.tp.tp_rank, s) for n, m in sharded_modules(model) for p, s in m.shards.items()}
    with safe_open(path, framework="pt") as file:
        mine = {name: read(p) for name, p in model.named_parameters()}
        assert set(mine) == set(file.keys())
        whole = {name: file.get_tensor(name) for name in mine}
    largest = max(grad.abs().max().item() for grad in whole.values())
    for name, grad in whole.items():
        rank, shard = shards.get(name, (0, None))
        slice_ = grad if shard is None else shard.split(grad, rank)
        error = (mine[name] - slice_).abs().max().item()
        assert error <= tolerance * grad.abs().max().item() + 1e-7 * largest, (name, error, grad.abs().max().item())
