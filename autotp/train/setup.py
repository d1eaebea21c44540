"""What a run starts from: accelerate's state, the tokenizer, and this rank's part of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..errors import AutoTPError, CheckpointError
from ..inject.plan import Plan
from ..inject.rewrite import from_pretrained, parallelize
from .options import TrainOptions
from .places import Places


def make_accelerator(options: TrainOptions, places: Places) -> Accelerator:
    """accelerate's process state and the mixed precision that `accelerate launch` was asked for.

    Raises:
        AutoTPError: it was configured for what this training does itself or can't do.
    """
    accelerator = Accelerator(cpu=places.tp.device.type == "cpu")
    kind = accelerator.distributed_type
    if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise AutoTPError(f"accelerate is configured for {kind.value}, which would shard the shards: run `accelerate config` "
                          f"anew for multi-GPU or multi-CPU, or use torchrun")  # fmt: skip
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise AutoTPError(f"accelerate is configured for mixed precision {accelerator.mixed_precision}: use --dtype float16 or "
                          f"bfloat16 instead, with float32 master weights")  # fmt: skip
    steps = accelerator.gradient_accumulation_steps
    if steps not in (1, options.grad_accum):
        raise AutoTPError(f"accelerate is configured for {steps} gradient accumulation steps, and --grad-accum is "
                          f"{options.grad_accum}: make them equal, or leave accelerate's out")  # fmt: skip
    return accelerator


def find_gguf(model: str) -> Path | None:
    """The GGUF file that MODEL is, or the only one in its directory if there are no safetensors.

    Raises:
        CheckpointError: several.
    """
    path = Path(model)
    if path.suffix == ".gguf" and path.is_file():
        return path
    found = sorted(path.glob("*.gguf")) if path.is_dir() and not list(path.glob("*.safetensors")) else []
    if len(found) > 1:
        raise CheckpointError(
            f"{model} holds {len(found)} GGUF files, {', '.join(each.name for each in found)}: name one of them"
        )
    return found[0] if found else None


def load_tokenizer(model: str) -> Any:
    """The model's tokenizer.

    Raises:
        AutoTPError: there is none.
    """
    gguf = find_gguf(model)
    try:
        if gguf is not None and not (gguf.parent / "tokenizer_config.json").exists():
            return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        return AutoTokenizer.from_pretrained(model if gguf is None else gguf.parent)
    except Exception as error:  # tokenizers fail in many ways
        raise AutoTPError(
            f"{model} has no tokenizer that can be loaded: {error}. Put the tokenizer's files (tokenizer.json, "
            f"tokenizer_config.json) into the model's directory."
        ) from error


def load_model(options: TrainOptions, places: Places) -> nn.Module:
    """This rank's part of the model, ready to train.

    Raises:
        AutoTPError: no such model, or one that can't be trained on text.
    """
    gguf = find_gguf(options.model)
    _check_config(options.model, gguf)
    plan: Any = "auto"
    if options.plan is not None:
        try:
            plan = Plan.from_json(Path(options.plan).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, AutoTPError) as error:
            raise AutoTPError(f"--plan {options.plan}: {error}") from error
    dtype = getattr(torch, options.dtype)
    if gguf is None:
        model = from_pretrained(options.model, places.tp, plan=plan, dtype=dtype)
    else:
        with places.together(f"reading {gguf}"):
            whole = _read_gguf(gguf, dtype)
        model = parallelize(whole, places.tp, plan=plan)
    if options.gradient_checkpointing:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise AutoTPError(f"{type(model).__name__} has no gradient checkpointing: leave --gradient-checkpointing out")
        _checkpoint_gradients(model)
    return model.train()


def _checkpoint_gradients(model: Any) -> None:
    """By the name that this transformers has for it."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _check_config(model: str, gguf: Path | None) -> None:
    try:
        config = AutoConfig.from_pretrained(model) if gguf is None else None
    except (OSError, ValueError) as error:
        raise AutoTPError(
            f"can't read the config of {model}, neither a directory nor a hub id that is known here: {error}"
        ) from error
    names = getattr(config, "architectures", None) or []
    if getattr(config, "is_encoder_decoder", False) or any("MaskedLM" in name for name in names):
        raise AutoTPError(
            f"{model} ({', '.join(names)}) does not predict the next token of a text: train a causal language model"
        )


def _read_gguf(path: Path, dtype: torch.dtype) -> nn.Module:
    """The whole model of a GGUF file, dequantized; on every rank, since the format can't be read in slices here."""
    try:
        loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    except ImportError as error:
        raise AutoTPError(f"{path} needs the gguf package to be read: pip install gguf") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"can't read {path}: {error}") from error
    config = loaded.config
    if hasattr(config, "quantization_config"):  # it describes the GGUF file, not what is trained
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    return model
