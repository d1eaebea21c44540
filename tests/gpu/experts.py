"""The experts' cases for kernels.py: forms, sizes and choices, and the plain loop that they are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from autotp.kernels.reference import ACTIVATIONS
from autotp.kernels.reference_experts import split_gate
from autotp.layers.experts import grouped_experts

# tokens, hidden, inside, experts, top k, activation, layout, transposed
SMALL = [(5, 16, 8, 3, 2, "silu", "gate_up", False), (4, 9, 7, 4, 3, "relu2", "ungated", True)]
LARGE = [
    (1031, 512, 328, 7, 3, "silu", "gate_up", False),
    (1031, 512, 205, 7, 2, "silu", "gate_up", False),  # no rows of 16 bytes
    (777, 256, 96, 64, 8, "gelu_tanh", "gate_up", True),
    (300, 1024, 2560, 8, 1, "silu", "interleaved", False),
    (512, 384, 128, 16, 6, "relu2", "ungated", False),
]
ODD = [
    (3, 33, 17, 4, 2, "silu", "gate_up", False),
    (1, 1, 1, 1, 1, "gelu", "up_gate", True),
    (700, 40, 2100, 3, 2, "silu", "interleaved", False),
    (2, 2056, 8, 70, 8, "relu", "ungated", False),
]


def draw_index(tokens: int, experts: int, top_k: int, device: str) -> torch.Tensor:
    """Choices, the last expert's by few, and some of none."""
    scores = torch.rand(tokens, experts, device=device)
    scores[4:, -1] = 0
    index = scores.topk(top_k).indices
    index[2::7, 0] = experts
    return index


def plain_experts(x, up, down, weights, index, activation, layout, transposed):
    """Expert by expert, in x's dtype throughout."""
    out = torch.zeros_like(x)
    for e in range(len(up)):
        token, j = torch.where(index == e)
        first, second = (up[e], down[e]) if transposed else (up[e].t(), down[e].t())
        gate, upper = split_gate(x[token] @ first, layout)
        value = ACTIVATIONS[activation](gate)
        y = (value if upper is None else value * upper) @ second
        out = out.index_add(0, token, y * weights[token, j, None])
    return out


def fused_experts(x, up, down, weights, index, activation, layout, transposed):
    return grouped_experts(x, up, down, index, weights, activation, layout, transposed)


def expert_forms(sizes: list[tuple], device: str) -> Iterator[tuple]:
    """(name, ours, plain, float64 inputs) of each size; names of the inputs: x up down weights."""
    for tokens, hidden, inside, experts, top_k, *form in sizes:
        columns = inside * (1 if form[1] == "ungated" else 2)
        shapes = (columns, hidden), (hidden, inside)
        up, down = (
            torch.randn(experts, *(s[::-1] if form[2] else s), dtype=torch.float64, device=device) * s[1] ** -0.5 for s in shapes
        )
        x = torch.randn(tokens, hidden, dtype=torch.float64, device=device)
        weights = torch.rand(tokens, top_k, dtype=torch.float64, device=device)
        index = draw_index(tokens, experts, top_k, device)
        options = dict(zip(("activation", "layout", "transposed"), form, strict=True), index=index)
        name = f"experts {(tokens, hidden, inside, experts, top_k, *form)}"
        yield name, partial(fused_experts, **options), partial(plain_experts, **options), (x, up, down, weights)
