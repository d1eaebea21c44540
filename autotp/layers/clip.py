"""The norm of gradients that are spread over ranks, as the unsharded model would have it.

Each element of a full gradient is counted once: a shard where this rank owns it (`Shard.owned`: copied kv heads count at
their lowest holder), a parameter that every rank holds whole on rank 0 only. One small all-reduce per TPGroup brings the
ranks' norms together, and one gather per data axis where FSDP2 deals the shards further; nothing is read back to the host unless
`error_if_nonfinite` asks for it, as in torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..comm import TPGroup
from ..errors import AutoTPError
from ..shard import Shard
from .base import TensorParallel_Layer, find_group, holder_of
from .fully import combine_norm, find_part


class _Counted:
    """What this rank counts of the gradients that are spread over one group, or none, and one data mesh, or none."""

    def __init__(self, like: DTensor | None) -> None:
        self.like = like
        self.grads: list[Tensor] = []


Gradients = dict[tuple[TPGroup | None, object], _Counted]
Owned = list[tuple[int, Tensor]] | None  # per dim, the indices of a local part that its rank owns; None: nothing


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for parameters of parallelized models, plain ones, or both in one list.

    Collective over each TPGroup that holds one of the parameters: all its ranks give the same list.

    Args:
        parameters: one tensor or an iterable of them; those without a gradient are skipped.
        max_norm: the norm that all gradients together are scaled down to.
        norm_type: any p > 0, or inf.
        error_if_nonfinite: raise on an infinite or nan norm; waits for the device.
        foreach: as in torch.

    Returns:
        the total norm before clipping, a scalar tensor equal on all ranks of a group.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    total = grad_norm(params, norm_type, error_if_nonfinite, foreach)
    scaled: Any = [_Scaled(_to_local(p.grad)) for p in params if p.grad is not None]
    torch.nn.utils.clip_grads_with_norm_(scaled, max_norm, total, foreach)
    return total


class _Scaled(NamedTuple):
    """What torch scales the gradient of: a chunk of FSDP2's and a plain shard go into one list."""

    grad: Tensor


def _to_local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


@torch.no_grad()
def grad_norm(
    parameters: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """The norm of all elements of the full gradients of `parameters`, each counted once; collective like `clip_grad_norm_`.

    Returns:
        a scalar tensor, float32 at least, on the first gradient's device.

    Raises:
        AutoTPError: `norm_type` is not above 0.
        RuntimeError: the norm is not finite and `error_if_nonfinite` asked, as in torch.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise AutoTPError(f"norm_type {norm_type} is not above 0: give a p such as 2, or inf")
    counted = _collect_gradients(params)
    first = next((p.grad.device for p in params if p.grad is not None), None)
    dtype = torch.float32
    for param in params:
        dtype = dtype if param.grad is None else torch.promote_types(dtype, param.grad.dtype)
    norms = []
    for (group, _), each in counted.items():
        if first is None and group is not None:
            first = group.device
        local = _norm_of(each.grads, norm_type, foreach, first).double()
        if each.like is not None:
            local = combine_norm(local, each.like, norm_type)
        if group is not None and group.tp_size > 1:  # norms, not powers: no overflow, and inf needs no other path
            every = local.new_zeros(group.tp_size)
            every[group.tp_rank] = local
            norms += group.all_reduce_owned(every.to(group.device)).to(local.device).unbind()
        else:
            norms.append(local)
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type).to(dtype) if norms else torch.tensor(0.0)
    if error_if_nonfinite and torch.logical_or(total.isnan(), total.isinf()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be clipped. "
            f"To disable this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    return total


def groups_of(parameters: Iterable[Tensor]) -> list[TPGroup]:
    """The TPGroups that hold one of `parameters`, in order of first appearance; one-rank groups too."""
    groups: dict[TPGroup, None] = {}
    roots: dict[nn.Module, TPGroup | None] = {}
    for param in parameters:
        group, _, _ = _place(param, roots)
        if group is not None:
            groups[group] = None
    return list(groups)


def _place(param: Tensor, roots: dict[nn.Module, TPGroup | None]) -> tuple[TPGroup | None, TensorParallel_Layer | None, str]:
    """A parameter's group, and the layer and name it is sharded under; no layer for a whole one."""
    held = holder_of(param)
    if held is None:
        return None, None, ""
    module, name = held
    if isinstance(module, TensorParallel_Layer):
        return module.tp, module if name in module.shards else None, name
    if module not in roots:
        roots[module] = find_group(module)
    return roots[module], None, name


def _collect_gradients(params: list[Tensor]) -> Gradients:
    """What this rank counts, by group and data mesh. One is listed even if this rank counts nothing: it takes part in the sum."""
    counted: Gradients = {}
    roots: dict[nn.Module, TPGroup | None] = {}
    for param in params:
        group, layer, name = _place(param, roots)
        like = param if isinstance(param, DTensor) else None
        key = (group, None if like is None else (like.device_mesh, like.placements))
        grads = counted.setdefault(key, _Counted(like)).grads
        grad = param.grad
        if grad is None:
            continue
        if layer is not None:
            grad = _take_owned(grad, layer, name)
        elif group is not None and group.tp_rank != 0:
            continue
        if grad is not None:
            grads.append(_to_local(grad))
    return counted


def _take_owned(grad: Tensor, layer: TensorParallel_Layer, name: str) -> Tensor | None:
    """The part of a shard's gradient that this rank owns; None if it owns nothing. The indices are kept on the layer."""
    cache: dict[tuple[str, torch.device], tuple[Shard | None, Owned]] = layer.__dict__.setdefault("owned_indices", {})
    grad, shard, rank = find_part(grad, layer.shards[name], layer.tp)
    assert shard is not None
    entry = cache.get((name, grad.device))
    if entry is None or entry[0] is not shard:
        owned: Owned = [(dim, mask.nonzero().flatten().to(grad.device)) for dim, mask in shard.owned(rank)]
        entry = (shard, None if shard.is_whole and rank != 0 else owned)
        cache[name, grad.device] = entry
    if entry[1] is None:
        return None
    for dim, indices in entry[1]:
        grad = grad.index_select(dim, indices)
    return grad if grad.numel() else None


def _norm_of(grads: list[Tensor], norm_type: float, foreach: bool | None, device: torch.device | None) -> Tensor:
    """The norm of `grads` together, in float32 at least; 0 for none."""
    norms: list[Tensor] = []
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        if grad.numel():
            by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (_, dtype), tensors in by_kind.items():
        wide = torch.promote_types(dtype, torch.float32)
        sparse = any(tensor.is_sparse for tensor in tensors)
        if (foreach is None and not sparse and tensors[0].device.type in ("cpu", "cuda", "xpu")) or foreach:
            norms += torch._foreach_norm(tensors, norm_type, dtype=wide)
        else:
            norms += [torch.linalg.vector_norm(tensor, norm_type, dtype=wide) for tensor in tensors]
    if not norms:
        return torch.zeros((), device=device)
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)
