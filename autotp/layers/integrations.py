"""Wraps around transformers and accelerate: what they save is whole, and all TP ranks take part; pass-through for others.

`save_pretrained`, `push_to_hub`, `Accelerator.get_state_dict`, `save_model` and `save_state` gather. They are collective
then: where only some ranks call them, the missing ones are named within the group's timeout. Optimizer state is a rank's
own, so each rank writes and reads a file of its own beside the one that the libraries write (rank_state.py).
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from math import prod
from types import SimpleNamespace
from typing import Any

from torch import nn

from ..errors import AutoTPError, CheckpointError
from . import data_axis
from .base import sharded_modules
from .data_axis import count_copies, find_prepared, find_spread
from .fused_head import wrap_trl
from .peft_wraps import install_peft
from .rank_state import check_rank_state, load_rank_state, own_loading, save_rank_state, share_random_state
from .stream import full_state_dict, gather_state, map_sharded
from .when_imported import when_imported

Save = Callable[..., None]  # save(model, directory, max_shard_size=..., is_main_process=...)
Resize = Callable[..., nn.Module]  # resize(transformers' method, model, its arguments...)


def install_integrations(save: Save | None, resize: Resize | None = None) -> None:
    """Wrap transformers' and accelerate's entry points; `save` writes a parallelized model, `resize` resizes its embeddings."""
    from accelerate import Accelerator
    from transformers.generation import GenerationMixin
    from transformers.modeling_utils import PreTrainedModel

    replace(PreTrainedModel, "save_pretrained", functools.partial(_wrap_save_pretrained, save))
    replace(PreTrainedModel, "push_to_hub", _wrap_push_to_hub)
    replace(PreTrainedModel, "resize_token_embeddings", functools.partial(_wrap_resize, resize))
    replace(PreTrainedModel, "num_parameters", _wrap_num_parameters)
    replace(GenerationMixin, "_get_static_cache_init_shape", _wrap_static_cache_shape)
    replace(Accelerator, "get_state_dict", _wrap_get_state_dict)
    replace(Accelerator, "prepare", data_axis.wrap_prepare)
    replace(Accelerator, "_prepare_tp", data_axis.wrap_prepare_tp)
    replace(Accelerator, "prepare_model", data_axis.wrap_prepare_model)
    replace(Accelerator, "prepare_data_loader", data_axis.wrap_prepare_loader)
    replace(Accelerator, "prepare_scheduler", data_axis.wrap_prepare_scheduler)
    replace(Accelerator, "gather", data_axis.wrap_gather)
    replace(Accelerator, "gather_for_metrics", data_axis.wrap_gather_for_metrics)
    replace(Accelerator, "save_state", _wrap_save_state)
    replace(Accelerator, "load_state", _wrap_load_state)
    when_imported("transformers.trainer", _install_trainer)  # it imports pandas and much else
    when_imported("peft", functools.partial(install_peft, replace))


def _install_trainer() -> None:
    from transformers.trainer import Trainer

    replace(Trainer, "_build_accelerator_args", _wrap_accelerator_args)
    replace(Trainer, "save_model", _wrap_trainer_save)
    replace(Trainer, "_save_optimizer_and_scheduler", _wrap_trainer_save_optimizer)
    replace(Trainer, "_load_optimizer_and_scheduler", _wrap_trainer_load_optimizer)
    replace(Trainer, "_load_rng_state", _wrap_trainer_load_random_state)


def install_on_cpus() -> None:
    """Let an Accelerator on CPUs have a tp axis; before there is a model, since scripts make their Accelerator first."""
    from accelerate import ParallelismConfig

    replace(ParallelismConfig, "_validate_accelerator", data_axis.wrap_validate)


def replace(owner: Any, name: str, make: Callable[[Callable], Callable]) -> None:
    """Put `make(original)` in place of `owner.name`, where there is one."""
    original = getattr(owner, name, None)
    if original is not None:
        setattr(owner, name, functools.wraps(original)(make(original)))


# -- transformers: saving -----------------------------------------------------------------------------------------------


def _wrap_save_pretrained(save: Save | None, original: Callable) -> Callable:
    def save_pretrained(
        self, save_directory, is_main_process=True, state_dict=None, push_to_hub=False, max_shard_size="50GB", **kwargs: Any
    ) -> None:
        group = find_spread(self)
        if group is None:
            return original(self, save_directory, is_main_process, state_dict, push_to_hub, max_shard_size, **kwargs)
        if kwargs.get("distributed_checkpoint"):
            raise CheckpointError(
                "distributed_checkpoint=True is not built for a parallelized model: leave it out to save it whole"
            )
        extra = {key for key, value in kwargs.items() if value is not None} - {"save_function", "safe_serialization"}
        adapters = getattr(self, "_hf_peft_config_loaded", False)  # transformers then writes those alone
        if save is not None and state_dict is None and not push_to_hub and not extra and not adapters:
            return save(self, save_directory, max_shard_size=max_shard_size, is_main_process=is_main_process)
        if state_dict is None:
            state_dict = full_state_dict(self)
        else:  # whole tensors on rank 0, as `Accelerator.get_state_dict` gives them
            _refuse_shards(self, state_dict)
            group.arrive("save_pretrained")
        if group.tp_rank == 0 and is_main_process:
            original(self, save_directory, True, state_dict, push_to_hub, max_shard_size, **kwargs)
        group.arrive("the end of save_pretrained")

    return save_pretrained


def _refuse_shards(model: nn.Module, state_dict: dict[str, Any]) -> None:
    sharded = map_sharded(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        found = sharded.get(id(tensor)) if name in state_dict else None
        if found is not None and tuple(state_dict[name].shape) != found[0].shards[found[1]].shape:
            raise CheckpointError(
                f"'{name}' in the state_dict given to save_pretrained is one rank's shard, of shape "
                f"{tuple(state_dict[name].shape)}: leave state_dict out, or pass autotp.full_state_dict(model)"
            )


def _wrap_push_to_hub(original: Callable) -> Callable:
    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        group = find_spread(self)
        if group is None or group.tp_rank == 0:
            return original(self, *args, **kwargs)  # saves once, through `save_pretrained`
        with tempfile.TemporaryDirectory() as nowhere:
            self.save_pretrained(nowhere, is_main_process=False)

    return push_to_hub


def _wrap_resize(resize: Resize | None, original: Callable) -> Callable:
    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        if find_spread(self) is None or not (args or kwargs):
            return original(self, *args, **kwargs)
        if resize is None or "autotp_plan" not in self.__dict__:
            raise AutoTPError(f"resize_token_embeddings of a part of a model that is parallelized: call it of the whole model, "
                              f"or of the {type(self).__name__} before parallelize")  # fmt: skip
        return resize(original, self, *args, **kwargs)

    return resize_token_embeddings


def _wrap_num_parameters(original: Callable) -> Callable:
    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Of the unsharded model."""
        elsewhere, seen = 0, set()
        for _, layer in sharded_modules(self):
            for name, shard in layer.shards.items():
                parameter = layer._parameters.get(name)
                counted = parameter is not None and id(parameter) not in seen and (parameter.requires_grad or not only_trainable)
                if parameter is not None and counted and not (exclude_embeddings and isinstance(layer, nn.Embedding)):
                    elsewhere += prod(shard.shape) - prod(shard.local_shape(layer.tp.tp_rank))  # not numel: it may be packed
                seen.add(id(parameter))
        return original(self, only_trainable, exclude_embeddings) + elsewhere

    return num_parameters


def _wrap_static_cache_shape(original: Callable) -> Callable:
    def get_static_cache_init_shape(self) -> Any:
        # The first call's keys say it exactly; transformers would divide heads that may be copied or left whole.
        return None if find_spread(self) is not None else original(self)

    return get_static_cache_init_shape


# -- transformers: Trainer ----------------------------------------------------------------------------------------------


@contextmanager
def _lent_config(model: nn.Module, copies: int):
    """transformers reads the data-parallel size off the config; configs are shared and saved, so it is there only here."""
    config = model.config
    lent = "distributed_config" not in config.__dict__
    if lent:
        object.__setattr__(config, "distributed_config", SimpleNamespace(dp_size=copies, dp_replicate_size=1))
    try:
        yield
    finally:
        if lent:
            config.__dict__.pop("distributed_config", None)


def _wrap_accelerator_args(original: Callable) -> Callable:
    from accelerate import ParallelismConfig

    def build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        group = find_spread(self.model)
        if group is None:
            return original(self, **kwargs)
        wrap_trl()  # whose trainers are Trainers: they are imported by now
        copies = count_copies(group, self.args.world_size, "Trainer")
        with _lent_config(self.model, copies):
            found = original(self, **kwargs)
        if self.args.parallelism_config is None:  # transformers 5.17 reads no data-parallel size
            found["parallelism_config"] = ParallelismConfig(tp_size=group.tp_size, dp_shard_size=copies)
        return found

    return build_accelerator_args


def _wrap_trainer_save(original: Callable) -> Callable:
    def save_model(self, output_dir=None, _internal_call=False) -> None:
        original(self, output_dir, _internal_call)
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        if find_spread(model) is not None and not self.args.should_save:  # a rank that does not write still takes part
            model.save_pretrained(output_dir or self.args.output_dir, is_main_process=False)

    return save_model


def _wrap_trainer_save_optimizer(original: Callable) -> Callable:
    def save_optimizer_and_scheduler(self, output_dir) -> None:
        original(self, output_dir)
        save_rank_state(find_spread(self.model), [self.optimizer], output_dir, self.args.process_index)

    return save_optimizer_and_scheduler


def _wrap_trainer_load_optimizer(original: Callable) -> Callable:
    def load_optimizer_and_scheduler(self, checkpoint) -> None:
        if checkpoint is None:
            return original(self, checkpoint)
        check_rank_state(find_spread(self.model), checkpoint)
        with own_loading([self.optimizer], checkpoint):
            original(self, checkpoint)
        load_rank_state(find_spread(self.model), [self.optimizer], checkpoint)

    return load_optimizer_and_scheduler


def _wrap_trainer_load_random_state(original: Callable) -> Callable:
    def load_rng_state(self, checkpoint) -> None:
        original(self, checkpoint)
        group = find_spread(self.model)
        if checkpoint is not None and group is not None:
            share_random_state(group, checkpoint)

    return load_rng_state


# -- accelerate ---------------------------------------------------------------------------------------------------------


def _wrap_get_state_dict(original: Callable) -> Callable:
    def get_state_dict(self, model, unwrap=True) -> Any:
        if find_spread(model) is None:
            return original(self, model, unwrap)
        return full_state_dict(self.unwrap_model(model)) if unwrap else gather_state(model)

    return get_state_dict


def _wrap_save_state(original: Callable) -> Callable:
    def save_state(self, output_dir=None, *args: Any, **kwargs: Any) -> Any:
        where = original(self, output_dir, *args, **kwargs)
        group = find_prepared(self)
        save_rank_state(group, self._optimizers, where if where is not None else output_dir, self.process_index)
        if group is not None:
            self.wait_for_everyone()  # every rank reads what rank 0 writes; a load may be the next call
        return where

    return save_state


def _wrap_load_state(original: Callable) -> Callable:
    def load_state(self, input_dir=None, *args: Any, **kwargs: Any) -> None:
        group = find_prepared(self)
        if group is not None and input_dir is None:
            raise AutoTPError("load_state needs the directory's name for a parallelized model: pass input_dir")
        if input_dir is None:
            return original(self, input_dir, *args, **kwargs)
        check_rank_state(group, input_dir, len(self._optimizers))
        with own_loading(self._optimizers, input_dir):
            original(self, input_dir, *args, **kwargs)
        load_rank_state(group, self._optimizers, input_dir)
        if group is not None:
            share_random_state(group, input_dir)

    return load_state
