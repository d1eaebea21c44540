"""Finds a checkpoint and builds its model with parameters on meta."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import AutoConfig, GenerationConfig

from ..checkpoint.open import CheckpointSource
from ..checkpoint.sharded import ShardedSource
from ..errors import CheckpointError, PlanError
from .plan import Plan
from .shadow import empty_weights


def find_checkpoint(path: str | os.PathLike) -> Path:
    """The directory of a checkpoint: `path` itself, or the local copy of a hub id (fetched if need be).

    Raises:
        CheckpointError: there is no such directory and no such hub model that can be reached.
    """
    directory = Path(path)
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model"]))
    except Exception as error:  # whatever the hub raises, the reader needs the path and one line
        raise CheckpointError(f"{path} is neither a directory nor a model that the hub gives: {error}") from error


def build_empty(directory: Path, source: CheckpointSource, dtype: torch.dtype | str | None) -> nn.Module:
    """The checkpoint's model: parameters on meta in their final dtype, buffers real, generation config as saved."""
    config = AutoConfig.from_pretrained(directory)
    names = getattr(config, "architectures", None) or []
    cls = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    if cls is None:
        raise CheckpointError(f"{directory}/config.json names the class {names}, which transformers does not have")
    if dtype == "auto":
        found = getattr(config, "dtype", None)
        if not isinstance(found, torch.dtype):
            floating = [source.dtype(name) for name in sorted(source.names()) if source.dtype(name).is_floating_point]
            found = floating[0] if floating else None
        dtype = found
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with empty_weights():
        model = cls._from_config(config, dtype=wanted) if wanted is not None else cls._from_config(config)
    model.tie_weights()  # accelerate gives every name a Parameter of its own
    if (directory / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model


def read_kept_plan(model: nn.Module, source: CheckpointSource, tp_size: int) -> Plan | None:
    """The plan that a sharded checkpoint was cut with, not proved yet; None if it is for other ranks or does not fit `model`."""
    if not isinstance(source, ShardedSource) or source.tp_size != tp_size or source.plan is None:
        return None
    state = {**model.state_dict(keep_vars=True), **dict(model.named_buffers(remove_duplicate=False))}
    try:
        for module in source.plan["modules"]:
            for own, shard in module["shards"].items():  # looked at before they are built, which takes memory for their sizes
                if tuple(shard["shape"]) != tuple(state[f"{module['name']}.{own}" if module["name"] else own].shape):
                    return None
        return Plan.from_json(json.dumps(source.plan))
    except (PlanError, KeyError, TypeError, AttributeError):
        return None
