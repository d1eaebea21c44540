"""Quantises the linears of a parallelized model, each rank its own parts: while a checkpoint is read, or in place; and back.

What is asked for is a config of transformers, and what transformers leaves on a model that it quantised is left on this one, so
that peft, Trainer and TRL treat it alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers import BitsAndBytesConfig, TorchAoConfig
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import AutoHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ..comm import TPGroup
from ..errors import AutoTPError, PlanError
from ..layers.base import check_usable, find_group, index_parameters, mark_broken
from ..layers.fully import refuse_dealt
from ..layers.quantised import SHARDED, find_plain, hold_packed, is_packed, pack_weight, restore_weight
from ..layers.sibling_memory import lay_siblings
from ..shard import Shard
from .adapted import find_root, list_wraps
from .checks import check_alike, refuse_quantised

MARKS = ("hf_quantizer", "is_quantized", "quantization_method", "is_loaded_in_4bit", "is_loaded_in_8bit")


@dataclass
class Quantiser:
    """What a config asks for.

    Attributes:
        config: of transformers; own: transformers' quantizer of it.
        kind: a key of layers.packed.FORMATS; options: how that packs a weight.
        group_size: how many inputs share a scale, where all rows must be made of whole groups; None for any number.
        skipped: name patterns of modules that stay as they are; None for transformers' own choice.
        held: weights that are packed already and wait for their modules.
    """

    config: Any
    own: Any
    kind: str
    options: dict[str, Any]
    group_size: int | None = None
    skipped: list[str] | None = None
    held: dict[str, tuple[nn.Parameter, dict[str, Any]]] = field(default_factory=dict)

    def pack(self, name: str, module: Any) -> None:
        """Quantise the weight of the linear called `name`; the module is made of it by `install`."""
        self.held[name] = pack_weight(module.weight, self.kind, self.options)
        module._parameters["weight"] = self.held[name][0]

    def pack_read(self, model: nn.Module, names: Iterable[str]) -> Callable[[str], None]:
        """What is to be told the name of each Parameter that was read: the weights of the linears `names` are packed at once."""
        of = {f"{name}.weight": name for name in names}

        def pack(parameter: str) -> None:
            if parameter in of:
                self.pack(of[parameter], model.get_submodule(of[parameter]))

        return pack

    def install(self, model: nn.Module) -> None:
        """Give the linears whose weights were packed their products, and the model transformers' marks."""
        for name, (weight, state) in self.held.items():
            hold_packed(model.get_submodule(name), self.kind, weight, state)
        self.held.clear()
        marks: dict[str, Any] = {"hf_quantizer": self.own, "is_quantized": True}
        marks["quantization_method"] = self.config.quant_method
        if self.kind != "torchao":
            marks["is_loaded_in_4bit" if self.kind == "bitsandbytes_4bit" else "is_loaded_in_8bit"] = True
        for name, value in marks.items():
            setattr(model, name, value)
        self.own.dequantize = lambda model, dtype=None: dequantize(model)
        index_parameters(model)


# -- what is asked for ----------------------------------------------------------------------------------------------------


def read_config(config: Any, precision: Any = None) -> Quantiser:
    """What a `quantization_config` asks for.

    Raises:
        PlanError: it is of another library, has an option that sharded linears don't, or stands beside `precision`, which is a
            format too; or its library is not there.
    """
    if precision is not None:
        raise PlanError("precision= and quantization_config= both say how linears multiply: give one of the two")
    if not isinstance(config, BitsAndBytesConfig | TorchAoConfig):
        raise PlanError(
            f"quantization_config= is a {type(config).__name__}: give a BitsAndBytesConfig or a TorchAoConfig of transformers"
        )
    own = AutoHfQuantizer.from_config(config, pre_quantized=False)
    try:
        own.validate_environment()
    except (ImportError, RuntimeError) as error:
        raise PlanError(f"quantization_config= can't be followed here: {error}") from error
    return _read_torchao(config, own) if isinstance(config, TorchAoConfig) else _read_bitsandbytes(config, own)


def _read_bitsandbytes(config: Any, own: Any) -> Quantiser:
    _refuse_options(config, "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight")
    skipped = config.llm_int8_skip_modules
    if config.load_in_8bit:
        return Quantiser(config, own, "bitsandbytes_8bit", {"threshold": config.llm_int8_threshold}, None, skipped)
    options = {
        "compute_dtype": config.bnb_4bit_compute_dtype,
        "compress_statistics": config.bnb_4bit_use_double_quant,
        "quant_type": config.bnb_4bit_quant_type,
        "quant_storage": config.bnb_4bit_quant_storage,
    }
    return Quantiser(config, own, "bitsandbytes_4bit", options, None, skipped)


def _read_torchao(config: Any, own: Any) -> Quantiser:
    _refuse_options(config, "include_input_output_embeddings", "untie_embedding_weights")
    asked = config.get_apply_tensor_subclass()
    if hasattr(asked, "fqn_to_config"):
        raise PlanError(
            "quantization_config= has a config for each name: give one, and name the others in modules_to_not_convert"
        )
    sizes = [asked, *(getattr(asked, name, None) for name in ("granularity", "weight_granularity"))]
    group_size = next((each.group_size for each in sizes if getattr(each, "group_size", None)), None)
    return Quantiser(config, own, "torchao", {"config": asked}, group_size, config.modules_to_not_convert)


def _refuse_options(config: Any, *names: str) -> None:
    used = [name for name in names if getattr(config, name, False)]
    if used:
        raise PlanError(f"quantization_config= sets {', '.join(used)}, which sharded models don't have: leave it out")


# -- which linears --------------------------------------------------------------------------------------------------------


def choose_linears(model: Any, shards: Mapping[str, Shard], quantiser: Quantiser) -> list[str]:
    """The names of the linears that are quantised: all that transformers would, but for kinds that have no packed form.

    Raises:
        PlanError: there are none, or a rank's part of one does not fit the format.
    """
    skipped = quantiser.own.get_modules_to_not_convert(model, quantiser.skipped, getattr(model, "_keep_in_fp32_modules", None))
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    chosen, left = [], []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | Conv1D) or not should_convert_module(name, skipped):
            continue
        fits = find_plain(module) in (nn.Linear, *SHARDED) and module is not head
        (chosen if fits else left).append(name)
    if not chosen:
        raise PlanError(f"{type(model).__name__} has no nn.Linear that could be quantised: leave quantization_config= out")
    if left:
        warnings.warn(
            f"{len(left)} linears stay as they are, as their kind has no quantised form: {', '.join(left[:4])}", stacklevel=2
        )
    if stacked := list_stacked(model, skipped):
        warnings.warn(
            f"{len(stacked)} stacks of experts' weights stay as they are, as they are no linears: {', '.join(stacked[:4])}",
            stacklevel=2,
        )
    if quantiser.group_size:
        _check_groups(model, shards, quantiser.group_size, chosen)
    return chosen


def list_stacked(model: nn.Module, skipped: list[str] | None) -> list[str]:
    """The names of matrices that lie stacked in one Parameter, as those of experts do, but for what was asked to stay."""
    return [
        full_name
        for module_name, module in model.named_modules()
        if not isinstance(module, _ConvNd) and should_convert_module(module_name, skipped)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and min(parameter.shape) > 1
        if should_convert_module(full_name := f"{module_name}.{name}".lstrip("."), skipped)
    ]


def _check_groups(model: nn.Module, shards: Mapping[str, Shard], size: int, names: Iterable[str]) -> None:
    """Raise for rows that are not made of whole groups of `size` inputs on some rank."""
    for name in names:
        linear: Any = model.get_submodule(name)
        shard, whole = shards.get(f"{name}.weight"), tuple(linear.weight.shape)
        parts = [whole] if shard is None else [shard.local_shape(rank) for rank in range(shard.tp_size)]
        for rank, (_, inputs) in enumerate(parts):
            if inputs % size:
                of = "" if shard is None else f" of {shard.shape[1]} on TP rank {rank} of {shard.tp_size}"
                raise PlanError(
                    f"{name}: {inputs} inputs{of} are no multiple of {size}, the inputs that share a scale: use a smaller group, "
                    f"fewer ranks, or name it in modules_to_not_convert"
                )


def check_configs(group: TPGroup, config: Any) -> None:
    """Raise on every rank if ranks ask for different formats."""
    check_alike(group, {"quantization_config= arguments": None if config is None else repr(config)})


# -- in place -------------------------------------------------------------------------------------------------------------


def quantize(model: nn.Module, quantization_config: Any) -> nn.Module:
    """Quantise the linears of a parallelized `model` in place, each rank its own parts, for adapters to train on; collective.

    `from_pretrained(path, quantization_config=..)` does so while it reads, and never holds more than one plain weight.

    Args:
        quantization_config: transformers' BitsAndBytesConfig or TorchAoConfig.

    Returns:
        `model` itself.

    Raises:
        AutoTPError: before anything is changed: not parallelized, has adapters already, a config that does not fit.
    """
    group = find_group(model)
    if group is None:
        raise PlanError(f"this {type(model).__name__} is not parallelized: autotp.parallelize(model) first, then quantize it")
    root: Any = find_root(model)
    check_usable(root)
    check_configs(group, quantization_config)
    with group.together("looking at what is quantised"):
        if root is not model or list_wraps(root):
            raise PlanError("the model has adapters already: quantize it first, then add or load them")
        refuse_dealt(root.named_parameters(), "quantize", "quantize the model first, and call fully_shard after that")
        quantiser = read_config(quantization_config)
        refuse_quantised(root)
        names = choose_linears(root, root.autotp_plan.shards, quantiser)
        used = [name for name in names if root.get_submodule(name).__dict__.get("scaling") is not None]
        if used:
            raise PlanError(f"{used[0]} multiplies in FP8, precision= asked for that: leave out one of the two")
    try:
        with group.together("quantising"):
            for name in names:
                quantiser.pack(name, root.get_submodule(name))
            quantiser.install(root)
    except BaseException as error:
        mark_broken(root, f"quantising it failed half way ({type(error).__name__}: {error})")
        raise
    _let_go(root)
    return model


def dequantize(model: nn.Module) -> nn.Module:
    """The inverse of `quantize`, in place: plain weights, which have the values that they were quantised to.

    Raises:
        AutoTPError: nothing is quantised, or adapters of quantised linears are there.
    """
    root = find_root(model)
    if not any(is_packed(module) for module in root.modules()):
        raise PlanError(f"nothing of this {type(model).__name__} is quantised")
    held = [name for name, wrap in list_wraps(root) if any(is_packed(module) for module in wrap.modules())]
    refuse_dealt(
        root.named_parameters(), "dequantize", "dequantize the model before fully_shard, or load its adapter into another"
    )
    if held:
        raise AutoTPError(
            f"{held[0]} has an adapter of a quantised linear: model.merge_and_unload() or model.unload() first, then dequantize"
        )
    for module in root.modules():
        if is_packed(module):
            restore_weight(module)
    for name in MARKS:
        root.__dict__.pop(name, None)
    lay_siblings(root)
    index_parameters(root)
    return model


def _let_go(model: nn.Module) -> None:
    """Free the plain weights, which siblings hold as one allocation."""
    for module in model.modules():
        siblings: Any = module.__dict__.get("siblings")
        if siblings is not None:
            siblings.find_laid()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
