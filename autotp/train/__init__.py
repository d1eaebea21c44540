"""Optimizer-side helpers and the training loop that the command line runs."""

from ..layers.clip import clip_grad_norm_
from .verify import VerifyReport, verify

__all__ = ["VerifyReport", "clip_grad_norm_", "verify"]
