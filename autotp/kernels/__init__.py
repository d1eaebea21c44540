"""Operations on tensors, each with a plain-torch meaning and the backends that compute it faster.

A new operation needs its meaning in reference.py, its backends in dispatch.py's one table, and a file of its own with the
functions that layers call (and their autograd). `explain` says which backend runs a problem, and why the others don't.
"""

from .dispatch import Problem, explain

__all__ = ["Problem", "explain"]
