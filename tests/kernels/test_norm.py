"""Norms of every backend against plain PyTorch: values, every gradient, every combination of frozen parts, any strides."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from autotp import KernelUnsupported
from autotp.kernels.norm import KINDS, add_norm, norm, norm_backward, norm_forward

from .tensors import DEVICE, HALVES, assert_close_enough, compare, draw, freeze, gradients

EPS = 1e-2
# The torch backend has layernorm on the CPU; the other backends have all kinds, and Triton computes in float32.
CASES = [("reference", torch.float64), ("reference", torch.float32), ("torch", torch.float64), ("triton", torch.float32)]
EVERY = [(*case, kind) for case in CASES for kind in (KINDS if case[0] != "torch" else ("layernorm",))]


def plain(x, weight, bias, kind):
    """The norm by PyTorch's own operations, differentiable."""
    width = x.shape[-1:]
    if kind == "layernorm":
        return F.layer_norm(x, width, weight, bias, EPS)
    scale = torch.ones(width, dtype=x.dtype, device=x.device) if weight is None else weight
    y = F.rms_norm(x, width, scale + 1 if kind == "rms1p" and weight is not None else scale, EPS)
    return y if bias is None else y + bias


@pytest.mark.parametrize("backend, dtype, kind", EVERY)
@pytest.mark.parametrize("has_weight, has_bias", [(True, True), (True, False), (False, False)])
def test_every_combination_of_frozen_parts(use, backend, dtype, kind, has_weight, has_bias):
    use(backend)
    torch.manual_seed(0)
    x, weight, bias = draw(3, 5, 37, dtype=dtype), draw(37, dtype=dtype), draw(37, dtype=dtype)
    weight, bias = weight if has_weight else None, bias if has_bias else None
    for trained in product((True, False), repeat=3):
        inputs = freeze((x, weight, bias), trained)
        y, expected = norm(*inputs, EPS, kind), plain(*inputs, kind)
        torch.testing.assert_close(y, expected)
        assert y.requires_grad == expected.requires_grad
        if y.requires_grad:
            compare(gradients([y], inputs), gradients([expected], inputs))


@pytest.mark.parametrize("backend, dtype, kind", EVERY)
def test_add_norm_and_every_combination_of_frozen_parts(use, backend, dtype, kind):
    use(backend)
    torch.manual_seed(0)
    tensors = [draw(2, 3, 21, dtype=dtype), draw(2, 3, 21, dtype=dtype), draw(21, dtype=dtype), draw(21, dtype=dtype)]
    for trained in product((True, False), repeat=4):
        inputs = freeze(tensors, trained)
        y, total = add_norm(*inputs, EPS, kind)
        outputs = [plain(inputs[0] + inputs[1], *inputs[2:], kind), inputs[0] + inputs[1]]
        compare([y, total], outputs)
        if any(trained):
            compare(gradients([y, total], inputs), gradients(outputs, inputs))


@pytest.mark.parametrize("backend, dtype, kind", EVERY)
def test_add_norm_where_one_output_is_not_used(use, backend, dtype, kind):
    use(backend)
    x, residual, weight = (draw(*shape, dtype=dtype).requires_grad_() for shape in ((4, 8), (4, 8), (8,)))
    y, _ = add_norm(x, residual, weight, None, EPS, kind)
    compare(gradients([y], [x, residual, weight]), gradients([plain(x + residual, weight, None, kind)], [x, residual, weight]))
    _, total = add_norm(x, residual, weight, None, EPS, kind)
    compare(torch.autograd.grad((total * 3).sum(), [x, residual]), [torch.full_like(x, 3)] * 2)


STRIDES = {
    "transposed": lambda x: x.transpose(0, 1),
    "column slice": lambda x: x[..., 3:9],
    "heads in a slice": lambda x: x[..., 2:14].unflatten(-1, (3, 4)),
    "heads in front": lambda x: x[..., 2:14].unflatten(-1, (3, 4)).transpose(1, 2),
    "every second column": lambda x: x[..., ::2],
    "expanded rows": lambda x: x[:1].expand(4, -1, -1),
    "expanded columns": lambda x: x[..., :1].expand(-1, -1, 6),
    "one row": lambda x: x[:1, :1],
    "one column": lambda x: x[..., 2:3],
    "one dimension": lambda x: x[1, 2],
    "no rows": lambda x: x[:0],
    "no columns": lambda x: x[..., :0],
    "wide enough for one row a program": lambda x: x.flatten().repeat(4).view(1, -1),
}


@pytest.mark.parametrize("name", STRIDES)
@pytest.mark.parametrize("backend, dtype", CASES)
def test_any_strides_and_sizes(use, backend, dtype, name):
    """x, the residual, and what comes into backward."""
    empty = name in ("no rows", "no columns")
    use("reference" if empty else backend)
    torch.manual_seed(0)
    for kind in KINDS if backend != "torch" else ("layernorm",):
        whole = [draw(4, 5, 16, dtype=dtype).requires_grad_() for _ in range(4)]
        x, residual, grad_y, grad_total = (STRIDES[name](t) for t in whole)
        weight = draw(x.shape[-1], dtype=dtype).requires_grad_()
        outputs = add_norm(x, residual, weight, None, EPS, kind)
        expected = (plain(x + residual, weight, None, kind) if x.numel() else x + residual, x + residual)
        compare(outputs, expected)
        inputs = [*whole[:2], weight] if x.numel() else whole[:2]
        incoming = [grad_y.detach(), grad_total.detach()]
        compare(*(torch.autograd.grad(out, inputs, incoming) for out in (outputs, expected)))


@pytest.mark.parametrize("backend, dtype", HALVES)
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_rounded_once(use, backend, dtype, kind):
    """Errors against float64 at most twice PyTorch's in the same dtype; parameters in float32 or in the same dtype."""
    use(backend)
    torch.manual_seed(0)
    for parameter_dtype in (dtype, torch.float32):
        x, residual = draw(9, 70, dtype=dtype), draw(9, 70, dtype=dtype)
        weight, bias = draw(70, dtype=parameter_dtype), draw(70, dtype=parameter_dtype)

        def run(compute, *tensors):
            inputs = [t.detach().requires_grad_() for t in tensors]
            outputs = compute(*inputs)
            return [*outputs, *gradients(outputs, inputs)]

        def by_torch(x, residual, weight, bias):
            total = x + residual
            return plain(total, weight, bias, kind), total

        ours = run(lambda *t: add_norm(*t, EPS, kind), x, residual, weight, bias)
        same = run(by_torch, x, residual, weight.to(dtype), bias.to(dtype))
        total = (x + residual).double()  # rounded to the dtype in all of them
        exact = run(lambda t, r, w, b: by_torch(t, r, w, b), total, torch.zeros_like(total), weight.double(), bias.double())
        for mine, theirs, true in zip(ours, same, exact, strict=True):
            assert mine.dtype == (theirs.dtype if mine.dim() > 1 else parameter_dtype)
            assert_close_enough(mine, theirs, true)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_incoming_gradients_are_not_written_to(use, backend):
    """Autograd hands one storage to both sides of `y + total`, and an expanded one to `.sum()`."""
    use(backend)
    x, residual, weight = (draw(*shape, dtype=torch.float32).requires_grad_() for shape in ((3, 8), (3, 8), (8,)))
    y, total = add_norm(x, residual, weight, None, EPS, "rms")
    incoming = draw(3, 8, dtype=torch.float32)
    kept = incoming.clone()
    found = torch.autograd.grad(y + total, [x, residual, weight], incoming, retain_graph=True)
    expected = plain(x + residual, weight, None, "rms") + x + residual
    compare(found, torch.autograd.grad(expected, [x, residual, weight], kept, retain_graph=True))
    torch.testing.assert_close(incoming, kept, rtol=0, atol=0)
    compare(torch.autograd.grad((y + total).sum(), [x, residual]), torch.autograd.grad(expected.sum(), [x, residual]))


@pytest.mark.parametrize("backend, dtype, kind", EVERY)
def test_forward_and_backward_by_hand(use, backend, dtype, kind):
    use(backend)
    x, weight, bias, dy, more = (draw(*shape, dtype=dtype) for shape in ((2, 3, 20), (20,), (20,), (2, 3, 20), (2, 3, 20)))
    y, rstd, mean = norm_forward(x, weight, bias, EPS, kind)
    inputs = [t.clone().requires_grad_() for t in (x, weight, bias)]
    expected = plain(*inputs, kind)
    torch.testing.assert_close(y, expected)
    assert rstd.shape == (6,) and rstd.dtype == dtype
    if kind == "layernorm":
        torch.testing.assert_close(mean, x.view(6, 20).mean(-1))
    else:
        assert mean is None
    true = torch.autograd.grad(expected, inputs, dy)
    for wanted in product((True, False), repeat=3):
        for residual_grad in (None, more):
            found = norm_backward(dy, x, weight, rstd, mean, kind, residual_grad, wanted)
            dx = true[0] if residual_grad is None else true[0] + more
            compare(found, [t if flag else None for t, flag in zip((dx, *true[1:]), wanted, strict=True)])


@pytest.mark.parametrize("kind", KINDS)
def test_in_compile_plain_torch_runs_without_a_break(monkeypatch, kind):
    monkeypatch.setenv("AUTOTP_BACKEND", "triton")
    x, residual, weight = (draw(*shape, dtype=torch.float32).requires_grad_() for shape in ((3, 8), (3, 8), (8,)))

    def step(x, residual, weight):
        y, total = add_norm(x, residual, weight, None, EPS, kind)
        return norm(y, weight, None, EPS, kind) + total

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    compare([compiled(x, residual, weight)], [step(x, residual, weight)])
    inputs = [x, residual, weight]
    compare(gradients([compiled(*inputs)], inputs), gradients([step(*inputs)], inputs))


def test_autocast_changes_nothing():
    x, weight, bias = draw(3, 8, dtype=torch.float32), draw(8, dtype=torch.float32), draw(8, dtype=torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        for kind in KINDS:
            compare([norm(x, weight, bias, EPS, kind)], [plain(x, weight, bias, kind)])


def test_what_cannot_be_is_refused():
    x, weight = draw(3, 8), draw(7)
    with pytest.raises(KernelUnsupported, match="'batch' is none of rms"):
        norm(x, None, None, EPS, "batch")
    with pytest.raises(KernelUnsupported, match=r"the weight is \(7,\), not \[8\]"):
        norm(x, weight, None, EPS, "rms")
    with pytest.raises(KernelUnsupported, match=r"residual \(1, 8\)"):
        add_norm(x, x[:1], None, None, EPS, "rms")
    y = norm(x.requires_grad_(), None, None, EPS, "rms")
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
