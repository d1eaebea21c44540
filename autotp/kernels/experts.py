"""Mixture of experts: slots sorted by expert, a product for each expert's rows, the gate, and the weighted sum back to tokens.

T tokens, each with k of E experts, are S = T * k slots: slot `t * k + j` is token t's j-th choice. Sorted by expert the slots are
rows. Rows from `offsets[E - 1]` on belong to no expert: they hold anything, and nothing reads them.

| tensor | shape, dtype |
|---|---|
| top_k_index | `[T, k]` integers; what is not in 0 .. E - 1 is no expert |
| order | `[S]` int32, the slot of each row |
| inverse | `[S]` int32, the row of each slot |
| offsets | `[E]` int32, where each expert's rows end |
| x, y | `[T, H]` tokens or `[S, H]` rows |
| h, a | `[S, 2F]` (`[S, F]` "ungated") before the gate, `[S, F]` after it |
| weights | `[T, k]`, any floating dtype |

Nothing here waits for the device, but for the grouped products' reference, and none of it is differentiable by autograd.
"""

from __future__ import annotations

from torch import Tensor

from .dispatch import Problem, select
from .reference_experts import split_gate

__all__ = [
    "LAYOUTS",
    "combine_rows",
    "gate_rows",
    "gate_rows_backward",
    "grouped_outer",
    "grouped_product",
    "route_tokens",
    "split_gate",
    "spread_rows",
]

LAYOUTS = ("gate_up", "up_gate", "interleaved", "ungated")  # of the columns of h; interleaved: gate, up, gate, up


def route_tokens(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order, inverse, offsets): slots sorted by expert, in their own order within one."""
    problem = Problem("route_tokens", top_k_index.device.type, top_k_index.dtype, rows=top_k_index.numel())
    return select(problem)(top_k_index, num_experts)


def spread_rows(x: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    """Rows of experts `[S, H]` from tokens `[T, H]`: `out[inverse[t * k + j]] = x[t]`."""
    return select(_problem("spread_rows", x))(x, inverse, top_k)


def combine_rows(y: Tensor, inverse: Tensor, offsets: Tensor, weights: Tensor | None, top_k: int) -> Tensor:
    """Tokens `[T, H]` from rows `[S, H]`: `out[t] = sum over j of weights[t, j] * y[inverse[t * k + j]]`.

    Sums in float32 (float64 for float64), always in the order of j. Without weights it is the gradient of `spread_rows`.
    """
    return select(_problem("combine_rows", y))(y, inverse, offsets, weights, top_k)


def gate_rows(h: Tensor, activation: str, layout: str) -> Tensor:
    """`a = activation(gate) * up` `[S, F]`, of a layout in LAYOUTS; "ungated": `activation(h)`."""
    return select(_problem("gate_rows", h, activation))(h, activation, layout)


def gate_rows_backward(
    da: Tensor, h: Tensor, weights: Tensor, order: Tensor, offsets: Tensor, activation: str, layout: str,
    wanted: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """All that backward needs between the two products' gradients, in one pass; w is the row's weight.

    The routing weights' gradient `<dout[t], y[row]>` is `<da, a>`, with `da = dout[t] @ down`: so y need not be kept, and the
    weight is applied here rather than to y's gradient.

    Args:
        da: gradient of a `[S, F]` by the unweighted output; may be written to.

    Returns:
        dh like h, the gradient of h times w; `w * a` `[S, F]`, of which down's gradient is made; `<da, a>` by slot, `[S]` float32
        (float64 for float64), zeros where there is no expert. None for what is not wanted.
    """
    run = select(_problem("gate_rows_backward", h, activation))
    return run(da, h, weights, order, offsets, activation, layout, wanted)


def grouped_product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """`[S, N]`: `x[rows of e] @ weight[e]`, of x `[S, K]` and weight `[E, K, N]`, both of one dtype."""
    return select(_product("grouped_product", x, weight, offsets))(x, weight, offsets)


def grouped_outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """`[E, M, N]`: `a[rows of e].T @ b[rows of e]`, of a `[S, M]` and b `[S, N]`; zeros for an expert without rows."""
    return select(_product("grouped_outer", a, b, offsets))(a, b, offsets)


def _problem(op: str, x: Tensor, kind: str = "") -> Problem:
    rows, width = x.shape
    return Problem(op, x.device.type, x.dtype, kind, rows if width else 0, width)


def _product(op: str, a: Tensor, b: Tensor, offsets: Tensor) -> Problem:
    return _problem(op, a)._replace(aligned=_is_aligned(a) and _is_aligned(b))


def _is_aligned(x: Tensor) -> bool:
    """Whether columns or rows lie side by side, and all else, the address too, is in multiples of 16 bytes."""
    *outer, rows, cols = x.stride()
    if cols == 1 and rows >= max(1, x.shape[-1]):
        steps = [*outer, rows]
    elif rows == 1 and cols >= max(1, x.shape[-2]):
        steps = [*outer, cols]
    else:
        return False
    return x.data_ptr() % 16 == 0 and all(step * x.element_size() % 16 == 0 for step in steps)
