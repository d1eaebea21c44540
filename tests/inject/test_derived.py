"""Weights that a forward computes from Parameters are split with what they are computed from, or left whole."""

import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import autotp
from autotp.inject.record import Recorder
from autotp.inject.rules import make_plan
from autotp.inject.shadow import Shadow
from autotp.shard import Shard
from tests.inject.test_families import full_gradients

H, WIDTH, HEADS, RANK = 16, 48, 4, 3
INPUTS = [{"x": torch.randn(2, 5, H)}, {"x": torch.randn(3, 4, H)}]

WEIGHTS = {
    "weight norm": lambda m: m.v * (m.g / m.v.norm(dim=1, keepdim=True)),
    "scaled inputs": lambda m: m.v * m.scale,
    "low rank": lambda m: m.v + m.a @ m.b,
    "rows normalised": lambda m: F.normalize(m.v, dim=1),
    "standardised": lambda m: (m.v - m.v.mean(1, keepdim=True)) / m.v.std(1, keepdim=True),
    "masked": lambda m: m.v * m.mask,
    "transposed": lambda m: (m.v * m.scale[:, None]).t(),
    "whole norm": lambda m: m.v / m.v.norm(),
    "columns normalised": lambda m: F.normalize(m.v, dim=0),
}
USED = {"weight norm": "g", "scaled inputs": "scale", "low rank": "ab", "masked": "mask", "transposed": "scale"}


def make(shape):
    return nn.Parameter(torch.randn(shape) * 0.3)


class MLP(nn.Module):
    """`up` is a computed weight, or a layer with one; `down` a plain layer."""

    def __init__(self, kind):
        super().__init__()
        self.kind, used = kind, USED.get(kind, "")
        if kind in WEIGHTS:
            self.v = make((H, WIDTH) if kind == "transposed" else (WIDTH, H))
        if "g" in used:
            self.g = make((WIDTH, 1))
        if "scale" in used:
            self.scale = make((H,))
        if "a" in used and "b" in used:
            self.a, self.b = make((WIDTH, RANK)), make((RANK, H))
        if "mask" in used:
            self.register_buffer("mask", torch.rand(WIDTH, H) > 0.3)
        if kind in LAYERS:
            self.up = LAYERS[kind](nn.Linear(H, WIDTH))
        self.down = nn.Linear(WIDTH, H)

    def forward(self, x):
        y = F.linear(x, WEIGHTS[self.kind](self)) if self.kind in WEIGHTS else self.up(x)
        return self.down(F.gelu(y))


def old_weight_norm(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nn.utils.weight_norm(layer)


class Masked(nn.Linear):
    """Builds on the plain forward only where nothing is masked."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features)
        self.register_buffer("mask", torch.rand(self.weight.shape) > 0.3)

    def forward(self, x):
        return super().forward(x) if bool(self.mask.all()) else F.linear(x, self.weight * self.mask, self.bias)


LAYERS = {
    "a layer that masks": Masked,
    "a layer with weight norm": parametrizations.weight_norm,
    "a layer with old weight norm": old_weight_norm,
    "a layer with a pruned weight": lambda layer: prune.random_unstructured(layer, "weight", 0.3),
    "a layer with spectral norm": parametrizations.spectral_norm,
}


class Attention(nn.Module):
    """q, k and v have weight norm, o has none."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (parametrizations.weight_norm(nn.Linear(H, H)) for _ in range(3))
        self.o = nn.Linear(H, H)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, H // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Both(nn.Module):
    """Columns and rows are computed, in the module's own forward."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.bias = make((WIDTH, H)), make((H, WIDTH)), make((H,))
        self.a, self.b, self.scale = make((H, RANK)), make((RANK, WIDTH)), make((WIDTH,))

    def forward(self, x):
        return F.linear(F.silu(F.linear(x, self.up.tanh())), self.down * self.scale + self.a @ self.b, self.bias)


class Packed(nn.Module):
    """Two weights are halves of one that is computed."""

    def __init__(self):
        super().__init__()
        self.both, self.scale, self.down = make((2 * WIDTH, H)), make((H,)), nn.Linear(WIDTH, H)

    def forward(self, x):
        gate, up = (self.both * self.scale).chunk(2)
        return self.down(F.silu(F.linear(x, gate)) * F.linear(x, up))


class Standardised(nn.Conv1d):
    def forward(self, x):
        weight = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(weight, None, None, training=True, momentum=0.0, eps=1e-6).reshape_as(self.weight)
        return F.conv1d(x, weight, self.bias, padding=1)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = Standardised(H, WIDTH, 3), nn.Conv1d(WIDTH, H, 1)

    def forward(self, x):
        return self.down(F.gelu(self.up(x.transpose(1, 2)))).transpose(1, 2)


class Net(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(H), inner, nn.Linear(H, 4)

    def forward(self, x):
        return self.out(x + self.inner(self.norm(x)))


def build(kind):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        own = {"attention": Attention, "both": Both, "packed": Packed, "convolutions": Convolutions}
        return Net(own[kind]() if kind in own else MLP(kind))
    finally:
        torch.set_default_dtype(torch.float32)


SPLIT = {  # what is dealt, and along which dim
    "weight norm": {"v": 0, "g": 0, "down.weight": 1},
    "scaled inputs": {"v": 0, "down.weight": 1},
    "low rank": {"v": 0, "a": 0, "down.weight": 1},
    "rows normalised": {"v": 0, "down.weight": 1},
    "standardised": {"v": 0, "down.weight": 1},
    "masked": {"v": 0, "mask": 0, "down.weight": 1},
    "transposed": {"v": 1, "down.weight": 1},
    "packed": {"both": 0, "down.weight": 1},
    "a layer that masks": {"up.weight": 0, "up.bias": 0, "up.mask": 0, "down.weight": 1},
    "a layer with weight norm": {f"up.parametrizations.weight.original{i}": 0 for i in (0, 1)} | {"up.bias": 0, "down.weight": 1},
    "a layer with old weight norm": {"up.weight_g": 0, "up.weight_v": 0, "up.bias": 0, "down.weight": 1},
    "a layer with a pruned weight": {"up.weight_orig": 0, "up.weight_mask": 0, "up.bias": 0, "down.weight": 1},
    "both": {"up": 0, "down": 1, "scale": 0, "b": 1},
    "convolutions": {"up.weight": 0, "up.bias": 0, "down.weight": 1},
    "attention": {f"{n}.parametrizations.weight.original{i}": 0 for n in "qkv" for i in (0, 1)}
    | {f"{n}.bias": 0 for n in "qkv"}
    | {"o.weight": 1},
}
WHOLE = ["whole norm", "columns normalised", "a layer with spectral norm"]


def run_once(model, x):
    y = model(x)
    y.square().sum().backward()
    return y.detach()


def check_same(group, kind):
    """Outputs, every gradient, the whole state dict, and the module after unshard."""
    x = torch.randn(2, 6, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain, model = build(kind).eval(), autotp.parallelize(build(kind).eval(), group, inputs=INPUTS)
    expected, got = run_once(plain, x), run_once(model, x)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    grads = full_gradients(model)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-9, atol=1e-9, msg=name)
    weights, state = autotp.full_state_dict(model), plain.state_dict()
    if dist.get_rank(group) == 0:
        assert set(weights) == set(state) and all(weights[name].equal(value) for name, value in state.items())
    if kind in LAYERS and kind in SPLIT and "old" not in kind and "pruned" not in kind:  # these compute it in a hook of forward
        with autotp.GatherReplacedLayerParams(list(model.parameters()), model):
            assert model.inner.up.weight.equal(plain.inner.up.weight)
    own = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    whole = autotp.unshard(model)
    assert all(value.equal(state[name]) for name, value in whole.state_dict().items())
    torch.testing.assert_close(run_once(whole, x), expected)
    return own, {name: tuple(value.shape) for name, value in state.items()}


@pytest.mark.parametrize("kind", [*SPLIT, *WHOLE])
def test_splits_and_computes_the_same(ranks, kind):
    own, full = ranks.run(check_same, kind)[0]
    dealt = {name: dim for name in full for dim, (a, b) in enumerate(zip(own[name], full[name], strict=True)) if a != b}
    expected = {f"inner.{name}": dim for name, dim in SPLIT.get(kind, {}).items()}
    if kind in WHOLE:  # the plain layer's output may be gathered
        assert set(dealt) <= {"inner.down.weight", "inner.down.bias"}
    else:
        assert {name: dim for name, dim in dealt.items() if name.startswith("inner.")} == expected


# -- wrong plans ------------------------------------------------------------------------------------------------------------


def change(plan, name, **fields):
    """`plan` with fields of the module `name` replaced; a callable is given the module plan."""
    (module,) = (m for m in plan.modules if m.name == name)
    new = {key: value(module) if callable(value) else value for key, value in fields.items()}
    return replace(plan, modules=tuple(replace(m, **new) if m is module else m for m in plan.modules))


def without(name):
    return lambda module: {key: shard for key, shard in module.shards.items() if key != name}


def exchanged(name):
    """The ranks' parts of one Parameter exchanged."""
    return lambda m: {**m.shards, name: Shard.from_indices(m.shards[name].shape, 0, [range(24, 48), range(24)])}


WN = "inner.up.parametrizations.weight"
CONTROLS = {
    "a gain left whole": ("weight norm", "inner", {"shards": without("g")}, "forward fails"),
    "another rank's gains": ("weight norm", "inner", {"shards": exchanged("g")}, "inner.v: the weight computed from it"),
    "another rank's gains in a layer": ("a layer with weight norm", WN, {"shards": exchanged("original0")}, "computed from it"),
    "another rank's mask": ("masked", "inner", {"shards": exchanged("mask")}, "inner.v: the weight computed from it"),
    "a summed gradient dropped": ("low rank", "inner", {"summed": ()}, "the gradient of inner.b"),
    "of a scale": ("scaled inputs", "inner", {"summed": ()}, "the gradient of inner.scale"),
    "of a row's": ("both", "inner", {"summed": ()}, "the gradient of inner.a"),
    "an input not entered": ("weight norm", "inner", {"inputs": ()}, "the gradient"),
    "a layer's input not entered": ("a layer with weight norm", "inner.up", {"inputs": ()}, "the gradient"),
    "parts not added up": ("both", "inner", {"outputs": ()}, "."),
}


@pytest.mark.parametrize("case", list(CONTROLS))
def test_a_wrong_plan_is_refused(case):
    kind, name, fields, why = CONTROLS[case]
    model = build(kind)
    plan = make_plan(model, 2, inputs=INPUTS)
    wrong = change(plan, name, **fields)
    assert wrong != plan, "the control changes nothing"
    assert make_plan(model, 2, plan=plan, inputs=INPUTS).modules == plan.modules
    with pytest.raises(autotp.errors.ProofError, match=why):
        make_plan(model, 2, plan=wrong, inputs=INPUTS)


def test_layers_that_read_one_input_enter_it_once():
    plan = make_plan(build("attention"), 2, inputs=INPUTS)
    entering = [(m.name, [i.argument for i in m.inputs]) for m in plan.modules if m.inputs]
    assert entering == [("inner", ["x"])]


class Residual(nn.Module):
    """Without a norm the residual stream itself might be dealt, with `inner.v` as a row: but its module goes on with gelu."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.out = nn.Linear(H, H), MLP("scaled inputs"), nn.Linear(H, H)

    def forward(self, x):
        x = self.first(x)
        return self.out(x + self.inner(x))


class Bent(nn.Module):
    def __init__(self):
        super().__init__()
        self.v, self.scale = make((WIDTH, 2 * WIDTH)), make((2 * WIDTH,))

    def forward(self, x):
        return F.gelu(F.linear(x, self.v * self.scale))


class Chain(nn.Module):
    """`inner.v` as a row of `first` is the largest region; what `inner` returns is no sum of the ranks' parts."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.out = nn.Linear(H, 2 * WIDTH), Bent(), nn.Linear(WIDTH, H)

    def forward(self, x):
        return self.out(self.inner(F.gelu(self.first(x))))


@pytest.mark.parametrize("make_model", [Residual, Chain])
def test_rows_whose_parts_no_module_could_add_up_are_columns(make_model):
    plan = make_plan(make_model(), 2, inputs=INPUTS)
    assert plan.shards["inner.v"].cuts[0].dim == 0


def test_a_layer_shows_its_own_number_of_outputs():
    assert make_plan(build("a layer with weight norm"), 2, inputs=INPUTS)["inner.up"].attrs == {"out_features": (24, 24)}


WEIGHTS["hidden whole norm"] = lambda m: m.v / m.v.norm().detach()  # its gradient alone does not show it
WEIGHTS["hidden whole threshold"] = lambda m: m.v * (m.v.abs() > m.v.abs().mean())


@pytest.mark.parametrize("kind", ["whole norm", "columns normalised", "hidden whole norm", "hidden whole threshold"])
def test_a_weight_that_no_rank_can_compute_from_its_rows_is_refused(kind):
    plan = make_plan(build("rows normalised"), 2, inputs=INPUTS)
    assert "inner.v" in plan.shards
    with pytest.raises(autotp.errors.ProofError):
        make_plan(build(kind), 2, plan=plan, inputs=INPUTS)
    assert "inner.v" not in make_plan(build(kind), 2, inputs=INPUTS).shards


# -- what is a weight, and what is data ---------------------------------------------------------------------------------------


class Queries(nn.Module):
    """Learned queries attend to the input; a weight is changed by it."""

    def __init__(self):
        super().__init__()
        self.queries, self.scale = make((6, H)), make((H,))
        self.q, self.k = nn.Linear(H, H), nn.Linear(H, H)
        self.changed, self.written, self.out = make((H, H)), make((H, H)), make((H, H))

    def forward(self, x):
        q = self.q(F.layer_norm(self.queries, (H,)) * self.scale).expand(len(x), -1, -1)
        y = (q @ self.k(x).transpose(1, 2)).softmax(-1) @ x
        y = F.linear(y, self.changed * x.mean())
        written = self.written * self.scale
        written[0] = x[0, 0]
        return F.linear(F.linear(y, written), self.out.to(torch.float32) * torch.ones(H))


def test_what_an_activation_came_into_is_no_weight():
    recorder = Recorder(Shadow(Queries()))
    recorder.run({"x": INPUTS[0]["x"].double()})
    assert {key[0] for key in recorder.record.sites} == {"q.weight", "k.weight", "out"}
    assert {key[0] for key, site in recorder.record.sites.items() if site.sources} == {"out"}


def test_frozen_parameters_are_split_alike():
    model = build("low rank")
    model.inner.v.requires_grad_(False)
    assert make_plan(model, 2, inputs=INPUTS).shards == make_plan(build("low rank"), 2, inputs=INPUTS).shards
