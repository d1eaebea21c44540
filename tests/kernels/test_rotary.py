"""Rotary embeddings of every backend against transformers' own: values and gradients, frozen parts, strides, partial rotation."""

from itertools import product

import pytest
import torch
from transformers.models.cohere.modeling_cohere import rotate_half as swap_neighbours
from transformers.models.llama.modeling_llama import rotate_half as swap_halves

from autotp import KernelUnsupported
from autotp.kernels.rotary import rotary

from .tensors import HALVES, assert_close_enough, compare, draw, freeze, gradients

CASES = [("reference", torch.float64), ("reference", torch.float32), ("triton", torch.float32)]
# batch, tokens, query heads, kv heads, D, R
SHAPES = [(2, 3, 4, 2, 8, 8), (1, 5, 3, 1, 10, 6), (3, 1, 7, 7, 12, 4), (1, 2, 33, 5, 160, 160), (2, 2, 1, 1, 2, 2)]


def plain(q, k, cos, sin, interleaved=False):
    """transformers' formula on the first R columns."""
    width = cos.shape[-1]
    swap = swap_neighbours if interleaved else swap_halves
    turned = (x[..., :width] * cos.unsqueeze(1) + swap(x[..., :width]) * sin.unsqueeze(1) for x in (q, k))
    return tuple(torch.cat([t, x[..., width:]], -1) for t, x in zip(turned, (q, k), strict=True))


def make(shape, dtype, batch=None):
    """q, k, cos, sin; every column has angles of its own, unlike a model's, whose partners share them."""
    b, s, h, hk, d, r = shape
    angles = draw(b if batch is None else batch, s, r, dtype=dtype)
    return draw(b, h, s, d, dtype=dtype), draw(b, hk, s, d, dtype=dtype), angles.cos(), (angles * 2).sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend, dtype", CASES)
def test_values_gradients_and_memory_order(use, backend, dtype, shape, interleaved):
    use(backend)
    torch.manual_seed(0)
    for batch in {1, shape[0]}:
        q, k, cos, sin = make(shape, dtype, batch)
        for trained in product((True, False), repeat=2):
            inputs = freeze((q, k), trained)
            found = rotary(*inputs, cos, sin, interleaved)
            expected = plain(*inputs, cos, sin, interleaved)
            compare(found, expected)
            assert all(x.transpose(1, 2).is_contiguous() for x in found)
            if any(trained):
                grads = gradients(found, inputs)
                compare(grads, gradients(expected, inputs))
                assert all(x is None or x.transpose(1, 2).is_contiguous() for x in grads)


def heads(x, count, width):
    return x.unflatten(-1, (count, width)).transpose(1, 2)


@pytest.mark.parametrize("backend, dtype", CASES)
def test_any_strides(use, backend, dtype):
    """Slices of one projection, one half of the results unused, expanded incoming gradients, odd angles."""
    use(backend)
    torch.manual_seed(0)
    qkv = draw(2, 3, 6 * 8, dtype=dtype).requires_grad_()
    q, k = heads(qkv[..., :32], 4, 8), heads(qkv[..., 32:40], 1, 8)
    angles = draw(2, 3, 8, dtype=dtype)
    for cos, sin in (
        (angles.cos(), angles.sin()),
        (angles[:1].cos().expand(2, -1, -1), angles[..., :1].sin().expand(-1, -1, 8)),
        (angles.cos()[..., ::2], angles.sin()[..., 1:5]),
    ):
        found, expected = rotary(q, k, cos, sin), plain(q, k, cos, sin)
        compare(found, expected)
        for used in ([0, 1], [0], [1]):
            pair = [sum(y[i].sum() for i in used) for y in (found, expected)]
            compare(*(torch.autograd.grad(y, qkv, retain_graph=True) for y in pair))
        dq = draw(2, 4, 8, 3, dtype=dtype).transpose(2, 3)
        compare(*(torch.autograd.grad(y[0], qkv, dq) for y in (found, expected)))
    q, k, cos, sin = q[..., ::2], k[..., ::2], angles.cos()[..., :4], angles.sin()[..., :4]
    compare(rotary(q, k, cos, sin), plain(q, k, cos, sin))


@pytest.mark.parametrize("shape", [(0, 3, 2, 1, 8, 8), (2, 0, 2, 1, 8, 8), (2, 3, 2, 1, 8, 0)])
def test_empty(shape):
    q, k, cos, sin = make(shape, torch.float32)
    q.requires_grad_()
    found = rotary(q, k, cos, sin)
    compare(found, (q, k))
    compare(gradients(found, [q]), gradients((q, k), [q]))


@pytest.mark.parametrize("backend, dtype", HALVES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_half_precision_is_rounded_once(use, backend, dtype, interleaved):
    use(backend)
    torch.manual_seed(0)
    for angle_dtype in (dtype, torch.float32):
        q, k, cos, sin = make((2, 5, 4, 2, 16, 12), dtype)
        cos, sin = cos.to(angle_dtype), sin.to(angle_dtype)

        def run(compute, *tensors, interleaved=interleaved):
            inputs = [t.detach().requires_grad_() for t in tensors[:2]]
            outputs = compute(*inputs, *tensors[2:], interleaved)
            return [*outputs, *gradients(outputs, inputs)]

        ours, same = run(rotary, q, k, cos, sin), run(plain, q, k, cos.to(dtype), sin.to(dtype))
        exact = run(plain, *(t.double() for t in (q, k, cos, sin)))
        for mine, theirs, true in zip(ours, same, exact, strict=True):
            assert mine.dtype == dtype
            assert_close_enough(mine, theirs, true)


def test_angles_that_want_a_gradient_get_it():
    inputs = [t.requires_grad_() for t in make((2, 3, 4, 2, 8, 6), torch.float64)]
    compare(gradients(rotary(*inputs), inputs), gradients(plain(*inputs), inputs))


def test_in_compile_plain_torch_runs_without_a_break(monkeypatch):
    monkeypatch.setenv("AUTOTP_BACKEND", "triton")
    q, k, cos, sin = make((2, 3, 4, 2, 8, 8), torch.float32)
    inputs = freeze((q, k), (True, True))
    compiled = torch.compile(rotary, backend="aot_eager", fullgraph=True)
    compare(compiled(*inputs, cos, sin), rotary(*inputs, cos, sin))
    compare(gradients(compiled(*inputs, cos, sin), inputs), gradients(rotary(*inputs, cos, sin), inputs))


def test_what_cannot_be_is_refused():
    q, k, cos, sin = make((2, 3, 4, 2, 8, 6), torch.float32)
    for wrong in (
        (q, k[:1], cos, sin),
        (q, k.double(), cos, sin),
        (q, k, cos[:, :2], sin[:, :2]),
        (q, k, cos[..., :5], sin[..., :5]),
        (q, k, cos, sin[..., :4]),
        (q[..., :4], k[..., :4], cos, sin),
        (q, k, cos[0], sin[0]),
    ):
        with pytest.raises(KernelUnsupported, match=r"rotary: q \(2, 4, 3"):
            rotary(*wrong)
