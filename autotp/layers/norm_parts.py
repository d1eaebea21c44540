"""What a LayerNormLinear is put together from: named parts of its outputs, or modules that exist already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..comm import TPGroup
from ..errors import PlanError
from ..kernels.product import Merged
from ..shard import Shard
from .linear import LinearLayer
from .siblings import SiblingInput
from .side_by_side import ALIGNMENT_BYTES, Laid, can_lie, lay_together

NORMS = ("LayerNorm", "RMSNorm")


class SideBySide(nn.Module):
    """Parts whose weights lie side by side, each in a storage of its own, so that one product takes them all.

    Attributes:
        weight_names, bias_names: the parts' parameters.
    """

    weight_names: list[str]
    bias_names: list[str]
    _owns: bool  # whether the memory is this module's to arrange
    _laid: Laid | None
    _siblings: SiblingInput | None  # which has arranged it, where it is not

    def _lay(self) -> None:
        """Put the parts' weights side by side, so that one product takes them all; where others hold them they stay."""
        weights: list[Any] = [self._parameters.get(name) for name in self.weight_names]
        biases: list[Any] = [self._parameters.get(name) for name in self.bias_names]
        if (
            not self._owns
            or len(weights) == 1
            or "gathered" in self.__dict__
            or any(type(weight) is not nn.Parameter for weight in weights)
        ):
            return
        if self._laid is None or not self._laid.holds(weights, biases):
            aligned = all(weight.numel() * weight.element_size() % ALIGNMENT_BYTES == 0 for weight in weights)
            self._laid = lay_together(weights, biases) if aligned and can_lie(weights) else None

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._lay()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_laid": None}  # a copy's weights are laid by themselves

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lay()

    def _merge(self, weights: Sequence[Tensor], bare: bool) -> Merged | None:
        """The weights (and the biases, unless `bare`) as one, where they lie side by side."""
        laid = self._laid if self._owns else None if self._siblings is None else self._siblings.find_laid()
        if laid is None or torch.compiler.is_compiling():
            return None
        if not laid.holds(weights, [getattr(self, name) for name in self.bias_names]):
            return None
        return Merged(laid.weight, None) if bare else laid.merge()


def check_size(group: TPGroup | None, tp_size: int, name: str) -> int:
    """The number of ranks, which `group` and `tp_size` (where it is not 1) must agree on.

    Raises:
        PlanError: they do not.
    """
    if group is not None and tp_size not in (1, group.tp_size):
        raise PlanError(f"{name}: tp_size={tp_size} and a group of {group.tp_size} ranks: give the group alone")
    return tp_size if group is None else group.tp_size


def name_parts(split: Sequence[str] | Mapping[str, int] | None, out_features: int, name: str) -> dict[str, int]:
    """Part name -> outputs, in order; the one part of an unsplit layer has the empty name.

    Raises:
        PlanError: no parts, a name twice, or sizes that do not add up.
    """
    if split is None:
        return {"": out_features}
    if isinstance(split, Mapping):
        pairs = [(part.rstrip("_"), size) for part, size in split.items()]
    else:
        pairs = [(part.rstrip("_"), out_features // max(1, len(split))) for part in split]
    parts = dict(pairs)
    if len(parts) < len(pairs) or sum(parts.values()) != out_features or not all(parts):
        raise PlanError(
            f"{name}: parameters_split={split!r} must give names, all different, and sizes that add up to {out_features}; "
            f"names alone make equal parts"
        )
    return parts


def name_linears(linears: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]) -> dict[str, Any]:
    """Part name -> linear: one alone has the empty name, those without names are called linear0, linear1, ..."""
    if isinstance(linears, nn.Module):
        return {"": linears}
    if isinstance(linears, Mapping):
        return {name.rstrip("_"): linear for name, linear in linears.items()}
    return {"": linears[0]} if len(linears) == 1 else {f"linear{i}": linear for i, linear in enumerate(linears)}


def read_linears(linears: Mapping[str, Any]) -> tuple[TPGroup | None, dict[str, Shard]]:
    """The group of column-parallel `linears`, or None, and how each one's weight is dealt.

    Raises:
        PlanError: another kind of module, several groups, or widths that differ.
    """
    for name, linear in linears.items():
        plain = isinstance(linear, nn.Linear) and type(linear).forward in (nn.Linear.forward, LinearLayer.forward)
        dealt = isinstance(linear, LinearLayer)
        if not plain or (dealt and (linear.gather_output or linear.siblings is None)):
            raise PlanError(
                f"linear '{name}' is a {type(linear).__name__}: LayerNormLinear stands for nn.Linear, and for LinearLayer that "
                f"sums its input's gradient itself and whose outputs stay dealt"
            )
    groups = {linear.tp.ranks if isinstance(linear, LinearLayer) else None: linear for linear in linears.values()}
    widths = sorted({linear.weight.shape[1] for linear in linears.values()})
    if len(groups) != 1 or len(widths) > 1:
        raise PlanError(f"linears {list(linears)} read {widths} columns over {len(groups)} groups: both must be one")
    (first,) = groups.values()
    group = first.tp if isinstance(first, LinearLayer) else None
    shards = {
        name: linear.shards["weight"] if group is not None else Shard.whole(linear.weight.shape, 1)
        for name, linear in linears.items()
    }
    return group, shards


def read_norm(norm: Any, normalization: str | None, eps: float | None) -> tuple[str, float]:
    """Which of NORMS `norm` is, and its eps.

    Raises:
        PlanError: it is neither torch's, nor said what it is.
    """
    known = {nn.LayerNorm.forward: "LayerNorm", nn.RMSNorm.forward: "RMSNorm"}.get(type(norm).forward)
    kind = normalization or known
    found = eps if eps is not None else getattr(norm, "eps", None) if known else None
    if kind is None or found is None or (known and known != kind):
        raise PlanError(
            f"{type(norm).__name__}: give normalization (one of {NORMS}) and eps, as its class does not say what it computes"
        )
    return kind, found


def join_biases(biases: Sequence[Tensor | None], sizes: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """The parts' biases side by side, `[sum of sizes]`, zeros for a part without one; None where no part has one."""
    like = next((bias for bias in biases if bias is not None), None)
    if like is None:
        return None
    whole = [like.new_zeros(size) if bias is None else bias for bias, size in zip(biases, sizes, strict=True)]
    return (whole[0] if len(whole) == 1 else torch.cat(whole)).to(dtype)
