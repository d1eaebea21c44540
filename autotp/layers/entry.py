"""The model's edge: what enters its forward is checked, and its logits stay sharded where the loss can use them.

The root module gets two hooks and, where the logits' path is proved (`check_logits_path`), a loss function that works on
this rank's columns. Hooks are plain functions that are given the module, and all state lies in one object on it
(`model.__dict__["autotp_entry"]`), so a deep copy has an edge of its own.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.loss.loss_utils import ForCausalLMLoss

from ..comm import TPGroup
from ..errors import AutoTPError, PlanError
from ..shard import Shard
from .base import index_parameters, sharded_modules
from .batch import BatchCheck
from .cross_entropy import vocab_parallel_cross_entropy
from .embedding import VocabParallelHead, gather_columns
from .logits import check_logits_path
from .masks import watch_positions

__all__ = ["SHARDED_LOSS", "EntryState", "ShardedLoss", "check_logits_path", "install_entry", "remove_entry"]

SHARDED_LOSS = "vocab-parallel cross-entropy"  # the `loss` of a plan whose loss works on sharded logits
LOGITS = ("auto", "full", "sharded")


class EntryState:
    """What the hooks of one model know.

    Attributes:
        group: the model's TPGroup; head_name: its vocabulary-parallel head, or None.
        logits: "auto", "full" or "sharded"; loss: the ShardedLoss, or None where the head always gathers.
        batch: the BatchCheck, or None.
        own_loss: the `_loss_function` that the model had itself, if any.
        labels_at: position of `labels` among the positional arguments of forward.
        active: the head that returns this rank's columns in the running forward; seen: the logits its loss was given.
        meshes: FSDP meshes found harmless.
    """

    def __init__(self, group: TPGroup, head_name: str | None, logits: str, batch: BatchCheck | None, labels_at: int) -> None:
        self.group, self.head_name, self.logits, self.batch, self.labels_at = group, head_name, logits, batch, labels_at
        self.loss: ShardedLoss | None = None
        self.own_loss: Any = None
        self.active: VocabParallelHead | None = None
        self.seen: Tensor | None = None
        self.meshes: set[tuple[int, ...]] = set()
        self.handles: list[Any] = []

    def find_head(self, model: nn.Module) -> VocabParallelHead | None:
        """The model's head, if it is split."""
        head = None if self.head_name is None else model.get_submodule(self.head_name)
        return head if isinstance(head, VocabParallelHead) and self.group.tp_size > 1 else None

    def find_labels(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The `labels` that a forward was given, or None."""
        return kwargs.get("labels", args[self.labels_at] if 0 <= self.labels_at < len(args) else None)


class ShardedLoss:
    """Stands for ForCausalLMLoss: the same number from this rank's columns; whole logits go to the model's own loss.

    `label_smoothing=` given to the model's forward is honoured, where ForCausalLMLoss would drop it.
    """

    def __init__(self, state: EntryState, original: Any) -> None:
        self.state, self.original = state, original

    def __call__(self, logits: Tensor, labels: Tensor, vocab_size: int, *args: Any, **kwargs: Any) -> Tensor:
        state, head = self.state, self.state.active
        smoothing = kwargs.get("label_smoothing") or 0.0
        if head is None and not (smoothing and self.original is ForCausalLMLoss):
            return self.original(logits, labels, vocab_size, *args, **kwargs)
        if head is None:
            return _causal_lm_loss(logits, labels, (0, logits.shape[-1]), None, *args, **kwargs)
        state.seen = logits
        shard = head.shards["weight"]
        if vocab_size != shard.shape[0]:
            rows = shard.shape[0]
            raise PlanError(f"the loss was given vocab_size={vocab_size}, but the head {state.head_name} has {rows} rows")
        return _causal_lm_loss(logits, labels, shard, state.group, *args, **kwargs)


def _causal_lm_loss(
    logits: Tensor,
    labels: Tensor,
    shard: Shard | tuple[int, int],
    group: TPGroup | None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    label_smoothing: float | None = None,
    **_: Any,
) -> Tensor:
    """The loss of token t + 1 at position t, divided by `num_items_in_batch` where that is given."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.to(logits.device).reshape(-1)
    flat, smoothing = logits.reshape(-1, logits.shape[-1]), label_smoothing or 0.0
    reduction = "mean" if num_items_in_batch is None else "sum"
    if group is None:
        loss = F.cross_entropy(flat.float(), target, None, None, ignore_index, None, reduction, smoothing)
    else:
        loss = vocab_parallel_cross_entropy(flat, target, shard, group, ignore_index, smoothing, reduction)
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


# -- hooks --------------------------------------------------------------------------------------------------------------


def enter_forward(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of the root: refuse what is broken, check the batch, decide how logits leave the head."""
    if "broken" in model.__dict__:
        raise AutoTPError(f"this model can't be used any more: {model.__dict__['broken']}. Load it again.")
    state: EntryState = model.__dict__["autotp_entry"]
    leave_sharded(state)
    if torch.compiler.is_compiling():
        return
    if model.training:
        refuse_mixed_mesh(model, state)
        if torch.is_grad_enabled():
            index_parameters(model)
    if state.batch is not None:
        state.batch.start(args, kwargs)
    if state.find_labels(args, kwargs) is None and state.logits != "sharded":
        return
    head = state.find_head(model)
    if head is None:
        return
    head.ran = False
    # Only while the model's loss is still ours: one that was set later needs whole logits.
    ours = state.loss is not None and model.__dict__.get("_loss_function") is state.loss
    if model.training and ours:
        head.keep_sharded, state.active = True, head


def asks_for(option: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a forward is asked for what `option` names ("output_attentions"), by an argument or by the config."""
    asked = kwargs.get(option)
    if asked is None:
        names = list(inspect.signature(type(module).forward).parameters)[1:] if args else []
        place = names.index(option) if option in names else len(args)
        asked = args[place] if place < len(args) else None
    if asked is None:
        asked = getattr(getattr(module, "config", None), option, False)
    return asked is not None and asked is not False


def judge_batch(model: nn.Module) -> None:
    """Wait for a comparison that is under way, and judge it.

    Raises:
        AutoTPError: what was checked last differs.
    """
    state: EntryState | None = model.__dict__.get("autotp_entry")
    if state is not None and state.batch is not None:
        state.batch.judge()


def exit_forward(model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of the root, run after an exception too: sharded logits become what `logits=` promises."""
    state: EntryState = model.__dict__["autotp_entry"]
    head, seen = state.active, state.seen
    leave_sharded(state)
    if output is not None and not torch.compiler.is_compiling():
        refuse_bypassed_head(model, state, args, kwargs)
    if head is None or seen is None or output is None or state.logits == "sharded":
        return None
    whole = gather_columns(seen, head.shards["weight"], 0, state.group) if state.logits == "full" else None
    if isinstance(output, tuple):
        return tuple(whole if value is seen else value for value in output)
    if isinstance(output, dict):  # a ModelOutput, made anew because its dict side can't drop a key
        return type(output)(**{name: whole if value is seen else value for name, value in output.items()})
    return None


def refuse_bypassed_head(model: nn.Module, state: EntryState, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise if a forward with labels did not run the split head: its loss took one rank's rows for the whole vocabulary.

    Raises:
        AutoTPError: naming the head.
    """
    head = None if state.find_labels(args, kwargs) is None else state.find_head(model)
    if head is not None and not head.ran:
        raise AutoTPError(
            f"the forward was given labels, but {state.head_name} did not run: a fused loss that reads its weight itself "
            f"sees {list(head.weight.shape)} of {list(head.shards['weight'].shape)} on TP rank {state.group.tp_rank}. "
            f"Pass head='whole' to parallelize or from_pretrained, so that every rank holds all of it, or switch that loss off."
        )


def leave_sharded(state: EntryState) -> None:
    """The head gathers again."""
    if state.active is not None:
        state.active.keep_sharded = False
    state.active = state.seen = None


def refuse_mixed_mesh(model: nn.Module, state: EntryState) -> None:
    """Raise, and mark the model broken, if FSDP2 sharded a shard over ranks of its own TP group.

    What FSDP wraps with the root itself is whole again by now, and left to data_parallel.py, which looks at the wrap.

    Raises:
        AutoTPError: naming the parameter and the ranks.
    """
    for name, module in sharded_modules(model):
        for key, parameter in module._parameters.items():
            if not isinstance(parameter, DTensor):
                continue
            ranks = tuple(parameter.device_mesh.mesh.flatten().tolist())
            if ranks in state.meshes:
                continue
            both = sorted(set(ranks) & set(module.tp.ranks))
            if len(both) > 1:
                model.__dict__["broken"] = (
                    f"FSDP shards {name}.{key} over ranks {list(ranks)}, of which {both} are in one TP group and hold different "
                    f"shards of it, so the wrap has mixed them. Wrap over the data axis: fully_shard(model, mesh=mesh['dp'])"
                )
                raise AutoTPError(f"this model can't be used any more: {model.__dict__['broken']}. Load it again.")
            state.meshes.add(ranks)


# -- installing ---------------------------------------------------------------------------------------------------------


def install_entry(
    model: nn.Module, group: TPGroup, head_name: str | None, loss: str, logits: str = "auto", check_batch: bool = True
) -> None:
    """Put the hooks, and the loss that works on sharded logits, on a rewritten `model`.

    Args:
        head_name: the VocabParallelHead's name; None if the logits are whole anyway.
        loss: SHARDED_LOSS where `check_logits_path` proved it; anything else means that the head always gathers.
        logits: what training with labels returns. "auto": no logits; "full": whole; "sharded": this rank's columns (then
            also without labels). Evaluation always gives whole logits.

    Raises:
        PlanError: `logits` is none of the three.
    """
    if logits not in LOGITS:
        raise PlanError(f"logits={logits!r} is not one of {LOGITS}")
    remove_entry(model)
    parameters = list(inspect.signature(type(model).forward).parameters)[1:]
    labels_at = parameters.index("labels") if "labels" in parameters else -1
    batch = BatchCheck(group) if check_batch and group.tp_size > 1 else None
    state = EntryState(group, head_name, logits, batch, labels_at)
    model.__dict__["autotp_entry"] = state
    if head_name is not None and loss == SHARDED_LOSS and group.tp_size > 1:
        state.own_loss = model.__dict__.get("_loss_function")
        state.loss = ShardedLoss(state, model.loss_function)
        model.__dict__["_loss_function"] = state.loss  # what the property of transformers' models reads
    state.handles = [
        model.register_forward_pre_hook(enter_forward, prepend=True, with_kwargs=True),
        model.register_forward_hook(exit_forward, with_kwargs=True, always_call=True),
        *watch_positions(model),
    ]


def remove_entry(model: nn.Module) -> None:
    """Take back what `install_entry` did; nothing happens to a model without it."""
    state: EntryState | None = model.__dict__.pop("autotp_entry", None)
    if state is None:
        return
    leave_sharded(state)
    for handle in state.handles:
        handle.remove()
    if state.loss is not None and model.__dict__.get("_loss_function") is state.loss:
        if state.own_loss is None:
            del model.__dict__["_loss_function"]
        else:
            model.__dict__["_loss_function"] = state.own_loss
