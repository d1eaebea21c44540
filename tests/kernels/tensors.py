"""Tensors, gradients and comparisons for the tests of kernels."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALVES = [("reference", torch.bfloat16), ("reference", torch.float16), ("triton", torch.float16)]
if DEVICE == "cuda":  # Triton's interpreter cuts bfloat16 off instead of rounding
    HALVES += [("triton", torch.bfloat16)]


def draw(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, device=DEVICE)


def gradients(outputs, inputs):
    """Gradients of a scalar that weighs every element of the outputs differently; None for inputs that want none."""
    loss = sum((y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)).sum() for y in outputs)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(loss, wanted) if wanted else ())
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]


def compare(found, expected):
    for got, want in zip(found, expected, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want)


def freeze(tensors, trained):
    """Copies of the tensors (None stays None) that require a gradient where `trained` says so."""
    return [None if t is None else t.clone().requires_grad_(flag) for t, flag in zip(tensors, trained, strict=True)]


def assert_close_enough(found, same_dtype, exact):
    """The numerics rule: an error against a wider reference at most twice that of PyTorch in the same dtype."""
    error, allowed = (found.double() - exact).norm(), 2 * (same_dtype.double() - exact).norm()
    assert error <= allowed + 1e-6 * exact.norm(), f"error {error:.3g}, allowed {allowed:.3g}"
