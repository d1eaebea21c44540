"""accelerate with models that are spread over ranks: metrics count each sample once, and copies of the model train together.

accelerate deals batches by its mesh, so that the ranks of one model get the same; what it gathers holds each sample once a rank,
and it averages no gradients beside a tp axis. `ParallelismConfig(tp_size=T, dp_shard_size=D)` without FSDP here means D copies of
the model, averaged by DistributedDataParallel over the data axis.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import RandomSampler

from ..comm import TPGroup
from ..errors import AutoTPError
from .base import find_group


def find_spread(model: Any) -> TPGroup | None:
    """The group of a model that is spread over several ranks; None for any other."""
    group = find_group(model) if isinstance(model, nn.Module) else None
    return group if group is not None and group.tp_size > 1 else None


def find_prepared(accelerator: Any) -> TPGroup | None:
    """The group of the first such model that `accelerator` has prepared."""
    return next((group for model in accelerator._models if (group := find_spread(model)) is not None), None)


def count_copies(group: TPGroup, processes: int, what: str) -> int:
    """Copies of the model on the job's `processes`, which must lie as accelerate's mesh has them: rank d * T + t.

    Raises:
        AutoTPError: they don't.
    """
    start = group.ranks[0] - group.ranks[0] % group.tp_size
    if processes % group.tp_size or list(group.ranks) != list(range(start, start + group.tp_size)):
        raise AutoTPError(
            f"{what} runs on {processes} ranks and this model on {list(group.ranks)}, which is no row of their mesh of D x "
            f"{group.tp_size}. Start D x {group.tp_size} ranks, and make the model on mesh['tp'] of "
            f"mesh = init_device_mesh(device, (D, {group.tp_size}), mesh_dim_names=('dp', 'tp')). "
            f"On CPUs both libraries know of other ranks only with TrainingArguments(use_cpu=True) or Accelerator(cpu=True)."
        )
    return processes // group.tp_size


# -- wraps of accelerate's methods --------------------------------------------------------------------------------------


def wrap_validate(original: Callable) -> Callable:
    """accelerate refuses every parallelism on CPUs, for FSDP's sake; a mesh of copies and TP ranks needs none of that."""

    def validate_accelerator(self, accelerator) -> None:
        from accelerate.utils import DistributedType

        ours = self.tp_size > 1 and self.tp_size * self.dp_shard_size == self.total_size == accelerator.num_processes
        if not (ours and accelerator.distributed_type == DistributedType.MULTI_CPU):
            original(self, accelerator)

    return validate_accelerator


def wrap_prepare(original: Callable) -> Callable:
    """Engines that would take the shards of one model for copies, or deal them out again, are refused before they do."""

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        kind = self.distributed_type.name
        if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM") and any(find_spread(each) is not None for each in args):
            raise AutoTPError(
                f"accelerate was started with {kind}, which would share out again the parameters of a model that is spread over "
                f"ranks already. Start it without; for copies of the model give ParallelismConfig(tp_size=, dp_shard_size=), or "
                f"apply fully_shard over mesh['dp'] in a loop of your own."
            )
        return original(self, *args, **kwargs)

    return prepare


def wrap_prepare_tp(original: Callable) -> Callable:
    """accelerate's own step for a tp axis is for DTensors; plain shards are prepared as any model is."""

    def prepare_tp(self, *args: Any) -> Any:
        return list(args) if any(find_spread(each) is not None for each in args) else original(self, *args)

    return prepare_tp


def wrap_prepare_model(original: Callable) -> Callable:
    """Copies of a model get DistributedDataParallel over the data axis."""

    def prepare_model(self, model, device_placement=None, evaluation_mode=False) -> Any:
        group, config = find_spread(model), self.parallelism_config
        again = getattr(model, "_is_accelerate_prepared", False)
        if group is None or config is None or not config.tp_enabled or again:
            return original(self, model, device_placement, evaluation_mode)
        copies = count_copies(group, self.num_processes, "accelerate")
        prepared = original(self, model, device_placement, evaluation_mode)
        if copies == 1 or evaluation_mode or not any(p.requires_grad for p in model.parameters()):
            return prepared
        options = self.ddp_handler.to_kwargs() if self.ddp_handler is not None else {}
        data = self.torch_device_mesh["dp_shard"].get_group()
        wrapped = torch.nn.parallel.DistributedDataParallel(prepared, process_group=data, **options)
        if self.ddp_handler is not None:
            self.ddp_handler.register_comm_hook(wrapped)
        wrapped._is_accelerate_prepared = True  # type: ignore[assignment]
        return wrapped

    return prepare_model


class SharedOrder(RandomSampler):
    """Shuffles as the rank 0 of the job would: accelerate gives ranks one order only where it deals the batches out."""

    def __iter__(self):
        from accelerate.utils import broadcast_object_list

        seed = [int(torch.empty((), dtype=torch.int64).random_().item())]  # as RandomSampler draws it
        broadcast_object_list(seed)
        self.generator = torch.Generator().manual_seed(seed[0])
        try:
            yield from super().__iter__()
        finally:
            self.generator = None


def align_loader(loader: Any, tp_size: int) -> None:
    """Let the ranks of one model shuffle alike, and their workers draw alike, which Trainer seeds by the rank."""
    sampler, start = getattr(loader.batch_sampler, "sampler", None), loader.worker_init_fn
    if type(sampler) is RandomSampler and sampler.generator is None:
        sampler.__class__ = SharedOrder
    if isinstance(start, functools.partial) and "rank" in start.keywords:
        loader.worker_init_fn = functools.partial(start, rank=start.keywords["rank"] // tp_size)


def wrap_prepare_loader(original: Callable) -> Callable:
    """The ranks of a model get the same batches; a loader that rank 0 reads for all copies of it is refused."""

    def prepare_data_loader(self, data_loader, *args: Any, **kwargs: Any) -> Any:
        from accelerate.data_loader import DataLoaderDispatcher

        config = self.parallelism_config
        if config is None or not config.tp_enabled:
            return original(self, data_loader, *args, **kwargs)
        if isinstance(data_loader, torch.utils.data.DataLoader) and not getattr(data_loader, "_is_accelerate_prepared", False):
            align_loader(data_loader, config.tp_size)
        prepared = original(self, data_loader, *args, **kwargs)
        if not config.dp_shard_enabled:
            return prepared
        if isinstance(prepared, DataLoaderDispatcher):
            raise AutoTPError(
                f"accelerate reads this loader on rank 0 and would deal one batch to all {config.dp_shard_size} copies of the "
                f"model. Pass dispatch_batches=False: DataLoaderConfiguration(dispatch_batches=False) to Accelerator, or "
                f"accelerator_config={{'dispatch_batches': False}} to TrainingArguments."
            )
        return prepared

    return prepare_data_loader


def wrap_gather(original: Callable) -> Callable:
    """Rows of samples come once from each copy of the model; a number without dimensions from each process, as ever."""

    def gather(self, tensor) -> Any:
        from accelerate.utils.operations import recursively_apply

        group = find_prepared(self)
        if group is None:
            return original(self, tensor)
        copies = self.num_processes // group.tp_size

        def gather_one(value: Tensor) -> Tensor:
            if value.dim() == 0:
                return original(self, value)
            if copies == 1:
                return value
            return original(self, value).unflatten(0, (copies, group.tp_size, -1))[:, 0].flatten(0, 1)

        return recursively_apply(gather_one, tensor, error_on_other_type=True)

    return gather


def wrap_gather_for_metrics(original: Callable) -> Callable:
    """The same less what fills up the last batch; objects that are no tensors come once from each copy too."""

    def gather_for_metrics(self, input_data, use_gather_object=False) -> Any:
        from accelerate.utils.operations import gather_object, recursively_apply

        group = find_prepared(self)
        if group is None:
            return original(self, input_data, use_gather_object)
        rest = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else 0
        if not use_gather_object:
            try:
                whole = self.gather(input_data)
                return recursively_apply(lambda value: value[:rest] if rest > 0 and value.dim() else value, whole)
            except TypeError:  # something in it is no tensor
                pass
        every = list(itertools.chain(*gather_object([input_data])[:: group.tp_size]))
        return every[:rest] if rest > 0 else every

    return gather_for_metrics


class CopiesScheduler:
    """Before AcceleratedScheduler, which steps once for each process: the ranks of one model have one batch between them.

    Attributes:
        accelerator: the one that prepared it, which knows the model by the time of the first step.
    """

    accelerator: Any
    scheduler: Any
    optimizers: Any

    def step(self, *args: Any, **kwargs: Any) -> None:
        group = find_prepared(self.accelerator)
        linked: Any = self
        if group is None or not linked.step_with_optimizer or linked.split_batches or not linked.gradient_state.sync_gradients:
            return super().step(*args, **kwargs)  # type: ignore[misc]
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return None
        for _ in range(count_copies(group, self.accelerator.num_processes, "accelerate")):
            if self.scheduler._step_count <= getattr(self.scheduler, "total_steps", self.scheduler._step_count):
                self.scheduler.step(*args, **kwargs)
        return None


@functools.cache
def _make_scheduler(cls: type) -> type:
    return type(cls.__name__, (CopiesScheduler, cls), {"__module__": cls.__module__})


def wrap_prepare_scheduler(original: Callable) -> Callable:
    """Learning rates go on as fast as an unsharded run's of as many copies."""

    def prepare_scheduler(self, scheduler) -> Any:
        from accelerate.scheduler import AcceleratedScheduler

        config, prepared = self.parallelism_config, original(self, scheduler)
        if type(prepared) is AcceleratedScheduler and config is not None and config.tp_enabled:
            prepared.__class__ = _make_scheduler(AcceleratedScheduler)
            prepared.accelerator = self
        return prepared

    return prepare_scheduler
