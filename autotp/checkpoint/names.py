"""Which tensor of a checkpoint belongs to which of the model, by transformers' own rules, checked before anything changes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import CheckpointError
from .fresh import can_draw
from .source import WeightSource

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


@dataclass(frozen=True)
class LoadingInfo:
    """How a checkpoint differs from the model that it is read into, in transformers' terms.

    Attributes:
        missing: of the model's tensors, those that the checkpoint lacks, though it should hold them.
        unexpected: what it holds beyond the model.
        mismatched: `(name, shape in the checkpoint, shape in the model)` of what does not fit.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """What transformers gives for `output_loading_info=True`."""
        keys = {"missing_keys": set(self.missing), "unexpected_keys": set(self.unexpected)}
        return {**keys, "mismatched_keys": set(self.mismatched), "error_msgs": []}

    def say(self, model: nn.Module, where: Any) -> None:
        """Log transformers' report of it, if there is anything to say."""
        from transformers.utils.loading_report import LoadStateDictInfo, log_state_dict_report

        info = LoadStateDictInfo(**self.to_dict(), conversion_errors={}, skipped_pp_keys=set())
        log_state_dict_report(model, str(where), True, info)


@dataclass(frozen=True)
class Match:
    """Which tensor of a checkpoint each of a model's is read from.

    Attributes:
        keys: state-dict name -> names in the checkpoint, all equal; none for what is to be drawn anew.
        info: what to tell the user.
    """

    keys: dict[str, tuple[str, ...]]
    info: LoadingInfo


def match_names(
    model: nn.Module, source: WeightSource, tied: Iterable[Collection[str]] = (), ignore_mismatched_sizes: bool = False
) -> Match:
    """What each tensor of `model` is read from.

    A tied tensor has one name in the checkpoint or several; each of its names in the model maps to all of them. What the
    checkpoint holds beyond the model is not read.

    Args:
        source: by the model's names, as `ConvertedSource` gives them.
        ignore_mismatched_sizes: tensors of another shape count as lacking.

    Raises:
        CheckpointError: the checkpoint holds tensors in another shape, or is quantized; or it lacks some, and the model is none
            of transformers', which would know how new ones begin.
    """
    where, source_names = getattr(source, "directory", type(source).__name__), source.names()
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        raise CheckpointError(
            f"{where} is quantized already, and such weights can't be cut: take the checkpoint that it was made from, with "
            f"quantization_config= to quantise it as it is read, or make this one plain, "
            f"autotp.parallelize(AutoModelForCausalLM.from_pretrained(path).dequantize())"
        )
    state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    ties = tie_names(model, tied)
    mismatched = tuple(
        (name, source.shape(name), tuple(tensor.shape))
        for name, tensor in state.items()
        if name in source_names and tuple(tensor.shape) != source.shape(name)
    )
    unfit = {name for name, *_ in mismatched}
    found = {name: tuple(same for same in ties[name] if same in source_names and same not in unfit) for name in state}
    ignore_missing, ignore_unexpected = _ignorable(model)
    missing = [name for name in state if not found[name] and not unfit & {*ties[name]}]
    missing = [name for name in missing if not (ignore_missing and ignore_missing.search(name))]
    unexpected = sorted(name for name in source_names if name not in state)
    unexpected = [name for name in unexpected if not (ignore_unexpected and ignore_unexpected.search(name))]
    info = LoadingInfo(tuple(missing), tuple(unexpected), mismatched)
    if (mismatched and not ignore_mismatched_sizes) or (missing and not can_draw(model)):
        raise CheckpointError(
            f"the checkpoint in {where} does not fit {type(model).__name__}: {_describe(info)}. Check that config.json "
            f"belongs to these weights, or give ignore_mismatched_sizes=True for new values in place of tensors of other shapes. "
            f"Nothing was changed."
        )
    return Match(found, info)


def _describe(info: LoadingInfo) -> str:
    problems = [f"'{name}' has shape {list(stored)}, but the model's {list(own)}" for name, stored, own in info.mismatched]
    problems += [f"it lacks {_list_names(info.missing)} of the model"] if info.missing else []
    problems += [f"it holds {_list_names(info.unexpected)}, which the model does not have"] if info.unexpected else []
    return "; ".join(problems[:_MAX_NAMED] + ([f"and {len(problems) - _MAX_NAMED} more"] if len(problems) > _MAX_NAMED else []))


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


def _list_names(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{len(names)} tensor(s) ({', '.join(names[:_MAX_NAMED])}{rest})"
