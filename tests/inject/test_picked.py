"""Modules that a forward picks from (experts in a list, adapters by language), and modules that it uses several times."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import autotp
from autotp.inject.rules import make_plan
from tests.inject.test_families import full_gradients


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Experts(nn.Module):
    """Each token is sent to the expert that its router likes best; experts without tokens do not run."""

    def __init__(self, width, count):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(count))

    def forward(self, x):
        tokens = self.norm(x).flatten(0, -2)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        y = torch.zeros_like(tokens)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().flatten()
            y.index_add_(0, rows, self.experts[number](tokens[rows]) * weight[rows, None])
        return x + y.view_as(x)


class Sparse(nn.Module):
    def __init__(self, count, layers=3, width=16):
        super().__init__()
        self.layers = nn.ModuleList(Experts(width, count) for _ in range(layers))
        self.head = nn.Linear(width, width)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Tongues(nn.Module):
    """One adapter a language; a call runs one of them, and not the first."""

    def __init__(self, width=16):
        super().__init__()
        self.norm, self.adapters = nn.LayerNorm(width), nn.ModuleDict({name: Expert(width) for name in ("de", "en", "fr")})

    def forward(self, x, tongue="fr"):
        return x + self.adapters[tongue](self.norm(x))


class Repeated(nn.Module):
    """One layer used several times, under several names."""

    def __init__(self, width=16):
        super().__init__()
        layers = [nn.Sequential(nn.LayerNorm(width), Expert(width)) for _ in range(2)]
        self.layers = nn.ModuleList(layers * 4)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class Odd(nn.Module):
    """Like layers, one of which the model uses otherwise: it runs or reads its parts itself."""

    def __init__(self, how, width=16):
        super().__init__()
        self.layers, self.how = nn.ModuleList(Expert(width) for _ in range(7)), how

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if number != 5:
                x = x + layer(x)
            elif self.how == "parts":
                x = x + layer.down(layer.up(x).cumsum(-1))
            elif self.how == "weight":
                x = x + nn.functional.linear(layer.up(x).relu(), layer.down.weight.flip(1))
            else:
                x = x + layer(x) * layer.up(x).mean(-1, keepdim=True)
        return x


class Halves(Sparse):
    """Half of the experts have the first one's second layer, so those that get no token still hold it."""

    def __init__(self, count):
        super().__init__(count, layers=2)
        for layer in self.layers:
            for expert in layer.experts[count // 2 :]:
                expert.down = layer.experts[0].down


def build(kind):
    torch.manual_seed(0)
    if kind in ("parts", "weight", "both"):
        return Odd(kind), torch.randn(2, 3, 16)
    made = {"few": lambda: Sparse(3), "many": lambda: Sparse(12, layers=6), "halves": lambda: Halves(24)}
    made |= {"tongues": Tongues, "repeated": Repeated}
    return made[kind](), torch.randn(2, 3, 16)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", [4, 40])
def test_experts_that_get_no_token_are_planned_like_those_that_do(seed, count):
    torch.manual_seed(seed)
    model = Sparse(count)
    plan = make_plan(model, 2, inputs={"x": torch.randn(2, 3, 16)})
    split = {f"layers.{layer}.experts.{n}.{name}" for layer in range(3) for n in range(count) for name in ("up", "down")}
    assert split <= set(plan.by_name) and plan.proof == "proved"
    assert not any(plan[name].style == "colwise_gather_output" for name in split)


def check(group, kind):
    model, x = build(kind)
    sharded = autotp.parallelize(copy.deepcopy(model), group, inputs={"x": x})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    calls = [{"tongue": name} for name in ("de", "en", "fr")] if kind == "tongues" else [{}]
    for number, kwargs in enumerate(calls):
        x = torch.randn(5, 7, 16, generator=torch.Generator().manual_seed(number))  # other tokens reach other experts
        expected, seen = model(x, **kwargs), sharded(x, **kwargs)
        torch.testing.assert_close(seen, expected)
        expected.square().sum().backward()
        seen.square().sum().backward()
    full = autotp.full_state_dict(sharded)
    assert full.keys() == (before.keys() if group.rank() == 0 else set())
    assert all(torch.equal(full[name], before[name]) for name in full)
    expected, seen = full_gradients(model), full_gradients(sharded)
    assert expected.keys() == seen.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(seen[name], gradient, atol=1e-4, rtol=1e-4, msg=name)
    held = sum(p.numel() for p in sharded.parameters()) / sum(p.numel() for p in model.parameters())
    return len(expected), held


@pytest.mark.parametrize("kind", ["few", "many", "tongues", "repeated", "halves", "parts", "weight", "both"])
def test_equals_the_unsharded_model(ranks, kind):
    most = {"weight": 0.65, "halves": 1.01}.get(kind, 0.6)  # of the parameters, on a rank; halves are right, and may be whole
    for reached, held in ranks.run(check, kind):
        assert reached > 6 and held < most


def leave_whole(plan, *names):
    kept = tuple(r for r in plan.regions if not set(names) & {*r.columns, *r.rows})
    return replace(plan, modules=tuple(m for m in plan.modules if m.name not in names), regions=kept)


def test_an_edited_plan_is_proved_on_every_member_that_it_treats_differently():
    model, x = build("many")
    plan = make_plan(model, 2, inputs={"x": x})
    assert make_plan(model, 2, plan=plan, inputs={"x": x}).proof == "proved"
    expert = "layers.4.experts.9"
    edited = make_plan(model, 2, plan=leave_whole(plan, f"{expert}.up", f"{expert}.down"), inputs={"x": x})
    assert edited.proof == "proved" and f"{expert}.up" not in edited.by_name
    with pytest.raises(autotp.errors.AutoTPError, match=expert):
        make_plan(model, 2, plan=leave_whole(plan, f"{expert}.down"), inputs={"x": x})


def test_picked_modules_with_hints_of_their_own_stand_for_no_other():
    """A hint is about the module that it names, also where a like one would stand for it."""
    model, x = build("tongues")
    for adapter in model.adapters.values():
        adapter.size = 7
    attrs = {"adapters.en": {"size": (3, 4)}}
    with pytest.raises(
        autotp.errors.AutoTPError, match=r"adapters\.en"
    ):  # it never runs, so nothing shows that the hint is right
        make_plan(model, 2, inputs={"x": x}, attrs=attrs)
    plan = make_plan(model, 2, inputs={"x": x}, attrs={"adapters.*": {"size": (3, 4)}})
    assert all(plan[f"adapters.{name}"].attrs["size"] == (3, 4) for name in ("de", "en", "fr"))


class OneBias(nn.Module):
    """Two linears that share a bias, one of which would be split by its columns and the other by its rows."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.rest = nn.Linear(16, 16), nn.Linear(16, 16), Expert(16)
        self.down.bias = self.up.bias

    def forward(self, x):
        return self.rest(self.down(self.up(x).relu()))


def test_what_can_not_be_split_alike_stays_whole():
    plan = make_plan(OneBias(), 2, inputs={"x": torch.randn(2, 5, 16)})
    assert set(plan.shards) == {"rest.up.weight", "rest.up.bias", "rest.down.weight"} and plan.proof == "proved"
    assert "shares a Parameter" in {entry.name: entry.reason for entry in plan.whole}["up.weight"]
