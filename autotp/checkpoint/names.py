"""Which tensor of a checkpoint belongs to which of the model, by transformers' own rules, checked before anything changes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable

from torch import Tensor, nn

from ..errors import CheckpointError
from .source import WeightSource

_WAY_OUT = "Load it with transformers' from_pretrained, then call autotp.parallelize on the model."
_MAX_NAMED = 8


def tie_names(model: nn.Module, tied: Iterable[Collection[str]] = ()) -> dict[str, tuple[str, ...]]:
    """State-dict name -> all names of the same tensor, itself included, in state-dict order.

    Args:
        model: names that hold one tensor object are tied, and those that transformers would tie (accelerate's empty models
            hold two objects for them).
        tied: further groups of names that are one tensor, as a plan lists them.
    """
    state = model.state_dict(keep_vars=True)
    group_of: dict[str, set[str]] = {}
    first: dict[int, str] = {}
    pairs = [(first.setdefault(id(t), name), name) for name, t in state.items() if isinstance(t, Tensor)]
    declared = list((getattr(model, "all_tied_weights_keys", None) or {}).items())
    pairs += [
        (names[0], name) for names in map(list, [*tied, *declared]) for name in names if name in state and names[0] in state
    ]
    for one, other in pairs:
        merged = group_of.get(one, {one}) | group_of.get(other, {other})
        for name in merged:
            group_of[name] = merged
    return {name: tuple(n for n in state if n in names) for name, names in group_of.items()}


def match_names(model: nn.Module, source: WeightSource, tied: Iterable[Collection[str]] = ()) -> dict[str, tuple[str, ...]]:
    """What each tensor of `model` is read from: state-dict name -> names in `source`, empty if it may be lacking.

    A tied tensor has one name in the checkpoint or several; each of its names in the model maps to all of them. What the
    checkpoint holds beyond the model is not read, and named in a warning, as transformers does.

    Args:
        source: by the model's names, as `ConvertedSource` gives them.

    Raises:
        CheckpointError: the checkpoint lacks tensors of the model, or holds them in another shape; or it is quantized.
    """
    where, source_names = getattr(source, "directory", type(source).__name__), source.names()
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        raise CheckpointError(f"{where} is quantized, which can't be read by slices yet. {_WAY_OUT}")
    state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    ties = tie_names(model, tied)
    found = {name: tuple(same for same in ties[name] if same in source_names) for name in state}
    problems = []
    for name, tensor in state.items():
        if name in source_names and tuple(tensor.shape) != source.shape(name):
            problems.append(f"'{name}' has shape {list(source.shape(name))}, but the model's {list(tensor.shape)}")
    ignore_missing, ignore_unexpected = _ignorable(model)
    missing = [name for name in state if not found[name] and not (ignore_missing and ignore_missing.search(name))]
    unexpected = sorted(name for name in source_names if name not in state)
    unexpected = [name for name in unexpected if not (ignore_unexpected and ignore_unexpected.search(name))]
    if missing:
        problems.append(f"it lacks {_list_names(missing)} of the model")
    if problems:
        if unexpected:
            problems.append(f"it holds {_list_names(unexpected)}, which the model does not have")
        shown = problems[:_MAX_NAMED] + ([f"and {len(problems) - _MAX_NAMED} more"] if len(problems) > _MAX_NAMED else [])
        raise CheckpointError(
            f"the checkpoint in {where} does not fit {type(model).__name__}: {'; '.join(shown)}. Check that config.json "
            f"belongs to these weights; or load it with transformers, which can leave weights out, then call autotp.parallelize. "
            f"Nothing was changed."
        )
    if unexpected:
        warnings.warn(
            f"the checkpoint in {where} holds {_list_names(unexpected)}, which {type(model).__name__} does not have: they are "
            f"not read. That is right for a checkpoint of another task, and wrong if it should be the same model.",
            stacklevel=2,
        )
    return found


def _ignorable(model: nn.Module) -> tuple[re.Pattern | None, re.Pattern | None]:
    """What transformers lets a checkpoint lack, and hold too much: keys of buffers that older versions saved."""
    missing: set[str] = set(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    unexpected: set[str] = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        unexpected.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        unexpected.add(r"(^|\.)position_ids$")
    patterns = ["|".join(f"({pattern})" for pattern in sorted(found)) for found in (missing, unexpected)]
    return re.compile(patterns[0]) if patterns[0] else None, re.compile(patterns[1]) if patterns[1] else None


def _list_names(names: list[str]) -> str:
    rest = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{len(names)} tensor(s) ({', '.join(names[:_MAX_NAMED])}{rest})"
