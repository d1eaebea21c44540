"""Names of modules in a profile: what runs, and which collective runs inside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.autograd.profiler import record_function

from .base import find_group, sharded_modules


@contextmanager
def profile_names(model: nn.Module) -> Iterator[None]:
    """Inside the `with`, torch's profiler shows the forward of each split module of `model` as a range with its name.

    A range is called `model.layers.0.mlp.down_proj LinearAllreduce tp=2`; the kernels and collectives of that forward lie inside,
    under the names that torch gives them (`c10d::allreduce_`, `nccl:all_reduce`). Nothing is computed otherwise. Compiled modules
    are compiled anew.

    Args:
        model: a parallelized model; of any other, nothing is named.
    """
    before: list[tuple[nn.Module, Any]] = []
    group = find_group(model)
    try:
        for name, module in sharded_modules(model) if group is not None else ():
            before.append((module, module.__dict__.get("forward")))
            label = f"{name} {type(module).__name__} tp={module.tp.tp_size}"
            module.__dict__["forward"] = partial(_run_named, label, module.forward)
        yield
    finally:
        for module, forward in reversed(before):
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward


def _run_named(label: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
    with record_function(label):
        return forward(*args, **kwargs)
