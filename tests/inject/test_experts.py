"""Stacked experts: what is recognised and what is not, which calls run grouped, and whole models on several ranks."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autotp
from autotp.inject import experts
from autotp.inject.experts import experts_forward, find_experts
from autotp.inject.forwards import replace_forward
from autotp.inject.plan import Fusion
from autotp.layers.entry import SHARDED_LOSS
from tests.inject.test_families import full_gradients, run_once
from tests.models import batch, tiny

MLA = dict(
    num_key_value_heads=8, head_dim=4, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, kv_lora_rank=16, q_lora_rank=24
)
BUILD = {
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "deepseek_v3": dict(
        MLA, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1
    ),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2),
}
FOUND = {"mixtral": 2, "qwen3_moe": 2, "deepseek_v3": 1, "gpt_oss": 0}
PARTS = ("gate_up_proj", "down_proj", "hidden_states", "top_k_index", "top_k_weights")


def find_all(model):
    return [found for name, module in model.named_modules() if (found := find_experts(name, module)) is not None]


@pytest.mark.parametrize("family", FOUND)
def test_what_is_found(family):
    found = find_all(tiny(family, **BUILD[family]))
    assert [(f.kind, f.variant, f.parts) for f in found] == [("experts", "silu, gate_up", PARTS)] * FOUND[family]


class Experts(nn.Module):
    """A loop over experts, its steps to be overridden."""

    names = ("gate_up", "down")

    def __init__(self, experts=3, hidden=8, inside=12, columns=24):
        super().__init__()
        for name, shape in zip(self.names, self.shapes(hidden, inside, columns), strict=True):
            self.register_parameter(name, nn.Parameter(torch.randn(experts, *shape)))

    def shapes(self, hidden, inside, columns):
        return (columns, hidden), (hidden, inside)

    def gate(self, h):
        first, second = h.chunk(2, -1)
        return F.silu(first) * second

    def expert(self, x, e):
        return F.linear(self.gate(F.linear(x, self.gate_up[e])), self.down[e])

    def forward(self, x, index, weights):
        out = torch.zeros_like(x)
        for e in range(len(self.down)):
            token, j = torch.where(index == e)
            out = out.index_add(0, token, self.expert(x[token], e) * weights[token, j, None])
        return out


class Tanh(Experts):
    def gate(self, h):
        first, second = h.chunk(2, -1)
        return F.gelu(second, approximate="tanh") * first


class Interleaved(Experts):
    def gate(self, h):
        return F.relu(h[..., ::2]) * h[..., 1::2]


class WeightsFirst(Experts):
    """Weights before the choices, stored input first, under other names."""

    names = ("second", "first")

    def shapes(self, hidden, inside, columns):
        return (inside, hidden), (hidden, columns)

    def expert(self, x, e):
        return self.gate(x @ self.first[e]) @ self.second[e]

    def forward(self, x, weights, index):
        out = torch.zeros_like(x)
        for e in range(len(self.first)):
            token, j = torch.where(index == e)
            out = out.index_add(0, token, self.expert(x[token], e) * weights[token, j, None])
        return out


class Ungated(Experts):
    def __init__(self):
        super().__init__(columns=12)

    def gate(self, h):
        return F.relu(h).square()


@pytest.mark.parametrize(
    ("cls", "variant", "parts"),
    [
        (Experts, "silu, gate_up", ("gate_up", "down", "x", "index", "weights")),
        (Tanh, "gelu_tanh, up_gate", ("gate_up", "down", "x", "index", "weights")),
        (Interleaved, "relu, interleaved", ("gate_up", "down", "x", "index", "weights")),
        (WeightsFirst, "silu, gate_up, transposed", ("first", "second", "x", "index", "weights")),
        (Ungated, "relu2, ungated", ("gate_up", "down", "x", "index", "weights")),
    ],
)
def test_forms_that_are_found(cls, variant, parts):
    module = cls()
    assert find_experts("m", module) == Fusion("m", "experts", variant=variant, parts=parts)
    x, index, weights = torch.randn(9, 8), torch.rand(9, 3).topk(2).indices, torch.rand(9, 2)
    given = (x, weights, index) if cls is WeightsFirst else (x, index, weights)
    want = module(*given)
    replace_forward(module, "m", experts_forward(type(module).forward, variant, *parts))
    torch.testing.assert_close(module(*given), want)


class Clamped(Experts):
    """Far from the limit nothing shows."""

    def gate(self, h):
        first, second = h.chunk(2, -1)
        return F.silu(first.clamp(max=20.0)) * second


class Detached(Experts):
    """The right output; the router learns nothing."""

    def forward(self, x, index, weights):
        return super().forward(x, index, weights.detach())


class GateDetached(Experts):
    def gate(self, h):
        first, second = h.chunk(2, -1)
        return F.silu(first).detach() * second


class Normalised(Experts):
    def forward(self, x, index, weights):
        return super().forward(x, index, weights / weights.sum(-1, keepdim=True))


class InTraining(Experts):
    def forward(self, x, index, weights):
        return super().forward(x, index, weights) * (1 if self.training else 2)


class Residual(Experts):
    def forward(self, x, index, weights):
        return super().forward(x, index, weights) + x


class Biased(Experts):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3, 8))

    def expert(self, x, e):
        return super().expert(x, e) + self.bias[e]


class Scaled(Experts):
    """A scale that is 1 now, and may be loaded as something else."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def expert(self, x, e):
        return super().expert(x, e) * self.scale


class DroppedLater(Experts):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def gate(self, h):
        return self.drop(super().gate(h))


class Dropped(Experts):
    def gate(self, h):
        return F.dropout(super().gate(h), 0.5, self.training)


@pytest.mark.parametrize(
    "cls",
    [
        Clamped,
        Detached,
        GateDetached,
        Normalised,
        InTraining,
        Residual,
        Biased,
        Scaled,
        Dropped,
        DroppedLater,
        lambda: nn.Linear(3, 4),
    ],
)
def test_what_is_not_found(cls):
    assert find_experts("m", cls()) is None


def test_a_model_on_meta_is_tried_out_and_left_as_it_was():
    with torch.device("meta"):
        module = Experts(experts=64, hidden=4096, inside=14336, columns=28672)
    module.act = nn.SiLU()
    before = dict(module.__dict__)
    assert find_experts("m", module) is not None
    assert module.__dict__ == before and module.training and module.act.training and module.gate_up.is_meta


# -- which calls run grouped ----------------------------------------------------------------------------------------------


def fuse(model):
    """What the rewriter does with the experts it finds."""
    for fusion in find_all(model):
        module = model.get_submodule(fusion.name)
        replace_forward(module, fusion.name, experts_forward(type(module).forward, fusion.variant, *fusion.parts))


@pytest.fixture
def counted(monkeypatch):
    """Calls of grouped_experts since it was last cleared."""
    calls, real = [], experts.grouped_experts
    monkeypatch.setattr(experts, "grouped_experts", lambda *args: calls.append(args) or real(*args))
    return calls


def test_other_calls_run_the_modules_own_forward(counted):
    model = tiny("mixtral", **BUILD["mixtral"])
    inputs = {"input_ids": batch(model)["input_ids"]}
    want = model(**inputs).logits
    fuse(model)
    for implementation, calls in {"eager": 2, "grouped_mm": 2, "batched_mm": 0}.items():
        counted.clear()
        model.set_experts_implementation(implementation)
        torch.testing.assert_close(model(**inputs).logits, want)
        assert len(counted) == calls, implementation
    model.set_experts_implementation("grouped_mm")
    counted.clear()
    with torch.autocast("cpu", torch.bfloat16):
        model(**inputs)
    assert not counted


def test_by_keyword_and_with_too_many_arguments(counted):
    module = Experts()
    given = dict(x=torch.randn(5, 8), index=torch.rand(5, 3).topk(2).indices, weights=torch.rand(5, 2))
    want = module(**given)
    fuse(nn.ModuleList([module]))
    counted.clear()
    torch.testing.assert_close(module(**given), want)
    torch.testing.assert_close(module(given["x"], weights=given["weights"], index=given["index"]), want)
    assert len(counted) == 2
    for wrong in ((given["x"],), (*given.values(), 1)):
        with pytest.raises(TypeError):
            module(*wrong)
    with pytest.raises(TypeError, match="other"):
        module(given["x"], given["index"], other=given["weights"])


def test_weights_are_read_by_name_at_each_call(counted):
    """As adapters by parametrization and the border of a region put something else in their place."""
    module = Experts()
    given = torch.randn(5, 8), torch.rand(5, 3).topk(2).indices, torch.rand(5, 2)
    fuse(nn.ModuleList([module]))
    counted.clear()
    before = module(*given)
    own = module._parameters
    module.__dict__["_parameters"] = {**own, "down": own["down"] * 3}
    torch.testing.assert_close(module(*given), before * 3)
    module.__dict__["_parameters"] = own
    assert len(counted) == 2


def test_compiled_without_a_break(counted):
    model = tiny("mixtral", **BUILD["mixtral"])
    fuse(model)
    counted.clear()
    compiled = torch.compile(model.model.layers[0].mlp, backend="eager", fullgraph=True)
    x = torch.randn(2, 5, 64)
    torch.testing.assert_close(compiled(x), model.model.layers[0].mlp(x))
    assert len(counted) == 1, "the plain one; compiled runs the module's own"


# -- whole models on several ranks ----------------------------------------------------------------------------------------


def check_on_ranks(group, family, overrides):
    """Logits and every gradient of a sharded model whose experts run grouped, against the unsharded plain one."""
    reference = tiny(family, **{**BUILD[family], **overrides})
    reference.set_experts_implementation("eager")  # the others want rows of 16 bytes
    model, calls, grouped = copy.deepcopy(reference), [], experts.grouped_experts
    experts.grouped_experts = lambda *args: calls.append(tuple(args[2].shape)) or grouped(*args)
    try:
        autotp.parallelize(model, group)
        calls.clear()
        inputs = batch(reference)
        logits, grads = run_once(reference, inputs)
        got_logits, _ = run_once(model, inputs)
        got = full_gradients(model)
        weights = autotp.full_state_dict(model)
    finally:
        experts.grouped_experts = grouped
    assert (got_logits - logits).abs().max() <= 1e-5 * logits.abs().max()
    assert set(got) == set(grads)
    worst = max(grad.abs().max() for grad in grads.values())
    for name, grad in grads.items():
        assert (got[name] - grad).abs().max() <= 1e-4 * grad.abs().max() + 1e-6 * worst, name
    if weights:
        assert all(torch.equal(value, weights[name]) for name, value in reference.state_dict().items())
    return calls


@pytest.mark.parametrize(
    ("family", "overrides", "size", "columns"),
    [
        ("mixtral", {}, 2, {48}),
        ("qwen3_moe", {}, 3, {8, 12}),  # 32 columns, dealt in fours
        ("deepseek_v3", {}, 2, {16}),
        ("mixtral", {"intermediate_size": 50}, 3, {16, 17}),  # no rows of 16 bytes: product after product
    ],
)
def test_on_ranks(ranks, family, overrides, size, columns):
    calls = ranks.run(check_on_ranks, family, overrides, size=size)
    assert {shape[2] for rank in calls for shape in rank} == columns
    assert all(len(rank) == 2 * FOUND[family] for rank in calls)  # once in evaluation, once in training


def check_router_logits(group, sequence_parallel):
    """Asked for in the config, transformers has hooks that it puts on modules in the first forward collect them."""
    reference = tiny("mixtral", **BUILD["mixtral"], output_router_logits=True).train()
    model = autotp.parallelize(copy.deepcopy(reference), group, sequence_parallel=sequence_parallel).train()
    assert model.autotp_plan.loss == SHARDED_LOSS
    for rows, length in ((3, 7), (2, 12)):
        call = batch(reference, rows, rows, length)
        mine, theirs = model(**call), reference(**call)
        assert len(mine.router_logits) == len(theirs.router_logits) == 2
        for name in ("loss", "aux_loss", "router_logits"):
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-4)
        mine.loss.backward()
        theirs.loss.backward()
    full = full_gradients(model)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(full[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_router_logits_and_their_loss(ranks, sequence_parallel):
    ranks.run(check_router_logits, sequence_parallel)
