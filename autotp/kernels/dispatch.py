"""Which backend runs an operation: an ordered list, each of which says why it can't, and the first that can is taken.

The environment variable AUTOTP_BACKEND overrides the order: one name, for every operation that has a backend of that name, or
`operation=name,operation=name`. Under torch.compile the operations' plain-torch reference runs, whatever the variable says:
inductor fuses it itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..errors import KernelUnsupported
from . import fp8_scaled, fused_torch, grouped, reference, reference_decode, reference_experts

VARIABLE = "AUTOTP_BACKEND"
WIDEST_ROW = 16384  # columns that a Triton norm holds in registers; from about twice as many the backward spills
MOST_ELEMENTWISE = 4  # rows of a product that is not run on matrix units
_asked = ContextVar("asked", default=True)  # whether AUTOTP_BACKEND is read
log = logging.getLogger(__name__)


class Problem(NamedTuple):
    """What is to be computed; the key by which the choice is remembered.

    Attributes:
        op: name of the operation, a key of BACKENDS.
        device, dtype: of its inputs.
        kind: of norm, activation or rotation.
        rows, width: M and the number of columns; 0 rows also stand for "nothing to do".
        weight_dtype: dtype of the weight, None without one.
        bias: whether there is one.
        aligned: whether addresses and row lengths are multiples of 16 bytes.
        outputs: N of a product.
    """

    op: str
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    kind: str = ""
    rows: int = 0
    width: int = 0
    weight_dtype: torch.dtype | None = None
    bias: bool = False
    aligned: bool = True
    outputs: int = 0


def _never(problem: Problem) -> list[str]:
    return []


@dataclass(frozen=True)
class Backend:
    """One implementation of an operation.

    Attributes:
        run: the function, or "module:function" in this folder, imported at its first use.
        why_not: the reasons why it can't run a problem, empty if it can.
        rather_not: the reasons why it should not, though it can: heard by `auto`, not where the backend is named.
    """

    name: str
    run: Callable[..., Any] | str
    why_not: Callable[[Problem], list[str]] = _never
    rather_not: Callable[[Problem], list[str]] = _never


@lru_cache
def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def why_not_triton(problem: Problem) -> list[str]:
    """What speaks against any of our Triton kernels, which compute in float32 and hold a row or a part of it in registers."""
    against = []
    if not _is_installed("triton"):
        against.append("triton is not installed")
    if problem.device != "cuda" and not (problem.device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        against.append(f"runs on CUDA, not on {problem.device}")
    if problem.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        against.append(f"computes in float32, not in {problem.dtype}")
    if problem.rows == 0:
        against.append("the input is empty")
    return against


def _why_not_triton_norm(problem: Problem) -> list[str]:
    wide = problem.width > WIDEST_ROW
    return why_not_triton(problem) + [f"a row of {problem.width} is wider than {WIDEST_ROW}"] * wide


def _why_not_triton_route(problem: Problem) -> list[str]:
    return why_not_triton(problem._replace(dtype=torch.float32))


def rather_not_triton(problem: Problem) -> list[str]:
    return ["interprets its kernels on the CPU, for tests"] if problem.device == "cpu" else []


def _why_not_triton_fp8(problem: Problem) -> list[str]:
    against = why_not_triton(problem) + ["the input is empty"] * (problem.width == 0 and problem.rows > 0)
    if problem.dtype is torch.float32 and problem.device == "cuda" and problem.kind != "tensorwise":
        # Seen on an H200 with Triton 3.6: a fourth of the values that it turned were others.
        against.append("turns values of 8 bits wrongly that were float32")
    return against


def _why_not_triton_stacks(problem: Problem) -> list[str]:
    return _why_not_triton_fp8(problem) + ["reads sizes and addresses in multiples of 16"] * (not problem.aligned)


def _rather_not_triton_norm(problem: Problem) -> list[str]:
    return rather_not_triton(problem) + ["a row of 1 has nothing but rounding to it"] * (problem.width == 1)


def _why_not_few_rows(problem: Problem) -> list[str]:
    against = why_not_triton(problem._replace(rows=max(1, problem.rows)))
    if problem.dtype is torch.float32 and problem.rows > MOST_ELEMENTWISE:
        against.append(f"more than {MOST_ELEMENTWISE} rows in float32 want matrix units of another precision")
    return against


def _rather_not_linear_few(problem: Problem) -> list[str]:
    # Measured on an H200: up to 2 rows ours reads faster at every shape, beyond that with a gate or very many outputs.
    plain = problem.weight_dtype in (None, problem.dtype)  # PyTorch reads no weights of 8 bits for an input of 16
    slower = problem.rows > 2 and plain and not problem.kind and problem.outputs < 32768
    return rather_not_triton(problem) + [f"cuBLAS reads the weights of {problem.rows} rows faster"] * slower


def _rather_not_few_rows(problem: Problem) -> list[str]:
    return _why_not_few_rows(problem) + rather_not_triton(problem)


def _triton(
    run: str,
    why_not: Callable[[Problem], list[str]] = why_not_triton,
    rather_not: Callable[[Problem], list[str]] = rather_not_triton,
) -> Backend:
    return Backend("triton", run, why_not, rather_not)


# The one place where backends are ordered; scripts/bench_kernels.py measures them.
BACKENDS: dict[str, list[Backend]] = {
    "linear": [
        Backend("few_rows", "few_rows:linear", rather_not=_rather_not_few_rows),  # reference.linear, but while decoding
        Backend("reference", reference.linear),
    ],
    "reduce_rows": [_triton("triton_peers:reduce_rows")],
    "sum_rows": [_triton("triton_sums:sum_rows")],
    "best_columns": [_triton("triton_choose:best_columns")],
    "look_up": [_triton("triton_lookup:look_up"), Backend("reference", reference_decode.look_up)],
    **{
        op: [_triton(f"triton_cache:{op}"), Backend("reference", getattr(reference_decode, op))]
        for op in ("attend_cache", "write_cache")
    },
    "linear_few": [
        _triton("triton_few_rows:linear_few", _why_not_few_rows, _rather_not_linear_few),
        Backend("reference", reference.linear_few),
    ],
    "quantise": [
        _triton("triton_fp8:quantise", _why_not_triton_fp8),
        Backend("reference", "reference_fp8:quantise"),
    ],
    "quantise_stacks": [
        _triton("triton_fp8_stacks:quantise_stacks", _why_not_triton_stacks),
        Backend("reference", "reference_fp8:quantise_stacks"),
    ],
    "scaled_product": [
        Backend("torch", fp8_scaled.multiply_scaled, fp8_scaled.why_not_scaled),
        Backend("reference", "reference_fp8:multiply"),
    ],
    "linear_transposed": [Backend("reference", reference.linear_transposed)],
    "norm_forward": [
        _triton("triton_norm:norm_forward", _why_not_triton_norm, _rather_not_triton_norm),
        Backend("torch", fused_torch.norm_forward, fused_torch.why_not_norm),
        Backend("reference", reference.norm_forward),
    ],
    "norm_backward": [
        _triton("triton_norm:norm_backward", _why_not_triton_norm, _rather_not_triton_norm),
        Backend("torch", fused_torch.norm_backward, fused_torch.why_not_norm),
        Backend("reference", reference.norm_backward),
    ],
    "gated_forward": [_triton("triton_gated:gated_forward"), Backend("reference", reference.gated_forward)],
    "gated_backward": [_triton("triton_gated:gated_backward"), Backend("reference", reference.gated_backward)],
    **{
        op: [_triton(f"triton_softmax:{op}"), Backend("reference", getattr(reference, op))]
        for op in ("sum_exponentials", "cross_entropy_backward")
    },
    "rotary_forward": [_triton("triton_rotary:rotary_forward"), Backend("reference", reference.rotary_forward)],
    "rotary_backward": [_triton("triton_rotary:rotary_backward"), Backend("reference", reference.rotary_backward)],
    "route_tokens": [
        _triton("triton_experts:route_tokens", _why_not_triton_route),
        Backend("reference", reference_experts.route_tokens),
    ],
    **{
        op: [_triton(f"triton_experts:{op}"), Backend("reference", getattr(reference_experts, op))]
        for op in ("spread_rows", "combine_rows", "gate_rows", "gate_rows_backward")
    },
    **{
        op: [
            Backend("torch", getattr(grouped, op), grouped.why_not_grouped, grouped.rather_not_grouped),
            Backend("reference", getattr(reference_experts, op)),
        ]
        for op in ("grouped_product", "grouped_outer")
    },
}


def select(problem: Problem, backend: str = "auto") -> Callable[..., Any]:
    """The function that computes `problem`: of the backend named here or in AUTOTP_BACKEND, else the first willing one.

    Raises:
        KernelUnsupported: the operation or the named backend is unknown, or it can't run the problem, with its reasons.
    """
    if backend == "auto" and _asked.get():
        backend = _named_for(problem.op, os.environ.get(VARIABLE, ""))
    return _choose(problem, backend)


@contextmanager
def ignore_setting() -> Iterator[None]:
    """Within it AUTOTP_BACKEND is not read: what is computed to be compared runs anywhere, in any dtype."""
    token = _asked.set(False)
    try:
        yield
    finally:
        _asked.reset(token)


@lru_cache(maxsize=64)
def _named_for(op: str, setting: str) -> str:
    """What the value of AUTOTP_BACKEND asks for `op`."""
    known = {choice.name for choices in BACKENDS.values() for choice in choices}
    asked = "auto"
    for part in filter(None, (part.strip() for part in setting.split(","))):
        target, _, name = part.rpartition("=")
        if name not in {*known, "auto"} or (target and target not in BACKENDS):
            raise KernelUnsupported(
                f"{VARIABLE}={setting!r}: {part!r} is neither a backend ({', '.join(sorted(known))}, auto) nor operation=backend "
                f"with one of the operations {', '.join(BACKENDS)}"
            )
        if target == op or (not target and name in {choice.name for choice in BACKENDS.get(op, [])}):
            asked = name
    return asked


@lru_cache(maxsize=4096)
def _choose(problem: Problem, backend: str) -> Callable[..., Any]:
    choices = BACKENDS.get(problem.op, [])
    reasons = []
    for choice in choices:
        if backend not in ("auto", choice.name):
            continue
        against = choice.why_not(problem)
        if backend == "auto":
            against = against + choice.rather_not(problem)
        if not against:
            if reasons:
                _say_once(f"{_title(problem)}: {choice.name} runs; " + "; ".join(reasons))
            return _load(choice.run)
        reasons += [f"{choice.name}: {reason}" for reason in against]
    detail = "; ".join(reasons) or f"backends are {[choice.name for choice in choices]}"
    raise KernelUnsupported(f"no backend {backend!r} for {_title(problem)}: {detail}")


def _load(run: Callable[..., Any] | str) -> Callable[..., Any]:
    if not isinstance(run, str):
        return run
    module, _, name = run.partition(":")
    return getattr(importlib.import_module(f".{module}", __package__), name)


@lru_cache(maxsize=256)
def _say_once(text: str) -> None:
    log.info(text)


def _title(problem: Problem) -> str:
    return f"{problem.op} {problem.kind} on {problem.device} in {problem.dtype}".replace("  ", " ")


def explain(problem: Problem) -> str:
    """Which backend runs `problem`, then one line for each, in order: whether it can run it, or why it can't or should not."""
    asked = _named_for(problem.op, os.environ.get(VARIABLE, ""))
    wish = f", {VARIABLE} asks for {asked}" if asked != "auto" else ""
    lines, chosen = [], "none"
    for choice in BACKENDS.get(problem.op, []):
        against, slower = choice.why_not(problem), choice.rather_not(problem)
        willing = not against and (asked == choice.name or (asked == "auto" and not slower))
        if willing and chosen == "none":
            chosen = choice.name
        lines.append(f"  {choice.name}: {'; '.join(against or slower) or 'can run it'}")
    return "\n".join([f"{_title(problem)}, {problem.rows} x {problem.width}{wish}: {chosen} runs", *lines])
