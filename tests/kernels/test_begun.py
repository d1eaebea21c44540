"""What norms and gates begin of quantising their output: the operands are those of the output, bit for bit."""

import pytest
import torch

from autotp.kernels.begun import Begun, Wish
from autotp.kernels.fp8 import quantise
from autotp.kernels.gated import gated, gated_forward
from autotp.kernels.norm import KINDS, add_norm, norm

from .tensors import DEVICE

SCALINGS = ("tensorwise", "rowwise", "blockwise")
SHAPES = [(5, 144), (130, 16), (1, 40)]  # beyond a block each way
LEFT = {  # of rows, turned, row_bits, column_bits by what computes y, where rows are whole
    ("norm", "tensorwise"): (False, False, True, False),
    ("norm", "rowwise"): (True, False, False, True),
    ("norm", "blockwise"): (True, False, False, False),
    ("gated", "tensorwise"): (False, False, True, False),
    ("gated", "rowwise"): (False, False, True, True),
    ("gated", "blockwise"): (True, True, False, False),
}


def draw(*shape, seed=0, dtype=torch.float16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def counter():
    return torch.zeros((), dtype=torch.int32, device=DEVICE)


def bits(tensor):
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def check_operands(y, wish, apart):
    """The operands finished from what was begun, against those of y alone."""
    flat = y.reshape(-1, y.shape[-1])
    if DEVICE == "cpu":
        assert torch.equal(y, apart)
    else:  # a row may be added up in another order
        torch.testing.assert_close(y, apart)
    how = dict(columns=wish.turned, cut=1 if wish.cut_rows else None, share=(lambda found: found + 0) if wish.cut_rows else None)
    found = quantise(flat, wish.scaling, begun=wish.begun, bad=wish.bad, **how)
    expected = quantise(flat, wish.scaling, bad=(bad := counter()), **how)
    for got, want in zip(found, expected, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            assert torch.equal(bits(got.values), bits(want.values)) and torch.equal(bits(got.scale), bits(want.scale))
            assert got.scaling == want.scaling and got.values.is_contiguous()
            assert got.scale.shape == want.scale.shape and got.scale.t().is_contiguous() == want.scale.t().is_contiguous()
    assert wish.bad == bad


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(("turned", "cut_rows"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_norm_begins_what_quantising_its_output_gives(use, scaling, shape, turned, cut_rows, backend):
    use(backend)
    weight, bias = draw(shape[1], seed=3), draw(shape[1], seed=4)
    for kind in KINDS:
        wish, x, residual = Wish(scaling, turned, cut_rows, counter()), draw(*shape), draw(*shape, seed=1)
        shift = bias if kind == "layernorm" else None
        if kind == "rms":
            y, apart = norm(x, weight, shift, 1e-5, kind, wish), norm(x, weight, shift, 1e-5, kind)
        else:
            y, total = add_norm(x, residual, weight, shift, 1e-5, kind, wish)
            apart, expected = add_norm(x, residual, weight, shift, 1e-5, kind)
            assert torch.equal(total, expected)
        check_operands(y, wish, apart)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(("turned", "cut_rows"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_gate_begins_what_quantising_its_output_gives(use, scaling, shape, turned, cut_rows, backend):
    use(backend)
    packed = draw(shape[0], 2 * shape[1])
    halves, apart = packed.split(shape[1], 1), (draw(*shape), draw(shape[1], shape[0], seed=1).t())
    for (gate, up), activation in ((halves, "silu"), (apart, "sigmoid")):
        wish = Wish(scaling, turned, cut_rows, counter())
        y, expected = gated(gate, up, activation, wish), gated(gate, up, activation)
        check_operands(y, wish, expected)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_what_is_not_finite_is_counted_once(use, scaling, backend, value):
    use(backend)
    x, y = draw(5, 144), draw(5, 144, seed=1)
    x[3, 130] = value
    wishes = [Wish(scaling, bad=counter()) for _ in range(2)]
    found = norm(x, None, None, 1e-5, "rms", wishes[0]), gated(y, x, "silu", wishes[1])
    for made, wish in zip(found, wishes, strict=True):
        flat = made.reshape(-1, 144)
        for operand in quantise(flat, scaling, begun=wish.begun, bad=wish.bad):
            assert not operand.scale.isfinite().all()
        bad = counter()
        quantise(flat, scaling, bad=bad)
        assert wish.bad == bad > 0


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_kernels_leave_what_is_promised(use, scaling):
    use("triton")
    x, y = draw(5, 144), draw(5, 144, seed=1)
    wishes = {"norm": Wish(scaling), "gated": Wish(scaling)}
    norm(x, None, None, 1e-5, "rms", wishes["norm"]), gated(x, y, "silu", wishes["gated"])
    for name, wish in wishes.items():
        assert tuple(part is not None for part in wish.begun) == LEFT[name, scaling]


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_what_was_not_wanted_is_found_all_the_same(use, backend):
    """A reader that wants more than was begun, or less."""
    use(backend)
    x, y = draw(5, 144), draw(5, 144, seed=1)
    for scaling in SCALINGS:
        for turned in (True, False):
            wish = Wish(scaling, turned)
            made = gated_forward(x, y, "silu", wish)
            for rows, columns in ((True, True), (True, False), (False, True)):
                found = quantise(made, scaling, rows=rows, columns=columns, begun=wish.begun)
                expected = quantise(made, scaling, rows=rows, columns=columns)
                assert [q is None for q in found] == [not rows, not columns]
                assert all(torch.equal(bits(q.values), bits(p.values)) for q, p in zip(found, expected, strict=True) if q)


def test_gradients_and_what_is_kept_do_not_change(use):
    use("reference")
    wishes, grads = (Wish("rowwise"), None), []
    for wish in wishes:
        x, r, w = (draw(*shape, seed=i).requires_grad_() for i, shape in enumerate(((20, 64), (20, 64), (64,))))
        y, total = add_norm(x, r, w, None, 1e-5, "rms", wish)
        z = gated(y, total, "silu", None if wish is None else Wish("blockwise"))
        assert {t.dtype for node in (y, z) for t in node.grad_fn.saved_tensors if t is not None} <= {torch.float16, torch.float32}
        z.sum().backward()
        grads.append((x.grad, r.grad, w.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)) and isinstance(wishes[0].begun, Begun)
