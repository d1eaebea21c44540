"""Optimizer-side helpers and the training loop that the command line runs."""

from ..layers.clip import clip_grad_norm_
from .sampler import DataSampler
from .verify import VerifyReport, verify

__all__ = ["DataSampler", "VerifyReport", "clip_grad_norm_", "verify"]
