"""Wraps around peft: adapters are dealt as they are added, what is saved is whole; pass-through for models that are not ours.

| wrapped | what is added |
|---|---|
| `BaseTuner.inject_adapter` | layers show their whole sizes; then the adapter is cut |
| `gather_params_ctx`, peft's seam for DeepSpeed | initial values and magnitudes are of whole weights |
| `BaseTuner.forward` | passes through the model's hooks |
| `ModulesToSaveWrapper.update` | a copy shares what its original shares with others |
| `get_peft_model_state_dict` | gathers |
| `PeftModel.save_pretrained`, `push_to_hub` | rank 0 writes; all ranks take part |
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import TPGroup
from ..errors import AutoTPError, CheckpointError
from .adapters import cut_adapters, share_adapters, shown_whole
from .base import find_group, holder_of, index_parameters
from .fully import find_data_group, make_whole
from .gather import GatherReplacedLayerParams
from .stream import iterate_full_tensors, map_sharded

GATHERING = ("layer", "dora")  # files of peft.tuners.lora that read weights inside gather_params_ctx
# Options of LoraConfig that read activations or whole weights in ways of their own.
UNSUPPORTED = {
    "alora_invocation_tokens": "aLoRA", "arrow_config": "Arrow", "use_qalora": "QALoRA", "use_bdlora": "BD-LoRA",
    "velora_config": "VeLoRA", "monteclora_config": "MonteCLoRA", "kasa_config": "KaSA",
    "layer_replication": "layer_replication", "trainable_token_indices": "trainable_token_indices",
    "ensure_weight_tying": "ensure_weight_tying", "megatron_config": "megatron_config",
}  # fmt: skip
UNSUPPORTED_INITS = ("eva", "corda", "lora_ga", "mica", "loftq")
WEIGHTED = ("linear", "cat")  # kinds of add_weighted_adapter that work on parts
PROXIES = ("_LoraParameterProxy", "_LoraFactorsProxy")  # of peft.tuners.lora.layer: what adds to a parameter during a forward
# What may be registered on a shard: it is computed from pieces that are dealt as the shard is.
dealt_parametrizations: set[type[nn.Module]] = set()


def install_peft(replace: Callable[..., None]) -> None:
    """Wrap peft's entry points, if peft is installed.

    Args:
        replace: puts `make(original)` in place of `owner.name`.
    """
    if importlib.util.find_spec("peft") is None:
        return
    import peft
    from peft.tuners.lora.model import LoraModel
    from peft.tuners.tuners_utils import BaseTuner
    from peft.utils.other import ModulesToSaveWrapper

    lora = [importlib.import_module(f"peft.tuners.lora.{name}") for name in GATHERING]
    for file in lora:
        replace(file, "gather_params_ctx", wrap_gather)
    dealt_parametrizations.update(getattr(lora[0], name) for name in PROXIES if hasattr(lora[0], name))
    replace(BaseTuner, "inject_adapter", wrap_inject)
    replace(BaseTuner, "forward", wrap_forward)
    replace(LoraModel, "add_weighted_adapter", wrap_weighted)
    replace(ModulesToSaveWrapper, "update", wrap_copy)
    for owner in (lora[0].LoraLayer, lora[0].ParamWrapper):
        replace(owner, "_get_in_out_features", wrap_sizes)
    for owner in ("peft", "peft.utils", "peft.utils.save_and_load", "peft.peft_model", "peft.mapping"):
        replace(importlib.import_module(owner), "get_peft_model_state_dict", wrap_state_dict)
    replace(peft.PeftModel, "save_pretrained", wrap_save)
    replace(peft.PeftModel, "push_to_hub", wrap_push)


def _find_ours(model: Any) -> TPGroup | None:
    group = find_group(model) if isinstance(model, nn.Module) else None
    return group if group is not None and group.tp_size > 1 else None


# -- adding ---------------------------------------------------------------------------------------------------------------


def wrap_inject(original: Callable) -> Callable:
    def inject_adapter(self, model, adapter_name, *args: Any, **kwargs: Any) -> None:
        group = _find_ours(model)
        if group is None:
            return original(self, model, adapter_name, *args, **kwargs)
        config = self.peft_config[adapter_name]
        with group.together(f"adding the adapter '{adapter_name}'"):
            check_tuner(self, config)
        check_same(group, adapter_name, config)
        index_parameters(model)
        with undone_on_error(model):
            original(self, model, adapter_name, *args, **kwargs)
            share_adapters(model, group, adapter_name)
            cut_adapters(model, group)

    return inject_adapter


def check_tuner(tuner: Any, config: Any) -> None:
    """Raise for what has no dealt form.

    Raises:
        AutoTPError: naming the method or option.
    """
    from peft.tuners.lora.model import LoraModel

    if type(tuner) is not LoraModel:
        raise AutoTPError(
            f"{type(tuner).__name__} has no form for layers that are dealt to ranks; LoRA has. Use it, or train this on the "
            f"unsharded model"
        )
    used = [text for name, text in UNSUPPORTED.items() if getattr(config, name, None)]
    init = getattr(config, "init_lora_weights", True)
    if isinstance(init, str) and init.startswith(UNSUPPORTED_INITS):
        used.append(f"init_lora_weights={init!r}")
    if used:
        raise AutoTPError(
            f"LoraConfig asks for {', '.join(used)}, which has no form for layers that are dealt: leave it out, or make the "
            f"adapter on the unsharded model, save it, and load it here"
        )


def check_same(group: TPGroup, adapter: str, config: Any) -> None:
    """Raise on every rank if ranks add other adapters.

    Raises:
        AutoTPError: naming the ranks.
    """
    asked = {**config.to_dict(), "base_model_name_or_path": None}  # each rank may have a directory of its own
    text = json.dumps(asked, default=lambda value: sorted(value) if isinstance(value, set) else str(value), sort_keys=True)
    notes = group.gather_objects((adapter, text))
    others = [rank for rank, note in enumerate(notes) if note != notes[0]]
    if others:
        raise AutoTPError(
            f"TP rank(s) {others} add another adapter than rank 0's '{notes[0][0]}': pass the same config on all ranks"
        )


@contextmanager
def undone_on_error(model: nn.Module) -> Iterator[None]:
    """Modules that were replaced inside are put back if it raises; what was already an adapter's keeps what it got."""
    tables = [(module, dict(module._modules)) for module in model.modules()]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for module, table in tables:
            module._modules.update({name: child for name, child in table.items() if name in module._modules})
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)
        raise


def wrap_sizes(original: Callable) -> Callable:
    def get_in_out_features(self, module) -> Any:
        with shown_whole(module):
            return original(self, module)

    return get_in_out_features


def wrap_gather(original: Callable) -> Callable:
    @contextmanager
    def gather_params_ctx(param, *args: Any, **kwargs: Any) -> Iterator[None]:
        params = [param] if isinstance(param, Tensor) else list(param)
        held = next((found for p in params if (found := holder_of(p)) is not None), None)
        if held is None:
            with original(iter(params), *args, **kwargs):
                yield
        else:
            with GatherReplacedLayerParams(params, held[0]):
                yield

    return gather_params_ctx


def wrap_forward(original: Callable) -> Callable:
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs) if _find_root(self.model) is None else self.model(*args, **kwargs)

    return forward


def _find_root(model: nn.Module) -> TPGroup | None:
    return model.__dict__.get("autotp_group")


def wrap_weighted(original: Callable) -> Callable:
    signature = inspect.signature(original)

    def add_weighted_adapter(self, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        kind = given.arguments["combination_type"]
        if _find_ours(self.model) is not None and kind not in WEIGHTED:
            raise AutoTPError(
                f"add_weighted_adapter(combination_type={kind!r}) reads whole adapters, which are dealt: use one of {WEIGHTED}, "
                f"or combine them on the unsharded model"
            )
        return original(self, *args, **kwargs)

    return add_weighted_adapter


def wrap_copy(original: Callable) -> Callable:
    def update(self, adapter_name, *args: Any, **kwargs: Any) -> Any:
        known = set(self.modules_to_save)
        result = original(self, adapter_name, *args, **kwargs)
        if adapter_name not in known and _find_ours(self.original_module) is not None:
            adopt_shared(self.original_module, self.modules_to_save[adapter_name])
        return result

    return update


def adopt_shared(original: nn.Module, copy: nn.Module) -> None:
    """Let a deep copy of a part of the model share what the part shares with the rest: where tokens are dealt, regions end."""
    for one, other in zip(original.modules(), copy.modules(), strict=True):
        for key in ("tokens", "autotp_tokens", "ends"):
            if key in one.__dict__:
                other.__dict__[key] = one.__dict__[key]


# -- saving ---------------------------------------------------------------------------------------------------------------


def wrap_state_dict(original: Callable) -> Callable:
    def get_peft_model_state_dict(model, state_dict=None, adapter_name="default", *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        if _find_ours(model) is None or state_dict is not None or model.peft_config[adapter_name].is_prompt_learning:
            return original(model, state_dict, adapter_name, *args, **kwargs)
        own = model.state_dict(keep_vars=True)
        # peft chooses and renames by what it is given: numbers stand for the tensors, which it may copy on the way.
        numbers = {name: torch.tensor([number]) for number, name in enumerate(own)}
        chosen = original(model, numbers, adapter_name, *args, **kwargs)
        names = list(own)
        return gather_chosen(model, own, {key: names[int(number)] for key, number in chosen.items()})

    return get_peft_model_state_dict


def gather_chosen(model: nn.Module, own: dict[str, Tensor], chosen: dict[str, str]) -> dict[str, Tensor]:
    """Some of the model's `own` tensors under other names, `chosen` new name -> own: whole on rank 0, the others' parts there."""
    sharded = map_sharded(model)
    wanted = {id(own[name]): name for name in chosen.values() if id(own[name]) in sharded}
    whole: dict[int, Tensor] = {}
    with closing(iterate_full_tensors(model, dict.fromkeys(wanted.values(), 0))) as stream:
        for name, tensor in stream:
            if tensor is not None:
                whole[id(own[name])] = tensor
    return {
        key: whole[place] if (place := id(own[name])) in whole else make_whole(own[name].detach()) for key, name in chosen.items()
    }


def wrap_save(original: Callable) -> Callable:
    signature = inspect.signature(original)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        group = _find_ours(self)
        if group is None:
            return original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        if given.arguments.get("path_initial_model_for_weight_conversion") is not None:
            raise CheckpointError(
                "path_initial_model_for_weight_conversion reads whole adapters, which are dealt: save without it, convert the "
                "saved adapter on the unsharded model"
            )
        data = find_data_group(self)  # whose ranks all gather, and the first writes
        main = given.arguments["is_main_process"] and group.tp_rank == 0 and (data is None or data.tp_rank == 0)
        given.arguments["is_main_process"] = main
        extra = given.arguments[next(iter(reversed(signature.parameters)))]
        group.arrive("save_pretrained of the adapters")
        if main or extra.get("state_dict") is None:  # one that is given is whole, on rank 0 alone
            original(*given.args, **given.kwargs)
        group.arrive("the end of save_pretrained")

    return save_pretrained


def wrap_push(original: Callable) -> Callable:
    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        group = _find_ours(self)
        if group is None or group.tp_rank == 0:
            return original(self, *args, **kwargs)
        with tempfile.TemporaryDirectory() as nowhere:
            self.save_pretrained(nowhere, is_main_process=False)

    return push_to_hub
