"""Making a model parallel that has peft's adapters: what is below is planned as if they were not there, then they are cut."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..comm import TPGroup
from ..errors import PlanError
from ..layers.adapters import cut_adapters
from ..layers.base import TensorParallel_Layer, mark_broken
from ..layers.peft_wraps import adopt_shared, check_tuner
from .checks import check_alike, digest_weights


def find_root(model: nn.Module) -> nn.Module:
    """The model that adapters were added to; `model` itself where it is none of peft's."""
    peft: Any = sys.modules.get("peft")
    wrapped: Any = model
    return wrapped.get_base_model() if peft is not None and isinstance(model, peft.PeftModel) else model


def list_wraps(model: nn.Module) -> list[tuple[str, Any]]:
    """`(name, wrap)` of the outermost modules that peft put around others."""
    if "peft" not in sys.modules:
        return []
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    found: list[tuple[str, Any]] = []
    for name, module in model.named_modules():
        wraps = isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) and not isinstance(module, BaseTuner)
        if wraps and not any(name.startswith(f"{outer}.") for outer, _ in found):
            found.append((name, module))
    return found


def parallelize_adapted(model: nn.Module, group: TPGroup, parallelize: Callable[[nn.Module], Any]) -> nn.Module:
    """Parallelize the model below the adapters with `parallelize(root)`, and deal the adapters beside it.

    Raises:
        AutoTPError: before anything is changed, for adapters that have no dealt form, or that differ between ranks.
    """
    root, tuner = find_root(model), getattr(model, "base_model", None)
    wraps = list_wraps(root)
    with group.together("looking at the adapters"):
        for config in getattr(model, "peft_config", {}).values() if wraps else ():
            check_tuner(tuner, config)
        check_wraps(wraps)
    check_alike(group, {"weights": digest_weights(model)})
    with set_aside(root, wraps):
        parallelize(root)
    if group.tp_size == 1:
        return model
    try:
        for _, wrap in wraps:
            for adapter, own in getattr(wrap, "modules_to_save", {}).items():
                wrap.modules_to_save[adapter] = cut_copy(wrap.original_module, own, group)
        cut_adapters(model, group)
        for parameter in model.parameters():
            if parameter.device != group.device:
                parameter.data = parameter.data.to(group.device)
    except BaseException as error:
        mark_broken(root, f"dealing its adapters failed half way ({type(error).__name__}: {error})")
        raise
    return model


def check_wraps(wraps: list[tuple[str, Any]]) -> None:
    """Raise for wraps that are neither LoRA layers nor copies of modules."""
    from peft.tuners.lora.layer import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

    for name, wrap in wraps:
        if not isinstance(wrap, LoraLayer | ModulesToSaveWrapper):
            raise PlanError(
                f"{name} is wrapped in peft's {type(wrap).__name__}, which has no form for layers that are dealt; LoRA and "
                f"modules_to_save have. Merge it first (merge_and_unload)"
            )


@contextmanager
def set_aside(root: nn.Module, wraps: list[tuple[str, Any]]) -> Iterator[None]:
    """Inside it the wrapped modules stand in the places of their wraps."""
    places: list[tuple[nn.Module, str, Any]] = []
    for name, wrap in wraps:
        parent, _, leaf = name.rpartition(".")
        places.append((root.get_submodule(parent), leaf, wrap))
    for parent, leaf, wrap in places:
        parent._modules[leaf] = wrap.original_module if hasattr(wrap, "original_module") else wrap.get_base_layer()
    try:
        yield
    finally:
        for parent, leaf, wrap in places:
            parent._modules[leaf] = wrap


@torch.no_grad()
def cut_copy(original: nn.Module, own: nn.Module, group: TPGroup) -> nn.Module:
    """What a rewritten module's whole copy `own` becomes: a copy of the rewritten one with own's Parameters, cut."""
    twin = copy.deepcopy(original)
    adopt_shared(original, twin)
    for new, old in zip(twin.modules(), own.modules(), strict=True):
        shards = new.shards if isinstance(new, TensorParallel_Layer) else {}
        for leaf, parameter in old._parameters.items():
            if parameter is None:
                continue
            grad, parameter.grad = parameter.grad, None
            parts = [
                value if leaf not in shards else shards[leaf].split(value, group.tp_rank).clone()
                for value in (parameter.data, grad)
                if value is not None
            ]
            parameter.data = parts[0].to(group.device)
            if grad is not None:
                parameter.grad = parts[1].to(group.device)
            new._parameters[leaf] = parameter
    return twin.train(own.training)
