"""The random numbers of a rank: as plain values, and set again, at the same sizes or others."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

OTHER = 0x9E3779B97F4A7C15  # spreads the seeds of data ranks that were not there before


def random_state() -> dict[str, Any]:
    """The state of every generator that a model may draw from, in plain values."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    state = {"torch": torch.get_rng_state(), "python": (version, torch.tensor(numbers), gauss)}
    state["numpy"] = (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest)
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """The inverse of `random_state`."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def choose_random_state(saved: tuple[int, int], now: tuple[int, int], tp_rank: int, dp_rank: int) -> tuple[int, int]:
    """Which saved rank's numbers a rank goes on with, and how often they are to be jumped.

    At the same sizes its own. At another TP size those of TP rank 0 of its data rank: all ranks of a model draw alike, so
    what is drawn outside shards goes on as it would have. Data ranks that were not there before take an older one's numbers
    and jump off, so that no two draw the same.

    Args:
        saved, now: `(tp, dp)` sizes.

    Returns:
        the number of the saved rank, and 0 or the number of the jump.
    """
    tp, dp = saved
    own = tp_rank if tp == now[0] else 0
    return (dp_rank % dp) * tp + own, dp_rank // dp


def jump_random_state(number: int) -> None:
    """Make this rank's generators those of another data rank; 0 leaves them as they are."""
    if number:
        seed = (torch.initial_seed() ^ int(torch.randint(1 << 62, ()))) + number * OTHER & (1 << 63) - 1
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
