"""One rank's run of a call: its sites are answered from the whole model's record, and their inputs compared with it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ProofError
from ..shard import Shard
from .compare import compare
from .record import Call, Site, SiteKey, add_terms
from .reference import Reference
from .shadow import Shadow, copy_model
from .sites import Operands


def cut_shadow(shadow: Shadow, shards: dict[str, Shard], rank: int) -> Shadow:
    """A copy of `shadow` that holds `rank`'s slices; numbers are shared where nothing is cut."""
    memo: dict[int, Any] = {}
    for name, parameter in shadow.model.named_parameters(remove_duplicate=False):
        source = shadow.leaf(name) if name in shadow.parameters else parameter
        value = source.detach()
        if name in shards:
            value = shards[name].split(value, rank).clone()
        memo.setdefault(id(parameter), nn.Parameter(value, parameter.requires_grad))
    for name, buffer in shadow.model.named_buffers():
        value = buffer.detach()
        memo.setdefault(id(buffer), shards[name].split(value, rank).clone() if name in shards else value.clone())
    made = copy.copy(shadow)
    made.model = copy_model(shadow.model, memo)
    made.real, made.generator = {}, torch.Generator().manual_seed(0)
    made.index()
    return made


class RankRun:
    """One rank's run of one call against a reference."""

    def __init__(
        self,
        reference: Reference,
        shadow: Shadow,
        shards: dict[str, Shard],
        rank: int,
        parts: Sequence[float],
        values: bool = True,
    ) -> None:
        """`values=False` compares shapes alone, where a norm over all ranks can't be right on one."""
        self.reference, self.shadow, self.shards, self.rank, self.values = reference, shadow, shards, rank, values
        self.part, self.read = parts[rank], 0
        self.drawn: list[Tensor] = []
        self.seen: dict[str, int] = defaultdict(int)
        self.roles: dict[SiteKey, tuple[Any, Any]] = {}
        self.leaves: list[tuple[int, Tensor]] = []
        self.targets: list[tuple[Tensor, Tensor]] = []
        self.inputs = {k: reference.call[k].detach().double().requires_grad_() for k in reference.input_grads}
        self.input_grads: Mapping[str, Tensor | None] = {}

    def arguments(self) -> dict[str, Any]:
        """The call, its floating tensors such that a gradient reaches them; copies, as the forward may write into them."""
        return self.reference.call | {name: leaf.clone() for name, leaf in self.inputs.items()}

    def respond(self, op: Operands, name: str, func: Any, args: tuple, kwargs: dict) -> Tensor:
        """What a site returns on this rank, its input checked."""
        order = self.reference.by_parameter.get(name, [])
        if self.seen[name] >= len(order):
            raise ProofError(f"{name}: rank {self.rank} calls it more often than the whole model does")
        index = order[self.seen[name]]
        self.seen[name] += 1
        site, call = self.reference.entry(index)
        cotangent = self.reference.site_grads[index]
        rows, cols = self.role(site)
        x, expected = op.x, call.x
        if rows is not None:
            expected, cotangent = (
                take(expected, call.x_axes, rows, site, call.x_start),
                (None if cotangent is None else take(cotangent, call.x_axes, rows, site, call.x_start)),
            )
        known = self.values and not self.looks_up(site)  # a rank counts ids from its own first row
        compare(x, expected if known or x.shape != expected.shape else x, f"{name}: the input", self.rank)
        if cotangent is not None and x.requires_grad:
            self.targets.append((x, cotangent * self.part if cols is not None else cotangent))
        value = call.y.detach()
        if cols is not None:
            value = take(value, call.y_axes, cols, site, call.y_start)
        leaf = value.clone().requires_grad_()
        self.leaves.append((index, leaf))
        mix = self.check_weight(op, site, call, rows, cols)
        return add_terms(leaf * self.part if rows is not None else leaf.clone(), op, self.shadow, mix)

    def check_weight(self, op: Operands, site: Site, call: Call, rows: Any, cols: Any) -> Tensor | None:
        """Compare a weight that this rank computed with its part of the whole one; that part of the coefficients of the whole."""
        if (call.op is None) != (self.shadow.find(op.weight) is not None):
            raise ProofError(f"{site.parameter}: rank {self.rank} does not compute its weight as the whole model does")
        if call.op is None or call.mix is None:
            return None
        expected, mix = call.op.weight, call.mix
        if rows is not None:
            expected, mix = (take(t, call.op.w_in, rows, site, call.x_start) for t in (expected, mix))
        if cols is not None:
            expected, mix = (take(t, call.op.w_out, cols, site, call.y_start) for t in (expected, mix))
        same = op.weight.shape == expected.shape and not self.values
        compare(op.weight, op.weight if same else expected, f"{site.parameter}: the weight computed from it", self.rank)
        return mix

    def note(self, number: Tensor) -> None:
        """A number that Python reads or compares on this rank: the whole model's, or ranks may take other branches."""
        expected = self.reference.record.numbers
        if self.values and self.read < len(expected):
            compare(number, expected[self.read].view_as(number), "a number that the forward reads from a tensor", self.rank)
        self.read += 1

    def note_draw(self, drawn: Tensor, rate: Any, drops: bool) -> None:
        """What this rank drops, or draws."""
        self.drawn.append(drawn.detach())

    def role(self, site: Site) -> tuple[Any, Any]:
        """`(dim, indices)` of a cut of the site's input columns, and of its output columns, for this rank."""
        if site.key not in self.roles:
            self.roles[site.key] = self._read_role(site)
        return self.roles[site.key]

    def _read_role(self, site: Site) -> tuple[Any, Any]:
        shard = self.shards.get(site.parameter)
        rows = cols = None
        for cut in shard.cuts if shard else ():
            if cut.dim in site.in_dims:
                rows = (site.in_dims, cut.dim, cut.indices(self.rank))
            elif cut.dim in site.out_dims:
                cols = (site.out_dims, cut.dim, cut.indices(self.rank))
            elif not self.looks_up(site):
                raise ProofError(f"{site.parameter}: dim {cut.dim} is cut, which is neither its inputs nor its outputs")
        return rows, cols

    def looks_up(self, site: Site) -> bool:
        """Whether a site finds the rows of some ids in this rank's part of a vocabulary, to be summed with the others' finds."""
        shard = self.shards.get(site.parameter)
        return site.kind == "embedding" and shard is not None and any(cut.dim not in site.out_dims for cut in shard.cuts)

    def finish(self, outputs: Sequence[Tensor]) -> tuple[Sequence[Tensor | None], Mapping[str, Tensor | None]]:
        """Compare the outputs, then pull the cotangents back: gradients at the sites' outputs and at the Parameters."""
        expected = self.reference.record.outputs
        if len(outputs) != len(expected):
            raise ProofError(f"rank {self.rank} returns {len(outputs)} floating tensors, the whole model {len(expected)}")
        for i, (value, whole) in enumerate(zip(outputs, expected, strict=True)):
            compare(value, whole, f"output {i} of the model", self.rank)
        for name, order in self.reference.by_parameter.items():
            if self.seen[name] != len(order):
                raise ProofError(f"{name}: rank {self.rank} calls it {self.seen[name]} times, the whole model {len(order)} times")
        targets = self.targets + [(t, g) for t, g in zip(outputs, self.reference.output_grads, strict=True) if t.requires_grad]
        names = [n for n in self.shadow.parameters if not self.shadow.leaf(n).is_meta and self.shadow.leaf(n).requires_grad]
        at = [leaf for _, leaf in self.leaves] + [self.shadow.leaf(n) for n in names] + list(self.inputs.values())
        tensors, cotangents = zip(*targets, strict=True)
        grads = iter(torch.autograd.grad(tensors, at, cotangents, allow_unused=True))
        y_grads = [next(grads) for _ in self.leaves]
        named = {n: next(grads) for n in names}
        self.input_grads = {n: next(grads) for n in self.inputs}
        return y_grads, named


def take(tensor: Tensor, axes: Sequence[int], role: tuple, site: Site, start: int) -> Tensor:
    """The part of `tensor` along a site's column `axes` that a cut of one of the Parameter's dims leaves."""
    dims, cut_dim, indices = role
    sizes = [site.shape[d] for d in dims]
    place = dims.index(cut_dim)
    if len(axes) == len(dims):
        own = indices - (start // _size(sizes[1:]) if place == 0 else 0)
        own = own[(own >= 0) & (own < tensor.shape[axes[place]])]
        return tensor.index_select(axes[place], own)
    mask = torch.zeros(sizes, dtype=torch.bool)
    mask.index_fill_(place, indices, True)
    own = mask.flatten().nonzero().flatten() - start
    own = own[(own >= 0) & (own < tensor.shape[axes[0]])]
    return tensor.index_select(axes[0], own)


def _size(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
