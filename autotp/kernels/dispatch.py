"""Which backend runs an operation: an ordered list, each of which says why it can't, and the first that can is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import KernelUnsupported
from . import reference


@dataclass(frozen=True)
class Problem:
    """What is to be computed: operation name, device type and dtype of its inputs."""

    op: str
    device: str = "cpu"
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Backend:
    """One implementation: `why_not(problem)` lists the reasons against it, empty if it can run the problem."""

    name: str
    run: Callable[..., Any]
    why_not: Callable[[Problem], list[str]]


def _never(problem: Problem) -> list[str]:
    return []


BACKENDS: dict[str, list[Backend]] = {
    "linear": [Backend("reference", reference.linear, _never)],
    "linear_transposed": [Backend("reference", reference.linear_transposed, _never)],
}


def select(problem: Problem, backend: str = "auto") -> Callable[..., Any]:
    """The function that computes `problem`: the first willing backend, or the one named.

    Raises:
        KernelUnsupported: the operation or the named backend is unknown, or it can't run the problem, with its reasons.
    """
    choices = BACKENDS.get(problem.op, [])
    reasons = []
    for choice in choices:
        if backend not in ("auto", choice.name):
            continue
        against = choice.why_not(problem)
        if not against:
            return choice.run
        reasons += [f"{choice.name}: {reason}" for reason in against]
    names = [choice.name for choice in choices]
    detail = "; ".join(reasons) or f"backends are {names}"
    raise KernelUnsupported(f"no backend {backend!r} for {problem.op} on {problem.device} in {problem.dtype}: {detail}")


def explain(problem: Problem) -> str:
    """One line for each backend of the operation, in order: whether it can run `problem`, or why not."""
    lines = [f"{problem.op} on {problem.device} in {problem.dtype}:"]
    for choice in BACKENDS.get(problem.op, []):
        lines.append(f"  {choice.name}: {'; '.join(choice.why_not(problem)) or 'can run it'}")
    return "\n".join(lines)
