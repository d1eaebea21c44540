"""`autotp plan | verify | train`: what a plan would do to a model, whether it computes the same, and training with it."""

from .main import main

__all__ = ["main"]
