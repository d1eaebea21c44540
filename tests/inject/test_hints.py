"""Hints for odd forward code: attributes and replacement forwards are proved, stay on the sharded module, and come off again."""

import copy

import pytest
import torch
from torch import nn

import autotp
from autotp.inject.plan import Plan
from autotp.inject.rules import make_plan
from autotp.layers.base import find_group
from tests.inject.test_shaperule import HEAD, HEADS, Attention, E, Model, calls, run


class Spelt(Attention):
    """Heads one by one; how many there are is read from a word, which no search edits."""

    def __init__(self):
        super().__init__()
        self.layout = f"{HEADS}x{HEAD}"

    def mix(self, q, k, v):
        heads, width = map(int, self.layout.split("x"))
        return one_by_one(self, q, k, v, heads, width)


class Checked(Spelt):
    """An integer, which is searched for, must fit the word."""

    def mix(self, q, k, v):
        if int(self.layout.split("x")[0]) != self.h:
            raise ValueError(f"{self.h} heads, not {self.layout}")
        return super().mix(q, k, v)


class Read(Attention):
    """Heads one by one, as many as an integer says: discovery alone splits it."""

    def mix(self, q, k, v):
        return one_by_one(self, q, k, v, self.h, HEAD)


class Counted(Attention):
    """Heads one by one; how many there are is written into the code."""

    def mix(self, q, k, v):
        return one_by_one(self, q, k, v, HEADS, HEAD)


def one_by_one(module, q, k, v, heads, width):
    parts = [[t[..., i * width : (i + 1) * width] for t in (q, k, v)] for i in range(heads)]
    return torch.stack([module.attend(*part) for part in parts], -2).flatten(-2)


def attend_all(module, x):
    q, k, v = (p(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (module.q, module.k, module.v))
    return module.out(module.attend(q, k, v).transpose(1, 2).flatten(-2))


def attend_unscaled(module, x):
    q, k, v = (p(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (module.q, module.k, module.v))
    return module.out(((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(-2))


def attend_without_gradient(module, x):
    q, k, v = (p(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (module.q, module.k, module.v))
    return module.out(module.attend(q.detach(), k, v).transpose(1, 2).flatten(-2))


def attend_in_pairs(module, x):
    return attend_all(module, x), None


def attend_twice(module, x):
    return attend_all(module, x, x)


def attend_counted(module, x):
    """Computes the same, and is no easier to split."""
    return module.out(one_by_one(module, module.q(x), module.k(x), module.v(x), HEADS, HEAD))


def odd(cls, depth=2):
    torch.manual_seed(0)
    return Model(cls, depth).double().eval()


def plan_odd(cls, attrs=None, depth=2, **options):
    return make_plan(odd(cls, depth), 2, inputs=calls(), attrs=attrs, **options)


def spelt(*values):
    return {"layers.*": {"layout": values}}


LOCAL = spelt("2x8", "2x8")
GOOD = {
    "an attribute": (Spelt, LOCAL),
    "of a class": (Spelt, {Spelt: {"layout": ["2x8", "2x8"]}}),
    "a forward": (Counted, {"layers.*": {"forward": attend_all}}),
    "a forward of a class": (Counted, {Counted: {"forward": attend_all}}),
    "a forward and its attribute": (Spelt, {Spelt: {"forward": Spelt.forward, "layout": ("2x8", "2x8")}}),
    "an attribute beside one that is found": (Checked, LOCAL),
    "an attribute that would be found": (Read, {"layers.*": {"h": (2, 2)}}),
}
WRONG = {  # what is refused, and the words of the message: the module, the numbers, a way out
    "too few heads": (Spelt, spelt("1x8", "1x8"), ["layers.0", "layout=('1x8', '1x8')", "shape [2, 5, 8], not", "leave it out"]),
    "half a head": (Spelt, spelt("4x4", "4x4"), ["layers.0", "layout=('4x4', '4x4')", "off by", "leave it out"]),
    "another rank's": (Spelt, spelt("2x8", "1x8"), ["layers.0", "layout=('2x8', '1x8')", "rank 1", "leave it out"]),
    "in place of what would be found": (Read, {"layers.*": {"h": (1, 1)}}, ["layers.0", "h=(1, 1)", "leave it out"]),
    "no such module": (Spelt, {"layer.*.attn": {"layout": ("2x8",) * 2}}, ["'layer.*.attn'", "matches no module", "nearest"]),
    "no such class": (Spelt, {Counted: {"layout": ("2x8",) * 2}}, ["Counted", "matches no module", "nearest: "]),
    "no such attribute": (Spelt, {"layers.*": {"heads": (2, 2)}}, ["'heads'", "layers.0", "does not have", "h"]),
    "one value": (Spelt, {"layers.*": {"layout": "2x8"}}, ["'layout'", "2 ranks", "'2x8'"]),
    "three values": (Spelt, spelt("2x8", "2x8", "2x8"), ["'layout'", "2 ranks"]),
    "twice": (Spelt, {**LOCAL, Spelt: {"layout": ("1x8", "1x8")}}, ["layers.0", "'1x8'", "'2x8'"]),
    "nothing split there": (Spelt, {"inp": {"in_features": (E, E)}}, ["inp", "in_features=(32, 32)", "leave it out"]),
    "no mapping": (Spelt, ["layout"], ["attrs=['layout']"]),
    "nothing said": (Spelt, {"layers.*": {}}, ["attrs['layers.*']"]),
    "other numbers": (Counted, {"layers.*": {"forward": attend_unscaled}}, ["layers.0", "output 0", "off by", "leave it out"]),
    "other gradients": (Counted, {"layers.*": {"forward": attend_without_gradient}}, ["layers.0", "gradient of", "off by"]),
    "another form": (Counted, {"layers.*": {"forward": attend_in_pairs}}, ["layers.0", "tuple of 2", "Tensor"]),
    "it fails": (Counted, {"layers.*": {"forward": attend_twice}}, ["layers.0", "attend_twice", "TypeError", "leave it out"]),
    "no better": (Counted, {"layers.*": {"forward": attend_counted}}, ["layers.0", "attend_counted", "no split", "leave it out"]),
    "no function": (Counted, {"layers.*": {"forward": "attend_all"}}, ["'attend_all'", "function"]),
    "a layer's own": (Counted, {"layers.*.q": {"forward": nn.Linear.forward}}, ["layers.0.q", "forward", "leave it out"]),
}


@pytest.mark.parametrize("cls", [Spelt, Checked, Counted])
def test_they_are_odd(cls):
    plan = plan_odd(cls)
    assert not plan.regions and "layers.0" not in plan.by_name
    assert {m.style for m in plan.modules} == {"colwise_gather_output"}


@pytest.mark.parametrize("case", list(GOOD))
def test_a_hint_lets_it_be_split(case):
    cls, attrs = GOOD[case]
    plan = plan_odd(cls, attrs)
    assert plan.proof == "proved" and {region.scope for region in plan.regions} == {"layers.0", "layers.1"}
    assert plan.split_share > 0.85 and Plan.from_json(plan.to_json()) == plan
    given = next(iter(attrs.values()))
    for name in ("layers.0", "layers.1"):
        assert plan[name].attrs.items() >= {key: tuple(values) for key, values in given.items() if key != "forward"}.items()
        assert (plan[name].forward is not None) == ("forward" in given)
    if "forward" in given:
        assert f"forward {given['forward'].__module__}:{given['forward'].__qualname__}" in str(plan)


def test_what_is_not_given_is_searched_for():
    assert plan_odd(Checked, LOCAL)["layers.0"].attrs == {"layout": ("2x8", "2x8"), "h": (2, 2)}
    assert plan_odd(Read)["layers.0"].attrs == {"h": (2, 2)}


def test_layers_that_others_stand_for_have_the_hints_too():
    for cls, attrs in (GOOD["an attribute"], GOOD["a forward"]):
        plan = plan_odd(cls, attrs, depth=6)
        assert len(plan.regions) == 6
        assert len({(tuple(plan[f"layers.{i}"].attrs.items()), plan[f"layers.{i}"].forward) for i in range(6)}) == 1


def test_a_hint_of_one_layer_of_many_splits_that_one():
    plan = plan_odd(Spelt, {"layers.4": {"layout": ("2x8", "2x8")}}, depth=6)
    assert [region.scope for region in plan.regions] == ["layers.4"] and plan["layers.4"].attrs == {"layout": ("2x8", "2x8")}
    assert not any(plan.by_name[name].attrs for name in plan.by_name if name != "layers.4")


PAIR = {**{f"layers.*.{name}": {"style": "colwise", "unit": HEAD} for name in "qkv"}}
PAIR["layers.*.out"] = {"style": "rowwise", "unit": HEAD}


def test_hints_go_with_a_dict_too():
    inside = plan_odd(Spelt, plan={**PAIR, "layers.*": {"attrs": {"layout": ["2x8", "2x8"]}}})
    assert inside.proof == "proved" and inside["layers.1"].attrs == {"layout": ("2x8", "2x8")}
    assert plan_odd(Spelt, LOCAL, plan=PAIR)["layers.1"].attrs == {"layout": ("2x8", "2x8")}
    assert plan_odd(Counted, plan={**PAIR, "layers.*": {"forward": attend_all}})["layers.1"].forward
    with pytest.raises(autotp.ProofError, match="attend_unscaled"):
        plan_odd(Counted, plan={**PAIR, "layers.*": {"forward": attend_unscaled}})
    with pytest.raises(autotp.ProofError, match="does not compute"):
        plan_odd(Spelt, spelt("4x4", "4x4"), plan=PAIR)


def test_a_plan_says_which_forward_it_needs():
    plan = Plan.from_json(plan_odd(*GOOD["a forward"]).to_json())
    with pytest.raises(autotp.PlanError, match=r"layers.0: .*test_hints:attend_all.*none was given.*attrs="):
        plan_odd(Counted, plan=plan)
    with pytest.raises(autotp.PlanError, match=r"attend_all.*attend_counted was given"):
        plan_odd(Counted, {Counted: {"forward": attend_counted}}, plan=plan)
    assert plan_odd(Counted, GOOD["a forward"][1], plan=plan) == plan
    plain = Plan.from_json(plan_odd(*GOOD["an attribute"]).to_json())
    assert plan_odd(Spelt, plan=plain) == plain  # its edits are its own
    with pytest.raises(autotp.PlanError, match=r"layers.0.*edit the plan"):
        plan_odd(Spelt, LOCAL, plan=plain)
    with pytest.raises(autotp.PlanError, match=r"made without .*attend_all"):
        plan_odd(Spelt, {"layers.*": {"forward": attend_all}}, plan=plain)


def test_a_forward_that_no_call_runs_is_not_proved():
    model = odd(Counted)
    model.spare = Counted().double()
    with pytest.raises(autotp.PlanError, match=r"spare: no example call runs it"):
        make_plan(model, 2, inputs=calls(), attrs={"spare": {"forward": attend_all}})


# -- on real ranks ----------------------------------------------------------------------------------------------------------


def check_good(group, case):
    cls, attrs = GOOD[case]
    plain, inputs = odd(cls), {"x": calls()[0]["x"].double()}
    expected, grads = run(plain, inputs)
    model = copy.deepcopy(plain)
    autotp.parallelize(model, group, inputs=calls(), attrs=attrs)
    assert model.layers[1].q.weight.shape == (E // 2, E)
    for each in (model, copy.deepcopy(model)):
        got, got_grads = run(each, inputs)
        torch.testing.assert_close(got, expected)
        for name, grad in grads.items():
            torch.testing.assert_close(got_grads[name], grad, msg=name)
    autotp.unshard(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert all(vars(a).get("layout") == vars(b).get("layout") for a, b in zip(model.layers, plain.layers, strict=True))
    assert all(value.equal(plain.state_dict()[name]) for name, value in model.state_dict().items())
    assert run(model, inputs)[0].equal(expected)


@pytest.mark.parametrize("case", list(GOOD))
def test_hints_on_two_ranks(ranks, case):
    ranks.run(check_good, case)


def snapshot(model):
    kept = [(type(m), {k: v for k, v in vars(m).items() if k[:1] != "_"}) for m in model.modules()]
    return kept, {name: value.clone() for name, value in model.state_dict().items()}


def check_wrong(group, case):
    cls, attrs, words = WRONG[case]
    model = odd(cls)
    before, state = snapshot(model)
    with pytest.raises((autotp.PlanError, autotp.ProofError)) as refused:
        autotp.parallelize(model, group, inputs=calls(), attrs=attrs)
    assert all(word in str(refused.value) for word in words), str(refused.value)
    after, now = snapshot(model)
    assert find_group(model) is None and after == before and all(now[name].equal(value) for name, value in state.items())


@pytest.mark.parametrize("case", list(WRONG))
def test_a_wrong_hint_is_refused_before_anything_changes(ranks, case):
    ranks.run(check_wrong, case)


def check_differing(group):
    mine = LOCAL if group.rank() == 0 else spelt("1x8", "1x8")
    with pytest.raises(autotp.AutoTPError, match="other attrs= arguments"):
        autotp.parallelize(odd(Spelt), group, inputs=calls(), attrs=mine)


def test_ranks_with_other_hints_are_named(ranks):
    ranks.run(check_differing)
