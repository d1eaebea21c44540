"""FP8 operands and products: scales, rounding, what is no number, odd shapes and strides; gradients of the autograd step."""

import pytest
import torch
import torch.nn.functional as F

from autotp.kernels import fp8_product
from autotp.kernels.fp8 import Recipe, multiply, quantise, quantise_stacks, turn
from autotp.kernels.fp8_product import Scaled, multiply_fp8
from autotp.kernels.fp8_scaled import LIMITS, Stack, multiply_scaled
from autotp.kernels.product import ProductSpec
from autotp.kernels.reference_fp8 import dequantise

from .tensors import DEVICE

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALINGS = ("tensorwise", "rowwise", "blockwise", "squares")
STEP = {E4M3: 2**-4, E5M2: 2**-3}  # half a unit in the last place, of the value


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def strided(x, layout):
    if layout == "turned":
        return x.t().contiguous().t()
    if layout == "expanded":
        return x[:1].expand_as(x)
    if layout == "columns":
        return torch.cat([x, x], 1)[:, : x.shape[1]]
    return x


@pytest.mark.parametrize("layout", ["plain", "turned", "expanded", "columns"])
@pytest.mark.parametrize("shape", [(48, 272), (33, 17), (1, 128), (130, 1), (0, 64)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_an_operand_is_what_it_was_but_for_rounding(scaling, dtype, shape, layout):
    x = strided(draw(*shape), layout)
    rows, columns = quantise(x, scaling, dtype)
    limit = LIMITS[dtype]
    for operand, whole in ((rows, x), (columns, x.t())):
        assert operand.values.is_contiguous() and operand.values.dtype is dtype
        height, width = whole.shape
        found = dequantise(operand)
        least = operand.scale.max() * 2**-9 if operand.scale.numel() else 0  # of a value below the smallest that is normal
        assert ((found[:, :width] - whole).abs() <= whole.abs() * STEP[dtype] * 1.001 + least).all()
        assert not found[:, width:].any() and found.shape[0] == height
        assert operand.values.float().abs().max() == limit if x.numel() else True  # the largest value is used


@pytest.mark.parametrize("scaling", SCALINGS)
def test_scales_of_zeros_tiny_and_huge_values(scaling):
    for value in (0.0, 1e-44, 1e-38, 1e-30, 3e38):
        x = torch.full((16, 16), value)
        x[0, 0] = -value
        bad = torch.zeros((), dtype=torch.int32)
        rows, columns = quantise(x, scaling, bad=bad)
        found, turned = dequantise(rows), dequantise(columns)[:, :16].t()
        assert found.isfinite().all() and torch.equal(found, turned) and not bad
        if value == 0.0 or value >= 1e-38:
            torch.testing.assert_close(found, x, rtol=0.0625, atol=0)
        else:
            assert found.abs().max() <= 1e-38


@pytest.mark.parametrize("shape", [(48, 272), (33, 17), (130, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_values_are_turned_as_they_are(use, backend, dtype, shape):
    use(f"quantise={backend}")
    rows, columns = quantise(draw(*shape).to(DEVICE, dtype), "tensorwise", E5M2)
    assert torch.equal(turn(rows).values.view(torch.uint8), columns.values.view(torch.uint8))


@pytest.mark.parametrize(("rows", "columns"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("shape", [(48, 272), (33, 17)])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_kernels_round_as_the_reference_does(use, scaling, shape, rows, columns):
    def share(bits):  # another rank's largest is 2
        return bits.clamp(min=torch.tensor(2.0).view(torch.int32).item())

    for dtype, layout, cut in ((E4M3, "turned", 0), (E5M2, "columns", 0), (E4M3, "columns", 1)):
        x, found = strided(draw(*shape), layout).to(torch.bfloat16).to(DEVICE), []
        x[-1, -1] = 1e-40
        for value, backend in ((None, "reference"), (None, "triton"), (float("inf"), "reference"), (float("inf"), "triton")):
            bad = torch.zeros((), dtype=torch.int32, device=DEVICE)
            if value is not None:
                x[3, 5] = value
            use(f"quantise={backend}")
            found.append((*quantise(x, scaling, dtype, rows=rows, columns=columns, cut=cut, share=share, bad=bad), bad))
        for expected, got in zip(found[0][:2], found[1][:2], strict=True):
            assert (expected is None) == (got is None)
            if expected is not None:
                assert (
                    torch.equal(expected.scale, got.scale) and expected.scale.t().is_contiguous() == got.scale.t().is_contiguous()
                )
                assert torch.equal(expected.values.float(), got.values.float())
        for expected, got in zip(found[2][:2], found[3][:2], strict=True):
            assert expected is None or torch.equal(expected.scale.isfinite(), got.scale.isfinite())
        assert not found[1][2] and found[3][2] == found[2][2] > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_what_is_not_finite_stays_so_and_is_counted(scaling, value):
    x, w = draw(32, 256), draw(48, 256, seed=1)
    x[3, 200] = value
    bad = torch.zeros((), dtype=torch.int32)
    rows, columns = quantise(x, scaling, bad=bad)
    assert bad == (1 if scaling in ("tensorwise", "squares") else 2)  # a scale of each operand
    weight, _ = quantise(w, "squares" if scaling in ("blockwise", "squares") else scaling, columns=False)
    y = multiply(rows, weight, torch.float32)
    assert y[3].isnan().all() and (y[:3].isfinite().all() or scaling in ("tensorwise", "squares"))
    assert dequantise(columns)[200, 3].isnan()


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("rows", [48, 37, 1])
def test_the_three_products_are_those_of_what_was_quantised(scaling, rows):
    recipe, spec = Recipe(scaling), ProductSpec()
    x, w, b = draw(2, rows, 128), draw(256, 128, seed=1), draw(256, seed=2)
    dy = draw(2, rows, 256, seed=3)
    x, w, b = (t.requires_grad_() for t in (x, w, b))
    scaled = Scaled(recipe, lambda turned: quantise(w.detach(), recipe.weight_scaling, columns=turned))
    (y,) = multiply_fp8(spec, scaled, x, (w,), (b,))
    y.backward(dy)
    flat, grad = x.detach().flatten(0, 1), dy.flatten(0, 1)
    (xr, xc), (wr, wc) = ([dequantise(q) for q in pair] for pair in (quantise(flat, scaling), scaled.read_weights(True)))
    dr, dc = (dequantise(q) for q in quantise(grad, scaling, recipe.gradient_dtype))
    torch.testing.assert_close(y.detach().flatten(0, 1), xr @ wr.t() + b.detach(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(x.grad.flatten(0, 1), dr @ wc.t(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(w.grad, dc @ xc.t(), rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(b.grad, grad.sum(0))
    exact = flat @ w.detach().t() + b.detach()
    assert (y.detach().flatten(0, 1) - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("frozen", ["x", "w", "b"])
def test_each_gradient_is_computed_for_its_own_sake(frozen):
    recipe, tensors = Recipe("rowwise"), {"x": draw(32, 32), "w": draw(48, 32, seed=1), "b": draw(48, seed=2)}
    grads = []
    for without in ("", frozen):
        x, w, b = (t.clone().requires_grad_(name != without) for name, t in tensors.items())
        scaled = Scaled(recipe, lambda turned, w=w: quantise(w.detach(), "rowwise", columns=turned))
        multiply_fp8(ProductSpec(), scaled, x, (w,), (b,))[0].square().sum().backward()
        grads.append({"x": x.grad, "w": w.grad, "b": b.grad})
    assert grads[1].pop(frozen) is None
    assert all(torch.equal(grads[0][name], grad) for name, grad in grads[1].items())


def test_without_gradient_nothing_is_made_for_a_backward(monkeypatch):
    asked, own = [], fp8_product.quantise
    monkeypatch.setattr(fp8_product, "quantise", lambda *args, **how: asked.append(how["columns"]) or own(*args, **how))
    x, w = draw(32, 32).requires_grad_(), draw(48, 32, seed=1).requires_grad_()
    scaled = Scaled(Recipe("rowwise"), lambda turned: asked.append(turned) or quantise(w.detach(), "rowwise", columns=turned))
    outputs = []
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            outputs += multiply_fp8(ProductSpec(), scaled, x, (w,), (None,))
    assert asked == [True, True, False, False] and torch.equal(*outputs) and not outputs[1].requires_grad


def test_under_autocast_weights_are_read_as_they_are():
    recipe, x, w = Recipe("rowwise"), draw(32, 32).requires_grad_(), draw(48, 32, seed=1).requires_grad_()
    scaled = Scaled(recipe, lambda turned: quantise(w.detach(), "rowwise", columns=turned))
    with torch.autocast("cpu", torch.bfloat16):
        (y,) = multiply_fp8(ProductSpec(), scaled, x, (w,), (None,))
        y.float().square().sum().backward()
    assert y.dtype is torch.bfloat16 and x.grad.dtype is torch.float32 and w.grad.dtype is torch.float32


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "blockwise"])
def test_a_scaled_product_asks_for_what_torch_would(monkeypatch, scaling, fast):
    """Our call of the operator, against that of `F.scaled_mm` with the same operands."""
    given = []

    def note(*args):
        given.append(args)
        return torch.empty(0, dtype=torch.bfloat16)

    monkeypatch.setattr(torch, "_scaled_mm_v2", note)
    weights = "squares" if scaling == "blockwise" else scaling
    (a, _), (b, _) = quantise(draw(128, 256), scaling, columns=False), quantise(draw(256, 256), weights, columns=False)
    kinds = F.ScalingType
    kind = {"tensorwise": kinds.TensorWise, "rowwise": kinds.RowWise, "blockwise": kinds.BlockWise1x128}[scaling]
    other = kinds.BlockWise128x128 if scaling == "blockwise" else kind
    scale = b.scale.t() if scaling == "rowwise" else b.scale
    multiply_scaled(a, b, torch.bfloat16, fast)
    own = fast and scaling != "blockwise"
    F.scaled_mm(a.values, b.values.t(), a.scale, kind, scale, other, output_dtype=torch.bfloat16, use_fast_accum=own)
    ours, theirs = given
    assert _describe(list(ours)) == _describe(list(theirs))


def _describe(value):
    """A tensor as where its numbers are and how they lie."""
    if isinstance(value, list):
        return [_describe(part) for part in value]
    return (value.data_ptr(), value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, which interprets Triton's 0 * inf
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_many_weights_at_once_are_what_each_is_alone(backend, dtype, shared, monkeypatch):
    monkeypatch.setenv("AUTOTP_BACKEND", f"quantise_stacks={backend},quantise={backend}")
    sizes = [((48, 16), 64), ((160,), 16), ((16, 16, 32), 272), ((32,), 144)]
    parts = [
        tuple((draw(n, 2 * width, seed=7 * i + j) * 10.0**i).to(DEVICE, dtype)[:, :width] for j, n in enumerate(heights))
        for i, (heights, width) in enumerate(sizes)
    ]
    parts[1][0][3, 5] = float("inf")
    parts[3][0].zero_()
    bad = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    stacks = [Stack(each, number != 2, bad[number] if number < 3 else None) for number, each in enumerate(parts)]
    asked = []

    def share(bits):
        asked.append(bits.numel())
        return bits.clamp(min=0x3FC00000)  # 1.5

    found = quantise_stacks(stacks, share if shared else None)
    assert asked == [len(stacks)] * shared  # the same of all backends: ranks may differ in how their weights lie
    for stack, (rows, turned) in zip(stacks, found, strict=True):
        how = dict(cut=0, share=share) if shared else {}
        want, want_turned = quantise(torch.cat(stack.parts), "tensorwise", columns=stack.columns, **how)
        for got, expected in ((rows, want), (turned, want_turned)):
            assert (got is None) == (expected is None)
            if got is not None:
                assert torch.equal(got.scale, expected.scale) and got.values.is_contiguous()
                equal = torch.equal(got.values.view(torch.uint8), expected.values.view(torch.uint8))
                assert equal or not got.scale.isfinite()
    assert bad.tolist() == [0, 1, 0, 0]
