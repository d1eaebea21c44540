"""Gated activations of every backend against plain PyTorch: values, gradients, frozen parts, strides, where gradients lie."""

from itertools import product

import pytest
import torch
from transformers.activations import ACT2FN

from autotp import KernelUnsupported
from autotp.kernels.gated import SPELLINGS, gated, gated_backward, gated_forward
from autotp.kernels.reference import ACTIVATIONS

from .tensors import DEVICE, HALVES, assert_close_enough, compare, draw, freeze, gradients

CASES = [("reference", torch.float64), ("reference", torch.float32), ("triton", torch.float32)]
THEIR_NAMES = {"gelu_tanh": "gelu_pytorch_tanh", "gelu_quick": "quick_gelu", "identity": "linear"}


def plain(gate, up, activation):
    return ACTIVATIONS[activation](gate) * up


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy, which interprets Triton's exp2
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("backend, dtype", CASES)
def test_every_activation_and_combination_of_frozen_parts(use, backend, dtype, activation):
    use(backend)
    torch.manual_seed(0)
    special = torch.tensor([-40.0, -6.1, -3.5, -0.1, -1e-4, 1e-6, 0.2, 3.5, 6.5, 40.0], dtype=dtype, device=DEVICE)
    tensors = torch.cat([draw(5, 27, dtype=dtype) * 3, special.expand(5, -1)], -1), draw(5, 37, dtype=dtype)
    for trained in product((True, False), repeat=2):
        inputs = freeze(tensors, trained)
        y, expected = gated(*inputs, activation), plain(*inputs, activation)
        torch.testing.assert_close(y, expected)
        if any(trained):
            compare(gradients([y], inputs), gradients([expected], inputs))


def test_names_mean_what_transformers_means():
    x = torch.linspace(-9, 9, 101, dtype=torch.float64)
    for name in {*ACTIVATIONS, *SPELLINGS} - set(THEIR_NAMES):
        torch.testing.assert_close(gated_forward(x, torch.ones_like(x), name), ACT2FN[name](x), rtol=1e-6, atol=1e-6)
    for name, theirs in THEIR_NAMES.items():
        torch.testing.assert_close(gated_forward(x, torch.ones_like(x), name), ACT2FN[theirs](x))


@pytest.mark.parametrize("backend, dtype", CASES)
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True), (False, False)])
def test_both_gradients_lie_side_by_side(use, backend, dtype, wanted):
    use(backend)
    dy, gate, up = (draw(2, 3, 11, dtype=dtype) for _ in range(3))
    found = gated_backward(dy, gate, up, "silu", wanted)
    inputs = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    true = torch.autograd.grad(plain(*inputs, "silu"), inputs, dy)
    compare(found, [t if flag else None for t, flag in zip(true, wanted, strict=True)])
    if all(wanted):
        dgate, dup = found
        assert dgate.untyped_storage().data_ptr() == dup.untyped_storage().data_ptr()
        assert dgate.stride() == dup.stride() == (66, 22, 1) and dup.storage_offset() == dgate.storage_offset() + 11 == 11
    elif any(wanted):
        assert (found[0] if wanted[0] else found[1]).is_contiguous()


STRIDES = {
    "slices of one buffer": lambda x: (x[..., :5], x[..., 5:10]),
    "slices, up first": lambda x: (x[..., 6:], x[..., 1:7]),
    "transposed": lambda x: (x.transpose(0, 1), x.transpose(0, 1)),
    "expanded rows": lambda x: (x[:1].expand(4, -1, -1), x),
    "expanded columns": lambda x: (x[..., :1].expand(-1, -1, 12), x),
    "every second column": lambda x: (x[..., ::2], x[..., 1::2]),
    "one dimension": lambda x: (x[0, 0], x[1, 1]),
    "one column": lambda x: (x[..., 3:4], x[..., 4:5]),
    "no rows": lambda x: (x[:0], x[:0]),
    "no columns": lambda x: (x[..., :0], x[..., 4:4]),
    "more columns than a program's": lambda x: (x.flatten().repeat(6).view(1, -1), x.flatten().repeat(6).view(1, -1)),
}


@pytest.mark.parametrize("name", STRIDES)
@pytest.mark.parametrize("backend, dtype", CASES)
def test_any_strides_and_sizes(use, backend, dtype, name):
    use("reference" if name in ("no rows", "no columns") else backend)
    torch.manual_seed(0)
    x, incoming = draw(4, 5, 12, dtype=dtype).requires_grad_(), draw(4, 5, 12, dtype=dtype)
    gate, up = STRIDES[name](x)
    found, expected = gated(gate, up, "gelu_tanh"), plain(gate, up, "gelu_tanh")
    torch.testing.assert_close(found, expected)
    dy = STRIDES[name](incoming)[0]
    compare(*(torch.autograd.grad(y, x, dy, retain_graph=True) for y in (found, expected)))
    compare(*(torch.autograd.grad(y.sum(), x) for y in (found, expected)))


@pytest.mark.parametrize("backend, dtype", HALVES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_half_precision_is_rounded_once(use, backend, dtype, activation):
    use(backend)
    torch.manual_seed(0)
    tensors = [draw(9, 70, dtype=dtype) * 2, draw(9, 70, dtype=dtype)]

    def run(compute, *tensors):
        inputs = [t.detach().requires_grad_() for t in tensors]
        y = compute(*inputs, activation)
        return [y, *gradients([y], inputs)]

    ours, same = run(gated, *tensors), run(plain, *tensors)
    for mine, theirs, true in zip(ours, same, run(plain, *(t.double() for t in tensors)), strict=True):
        assert mine.dtype == dtype
        assert_close_enough(mine, theirs, true)


def test_in_compile_plain_torch_runs_without_a_break(monkeypatch):
    monkeypatch.setenv("AUTOTP_BACKEND", "triton")
    inputs = [draw(3, 8, dtype=torch.float32).requires_grad_() for _ in range(2)]
    compiled = torch.compile(lambda gate, up: gated(gate, up, "swish"), backend="aot_eager", fullgraph=True)
    compare([compiled(*inputs)], [gated(*inputs, "swish")])
    compare(gradients([compiled(*inputs)], inputs), gradients([gated(*inputs, "silu")], inputs))


def test_what_cannot_be_is_refused():
    x = draw(3, 8)
    with pytest.raises(KernelUnsupported, match="'xielu' is none of gelu, "):
        gated(x, x, "xielu")
    with pytest.raises(KernelUnsupported, match=r"up \(3, 1\)"):
        gated(x, x[:, :1], "silu")
    with pytest.raises(KernelUnsupported, match=r"torch.float32; make them alike"):
        gated_backward(x, x, x.float(), "silu")
