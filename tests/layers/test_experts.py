"""Stacked experts as one function, against a plain loop over tokens: output, every gradient, what is saved, what is refused."""

import itertools

import pytest
import torch

from autotp.errors import KernelUnsupported
from autotp.kernels.reference import ACTIVATIONS
from autotp.layers.experts import grouped_experts

SIZES = dict(tokens=11, hidden=12, inside=8, experts=5, top_k=2)


def draw(tokens, hidden, inside, experts, top_k, layout="gate_up", transposed=False, dtype=torch.float64, empty=True):
    """x, up, down, index, weights; the last expert gets no token if `empty`."""
    torch.manual_seed(0)
    columns = inside * (1 if layout == "ungated" else 2)
    shapes = (columns, hidden), (hidden, inside)
    up, down = (torch.randn(experts, *(s[::-1] if transposed else s), dtype=dtype).requires_grad_() for s in shapes)
    x = torch.randn(tokens, hidden, dtype=dtype).requires_grad_()
    index = torch.rand(tokens, max(top_k, experts - empty)).topk(top_k).indices
    return x, up, down, index, torch.rand(tokens, top_k, dtype=dtype).requires_grad_()


def loop(x, up, down, index, weights, activation="silu", layout="gate_up", transposed=False):
    act, outs = ACTIVATIONS[activation], []
    for t, j in itertools.product(range(len(x)), range(index.shape[1])):
        e = int(index[t, j])
        if not 0 <= e < len(up):
            outs.append(x[t] * 0)
            continue
        h = x[t] @ (up[e] if transposed else up[e].T)
        if layout == "interleaved":
            a = act(h[::2]) * h[1::2]
        elif layout == "ungated":
            a = act(h)
        else:
            first, second = h.chunk(2)
            a = act(first) * second if layout == "gate_up" else act(second) * first
        outs.append(weights[t, j] * (a @ (down[e] if transposed else down[e].T)))
    return torch.stack(outs).view(len(x), index.shape[1], -1).sum(1)


def compare(got, want, leaves, tolerance=1e-12):
    """Output and every gradient, of the largest entry's size."""
    cotangent = torch.randn_like(want)
    pulled = [torch.autograd.grad(out, leaves, cotangent) for out in (got, want)]
    for a, b in zip((got, *pulled[0]), (want, *pulled[1]), strict=True):
        assert a.dtype == b.dtype and (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved", "ungated"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
def test_forms(activation, layout, transposed):
    x, up, down, index, weights = draw(**SIZES, layout=layout, transposed=transposed)
    form = activation, layout, transposed
    got, want = (f(x, up, down, index, weights, *form) for f in (grouped_experts, loop))
    compare(got, want, (x, up, down, weights))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "hidden", "inside", "experts", "top_k"),
    [(9, 12, 8, 6, 1), (9, 12, 8, 6, 2), (9, 12, 8, 12, 8), (7, 9, 5, 4, 3), (1, 16, 3, 2, 2), (13, 8, 11, 1, 1)],
)
def test_sizes(tokens, hidden, inside, experts, top_k, dtype):
    drawn = draw(tokens, hidden, inside, experts, top_k, dtype=dtype)
    x, up, down, _, weights = drawn
    compare(grouped_experts(*drawn), loop(*drawn), (x, up, down, weights), 1e-12 if dtype == torch.float64 else 5e-6)


@pytest.mark.parametrize("layout", ["gate_up", "ungated"])
def test_in_triton(layout, monkeypatch):
    monkeypatch.setenv("AUTOTP_BACKEND", "triton")
    drawn = draw(**SIZES, layout=layout, dtype=torch.float32)
    drawn[3][2, 0] = SIZES["experts"]
    got, want = (f(*drawn, "silu", layout) for f in (grouped_experts, loop))
    compare(got, want, (*drawn[:3], drawn[4]), 5e-6)


def test_a_choice_of_no_expert_adds_nothing():
    drawn = draw(**SIZES, empty=False)
    index = drawn[3]
    index[2, 1], index[3, 0], index[4] = 5, 9, -1
    compare(grouped_experts(*drawn), loop(*drawn), (*drawn[:3], drawn[4]))
    assert grouped_experts(*drawn)[4].abs().max() == 0


@pytest.mark.parametrize("trained", [c for n in (1, 2, 3) for c in itertools.combinations(range(4), n)])
def test_frozen_parts(trained):
    """Each gradient is the same whatever else is trained, and nothing else gets one."""
    drawn = draw(**SIZES)
    leaves = [drawn[0], drawn[1], drawn[2], drawn[4]]
    want = torch.autograd.grad(loop(*drawn).sum(), leaves)
    for number, leaf in enumerate(leaves):
        leaf.requires_grad_(number in trained)
    grouped_experts(*drawn).sum().backward()
    for number, leaf in enumerate(leaves):
        if number in trained:
            assert (leaf.grad - want[number]).abs().max() <= 1e-12 * want[number].abs().max()
        else:
            assert leaf.grad is None


def test_strided_and_expanded():
    drawn = draw(**SIZES)
    x, up, down, index, weights = drawn
    wide = torch.randn(11, 30, dtype=torch.float64)
    wide[:, 3:15] = x.detach()
    x = wide[:, 3:15].requires_grad_()
    got = grouped_experts(x, up, down, index, weights)
    leaves = (x, up, down, weights)
    want = torch.autograd.grad(loop(*drawn).sum(), (drawn[0], up, down, weights))
    for a, b in zip(torch.autograd.grad(got.sum(), leaves), want, strict=True):  # sum's gradient is expanded
        assert (a - b).abs().max() <= 1e-12 * b.abs().max()


def test_no_tokens():
    x, up, down, index, weights = draw(**SIZES)
    out = grouped_experts(x[:0], up, down, index[:0], weights[:0])
    assert out.shape == (0, 12)
    out.sum().backward()
    assert up.grad.abs().max() == down.grad.abs().max() == 0


def test_what_is_saved_and_what_is_run_twice():
    """Beside what came in: h and the routes. A graph that is kept pulls the same gradients again."""
    drawn = draw(**SIZES)
    known, saved = {t.data_ptr() for t in drawn}, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = grouped_experts(*drawn)
    mine = [t for t in saved if t.data_ptr() not in known]
    slots = 11 * 2
    assert [t.shape for t in mine if t.is_floating_point()] == [(slots, 16)]
    assert sum(t.numel() for t in mine if not t.is_floating_point()) == 2 * slots + 5
    leaves = (*drawn[:3], drawn[4])
    first, second = (torch.autograd.grad(out.sum(), leaves, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_weights_of_another_dtype():
    """Routers often weigh in float32: the result keeps the tokens' dtype, the gradient the weights' own."""
    drawn = [t.detach() for t in draw(**SIZES)]
    x, up, down = (t.bfloat16().requires_grad_() for t in drawn[:3])
    weights = drawn[4].float().requires_grad_()
    out = grouped_experts(x, up, down, drawn[3], weights)
    want = loop(*(t.detach().double() for t in (x, up, down)), drawn[3], drawn[4].float().double())
    assert out.dtype == torch.bfloat16 and (out - want).abs().max() <= 0.02 * want.abs().max()
    out.sum().backward()
    assert weights.grad.dtype == torch.float32 and x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x, up, down, index, weights: (x[:, :5], up, down, index, weights), "do not fit together"),
        (lambda x, up, down, index, weights: (x, up[:3], down, index, weights), "do not fit together"),
        (lambda x, up, down, index, weights: (x, up[:, :15], down, index, weights), "do not fit together"),
        (lambda x, up, down, index, weights: (x, up, down, index[:, :1], weights), "top_k_index"),
        (lambda x, up, down, index, weights: (x[:4], up, down, index, weights), "4 tokens"),
        (lambda x, up, down, index, weights: (x.float(), up, down, index, weights), "float32"),
        (lambda x, up, down, index, weights: (x, up, down, index, weights, "silu", "sideways"), "sideways"),
    ],
)
def test_what_is_refused(change, said):
    with pytest.raises(KernelUnsupported, match=said):
        grouped_experts(*change(*draw(**SIZES)))
