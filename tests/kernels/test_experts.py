"""The experts' operations, in every backend that runs here, against what their docstrings say in a line of torch each."""

import pytest
import torch

from autotp.errors import KernelUnsupported
from autotp.kernels import Problem, explain
from autotp.kernels import experts as ops
from autotp.kernels.dispatch import select
from autotp.kernels.reference import ACTIVATIONS

BACKENDS = ["reference", "triton"]


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """Every operation that has it runs by it; the dtype in which it computes."""
    monkeypatch.setenv("AUTOTP_BACKEND", request.param)
    return torch.float64 if request.param == "reference" else torch.float32


def near(got, want, dtype):
    assert got.dtype == want.dtype and got.shape == want.shape
    bound = (1e-12 if dtype == torch.float64 else 1e-5) * max(1.0, want.abs().max().item() if want.numel() else 0)
    assert not want.numel() or (got - want).abs().max().item() <= bound


def draw_index(tokens, top_k, experts, strays=True):
    """Choices of which the last expert is never one, and some that are no expert."""
    index = torch.rand(tokens, max(experts - 1, top_k)).topk(top_k).indices
    if strays:
        index[::3, 0], index[1::4, -1], index[2::5, 0] = experts, experts + 2, -1
    return index


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(11, 2, 4), (700, 3, 5), (5, 1, 3), (9, 8, 16), (1, 2, 40)])
def test_routing_sorts_slots_by_expert(backend, tokens, top_k, experts, index_dtype):
    torch.manual_seed(0)
    index = draw_index(tokens, top_k, experts).to(index_dtype)
    order, inverse, offsets = ops.route_tokens(index, experts)
    owners = [e if 0 <= e < experts else experts for e in index.flatten().tolist()]
    assert order.tolist() == sorted(range(len(owners)), key=lambda slot: owners[slot])
    assert inverse[order].tolist() == list(range(len(owners)))
    assert offsets.tolist() == [sum(owner <= e for owner in owners) for e in range(experts)]
    assert order.dtype == inverse.dtype == offsets.dtype == torch.int32


@pytest.mark.parametrize(("tokens", "top_k", "width"), [(7, 2, 5), (6, 1, 33), (5, 8, 2100)])
def test_rows_go_out_and_come_back(backend, tokens, top_k, width):
    torch.manual_seed(0)
    index = draw_index(tokens, top_k, 9)
    order, inverse, offsets = ops.route_tokens(index, 9)
    x = torch.randn(tokens, 2 * width, dtype=backend)[:, :width]
    rows = ops.spread_rows(x, inverse, top_k)
    assert torch.equal(rows, x[order // top_k])
    y = torch.randn(len(order), width + 3, dtype=backend)[:, :width]
    y[offsets[-1] :] = float("nan")  # rows of no expert are never read
    there = ((index >= 0) & (index < 9))[..., None]
    slots = torch.where(there, y[inverse].view(tokens, top_k, width), 0)
    near(ops.combine_rows(y, inverse, offsets, None, top_k), slots.sum(1), backend)
    weights = torch.rand(top_k, tokens, dtype=backend).t()
    near(ops.combine_rows(y, inverse, offsets, weights, top_k), (slots * weights[..., None]).sum(1), backend)


def test_sums_of_half_precision_are_rounded_once(backend):
    _, inverse, offsets = ops.route_tokens(torch.zeros(1, 3, dtype=torch.int64), 1)
    y = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert ops.combine_rows(y, inverse, offsets, torch.ones(1, 3), 3).item() == 258  # 256 + 1 is 256 in bfloat16


def plain_gate(h, activation, layout):
    act = ACTIVATIONS[activation]
    if layout == "ungated":
        return act(h)
    if layout == "interleaved":
        return act(h[:, ::2]) * h[:, 1::2]
    half = h.shape[1] // 2
    first, second = h[:, :half], h[:, half:]
    return act(first) * second if layout == "gate_up" else act(second) * first


@pytest.mark.parametrize("layout", ops.LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate_and_its_backward(backend, activation, layout):
    torch.manual_seed(0)
    index, weights = draw_index(7, 2, 4), torch.rand(7, 2, dtype=backend)
    order, _, offsets = ops.route_tokens(index, 4)
    live = offsets[-1]
    h = torch.randn(14, 25, dtype=backend)[:, : 11 if layout == "ungated" else 22].requires_grad_()
    a = plain_gate(h, activation, layout)
    near(ops.gate_rows(h.detach(), activation, layout), a.detach(), backend)
    da, w = torch.randn_like(a), weights.flatten()[order][:, None]
    (want,) = torch.autograd.grad(a, h, da * w)
    dh, scaled, dweights = ops.gate_rows_backward(da.clone(), h.detach(), weights, order, offsets, activation, layout)
    near(dh[:live], want[:live], backend)
    near(scaled[:live], (a * w).detach()[:live], backend)
    pulled = torch.zeros(14, dtype=backend)
    pulled[order[:live]] = (a * da).detach().sum(1)[:live]
    near(dweights, pulled, backend)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_gate_backward_makes_what_is_wanted(backend, wanted):
    torch.manual_seed(0)
    order, _, offsets = ops.route_tokens(draw_index(3, 1, 2, strays=False), 2)
    h, da, weights = torch.randn(3, 9000, dtype=backend), torch.randn(3, 4500, dtype=backend), torch.rand(3, 1, dtype=backend)
    every = ops.gate_rows_backward(da.clone(), h, weights, order, offsets, "silu", "gate_up")
    some = ops.gate_rows_backward(da.clone(), h, weights, order, offsets, "silu", "gate_up", wanted)
    for one, other, want in zip(some, every, wanted, strict=True):
        assert torch.equal(one, other) if want else one is None


PRODUCTS = ["reference", "torch"]


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products(name, dtype, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setenv("AUTOTP_BACKEND", name)
    offsets = torch.tensor([4, 4, 9], dtype=torch.int32)  # the second expert has no row, and the last two rows no expert
    x, weight, dy = (torch.randn(*shape, dtype=dtype) for shape in ((11, 16), (3, 24, 16), (11, 24)))
    groups = [slice(0, 4), slice(4, 4), slice(4, 9)]
    for held in (weight.mT, weight.mT.contiguous()):
        y = ops.grouped_product(x, held, offsets)
        for expert, rows in enumerate(groups):
            near(y[rows], x[rows] @ held[expert], dtype)
    outer = ops.grouped_outer(dy, x, offsets)
    for expert, rows in enumerate(groups):
        near(outer[expert], dy[rows].t() @ x[rows], dtype)


@pytest.mark.parametrize("columns", [22, 24])
def test_products_of_odd_rows_fall_back_with_a_reason(columns):
    """PyTorch's grouped products want rows of 16 bytes: uneven shards of experts may not have them."""
    offsets = torch.tensor([3, 5], dtype=torch.int32)
    x, weight = torch.randn(5, 16, dtype=torch.bfloat16), torch.randn(2, 16, columns, dtype=torch.bfloat16)
    y = ops.grouped_product(x, weight, offsets)
    near(y, torch.cat([x[:3] @ weight[0], x[3:] @ weight[1]]), torch.bfloat16)
    problem = ops._product("grouped_product", x, weight, offsets)
    assert problem.aligned == (columns == 24)
    assert ("16 bytes" in explain(problem)) == (columns == 22)
    if columns == 22:
        with pytest.raises(KernelUnsupported, match="16 bytes"):
            select(problem, "torch")


@pytest.mark.parametrize("device_dtype", [("cuda", torch.float16), ("cuda", torch.float32), ("cpu", torch.float64)])
def test_products_without_a_kernel_say_why(device_dtype):
    device, dtype = device_dtype
    text = explain(Problem("grouped_product", device, dtype, rows=8, width=16))
    assert "reference runs" in text and str(dtype) in text


def test_no_tokens():
    order, inverse, offsets = ops.route_tokens(torch.zeros(0, 2, dtype=torch.int64), 3)
    assert order.shape == inverse.shape == (0,) and offsets.tolist() == [0, 0, 0]
    x = torch.zeros(0, 4)
    assert ops.grouped_product(ops.spread_rows(x, inverse, 2), torch.ones(3, 4, 6), offsets).shape == (0, 6)
    assert ops.grouped_outer(x, torch.zeros(0, 6), offsets).abs().sum() == 0
    assert ops.combine_rows(x, inverse, offsets, None, 2).shape == (0, 4)
