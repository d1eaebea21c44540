"""`autotp plan | verify | train | generate`: what a plan would do, whether it computes the same, training, and text."""

from .main import main

__all__ = ["main"]
