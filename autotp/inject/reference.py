"""The whole model's run of one call, against which every rank's is compared: its sites, and gradients of random cotangents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .record import Call, Record, Site
from .shadow import Shadow


@dataclass
class Reference:
    """The whole model's run of one call: its record, random cotangents, and the gradients they give."""

    call: dict[str, Any]
    record: Record
    site_grads: list[Tensor | None]
    output_grads: list[Tensor]
    y_grads: Sequence[Tensor | None]
    parameter_grads: Mapping[str, Tensor | None]
    input_grads: Mapping[str, Tensor | None]
    by_parameter: dict[str, list[int]] = field(default_factory=dict)

    def entry(self, index: int) -> tuple[Site, Call]:
        key, number = self.record.order[index]
        return self.record.sites[key], self.record.sites[key].calls[number]


def make_reference(shadow: Shadow, call: dict[str, Any], record: Record, seed: int = 0) -> Reference:
    """Pull random cotangents of every site's input and of the outputs back through the whole model's cut graph."""
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64)

    calls = [record.sites[key].calls[number] for key, number in record.order]
    site_grads = [draw(c.x) if c.x.requires_grad else None for c in calls]
    output_grads = [draw(t) for t in record.outputs]
    targets = [(c.x, g) for c, g in zip(calls, site_grads, strict=True) if g is not None]
    targets += [(t, g) for t, g in zip(record.outputs, output_grads, strict=True) if t.requires_grad]
    names = [n for n in shadow.parameters if not shadow.leaf(n).is_meta and shadow.leaf(n).requires_grad]
    inputs = {k: v for c in record.module_calls.get("", []) for k, v in c.constants.items() if k in call}
    at = [c.y for c in calls] + [shadow.leaf(n) for n in names] + list(inputs.values())
    tensors, cotangents = zip(*targets, strict=True)
    grads = iter(torch.autograd.grad(tensors, at, cotangents, retain_graph=True, allow_unused=True))
    y_grads = [next(grads) for _ in calls]
    named, given = ({n: next(grads) for n in keys} for keys in (names, inputs))
    made = Reference(call, record, site_grads, output_grads, y_grads, named, given)
    for index, (key, _) in enumerate(record.order):
        made.by_parameter.setdefault(key[0], []).append(index)
    return made
