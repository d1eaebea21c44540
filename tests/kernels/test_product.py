"""A linear that also returns its input: the GEMM adds the residual's gradient where that is safe; it is right elsewhere too."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autotp
from autotp.kernels import product
from autotp.kernels.ownership import Ownership, count_references
from autotp.kernels.product import ProductSpec, linear_with_residual, multiply


def made(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Into:
    """The memory that dgrads inside the `with` added to; None for those that took new memory."""

    def __enter__(self):
        self.seen, self.real = [], product.dgrad

        def dgrad(dy, w, into=None):
            self.seen.append(None if into is None else into.data_ptr())
            return self.real(dy, w, into)

        product.dgrad = dgrad
        return self

    def __exit__(self, *args):
        product.dgrad = self.real


def shares_earlier(y, x_res, other):
    return ((x_res + other) * 2).square().sum() + y.square().sum()


LOSSES = {
    "its own": (lambda y, r, o: (r * 3).sum() + y.square().sum(), True),
    "summed from two": (lambda y, r, o: (r * 3).square().sum() + (r * 2).sum() + y.square().sum(), True),
    "one gradient for both": (lambda y, r, o: ((y + r) * 3).square().sum(), False),
    "one gradient for it and an earlier tensor": (shares_earlier, False),
    "expanded": (lambda y, r, o: r.sum() + y.sum(), False),
    "transposed": (lambda y, r, o: (r.transpose(0, 1).contiguous() * 3).square().sum() + y.sum(), False),
    "the product unused": (lambda y, r, o: (r * 3).square().sum(), None),
    "the residual unused": (lambda y, r, o: (y * 3).square().sum(), False),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("case", list(LOSSES))
def test_gradients_and_where_they_are_added(case, bias):
    loss, in_place = LOSSES[case]
    w, b = made(0, 6, 6), made(1, 6) if bias else None
    grads = []
    for mine in (True, False):
        x, other = made(2, 4, 5, 6).requires_grad_(), made(3, 4, 5, 6).requires_grad_()
        params = [w.clone().requires_grad_(), *([b.clone().requires_grad_()] if bias else [])]
        entered, aside = x * 1, other * 1  # the other is older: it gets what it shares after the linear has
        with Into() as seen:
            y, x_res = linear_with_residual(entered, *params) if mine else (F.linear(entered, *params), entered)
            assert torch.equal(x_res, entered) and torch.equal(y, F.linear(entered, *params))
            loss(y, x_res, aside).backward()
        if mine:
            measured = len(seen.seen) - (in_place is not None)
            assert measured in (0, 2)  # what an own gradient looks like is measured once
            assert in_place is None or (seen.seen[-1] is not None) == in_place
        grads.append([None if t.grad is None else t.grad for t in (x, other, *params)])
    for got, expected in zip(*grads, strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            torch.testing.assert_close(got, expected)


def test_gradients_that_someone_keeps_are_not_written_to():
    w, kept = made(0, 6, 6), []
    x = made(1, 3, 6).requires_grad_()
    y, x_res = linear_with_residual(x * 1, w)
    x_res.register_hook(kept.append)
    ((x_res * 3).sum() + y.sum()).backward()
    assert torch.equal(kept[0], torch.full((3, 6), 3.0, dtype=torch.float64))
    y, x_res = linear_with_residual(x * 1, w)
    given = made(2, 3, 6)
    before = given.clone()
    torch.autograd.backward([y, x_res], [torch.ones_like(y), given])
    assert torch.equal(given, before)
    y, x_res = linear_with_residual(x * 1, w)
    x_res.retain_grad()
    ((x_res * 3).sum() + y.sum()).backward()
    assert torch.equal(x_res.grad, torch.full((3, 6), 3.0, dtype=torch.float64))
    whole = made(3, 6, 6)
    y, x_res = linear_with_residual(x * 1, w)
    stacked = torch.cat([x_res, x * 2])  # a slice of the gradient of both
    (stacked * whole).sum().backward()


@pytest.mark.parametrize("frozen", [(True, False), (False, True), (True, True)])
def test_each_gradient_alone(frozen):
    w, b = (made(i, *shape).requires_grad_(not f) for i, (shape, f) in enumerate(zip([(6, 6), (6,)], frozen, strict=True)))
    x = made(2, 3, 6)
    y, x_res = linear_with_residual(x, w, b)
    assert not x_res.requires_grad and y.requires_grad == (not all(frozen))
    if y.requires_grad:
        y.sum().backward()
        assert [w.grad is None, b.grad is None] == list(frozen)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_even_when_counts_are_measured_inside(monkeypatch, reentrant):
    monkeypatch.setattr(product, "_ownership", Ownership())
    w = made(0, 6, 6).requires_grad_()
    x = made(1, 3, 6).requires_grad_()

    def block(x):
        y, x_res = linear_with_residual(x * 1, w)
        return torch.tanh(y) + x_res * 2

    block(x).square().sum().backward()
    expected, x.grad, w.grad = (x.grad, w.grad), None, None
    monkeypatch.setattr(product, "_ownership", Ownership())
    checkpoint(block, x, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close((x.grad, w.grad), expected)


def test_autocast_compile_and_main_grad():
    w, x = made(0, 6, 6, dtype=torch.float32).requires_grad_(), made(1, 3, 6, dtype=torch.float32)
    grads = []
    for function in (linear_with_residual, lambda x, w: (F.linear(x, w), x)):
        leaf = x.clone().requires_grad_()
        w.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, x_res = function(leaf * 1, w)
            assert y.dtype is torch.bfloat16 and x_res.dtype is torch.float32
        (y.float().square().sum() + (x_res * 3).square().sum()).backward()
        grads.append((leaf.grad, w.grad))
    torch.testing.assert_close(*grads, rtol=2e-2, atol=2e-2)
    leaf = x.clone().requires_grad_()
    compiled = torch.compile(linear_with_residual, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(leaf, w), (F.linear(leaf, w), leaf))
    weight = nn.Parameter(w.detach().clone())
    with pytest.raises(autotp.AutoTPError, match=r"down\.weight is trained"):
        linear_with_residual(leaf, weight, accumulate_into_main_grad=True, name="down")[0].sum().backward()
    weight.main_grad = torch.ones(6, 6)
    for _ in range(2):
        y, x_res = linear_with_residual(leaf * 1, weight, accumulate_into_main_grad=True)
        (y.sum() + x_res.sum()).backward()
    expected = 1 + 2 * x.sum(0).expand(6, 6)
    torch.testing.assert_close(weight.main_grad, expected)
    assert weight.grad_added_to_main_grad and not weight.grad.any()


def test_several_weights_and_a_rank_that_leaves_the_residual_to_another():
    weights = [made(i, n, 6).requires_grad_() for i, n in enumerate((4, 8))]
    for adds in (True, False):
        x = made(3, 5, 6).requires_grad_()
        spec = ProductSpec(
            sum_copies=(None,) * 4, main_grads=(None,) * 4, residual=True, adds_residual=adds, sum_input=lambda dx: dx * 2
        )
        with Into() as seen:
            a, b, x_res = multiply(spec, x * 1, weights, [None, None])
            (a.sum() + b.sum() + (x_res * 3).sum()).backward()
        expected = 2 * (sum(w.detach().sum(0) for w in weights) + (3 if adds else 0))
        torch.testing.assert_close(x.grad, expected.expand(5, 6))
        assert [at is not None for at in seen.seen[-2:]] == [adds, True]  # chained, from the residual's gradient on


def test_where_sharing_can_not_be_seen_nothing_is_written_to(monkeypatch):
    monkeypatch.setattr(product, "_ownership", Ownership())
    monkeypatch.setattr(product, "count_references", lambda grad: (1, 1, 1))
    x = made(1, 3, 6).requires_grad_()
    with Into() as seen:
        y, x_res = linear_with_residual(x * 1, made(0, 6, 6))
        ((x_res * 3).sum() + y.sum()).backward()
    assert seen.seen[-1] is None
    assert count_references(x)[0] > 0
