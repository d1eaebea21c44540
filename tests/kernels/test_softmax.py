"""Sums of exponentials and cross-entropy's gradient, against float64 and against what PyTorch says of infinities."""

import pytest
import torch
import torch.nn.functional as F

from autotp.kernels.softmax import cross_entropy_backward, sum_exponentials

from .tensors import DEVICE, HALVES, assert_close_enough, draw

BACKENDS = [("reference", torch.float64), ("reference", torch.float32), ("triton", torch.float32), *HALVES]
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, which interprets Triton's inf - inf


def losses_and_gradient(x, target, grad, smoothing):
    """As one rank computes them that has all columns; target -1 where it is another's."""
    peak, sums, totals = sum_exponentials(x)
    log_sum = peak + sums.log()
    here = target >= 0
    found = x.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1).to(log_sum.dtype)
    base = peak.masked_fill(peak == -torch.inf, 0)
    losses = log_sum - (1 - smoothing) * found.masked_fill(~here, 0)
    if smoothing:
        losses = losses - smoothing * (totals / x.shape[1] + base)
    return losses, cross_entropy_backward(x, peak, sums.log(), target, grad, 1 - smoothing, smoothing / x.shape[1])


def plain(x, target, grad, smoothing):
    x = x.detach().requires_grad_()
    losses = F.cross_entropy(x, target, reduction="none", label_smoothing=smoothing)
    return losses.detach(), torch.autograd.grad(losses, x, grad.to(losses.dtype))[0]


@pytest.mark.parametrize("shape", [(5, 7), (3, 4096), (2, 9001), (4, 2)])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_losses_and_gradients(backend, dtype, smoothing, shape, monkeypatch):
    monkeypatch.setenv("AUTOTP_BACKEND", backend)
    torch.manual_seed(0)
    whole = (draw(shape[0], 3 + shape[1]) * 6).to(dtype)
    x = whole[:, 3:]  # rows that begin anywhere
    target = torch.randint(shape[1], shape[:1], device=DEVICE)
    grad = draw(shape[0], dtype=torch.float32)
    losses, dx = losses_and_gradient(x, target, grad, smoothing)
    wide = torch.promote_types(dtype, torch.float32)
    exact = plain(x.double(), target, grad, smoothing)
    same = plain(x.to(wide), target, grad, smoothing)
    assert losses.dtype == wide and dx.dtype == dtype and dx.is_contiguous()
    assert_close_enough(losses, same[0], exact[0])
    assert_close_enough(dx, same[1].to(dtype), exact[1])


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_target_of_another_rank_and_rows_that_do_not_count(backend, monkeypatch):
    monkeypatch.setenv("AUTOTP_BACKEND", backend)
    x = draw(4, 50, dtype=torch.float32)
    target, grad = torch.tensor([-1, 3, -1, 49], device=DEVICE), torch.tensor([1.0, 0.0, 2.0, 1.0], device=DEVICE)
    _, dx = losses_and_gradient(x, target, grad, 0.0)
    expected = (x.softmax(-1) - F.one_hot(target.clamp(min=0), 50) * (target >= 0).unsqueeze(-1)) * grad.unsqueeze(-1)
    torch.testing.assert_close(dx, expected)
    assert not dx[1].any()


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_infinities_and_what_is_no_number(backend, monkeypatch):
    monkeypatch.setenv("AUTOTP_BACKEND", backend)
    x = draw(6, 40, dtype=torch.float32)
    x[0, 5:30] = -torch.inf
    x[1, :] = -torch.inf
    x[2, 7] = torch.inf
    x[3, 9] = torch.nan
    x[4, :] = 1e38
    peak, sums, totals = sum_exponentials(x)
    assert peak[1] == -torch.inf and sums[1] == 0  # another rank may have columns that are not
    got = peak + sums.log()
    torch.testing.assert_close(got[[0, 4, 5]], x.logsumexp(-1)[[0, 4, 5]])
    assert got[2:4].isnan().all() or (got[2] == torch.inf and got[3].isnan())
    assert totals[0] == -torch.inf and totals[4].abs() <= 1e33
    target, grad = torch.zeros(6, dtype=torch.int64, device=DEVICE), torch.ones(6, device=DEVICE)
    dx = cross_entropy_backward(x, peak, sums.log(), target, grad, 1.0, 0.0)
    expected = plain(x, target, grad, 0.0)[1]
    for row in (0, 4, 5):
        torch.testing.assert_close(dx[row], expected[row])
    assert dx[3].isnan().all() and expected[3].isnan().all()
