"""Random numbers that a forward draws: the same in every run on a shadow, whichever thread draws; nobody else's draws move."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

SEED = 0
_LOCK = threading.Lock()  # ranks that are threads share torch's default generator
_NAMES = [
    "rand",
    "randn",
    "randint",
    "randperm",
    "rand_like",
    "randn_like",
    "randint_like",
    "normal",
    "bernoulli",
    "multinomial",
    "poisson",
    "binomial",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "feature_dropout",
    "alpha_dropout",
    "feature_alpha_dropout",
    "native_dropout",
    "rrelu",
    "rrelu_",
    "gumbel_softmax",
    "dropout_",
    "feature_dropout_",
    "alpha_dropout_",
    "feature_alpha_dropout_",
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
]
DRAWING = {getattr(holder, name) for name in _NAMES for holder in (torch, torch.Tensor, F) if hasattr(holder, name)}


class Draws:
    """One forward's stream of random numbers: what a model seeded with `SEED` would draw."""

    def __init__(self) -> None:
        self.state = torch.Generator().manual_seed(SEED).get_state()

    def run(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """`func(*args, **kwargs)`; if it draws, from this stream in place of torch's default one."""
        if func not in DRAWING:
            return func(*args, **kwargs)
        with _LOCK:
            before = torch.get_rng_state()
            torch.set_rng_state(self.state)
            try:
                return func(*args, **kwargs)
            finally:
                self.state = torch.get_rng_state()
                torch.set_rng_state(before)


@contextmanager
def keep_random() -> Iterator[None]:
    """The default generators of torch, numpy and Python are afterwards where they were: planning runs on one rank alone."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
