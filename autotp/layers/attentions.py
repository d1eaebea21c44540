"""Whole attention weights for whoever asks a model for them (`output_attentions=True`): each rank computes its heads' alone.

Which tensors of an output are attention weights, the model says by their names; which heads they are of, the module that returned
them: the columns that it multiplies end in a row linear, whose inputs are those heads' values, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..collectives import gather_from_group
from ..comm import TPGroup
from ..errors import AutoTPError
from ..shard import Cut, Shard
from .entry import asks_for

HEADS = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads")


class Attentions:
    """What is known of a model's attentions while somebody asks for them.

    Attributes:
        group: the ranks; rows: module name -> the cut of what the heads that it computes are multiplied with next.
        seen: what the modules returned in the running forward, and which cut is theirs.
        handles: of the hooks that see it; empty where nobody asks.
    """

    def __init__(self, group: TPGroup, rows: Mapping[str, Cut]) -> None:
        self.group, self.rows = group, dict(rows)
        self.seen: list[tuple[Tensor, Cut]] = []
        self.handles: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Attentions:
        twin = memo[id(self)] = Attentions(self.group, self.rows)
        return twin

    def find(self, x: Tensor) -> Cut | None:
        """The cut of the heads of `x`; None if none of the modules returned it."""
        return next((cut for tensor, cut in self.seen if tensor is x), None)

    def stop(self) -> None:
        """See nothing any more."""
        for handle in self.handles:
            handle.remove()
        self.handles, self.seen = [], []


def watch_attentions(model: nn.Module, group: TPGroup, rows: Mapping[str, Cut]) -> list[Any]:
    """Hooks on a model and on the models inside it, which make attention weights whole where they are asked for.

    Args:
        rows: name of a module -> the cut of the inputs of the row linear behind what it computes.

    Returns:
        handles by which the hooks are removed.
    """
    handles: list[Any] = []
    if group.tp_size == 1 or not rows:
        return handles
    state = Attentions(group, rows)
    for name, module in model.named_modules():
        own = {key[len(name) + 1 :] if name else key: cut for key, cut in rows.items() if not name or key.startswith(f"{name}.")}
        if isinstance(module, PreTrainedModel) and own:
            module.__dict__["autotp_attentions"] = state, own
            handles.append(module.register_forward_pre_hook(begin_asking, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(gather_asked, with_kwargs=True, always_call=True))
    return handles


def begin_asking(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: see what the modules return, if attention weights are asked for."""
    state, own = model.__dict__["autotp_attentions"]
    if "autotp_entry" in model.__dict__:  # Ctrl-C ends a forward without its hooks
        state.stop()
    if not torch.compiler.is_compiling() and not state.handles and asks_for("output_attentions", model, args, kwargs):
        for name, cut in own.items():
            note = _make_note(state, cut)
            state.handles.append(model.get_submodule(name).register_forward_hook(note, prepend=True))
        state.asker = model


def _make_note(state: Attentions, cut: Cut) -> Callable[..., None]:
    def note(module: Any, args: tuple[Any, ...], output: Any) -> None:
        state.seen += [(x, cut) for x in _list_tensors(output) if x.ndim == 4]

    return note


def _list_tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict | tuple | list):
        for each in output.values() if isinstance(output, dict) else output:
            yield from _list_tensors(each)


def gather_asked(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook, run after an exception too: the output of the model that was asked, with all heads' weights.

    Raises:
        AutoTPError: it is not known of which heads some of them are.
    """
    state = model.__dict__["autotp_attentions"][0]
    if not state.handles or state.asker is not model:
        return None
    try:
        if isinstance(output, dict):
            for key, value in list(output.items()):
                if key.endswith("attentions") and value is not None:
                    output[key] = _gather(model, state, key, value)
            return output
        return None if output is None else _gather(model, state, "", output)
    finally:
        state.stop()


def _gather(model: Any, state: Attentions, key: str, value: Any) -> Any:
    """`value` with all heads in what the modules returned; under a `key`, all tensors in it are weights."""
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return type(value)(_gather(model, state, key, each) for each in value)
    if not isinstance(value, Tensor):
        return value
    cut, heads = state.find(value), _list_heads(model.config)
    if cut is not None:
        return gather_heads(value, cut, state.group, heads, key or "its output")
    if key and (value.ndim < 2 or value.shape[1] not in heads):
        raise AutoTPError(
            f"{type(model).__name__} was asked for attentions, and it is not known of which heads a {list(value.shape)} in {key} "
            f"is: the model has {heads}. Ask the model before parallelize, or leave its attention whole."
        )
    return value


def _list_heads(config: Any) -> list[int]:
    """The numbers of heads that a config, and the configs inside it, say."""
    inside = [value for value in vars(config).values() if hasattr(value, "model_type")]
    own = {getattr(config, name, None) for name in HEADS} | {n for each in inside for n in _list_heads(each)}
    return sorted(n for n in own if isinstance(n, int))


def gather_heads(x: Tensor, cut: Cut, group: TPGroup, heads: list[int], key: str) -> Tensor:
    """All heads' weights `[B, H, S, S']` of this rank's `x` `[B, h, S, S']`, in the whole model's order.

    Args:
        cut: of the values of all heads, side by side. heads: how many there may be; key: for messages.

    Raises:
        AutoTPError: the ranks' heads are no whole ones.
    """
    every = [cut.indices(rank) for rank in range(group.tp_size)]
    counts, total = group.gather_objects(x.shape[1]), sum(len(each) for each in every)
    width = total // max(1, sum(counts))
    found = [each.view(-1, width) // max(1, width) if width and len(each) % width == 0 else each[:, None] for each in every]
    whole = all(len(each) == count and bool((each == each[:, :1]).all()) for each, count in zip(found, counts, strict=True))
    if not whole or sum(counts) not in heads:
        raise AutoTPError(
            f"attentions were asked for, but in {key} the ranks have {counts} heads of a model that has {heads}, as they share "
            f"some: ask the model before parallelize, or shard it over fewer ranks."
        )
    runs = tuple(tuple((int(head), 1, 1, 1) for head in each[:, 0]) for each in found)
    shard = Shard((x.shape[0], sum(counts), *x.shape[2:]), group.tp_size, (Cut(1, runs),))
    return gather_from_group(x, group, shard)
