"""Which tensor of a checkpoint belongs to which of the model, by transformers' own rules, checked before anything changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable

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
    """The checkpoint's names for each tensor of `model`: state-dict name -> names in `source`, empty if it is ignorable.

    A tied tensor has one name in the checkpoint or several; each of its names in the model maps to all of them.

    Raises:
        CheckpointError: the checkpoint lacks tensors of the model, holds others, or holds them in another shape; or it
            needs transformers' weight conversion or dequantization.
    """
    where, source_names = getattr(source, "directory", type(source).__name__), source.names()
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        raise CheckpointError(f"{where} is quantized, which can't be read by slices yet. {_WAY_OUT}")
    state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    renamed = rename_keys(model, source_names, state, where)
    ties = tie_names(model, tied)
    found: dict[str, list[str]] = {}
    for key, name in renamed.items():
        for same in ties.get(name, ()):
            found.setdefault(same, []).append(key)
    problems = []
    for key, name in renamed.items():
        if name in state and tuple(state[name].shape) != source.shape(key):
            problems.append(f"'{key}' has shape {list(source.shape(key))}, but the model's '{name}' {list(state[name].shape)}")
    ignore_missing, ignore_unexpected = _ignorable(model)
    missing = [name for name in state if name not in found and not (ignore_missing and ignore_missing.search(name))]
    unexpected = [key for key, name in renamed.items() if name not in state]
    unexpected = [key for key in unexpected if not (ignore_unexpected and ignore_unexpected.search(renamed[key]))]
    if missing:
        problems.append(f"it lacks {_list_names(missing)} of the model")
    if unexpected:
        problems.append(f"it holds {_list_names(unexpected)}, which the model does not have")
    if problems:
        shown = problems[:_MAX_NAMED] + ([f"and {len(problems) - _MAX_NAMED} more"] if len(problems) > _MAX_NAMED else [])
        raise CheckpointError(
            f"the checkpoint in {where} does not fit {type(model).__name__}: {'; '.join(shown)}. Check that config.json "
            f"belongs to these weights; or load it with transformers, which can leave weights out, then call autotp.parallelize. "
            f"Nothing was changed."
        )
    return {name: tuple(found.get(name, ())) for name in state}


def rename_keys(model: nn.Module, keys: Iterable[str], state: dict[str, Tensor], where: object = "it") -> dict[str, str]:
    """Checkpoint key -> the model's name for it, as transformers renames keys while loading.

    Its base-model prefix is added or removed, and its renamings for this model type are applied.

    Raises:
        CheckpointError: a key needs more than a new name: transformers would split, stack or transpose its tensor.
    """
    prefix = getattr(model, "base_model_prefix", "") or ""
    renamings, converters, rename = _find_conversions(model)
    out = {}
    for key in sorted(keys, key=_natural_key):
        name, converted = rename(key, renamings, converters, prefix or None, state) if rename else (key, None)
        if name not in state and key in state:
            name, converted = key, None
        if name not in state and not converted:
            name = _move_prefix(key, prefix, state) if key not in state else key
        if converted:
            raise CheckpointError(
                f"the checkpoint in {where} stores '{key}' in a layout that transformers converts into the model's '{name}' "
                f"while loading, which can't be read by slices yet. {_WAY_OUT} (Saved from there once, it needs no conversion.)"
            )
        out[key] = name
    return out


def _move_prefix(key: str, prefix: str, state: dict[str, Tensor]) -> str:
    """`key` with the base-model prefix added or removed, if that is a name of the model."""
    if prefix and key.startswith(f"{prefix}.") and key.removeprefix(f"{prefix}.") in state:
        return key.removeprefix(f"{prefix}.")
    return f"{prefix}.{key}" if prefix and f"{prefix}.{key}" in state else key


def _find_conversions(model: nn.Module) -> tuple[list, list, Callable[..., tuple[str, str | None]] | None]:
    """transformers' renamings and converters for this model, and its function that applies them; None for a plain module."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return [], [], None
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    mapping = get_model_conversion_mapping(model)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    return [entry for entry in mapping if not isinstance(entry, WeightConverter)], converters, rename_source_key


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


def _natural_key(name: str) -> list:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def _list_names(names: list[str]) -> str:
    rest = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{len(names)} tensor(s) ({', '.join(names[:_MAX_NAMED])}{rest})"
