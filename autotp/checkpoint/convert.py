"""A checkpoint seen by the model's own names and layouts: renamed, stacked, split and transposed as transformers does it.

transformers' operations run on tensors without values first, which tells every target's name and shape. Stacked and
concatenated tensors are then read slice by slice: the cut of the whole is turned into cuts of what it is made of. Other
conversions are of data that is mapped, one target at a time, and cut afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..index_runs import Run, compress_indices, take_runs
from ..shard import Cut, Shard
from .source import WeightSource, digest_lines, take_part

_WAY_OUT = "Load it with transformers' from_pretrained, then call autotp.parallelize on the model."
_CPU = torch.device("cpu")
Runs = Mapping[int, tuple[Run, ...]]  # cut dimension -> the indices that are taken of it


class ConvertedSource:
    """`source` by the names of `model`'s state dict; what is none of the model's keeps a name of its own.

    Raises:
        CheckpointError: two tensors of the checkpoint would be one of the model's, or a conversion fails.
    """

    def __init__(self, model: nn.Module, source: WeightSource) -> None:
        self.source = source
        self.directory = getattr(source, "directory", type(source).__name__)
        self._model = model
        self._plain: dict[str, str] = {}
        self._made: dict[str, _Target] = {}
        state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
        groups: dict[str, _Group] = {}
        for key, (name, pattern, converter) in rename_keys(model, source.names(), state).items():
            if converter is not None and pattern is not None and name in state:
                group = groups.setdefault(name, _Group(name, copy.deepcopy(converter)))
                group.keys.setdefault(pattern, []).append(key)
            elif name in self._plain and name in state:
                raise CheckpointError(
                    f"the checkpoint in {self.directory} holds '{self._plain[name]}' and '{key}', both '{name}' of the "
                    f"model: remove the one that is not meant"
                )
            else:
                self._plain[key if name in self._plain else name] = key
        for group in groups.values():
            self._add_targets(group)

    def _add_targets(self, group: _Group) -> None:
        """Run a conversion without values: what it makes, and in which shapes."""
        try:
            made = group.convert(self._model, self._empty)
        except Exception as error:  # transformers' operations raise anything
            raise CheckpointError(
                f"the checkpoint in {self.directory} stores '{group.first}' in a layout that transformers converts while "
                f"loading, which fails here ({type(error).__name__}: {error}). {_WAY_OUT} "
                f"(Saved from there once, it needs no conversion.)"
            ) from error
        tree = _make_tree(group, self.source) if len(made) == 1 else None
        for name, tensor in made.items():
            same = tree is not None and tree.shape == tuple(tensor.shape)
            self._made[name] = _Target(group, tuple(tensor.shape), tensor.dtype, tree if same else None)

    def _empty(self, key: str) -> Tensor:
        return torch.empty(self.source.shape(key), dtype=self.source.dtype(key), device="meta")

    def names(self) -> set[str]:
        """Names of all tensors, as the model spells them."""
        return {*self._plain, *self._made}

    def keys(self, name: str) -> list[str]:
        """What the checkpoint calls the tensors that `name` is made of."""
        if name in self._plain:
            return [self._plain[name]]
        return [key for keys in self._made[name].group.keys.values() for key in keys]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the full tensor."""
        return self.source.shape(self._plain[name]) if name in self._plain else self._made[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype it is stored in."""
        return self.source.dtype(self._plain[name]) if name in self._plain else self._made[name].dtype

    def read(self, name: str, shard: Shard | None, rank: int, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        """What `rank` holds of it, in memory of its own.

        Raises:
            CheckpointError: it can't be read.
        """
        if name in self._plain:
            return self.source.read(self._plain[name], shard, rank, dtype, device)
        target = self._made[name]
        if target.tree is not None:
            runs = {} if shard is None else {cut.dim: cut.runs[rank] for cut in shard.cuts}
            part = target.tree.take(runs, self.source.view)
            return part.to(device=device, dtype=dtype or target.dtype, memory_format=torch.contiguous_format)
        full = target.group.convert(self._model, self.source.view)[name]
        return take_part(full, shard, rank, dtype, device)

    def nbytes(self, name: str) -> int:
        """Bytes of what it is made of."""
        return sum(self.source.nbytes(key) for key in self.keys(name))

    def check(self, name: str) -> None:
        """Check all that it is made of.

        Raises:
            CheckpointError: a tensor is not what was saved.
        """
        for key in self.keys(name):
            self.source.check(key)

    def view(self, name: str) -> Tensor:
        """The whole tensor; of what is converted, a copy."""
        return self.source.view(self._plain[name]) if name in self._plain else self.read(name, None, 0, None, _CPU)

    def digest(self) -> str:
        """The digest of the checkpoint, and of the names that its tensors have here."""
        return digest_lines([self.source.digest(), *(f"{name} {self.keys(name)}" for name in self.names())])


@dataclass
class _Group:
    """One of transformers' converters, with the tensors that it collects: `keys[pattern]` in their order."""

    first: str
    converter: Any
    keys: dict[str, list[str]] = field(default_factory=dict)

    def convert(self, model: nn.Module, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """What transformers makes of the tensors that `get` gives, by full name."""
        converter = copy.deepcopy(self.converter)
        for pattern, keys in self.keys.items():
            for key in keys:
                converter.add_tensor(self.first, key, pattern, get(key))
        with torch.no_grad():
            made = converter.convert(self.first, model=model, config=model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


@dataclass
class _Target:
    """One tensor that a group makes; `tree` says how, where slices of it can be read."""

    group: _Group
    shape: tuple[int, ...]
    dtype: torch.dtype
    tree: _Leaf | _Joined | None


# -- tensors made of others, and slices of them -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Leaf:
    """A tensor of the checkpoint."""

    key: str
    shape: tuple[int, ...]

    def take(self, runs: Runs, get: Callable[[str], Tensor]) -> Tensor:
        """The indices `runs` of it."""
        tensor = get(self.key)
        for dim, indices in runs.items():
            tensor = take_runs(tensor, dim, indices)
        return tensor


@dataclass(frozen=True)
class _Joined:
    """`parts` one after the other along `dim`, which is a new one if they are `stacked`."""

    parts: Sequence[_Leaf | _Joined]
    dim: int
    stacked: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        first = self.parts[0].shape
        if self.stacked:
            return (*first[: self.dim], len(self.parts), *first[self.dim :])
        return (*first[: self.dim], sum(part.shape[self.dim] for part in self.parts), *first[self.dim + 1 :])

    def take(self, runs: Runs, get: Callable[[str], Tensor]) -> Tensor:
        """The indices `runs` of the whole; only what they touch of the parts is read."""
        others = {dim - (self.stacked and dim > self.dim): indices for dim, indices in runs.items() if dim != self.dim}
        own = runs.get(self.dim)
        size = self.shape[self.dim]
        indices = list(range(size)) if own is None else Cut(self.dim, (own,)).indices(0).tolist()
        if self.stacked:
            taken = [self.parts[i].take(others, get) for i in indices]
            empty = self.parts[0].take(others, get).unsqueeze(self.dim).narrow(self.dim, 0, 0) if not taken else None
            return torch.stack(taken, self.dim) if empty is None else empty
        pieces = [part.take({**others, self.dim: inside}, get) for part, inside in self._find_pieces(indices)]
        return torch.cat(pieces, self.dim)  # a copy of a single piece too, which lies in the mapped file

    def _find_pieces(self, indices: Sequence[int]) -> list[tuple[_Leaf | _Joined, tuple[Run, ...]]]:
        """Which indices of which part, in order; one empty piece if there are no indices."""
        starts = [0]
        for part in self.parts:
            starts.append(starts[-1] + part.shape[self.dim])
        pieces: list[tuple[int, list[int]]] = []
        number = 0
        for index in indices:
            while not starts[number] <= index < starts[number + 1]:
                number = (number + 1) % len(self.parts)
            if not pieces or pieces[-1][0] != number:
                pieces.append((number, []))
            pieces[-1][1].append(index - starts[number])
        return [(self.parts[number], compress_indices(inside)) for number, inside in pieces or [(0, [])]]


def _make_tree(group: _Group, source: WeightSource) -> _Leaf | _Joined | None:
    """What a conversion that only stacks and concatenates makes; None for any other."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    made: dict[str, list] = {pattern: [_Leaf(key, source.shape(key)) for key in keys] for pattern, keys in group.keys.items()}
    for operation in group.converter.operations:
        if type(operation) is MergeModulelist:
            made = {pattern: [_join(parts, operation.dim, True)] for pattern, parts in made.items()}
        elif type(operation) is Concatenate:
            parts = [part for pattern in group.converter.source_patterns for part in made.get(pattern, [])]
            made = {"": [_join(parts, operation.dim, False)]}
        else:
            return None
    parts = [part for parts in made.values() for part in parts]
    return parts[0] if len(parts) == 1 else None


def _join(parts: Sequence[_Leaf | _Joined], dim: int, stacked: bool) -> _Joined:
    return _Joined(parts, dim % (len(parts[0].shape) + stacked), stacked)


# -- names --------------------------------------------------------------------------------------------------------------


def rename_keys(model: nn.Module, keys: Any, state: Mapping[str, Tensor]) -> dict[str, tuple[str, str | None, Any]]:
    """Checkpoint key -> the model's name for it, and the pattern and converter of transformers that it goes through, if any.

    transformers' renamings for this model type are applied, and its base-model prefix is added or removed.
    """
    prefix = getattr(model, "base_model_prefix", "") or ""
    renamings, converters, rename = _find_conversions(model)
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    out: dict[str, tuple[str, str | None, Any]] = {}
    for key in sorted(keys, key=natural_key):
        name, pattern = rename(key, renamings, converters, prefix or None, state) if rename else (key, None)
        if name not in state and key in state:
            name, pattern = key, None
        if name not in state and pattern is None:
            name = _move_prefix(key, prefix, state)
        out[key] = (name, pattern, by_pattern.get(pattern))
    return out


def _move_prefix(key: str, prefix: str, state: Mapping[str, Tensor]) -> str:
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


def natural_key(name: str) -> list:
    """Sorts names so that layer 2 comes before layer 10."""
    return [(0, int(part), "") if part.isdecimal() and len(part) < 20 else (1, 0, part) for part in name.split(".")]
