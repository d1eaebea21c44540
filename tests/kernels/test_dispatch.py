"""The first willing backend runs; a named one runs or says why not."""

import pytest
import torch

from autotp import KernelUnsupported
from autotp.kernels import dispatch, reference
from autotp.kernels.dispatch import Backend, Problem, explain, select


def test_the_first_willing_backend_is_taken(monkeypatch):
    picky = Backend("picky", lambda: "picky", lambda p: [] if p.dtype is torch.bfloat16 else ["wants bfloat16"])
    monkeypatch.setitem(dispatch.BACKENDS, "linear", [picky, *dispatch.BACKENDS["linear"]])
    assert select(Problem("linear")) is reference.linear
    assert select(Problem("linear", dtype=torch.bfloat16))() == "picky"
    with pytest.raises(KernelUnsupported, match="wants bfloat16"):
        select(Problem("linear"), "picky")
    text = explain(Problem("linear"))
    assert "picky: wants bfloat16" in text and "reference: can run it" in text


def test_an_unknown_operation_or_backend_is_refused():
    for problem, backend in ((Problem("convolve"), "auto"), (Problem("linear"), "cuda")):
        with pytest.raises(KernelUnsupported):
            select(problem, backend)


def test_the_references_mean_what_they_say():
    x, weight, bias = torch.randn(2, 3, 5), torch.randn(4, 5), torch.randn(4)
    torch.testing.assert_close(reference.linear(x, weight, bias), x @ weight.t() + bias)
    for b in (bias, None):
        expected = x @ weight.t() + (0 if b is None else b)
        torch.testing.assert_close(reference.linear_transposed(x, weight.t().contiguous(), b), expected)
