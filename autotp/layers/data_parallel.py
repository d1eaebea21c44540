"""DDP and FSDP beside TP: what would take shards of one model for its copies, or lose something, is refused as it is wrapped.

Quantised weights are more than the Parameter that both see, so their scales, which lie beside it, are looked after here.

| | copies of a model | chunks of its shards |
|---|---|---|
| weights | DDP: the first data rank's are copied to the others | FSDP2: each data rank keeps a chunk, gathered while it is read |
| bitsandbytes' | values and scales go together | values in chunks; scales whole on the module, as the Parameter is another |
| torchao's | likewise, tensor by tensor, as DDP can't | refused, unless they are among `ignored_params` |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AutoTPError
from ..groups import ranks_of, resolve_group
from .base import TensorParallel_Layer, holder_of, index_parameters, sharded_modules
from .packed import Packed, list_tensors


def check_data_group(modules: Iterable[nn.Module], group: Any, wrapper: str) -> None:
    """Refuse data parallelism between ranks that hold different shards of one model.

    Raises:
        AutoTPError: naming the ranks.
    """
    for module in modules:
        layer = next(_layers_of(module), None)
        both = sorted(set(ranks_of(group)) & set(layer.tp.ranks)) if layer is not None else []
        if layer is not None and len(both) > 1:
            where = layer.__dict__.get("full_name") or type(layer).__name__
            raise AutoTPError(
                f"{wrapper} over ranks {list(ranks_of(group))} would treat ranks {both} as copies of one model, but they hold "
                f"different shards of it ('{where}'). Give it the process group of the data axis only (mesh['dp'].get_group()). "
                f"With accelerate, pass ParallelismConfig(tp_size={layer.tp.tp_size})."
            )


def _layers_of(module: nn.Module) -> Iterator[TensorParallel_Layer]:
    """The rewritten modules below `module`, and those whose parameters it holds (torch's `replicate` wraps a bare list)."""
    yield from (layer for _, layer in sharded_modules(module))
    for parameter in module.parameters():
        held = holder_of(parameter)
        if held is not None and isinstance(held[0], TensorParallel_Layer):
            yield held[0]


def _refuse_flattening(module: nn.Module) -> None:
    if any(layer.tp.tp_size > 1 for _, layer in sharded_modules(module)):
        raise AutoTPError(
            f"FullyShardedDataParallel makes flat chunks of {type(module).__name__}'s shards, of which no norm or checkpoint can "
            f"be told: use FSDP2, torch.distributed.fsdp.fully_shard(model, mesh=mesh['dp'])"
        )


def _refuse_main_grad(modules: Iterable[nn.Module], wrapper: str) -> None:
    for module in modules:
        for name, layer in sharded_modules(module):
            if layer.accumulate_into_main_grad:
                raise AutoTPError(
                    f"{wrapper} averages `.grad`, and the gradients of '{layer.__dict__.get('full_name') or name}' go into "
                    f"main_grad, which it does not know: call autotp.enable_main_grad(model, False) first"
                )


def let_go_of_laid(module: nn.Module) -> None:
    """Free the allocations in which weights lay side by side, once they are others."""
    for _, layer in sharded_modules(module):
        siblings = layer.__dict__.get("siblings")
        if siblings is not None:
            siblings.find_laid()


# -- quantised weights ----------------------------------------------------------------------------------------------------


def _name_packed(module: nn.Module) -> dict[str, Packed]:
    return {f"{name}.weight".lstrip("."): each for name, each in module.named_modules() if isinstance(each, Packed)}


@torch.no_grad()
def share_packed(module: nn.Module, group: Any) -> None:
    """Give the quantised weights below `module` the values and scales of the first rank of `group`; collective."""
    packed = _name_packed(module).values()
    data = resolve_group(group) if packed else None
    for each in packed:
        for tensor in list_tensors(each.weight):
            tensor.copy_(data.broadcast(tensor.contiguous()))  # type: ignore[union-attr]


def _leave_to_us(module: nn.Module) -> None:
    """Tell DDP to keep away from quantised weights, beside what the caller told it."""
    own = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    if packed := _name_packed(module):
        names = sorted({*own, *packed})
        torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


def _prepare_packed(modules: Iterable[nn.Module], params: Iterable[Tensor]) -> None:
    """For FSDP2, which makes other Parameters of `params`, those of quantised weights below `modules` among them.

    Raises:
        AutoTPError: a weight of a tensor class that can't be cut.
    """
    taken = {id(param) for param in params}
    packed = {f: each for m in modules for f, each in _name_packed(m).items() if id(each.weight) in taken}
    for name, each in packed.items():
        if hasattr(each.weight, "__tensor_flatten__"):
            where = f"{each.__dict__['full_name']}.weight" if "full_name" in each.__dict__ else name
            raise AutoTPError(
                f"fully_shard would cut '{where}' into chunks, which torchao's {type(each.weight).__name__} "
                f"{list(each.weight.shape)} can't be: call it with ignored_params={{p for p in model.parameters() if "
                f"hasattr(p, '__tensor_flatten__')}}, made before the first call, so that each data rank keeps those weights "
                f"whole. DistributedDataParallel takes them, and bitsandbytes' formats can be cut"
            )
    for each in packed.values():
        each.keep_scales()


def _take_back(modules: Iterable[nn.Module]) -> None:
    """Undo what fully_shard has put on `modules` by the time that it is refused: its marks, and two hooks."""
    with suppress(ImportError, AttributeError):  # private: where it has moved, the marks stay
        from torch.distributed._composable.contract import STATE_KEY, _get_registry
        from torch.distributed._composable_state import _module_state_mapping
        from torch.distributed.fsdp._fully_shard._fully_shard import fully_shard

        for module in modules:
            state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
            if state is not None:
                state._pre_forward_hook_handle.remove()
                state._post_forward_hook_handle.remove()
                module.__dict__[STATE_KEY].pop(fully_shard.__wrapped__, None)
                (_get_registry(module) or {}).pop("fully_shard", None)
            _module_state_mapping.pop(module, None)


# -- wraps ----------------------------------------------------------------------------------------------------------------


def install_data_parallel(replace: Callable) -> None:
    """Wrap DDP and FSDP 1 and 2; `replace(owner, name, wrap)` does it."""

    def wrap_ddp(original: Callable) -> Callable:
        signature = inspect.signature(original)

        def init(self, module, *args: Any, **kwargs: Any) -> None:
            _refuse_main_grad([module], "DistributedDataParallel")
            given = signature.bind(self, module, *args, **kwargs).arguments
            group = given.get("process_group") or given.get("device_mesh")
            check_data_group([module], group, "DistributedDataParallel")
            _leave_to_us(module)
            original(self, module, *args, **kwargs)
            if given.get("init_sync", True):
                share_packed(module, group)

        return init

    def wrap_fsdp(original: Callable) -> Callable:
        def init(self, module, process_group=None, *args: Any, **kwargs: Any) -> None:
            check_data_group([module], process_group or kwargs.get("device_mesh"), "FullyShardedDataParallel")
            _refuse_flattening(module)
            original(self, module, process_group, *args, **kwargs)

        return init

    def wrap_fsdp2(original: Callable) -> Callable:
        def init(self, params, modules, mesh_info, *args: Any, **kwargs: Any) -> None:
            try:
                check_data_group(modules, mesh_info.mesh, "fully_shard")
                _refuse_main_grad(modules, "fully_shard")
                _prepare_packed(modules, params)
            except AutoTPError:
                _take_back(modules)
                raise
            original(self, params, modules, mesh_info, *args, **kwargs)
            for module in modules:
                index_parameters(module)
                let_go_of_laid(module)

        return init

    replace(torch.nn.parallel.DistributedDataParallel, "__init__", wrap_ddp)
    from torch.distributed.fsdp import FullyShardedDataParallel

    replace(FullyShardedDataParallel, "__init__", wrap_fsdp)
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    except ImportError:  # private: where it has moved, FSDP2 is not watched
        return
    replace(FSDPParamGroup, "__init__", wrap_fsdp2)
