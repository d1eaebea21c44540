"""Fused forwards: what is recognised, what is not, and that a fused model computes what the plain one does."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from transformers.models.llama import modeling_llama

import autotp
from autotp.comm import TPGroup
from autotp.errors import KernelUnsupported, PlanError
from autotp.inject import block
from autotp.inject.block import find_fusions, find_gated, find_norm, fuse_modules
from autotp.inject.forwards import remove_forward
from autotp.inject.plan import Fusion, Plan
from autotp.inject.rotary import find_variant
from autotp.inject.rotary import fused as fused_rotary
from autotp.layers.base import TensorParallel_Layer
from tests.models import batch, tiny

FOUND = {
    "llama": {"rms norm, eps 1e-06": 5, "gated mlp (silu)": 2, "rotary (half)": 2, "add norm (post_attention_layernorm)": 2},
    "gemma2": {
        "rms1p norm, eps 1e-06": 9,
        "gated mlp (gelu_tanh)": 2,
        "rotary (half)": 2,
        "add norm (pre_feedforward_layernorm)": 2,
    },
    "phi3": {"rms norm, eps 1e-05": 5, "gated mlp (silu)": 2, "rotary (half)": 2, "add norm (post_attention_layernorm)": 2},
    "qwen3": {"rms norm, eps 1e-06": 9, "gated mlp (silu)": 2, "rotary (half)": 2, "add norm (post_attention_layernorm)": 2},
    "cohere": {"layernorm norm, eps 1e-05": 3, "gated mlp (silu)": 2, "rotary (interleaved)": 2},
    "gpt_neox": {"rotary (half)": 2},
    "mixtral": {
        "rms norm, eps 1e-05": 5,
        "experts (silu, gate_up)": 2,
        "rotary (half)": 2,
        "add norm (post_attention_layernorm)": 2,
    },
}


def count(fusions):
    kinds = [fusion.describe() for fusion in fusions]
    return {kind: kinds.count(kind) for kind in kinds}


@pytest.mark.parametrize("family", FOUND)
def test_what_is_found(family):
    assert count(find_fusions(tiny(family))) == FOUND[family]


class Norm(nn.Module):
    def __init__(self, width=8, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class NormOfSum(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps) * self.weight


class NormWithEpsOutside(Norm):
    def forward(self, x):
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class NormDetached(Norm):
    """The right output, and a gradient that leaves out the statistics."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps).detach() * self.weight


class NormInTraining(Norm):
    """Something else in evaluation."""

    def forward(self, x):
        return super().forward(x) if self.training else x * self.weight


@pytest.mark.parametrize("cls", [NormOfSum, NormWithEpsOutside, NormDetached, NormInTraining])
def test_what_is_no_norm(cls):
    assert find_norm("n", Norm()) == Fusion("n", "rms", eps=1e-6)
    assert find_norm("n", Norm(eps=3e-4)) == Fusion("n", "rms", eps=3e-4)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert find_norm("n", cls(eps=1e-4)) is None


class Gated(nn.Module):
    def __init__(self, hidden=6, width=10):
        super().__init__()
        self.a, self.b = nn.Linear(hidden, width), nn.Linear(hidden, width)
        self.c = nn.Linear(width, hidden)

    def forward(self, x):
        return self.c(F.silu(self.b(x)) * self.a(x))


class WithActivation(Gated):
    def __init__(self):
        super().__init__()
        self.act = nn.SiLU()

    def forward(self, x):
        return self.c(self.act(self.b(x)) * self.a(x))


class Scaled(Gated):
    def forward(self, x):
        return self.c(F.silu(self.b(x)) * self.a(x)) * 2


class Clamped(Gated):
    def forward(self, x):
        return self.c(F.silu(self.b(x)).clamp(max=1.0) * self.a(x))


class ClampedFarOut(Gated):
    def forward(self, x):
        return self.c(F.silu(self.b(x).clamp(max=7.0)) * self.a(x).clamp(-7.0, 7.0))


class Dropped(Gated):
    def forward(self, x):
        return self.c(F.dropout(F.silu(self.b(x)) * self.a(x), 0.5, self.training))


class OtherInput(Gated):
    def forward(self, x):
        return self.c(F.silu(self.b(x + 1)) * self.a(x))


class Repeated(Gated):
    def forward(self, x):
        return self.c(F.silu(self.b(x)) * self.a(x)) + 0 * self.a(x).sum()


class GateDetached(Gated):
    def forward(self, x):
        return self.c(F.silu(self.b(x)).detach() * self.a(x))


def test_what_is_no_gated_mlp():
    assert find_gated("m", Gated()) == Fusion("m", "gated_mlp", variant="silu", parts=("b", "a", "c"))
    for cls in (Scaled, Clamped, ClampedFarOut, Dropped, OtherInput, Repeated, GateDetached):
        try:
            found = find_gated("m", cls())
        except Exception:
            found = None
        assert found is None, cls


def rotate(q, k, cos, sin, swap=1.0):
    def half(x):
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a * swap), -1)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def rotate_wrongly(q, k, cos, sin):
    return rotate(q, k, cos, sin, swap=-1.0)


def rotate_queries_alone(q, k, cos, sin):
    return rotate(q, k, cos, sin)[0], k


def test_what_is_no_rotary():
    assert find_variant(rotate) == "half"
    assert find_variant(rotate_wrongly) is None and find_variant(rotate_queries_alone) is None


def gradients(model, inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FOUND)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_fused_equals_plain(family, dtype):
    plain = tiny(family).to(dtype).train()
    if plain._can_set_experts_implementation():
        plain.set_experts_implementation("eager")  # the others know no float64
    fused = autotp.parallelize(copy.deepcopy(plain), one_rank(), logits="full").train()
    inputs = batch(plain)
    (loss, want), (own, got) = gradients(plain, inputs), gradients(fused, inputs)
    bar = 1e-5
    assert abs(loss - own) <= bar * abs(loss) and set(got) == set(want)
    for name, grad in want.items():
        assert (got[name] - grad).abs().max() <= bar * max(grad.abs().max(), 1e-3), name


def one_rank():
    return TPGroup(None, torch.device("cpu"))


def test_adapters_added_afterwards_are_called():
    model: Any = autotp.parallelize(tiny("llama"), one_rank()).eval()
    inputs = {"input_ids": batch(model)["input_ids"]}
    before, mlp = model(**inputs).logits, model.model.layers[0].mlp

    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer = base

        def forward(self, x):
            return self.base_layer(x) * 1.5

    mlp.gate_proj, mlp.down_proj = Adapter(mlp.gate_proj), Adapter(mlp.down_proj)
    assert not torch.equal(before, model(**inputs).logits)
    seen = []
    model.model.norm.register_forward_hook(lambda module, args, output: seen.append(output))
    model(**inputs)
    assert len(seen) == 1


def test_plan_says_it_and_is_checked():
    model = tiny("llama")
    plan = autotp.make_plan(model, 2)
    assert Plan.from_json(plan.to_json()) == plan and "gated mlp (silu): model.layers.*.mlp (2x)" in str(plan)
    assert not autotp.make_plan(model, 2, replace(plan, fused=())).fused
    wrong = replace(plan.fused[0], kind="rms", eps=0.5)
    with pytest.raises(PlanError, match=r"norm, eps 0\.5"):
        autotp.make_plan(model, 2, replace(plan, fused=(wrong,)))


def test_unshard_gives_the_classes_back():
    model = tiny("llama")
    classes = {name: type(module) for name, module in model.named_modules()}
    autotp.parallelize(model, one_rank())
    assert type(model.model.norm) is not classes["model.norm"]
    autotp.unshard(model)
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert not any(isinstance(module, TensorParallel_Layer) for module in model.modules())


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Norm(), Norm()

    def forward(self, x):
        residual = x
        x = self.first(x).tanh()
        x = residual + x
        residual = x
        x = self.second(x)
        return residual + x


class EditedLayer(Layer):
    def forward(self, x):
        residual = x
        x = self.first(x).tanh()
        x = residual + x
        if self.training:
            x.mul_(3)
        residual = x
        x = self.second(x)
        return residual + x


def outputs_and_gradients(layer: Any, x, run) -> tuple[Any, ...]:
    x = x.clone().requires_grad_()
    y = run(layer, x)
    y.pow(2).sum().backward()
    return y.detach(), x.grad, layer.first.weight.grad, layer.second.weight.grad


def by(reentrant):
    return lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant)


@pytest.mark.parametrize("cls, sums", [(Layer, {"add norm (second)": 1}), (EditedLayer, {})])
@pytest.mark.parametrize("run", [lambda layer, x: layer(x), by(False), by(True)], ids=["plain", "checkpoint", "reentrant"])
def test_sum_and_norm(cls, sums, run):
    plain = cls()
    fused, seen = copy.deepcopy(plain), []
    fuse_modules(fused, Plan(1, "Layer", fused=find_fusions(fused)))
    assert count(find_fusions(plain)) == {"rms norm, eps 1e-06": 2} | sums
    fused.second.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    x = torch.randn(3, 8)
    for got, want in zip(outputs_and_gradients(fused, x, run), outputs_and_gradients(plain, x, run), strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)
    assert seen and all(torch.allclose(plain.second(a), b, atol=1e-6) for a, b in seen)
    assert "ready" not in vars(fused.second)  # nothing outlives the forward


def test_the_sum_leaves_other_norms_alone():
    layer = Layer()
    fuse_modules(layer, Plan(1, "Layer", fused=find_fusions(layer)))
    layer.second = nn.Identity()
    assert torch.equal(layer(x := torch.randn(3, 8)), 2 * (x + layer.first(x).tanh()))


def test_autocast():
    plain = tiny("llama").eval()
    fused, inputs = autotp.parallelize(copy.deepcopy(plain), one_rank()).eval(), {"input_ids": batch(plain)["input_ids"]}
    with torch.no_grad():
        exact = plain(**inputs).logits
        with torch.autocast("cpu", torch.bfloat16):
            want, got = plain(**inputs).logits, fused(**inputs).logits
    assert got.dtype is want.dtype
    assert (got - exact).abs().max() <= 2 * (want - exact).abs().max()


def test_looking_changes_nothing():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp = nn.BatchNorm1d(8), WithActivation()

    model = Model()
    model.mlp.act.eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert count(find_fusions(model)) == {"gated mlp (silu)": 1}
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_modules_of_one_kind_are_tried_out_once(monkeypatch):
    tried = []
    monkeypatch.setattr(block, "find_norm", lambda name, module: tried.append(name) or find_norm(name, module))
    model = nn.ModuleList([Norm(), Norm(), Norm(eps=1e-5), Norm(width=12), Norm()])
    model[4].scale = torch.ones(8)  # an object of its own: nothing tells that it is another's like
    fusions = find_fusions(model)
    assert [(f.name, f.eps) for f in fusions] == [("0", 1e-6), ("1", 1e-6), ("2", 1e-5), ("3", 1e-6), ("4", 1e-6)]
    assert [name for name in tried if name] == ["0", "2", "3", "4"]


class Counting(Norm):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Measuring(Norm):
    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        self.largest.copy_(x.detach().abs().max())
        return super().forward(x)


class InFloat32(Norm):
    def forward(self, x):
        return super().forward(x.float()).float()


class ClampedInHalf(Norm):
    def forward(self, x):
        y = super().forward(x)
        return y.clamp(max=0.5) if x.dtype is torch.float16 else y


class HardlyDropped(Gated):
    def forward(self, x):
        return self.c(F.dropout(F.silu(self.b(x)) * self.a(x), 1e-9, self.training))


@pytest.mark.parametrize("cls", [Counting, Measuring, InFloat32, ClampedInHalf, HardlyDropped])
def test_what_does_more_than_its_numbers_tell(cls):
    module = cls()
    assert find_fusions(module) == ()
    assert getattr(module, "calls", 0) == 0


class DroppedLater(Gated):
    def __init__(self):
        super().__init__()
        self.p, self.act = 0.0, F.silu

    def forward(self, x):
        return self.c(F.dropout(self.act(self.b(x)) * self.a(x), self.p, self.training))


def edit_eps(model):
    for name, module in model.named_modules():
        if "norm" in name:
            module.variance_epsilon = 0.5


def edit_activation(model):
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.ReLU()


def edit_inside_the_activation(model):
    for layer in model.model.layers:
        layer.mlp.act_fn.negative_slope = 0.9


@pytest.mark.parametrize("edit", [edit_eps, edit_activation, edit_inside_the_activation])
def test_attributes_set_afterwards_are_heeded(edit):
    plain = tiny("llama", hidden_act="leaky_relu" if edit is edit_inside_the_activation else "silu")
    fused, inputs = copy.deepcopy(autotp.parallelize(copy.deepcopy(plain), one_rank(), logits="full")), batch(plain)
    before, _ = gradients(fused, inputs)
    edit(plain), edit(fused)
    (loss, want), (own, got) = gradients(plain, inputs), gradients(fused, inputs)
    assert abs(before - loss) > 1e-3 and abs(loss - own) <= 1e-6
    assert all(torch.allclose(got[name], grad, rtol=1e-4, atol=1e-6) for name, grad in want.items())


def fuse(module):
    fused: Any = copy.deepcopy(module)
    fuse_modules(fused, Plan(1, "Module", fused=find_fusions(fused)))
    assert type(fused) is not type(module)
    return fused


def test_dropout_and_functions_set_afterwards():
    plain, x = DroppedLater(), torch.randn(64, 6)
    fused = fuse(plain)
    plain.act = fused.act = F.relu
    assert torch.allclose(fused(x), plain(x), atol=1e-6)
    fused.p = 0.5
    assert not torch.equal(fused(x), fused(x))
    remove_forward(fused)
    assert set(vars(fused)) == set(vars(plain))


class BiasedNorm(Norm):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return F.layer_norm(x, (8,), self.weight, self.bias, self.eps)


def test_a_pruned_bias_is_still_added():
    plain, x = BiasedNorm(), torch.randn(3, 8)
    fused = fuse(plain)
    prune.random_unstructured(fused, "bias", 0.5)
    plain.bias = nn.Parameter(fused.bias.detach().clone())
    assert torch.allclose(fused(x), plain(x), atol=1e-6)


def test_what_differentiates_forward_takes_the_plain_forward():
    plain, x = tiny("llama"), torch.randn(2, 3, 8)
    fused, inputs = autotp.parallelize(copy.deepcopy(plain), one_rank(), logits="full"), batch(plain)

    def loss(parameters, model):
        return torch.func.functional_call(model, parameters, kwargs=inputs).loss

    want = torch.func.grad(loss)(dict(plain.named_parameters()), plain)
    got = torch.func.grad(loss)(dict(fused.named_parameters()), fused)
    assert all(torch.allclose(got[name], grad, rtol=1e-4, atol=1e-6) for name, grad in want.items())
    norm = Norm()
    layer, own = fuse(Layer()), Layer()
    assert torch.allclose(torch.func.jvp(fuse(norm), (x,), (x,))[1], torch.func.jvp(norm, (x,), (x,))[1], atol=1e-6)
    assert torch.allclose(torch.vmap(layer)(x), own(x), atol=1e-6)
    with forward_ad.dual_level():
        tangents = [forward_ad.unpack_dual(each(forward_ad.make_dual(x, x))).tangent for each in (layer, own)]
    assert torch.allclose(*tangents, atol=1e-6)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_found_in_any_mode(mode):
    model = tiny("llama")
    with mode():
        assert count(find_fusions(model)) == FOUND["llama"]


@pytest.mark.parametrize("setting", ["triton", "norm_forward=triton", "torch"])
def test_found_whatever_backend_is_asked_for(setting, monkeypatch):
    monkeypatch.setenv("AUTOTP_BACKEND", setting)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = tiny("llama")
    plan = autotp.make_plan(model, 1)
    assert count(plan.fused) == FOUND["llama"]
    model = autotp.parallelize(model, one_rank(), plan=plan)
    with pytest.raises(KernelUnsupported, match="no backend"):
        model(**batch(model))


def test_adapters_may_give_another_dtype_or_shape():
    plain, x = Gated(), torch.randn(3, 6)
    fused = fuse(plain)
    for module in (plain, fused):
        module.register_module("a", nn.Sequential(nn.Flatten(), nn.Linear(6, 1).requires_grad_(False)))
    fused.a = plain.a
    assert torch.allclose(fused(x), plain(x), atol=1e-6)
    fused.b.register_forward_hook(lambda module, args, output: output.double())
    fused.c.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    assert torch.allclose(fused(x), plain(x), atol=1e-6)


def test_a_rotary_function_patched_before_or_after_is_called(monkeypatch):
    plain = tiny("llama")
    before = autotp.parallelize(copy.deepcopy(plain), one_rank(), logits="full")
    inputs, own = batch(plain), modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin, unsqueeze_dim=1: own(2 * q, k, cos, sin))
    after = autotp.parallelize(copy.deepcopy(plain), one_rank(), logits="full")
    want = plain(**inputs).logits
    assert torch.allclose(before(**inputs).logits, want, atol=1e-5) and torch.allclose(after(**inputs).logits, want, atol=1e-5)


def test_rotary_of_shapes_that_broadcast():
    q, k = torch.randn(1, 3, 5, 8), torch.randn(1, 1, 5, 8)
    for cos in (torch.randn(2, 5, 8), torch.randn(1, 1, 8)):
        got, want = fused_rotary(rotate, "half")(rotate, q, k, cos, cos), rotate(q, k, cos, cos)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
