"""Products of a few rows: every form of the Triton kernels against plain PyTorch, and when they are taken."""

import pytest
import torch
import torch.nn.functional as F

from autotp.kernels import few_rows, reference
from autotp.kernels.decode import decoding, is_decoding
from autotp.kernels.dispatch import Problem, select
from autotp.kernels.fp8 import quantise
from autotp.kernels.reference_fp8 import dequantise

from .tensors import DEVICE, assert_close_enough, draw

SIZES = [(torch.float16, *size) for size in ((1, 7, 33), (3, 5, 64), (4, 33, 100), (5, 9, 40), (16, 16, 128))]
SIZES += [(torch.float16, *size) for size in ((1, 3, 1792), (2, 3, 1792))]  # of Llama-3-8B over 8 ranks: no power of two
SIZES += [(torch.float32, *size) for size in ((1, 9, 64), (2, 33, 100), (4, 5, 33))]  # rows, outputs, terms


def plain(x, w, b, activation):
    y = F.linear(x, w, b)
    if not activation:
        return y
    gate, up = y.chunk(2, -1)
    return reference.ACTIVATIONS[activation](gate) * up


@pytest.mark.parametrize("dtype, rows, outputs, terms", SIZES)
def test_products_gates_and_biases(use, dtype, rows, outputs, terms):
    use("linear_few=triton")
    torch.manual_seed(0)
    for activation, biased in (("", False), ("", True), ("silu", False), ("gelu_tanh", True)):
        n = outputs * (2 if activation else 1)
        x, w = draw(rows, 1, terms).to(dtype), draw(n, terms).to(dtype)
        b = draw(n).to(dtype) if biased else None
        with decoding():
            y = few_rows.linear_gated(x, w, b, activation) if activation else few_rows.linear(x, w, b)
        assert y.shape == (rows, 1, outputs) and y.dtype is dtype
        exact = plain(x.double(), w.double(), None if b is None else b.double(), activation)
        assert_close_enough(y, plain(x, w, b, activation), exact)


@pytest.mark.parametrize(
    "dtype, rows, outputs, terms", [(torch.float32, 1, 9, 64), (torch.float16, 2, 7, 130), (torch.float16, 9, 33, 300)]
)
def test_weights_of_8_bits_are_multiplied_as_what_they_stand_for(use, dtype, rows, outputs, terms):
    torch.manual_seed(0)
    for activation in ("", "silu"):
        n = outputs * (2 if activation else 1)
        x, b = draw(rows, terms).to(dtype), draw(n).to(dtype)
        stored, _ = quantise(draw(n, terms).float(), "rowwise", columns=False)
        w = dequantise(stored)
        exact = plain(x.double(), w.double(), b.double(), activation)
        for backend in ("triton", "reference"):
            use(f"linear_few={backend}")
            assert few_rows.fits(x, stored.values, b, scaled=True) and not few_rows.fits(x, stored.values, b)
            if activation:
                y = few_rows.linear_gated(x, stored.values, b, activation, stored.scale)
            else:
                y = few_rows.linear_scaled(x, stored.values, stored.scale, b)
            assert y.dtype is dtype
            assert_close_enough(y, plain(x, w.to(dtype), b, activation), exact)


def test_ids_are_looked_up_where_they_are_held(use):
    weight, ids = draw(7, 33).float(), torch.tensor([[3, 9], [10, 20], [-1, 4], [40, 11]], device=DEVICE)
    column = dict(enumerate(weight[:, 5].tolist(), 4)) | {20: 0.0, 3: 0.0, 11: 0.0}
    held = [column.get(token, torch.nan) for token in ids.flatten().tolist()]
    for backend in ("reference", "triton"):
        found = select(Problem("look_up", DEVICE, rows=8, width=33), backend)(ids, weight, 4, 30)
        assert found.shape == (4, 2, 33)
        torch.testing.assert_close(found[..., 5].flatten(), torch.tensor(held, device=DEVICE), rtol=0, atol=0, equal_nan=True)


def test_only_plain_few_rows_within_decoding_take_the_kernel(use, monkeypatch):
    use("linear_few=triton")
    chosen = []
    monkeypatch.setattr(few_rows, "select", lambda problem: chosen.append(problem) or F.linear)
    x, w = draw(2, 8).float(), draw(4, 8).float()
    outside = few_rows.linear(x, w)
    with decoding():
        assert is_decoding()
        many, strided = draw(17, 8).float(), draw(8, 2).float().t()
        grown = w.clone().requires_grad_()
        for y in (
            few_rows.linear(many, w),
            few_rows.linear(strided, w),
            few_rows.linear(x, w.t().contiguous().t()),
            few_rows.linear(x, grown),
        ):
            assert y.shape[-1] == 4
        few_rows.linear(x, grown)[0, 0].backward()
        with torch.autocast(DEVICE, torch.bfloat16):
            assert few_rows.linear(x, w).dtype is torch.bfloat16
        assert not chosen and grown.grad is not None
        torch.testing.assert_close(few_rows.linear(x, w), outside)
        with torch.no_grad():
            few_rows.linear(x, grown)
    assert [(problem.rows, problem.width) for problem in chosen] == [(2, 8)] * 2 and not is_decoding()
