"""The few wraps around torch that catch misuse of plain shards; every one passes through for models that are not ours.

| wrapped | without it |
|---|---|
| `torch.nn.utils.clip_grad_norm_`, `get_total_norm` | each rank clips by its own norm |
| `GradScaler._unscale_grads_` | a rank skips a step that the others take |
| `Optimizer.step` (a pre-hook) | whole-matrix optimizers train another model; old state has the wrong shape |
| `torch.utils.checkpoint`'s two kinds (in recompute.py) | a part of a dealt layer runs again without knowing its rows |
| DDP, FSDP 1 and 2 (in data_parallel.py) | rank 0's shards are copied over the others', or their gradients averaged |
| `torch.distributed.checkpoint.save` | one TP rank's shard is kept for all |
| parametrizations, pruning, old weight and spectral norm | each rank takes norms and ranks of its part alone; saved in parts |

What is wrapped in transformers and accelerate is in `integrations.py`. A reference such as
`from torch.nn.utils import clip_grad_norm_` taken before `install_guards` ran can't be caught: call `autotp.clip_grad_norm_`.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..comm import TPGroup
from ..errors import AutoTPError
from .base import TensorParallel_Layer, _holder_of, sharded_modules
from .clip import clip_grad_norm_, grad_norm, groups_of
from .data_parallel import install_data_parallel
from .initialize import install_initialize
from .integrations import Resize, Save, install_integrations, replace
from .optimizers import check_optimizer
from .peft_wraps import dealt_parametrizations
from .recompute import install_recompute
from .save_guard import install_save_guard

_installed = False
_checked: weakref.WeakSet = weakref.WeakSet()  # optimizers that hold shards and were found fit


def install_guards(save: Save | None = None, resize: Resize | None = None) -> None:
    """Wrap what is listed above and in `integrations.py`, once for the process.

    Args:
        save: the function that writes a parallelized model (`checkpoint.save.save_pretrained`), used where a model's own
            `save_pretrained` is called; without it that raises.
        resize: the function that resizes its embeddings (`inject.resize.resize_embeddings`); without it that raises.
    """
    global _installed
    if _installed:
        return
    _installed = True
    _wrap_clip()
    _wrap_grad_scaler()
    register_optimizer_step_pre_hook(_check_step)
    install_data_parallel(replace)
    install_recompute()
    _wrap_reparametrizations()
    install_save_guard(replace)
    install_initialize(replace)
    install_integrations(save, resize)


def mark_model(model: nn.Module, group: TPGroup) -> None:
    """Say on the model, where Trainer and accelerate look, that the ranks of `group` need one batch; never saved.

    The mark is on this model object alone: a config may be shared with other models.
    """
    if group.tp_size == 1:
        return
    model._tp_size = group.tp_size  # type: ignore[assignment]
    if not hasattr(type(model), "tp_size"):
        model.tp_size = group.tp_size  # type: ignore[assignment]


def unmark_model(model: nn.Module) -> None:
    """Take back what `mark_model` said."""
    for name in ("_tp_size", "tp_size"):
        model.__dict__.pop(name, None)


# -- gradients ----------------------------------------------------------------------------------------------------------


def _as_list(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _wrap_clip() -> None:
    def wrap_clip(original: Callable) -> Callable:
        def clip(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None) -> Tensor:
            parameters = _as_list(parameters)
            ours = any(group.tp_size > 1 for group in groups_of(parameters))
            return (clip_grad_norm_ if ours else original)(parameters, max_norm, norm_type, error_if_nonfinite, foreach)

        return clip

    def wrap_norm(original: Callable) -> Callable:
        def total_norm(tensors, norm_type=2.0, error_if_nonfinite=False, foreach=None) -> Tensor:
            tensors = _as_list(tensors)
            owners = _owners_of(tensors)
            if len(owners) == len(tensors) and any(group.tp_size > 1 for group in groups_of(owners)):
                return grad_norm(owners, norm_type, error_if_nonfinite, foreach)
            return original(tensors, norm_type, error_if_nonfinite, foreach)

        return total_norm

    replace(torch.nn.utils.clip_grad, "clip_grad_norm_", wrap_clip)
    torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_
    replace(torch.nn.utils, "get_total_norm", wrap_norm)


def _owners_of(gradients: list[Tensor]) -> list[Tensor]:
    """The known parameters whose `.grad` is one of `gradients`."""
    wanted = {id(gradient) for gradient in gradients}
    params = [entry[0]() for entry in list(_holder_of.values())]
    return [p for p in params if p is not None and p.grad is not None and id(p.grad) in wanted]


def _wrap_grad_scaler() -> None:
    def wrap(original: Callable) -> Callable:
        def unscale(self, optimizer, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
            found = original(self, optimizer, *args, **kwargs)
            for group in groups_of(p for param_group in optimizer.param_groups for p in param_group["params"]):
                if group.tp_size > 1:
                    _share_found_inf(found, group)
            return found

        return unscale

    replace(torch.amp.grad_scaler.GradScaler, "_unscale_grads_", wrap)


def _share_found_inf(found: dict[torch.device, Tensor], group: TPGroup) -> None:
    """An inf that one rank saw is seen by all; in place, and without waiting for the device."""
    seen = torch.zeros(1, device=group.device)
    for value in found.values():
        seen = torch.maximum(seen, value.to(group.device).reshape(1))
    seen = group.all_reduce(seen, "max")
    for value in found.values():
        value.copy_(seen.reshape(value.shape))


def warn_of_states(model: nn.Module) -> None:
    """Warn of each optimizer that took steps with shards of `model`, which are about to become whole."""
    parameters = {id(parameter) for _, layer in sharded_modules(model) for parameter in layer._parameters.values()}
    for optimizer in list(_checked):
        if any(id(parameter) in parameters and state for parameter, state in optimizer.state.items()):
            _checked.discard(optimizer)
            warnings.warn(
                f"{type(optimizer).__name__} holds states of this rank's shards of {type(model).__name__}, whose parameters are "
                f"whole again: make a new optimizer. autotp.TrainingState, saved before, carries its states over",
                stacklevel=3,
            )


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer not in _checked and check_optimizer(optimizer):
        _checked.add(optimizer)


# -- weights computed from others ---------------------------------------------------------------------------------------


def _wrap_reparametrizations() -> None:
    def wrap(original: Callable) -> Callable:
        signature = inspect.signature(original)

        def register(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            if type(given.get("parametrization")) in dealt_parametrizations:
                return original(*args, **kwargs)
            _refuse_computed(given["module"], given.get("tensor_name") or given.get("name"))
            return original(*args, **kwargs)

        return register

    import torch.nn.utils.prune as prune
    from torch.nn.utils.spectral_norm import SpectralNorm
    from torch.nn.utils.weight_norm import WeightNorm

    replace(torch.nn.utils.parametrize, "register_parametrization", wrap)
    for owner in (WeightNorm, SpectralNorm):
        owner.apply = staticmethod(wrap(owner.apply))  # type: ignore[method-assign]
    prune_apply = prune.BasePruningMethod.apply.__func__  # type: ignore[attr-defined]
    prune.BasePruningMethod.apply = classmethod(wrap(prune_apply))  # type: ignore[assignment]


def _refuse_computed(module: nn.Module, name: Any) -> None:
    tp = module.__dict__.get("tp")
    shard = module.shards.get(name) if isinstance(module, TensorParallel_Layer) else None
    if shard is not None and tp is not None and not shard.is_whole:
        where = module.__dict__.get("full_name") or type(module).__name__
        raise AutoTPError(
            f"'{where}.{name}' is a shard of {shard.shape}, this rank's {shard.local_shape(tp.tp_rank)}: what is computed "
            f"from it here would be of this part alone, and saved so. Do it to the model before parallelize, which "
            f"splits weights together with what they are computed from."
        )
