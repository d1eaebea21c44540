"""Finds a checkpoint and builds its model with parameters on meta."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ..checkpoint.gguf_tensors import GGUFSource
from ..checkpoint.load import widen_exceptions
from ..checkpoint.open import CheckpointSource
from ..checkpoint.sharded import ShardedSource
from ..errors import CheckpointError, PlanError
from .plan import Plan
from .shadow import empty_weights

_BESIDE = ("*.json", "*.txt", "*.model*", "*.jinja", "*.py", "*.tiktoken", "*.bpe", "*.vocab")  # what comes with weights


def find_checkpoint(path: str | os.PathLike) -> Path:
    """Where a checkpoint is: `path` itself, a directory or GGUF file, or the local copy of a hub id (fetched if need be).

    Raises:
        CheckpointError: there is no such directory and no such hub model that can be reached.
    """
    place = Path(path)
    if place.is_dir() or (place.suffix == ".gguf" and place.is_file()):
        return place
    from huggingface_hub import snapshot_download

    try:
        found = Path(snapshot_download(str(path), allow_patterns=["*.safetensors", *_BESIDE]))
        if not any(found.glob("*.safetensors")):
            found = Path(snapshot_download(str(path), allow_patterns=["pytorch_model*.bin", *_BESIDE]))
        return found
    except Exception as error:  # whatever the hub raises, the reader needs the path and one line
        raise CheckpointError(f"{path} is neither a directory nor a model that the hub gives: {error}") from error


def read_config(source: CheckpointSource, trust_remote_code: bool = False) -> Any:
    """The config beside the weights, or in the GGUF file that they are.

    Raises:
        CheckpointError: there is none, or it needs code of its own and `trust_remote_code` is not given.
    """
    place, more = Path(source.directory), {}
    if isinstance(source, GGUFSource):
        place, more = place.parent, {"gguf_file": place.name}
    try:
        return AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code, **more)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the config of {source.directory} can't be read: {error}" + _hint_trust(error)) from error


def _hint_trust(error: BaseException) -> str:
    return " With autotp it is from_pretrained(path, trust_remote_code=True)." if "trust_remote_code" in str(error) else ""


def find_class(
    config: Any, source: CheckpointSource, trust_remote_code: bool = False, model_class: Any = None
) -> type[nn.Module]:
    """The class of transformers that a config names, or, where that is trusted, of the code beside it; or `model_class`.

    Raises:
        CheckpointError: there is no such class, or `model_class`, one of the Auto classes, has none for the config.
    """
    if model_class is not None:
        mapping = getattr(model_class, "_model_mapping", None)
        if mapping is not None and type(config) not in mapping:
            raise CheckpointError(f"{model_class.__name__} has no class for a {type(config).__name__}: name the class itself")
        return model_class if mapping is None else mapping[type(config)]
    names = [name for name in getattr(config, "architectures", None) or [] if isinstance(name, str)]
    for name in names:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):  # a config may name anything
            return found
    for reference in (getattr(config, "auto_map", None) or {}).values() if trust_remote_code else ():
        if isinstance(reference, str) and reference.rpartition(".")[2] in names:
            return get_class_from_dynamic_module(reference, source.directory)
    if isinstance(source, GGUFSource) and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # type: ignore[return-value]
    raise CheckpointError(
        f"{source.directory} names the class {names}, which transformers does not have"
        + (": give trust_remote_code=True if you trust the code beside it" if getattr(config, "auto_map", None) else "")
    )


def find_dtype(
    source: CheckpointSource, dtype: torch.dtype | str | None, trust_remote_code: bool = False, config: Any = None
) -> torch.dtype | None:
    """The dtype of floating-point parameters: "auto" is the config's, or else that of what is stored; None is the config's."""
    if dtype == "auto" and isinstance(source, GGUFSource):
        return torch.float32
    if dtype == "auto":
        found = getattr(config or read_config(source, trust_remote_code), "dtype", None)
        if isinstance(found, torch.dtype):
            return found
        floating = [source.dtype(name) for name in sorted(source.names()) if source.dtype(name).is_floating_point]
        return floating[0] if floating else None
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def build_empty(
    source: CheckpointSource,
    dtype: torch.dtype | None,
    trust_remote_code: bool = False,
    model_class: Any = None,
    config: Any = None,
) -> nn.Module:
    """The checkpoint's model, or `model_class`'s: parameters on meta in `dtype`, buffers real, generation config as saved."""
    config = copy.deepcopy(config) or read_config(source, trust_remote_code)
    cls = find_class(config, source, trust_remote_code, model_class)
    with empty_weights():
        model = cls._from_config(config, dtype=dtype) if dtype is not None else cls._from_config(config)
    model.tie_weights()  # accelerate gives every name a Parameter of its own
    widen_exceptions(model, dtype or getattr(model.config, "dtype", None))
    if (Path(source.directory) / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        model.generation_config = GenerationConfig.from_pretrained(source.directory)
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
