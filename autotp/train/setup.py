"""What a run starts from: accelerate's state, the tokenizer, and this rank's part of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers import AutoConfig, AutoTokenizer

from ..errors import AutoTPError
from ..inject.plan import Plan
from ..inject.rewrite import from_pretrained
from ..places import Places
from .options import WHEN_DEALT, TrainOptions
from .paths import nearest_path


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


def load_config(model: str) -> Any:
    """The config of a hub id or a directory.

    Raises:
        AutoTPError: there is none, or this transformers doesn't know it.
    """
    path = Path(model).expanduser()
    looks_like_path = model.startswith(("/", ".", "~")) or model.count("/") > 1  # a hub id is `name` or `owner/name`
    if looks_like_path and not path.exists():
        raise AutoTPError(f"MODEL {model}: there is no such directory.{nearest_path(path)}")
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)  # else transformers asks on the terminal
    except (OSError, ValueError) as error:
        raise AutoTPError(
            f"can't read the config of {model}, neither a directory with one nor a hub id that is known here: "
            f"{error}{nearest_path(model)}"
        ) from error


def check_model(model: str) -> None:
    """Refuse, from its config, what can't be trained on text.

    Raises:
        AutoTPError: no such model, or one that doesn't predict the next token.
    """
    config = load_config(model)
    names = getattr(config, "architectures", None) or []
    if getattr(config, "is_encoder_decoder", False) or any("MaskedLM" in name for name in names):
        raise AutoTPError(
            f"{model} ({', '.join(names)}) does not predict the next token of a text: train a causal language model"
        )


def read_plan(path: str) -> Plan:
    """The plan in a file that `autotp plan --json` printed.

    Raises:
        AutoTPError: no such file, or no plan in it.
    """
    try:
        return Plan.from_json(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise AutoTPError(f"--plan {path}: there is no such file.{nearest_path(path)}") from error
    except (OSError, UnicodeDecodeError, AutoTPError) as error:
        raise AutoTPError(f"--plan {path}: {error}") from error


def load_tokenizer(model: str) -> Any:
    """The model's tokenizer.

    Raises:
        AutoTPError: there is none, or its vocabulary is empty because its files are missing.
    """
    way_out = "copy tokenizer.json and tokenizer_config.json of the model into its directory"
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # tokenizers fail in many ways
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise AutoTPError(f"{model} has no tokenizer that transformers can load ({said[0]}): {way_out}") from error
    if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids):
        raise AutoTPError(f"{model} has no tokenizer: its vocabulary is empty, as its files are missing: {way_out}")
    return tokenizer


def load_model(options: TrainOptions, places: Places) -> nn.Module:
    """This rank's part of the model, ready to train.

    Raises:
        AutoTPError: no weights, no plan, or no gradient checkpointing where it is asked for.
    """
    plan = "auto" if options.plan is None else read_plan(options.plan)
    dealt = WHEN_DEALT[options.sequence_parallel]
    torch.manual_seed(options.seed)  # what the checkpoint lacks is drawn: alike in all copies of the model
    model = from_pretrained(options.model, places.tp, plan=plan, sequence_parallel=dealt, dtype=getattr(torch, options.dtype))
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
