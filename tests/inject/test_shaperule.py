"""Forwards that write full widths into shapes get plans with fixes, which prove, and run on real ranks as the plain model."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import autotp
from autotp.inject.plan import Plan
from autotp.inject.rules import make_plan
from autotp.inject.shaperule import find_held, target_shape
from autotp.layers.base import sharded_modules

HEADS, HEAD, E = 4, 8, 32


class Attention(nn.Module):
    """Four projections; `mix` is what a spelling does between them."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(E, E) for _ in range(4))
        self.h = HEADS

    def forward(self, x):
        return self.out(self.mix(self.q(x), self.k(x), self.v(x)))

    def attend(self, q, k, v, bias=None):
        scores = q @ k.transpose(-2, -1) / HEAD**0.5
        return (scores if bias is None else scores + bias).softmax(-1) @ v


class Local(Attention):
    """nanoGPT's spelling: widths are local variables."""

    def mix(self, q, k, v):
        B, T, C = v.shape[0], v.shape[1], E
        q, k, v = (t.view(B, T, self.h, C // self.h).transpose(1, 2) for t in (q, k, v))
        return self.attend(q, k, v).transpose(1, 2).contiguous().view(B, T, C)


class Merged(Attention):
    """Batch and heads are one axis."""

    def mix(self, q, k, v):
        B, T, C, heads = v.shape[0], v.shape[1], E, HEADS
        q, k, v = (t.reshape(B, T, heads, C // heads).transpose(1, 2).reshape(B * heads, T, C // heads) for t in (q, k, v))
        y = self.attend(q, k, v).view(B, heads, T, C // heads)
        return y.transpose(1, 2).reshape(B, T, C)


class Packed(Attention):
    """One projection, taken apart by a width."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)
        del self.q, self.k, self.v

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.qkv(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.h, C // self.h).transpose(1, 2) for t in (q, k, v))
        return self.out(self.attend(q, k, v).transpose(1, 2).contiguous().view(B, T, C))


class Checked(Attention):
    """An attribute is compared with what a local variable made."""

    def mix(self, q, k, v):
        B, T, C = v.shape[0], v.shape[1], E
        q, k, v = (t.view(B, T, HEADS, HEAD).transpose(1, 2) for t in (q, k, v))
        y = self.attend(q, k, v)
        if y.size() != (B, self.h, T, HEAD):
            raise ValueError(f"attention is of size {y.size()}")
        return y.transpose(1, 2).reshape(B, T, C)


class Biased(Attention):
    """A bias for every head, computed, meets local heads."""

    def mix(self, q, k, v):
        B, T, C = v.shape[0], v.shape[1], E
        q, k, v = (t.view(B, T, -1, HEAD).transpose(1, 2) for t in (q, k, v))
        slopes = 2.0 ** -torch.arange(1, HEADS + 1, device=q.device, dtype=q.dtype)
        away = torch.arange(T, device=q.device).view(1, T) - torch.arange(T, device=q.device).view(T, 1)
        bias = slopes.view(HEADS, 1, 1) * away
        return self.attend(q, k, v, bias).transpose(1, 2).reshape(B, T, C)


SPELLINGS = [Local, Merged, Packed, Checked, Biased]


class Model(nn.Module):
    def __init__(self, spelling, depth):
        super().__init__()
        self.inp = nn.Linear(E, E)
        self.layers = nn.ModuleList(spelling() for _ in range(depth))

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def toy(spelling, depth=2):
    torch.manual_seed(0)
    return Model(spelling, depth)


def calls():
    return [{"x": torch.randn(2, 5, E)}, {"x": torch.randn(3, 7, E)}]


def plan_toy(spelling, tp_size=2):
    return make_plan(toy(spelling), tp_size, inputs=calls())


def fixes_of(plan):
    return [fix for module in plan.modules for fix in module.fixes]


@pytest.mark.parametrize("tp_size", [2, 3])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_split(spelling, tp_size):
    plan = plan_toy(spelling, tp_size)
    assert plan.proof == "proved"
    assert {r.scope for r in plan.regions} == {"layers.0", "layers.1"}
    assert fixes_of(plan)
    assert Plan.from_json(plan.to_json()) == plan
    assert make_plan(toy(spelling), tp_size, plan=plan, inputs=calls()) == plan


def test_what_each_needs():
    kinds = {spelling: {fix.kind for fix in fixes_of(plan_toy(spelling))} for spelling in SPELLINGS}
    assert kinds == {
        Local: {"shape"},
        Merged: {"shape"},
        Packed: {"shape", "split"},
        Checked: {"shape"},
        Biased: {"narrow", "shape"},
    }
    assert all(m.attrs == {"h": (2, 2)} for m in plan_toy(Checked).modules if m.fixes)
    assert "own sizes in" in str(plan_toy(Local))


def test_layers_that_others_stand_for_have_the_fixes_too():
    plan = make_plan(toy(Local, depth=6), 2, inputs=calls())
    assert [len(plan[f"layers.{i}"].fixes) for i in range(6)] == [len(plan["layers.0"].fixes)] * 6 != [0] * 6


def wrong(fix):
    """The same fix with another size, or other indices."""
    if fix.kind == "shape":
        return replace(fix, sizes={axis: tuple(n * 2 for n in sizes) for axis, sizes in fix.sizes.items()})
    if fix.kind == "split":
        return replace(fix, sections=tuple((a + 1, b - 1, *rest) for a, b, *rest in fix.sections))
    return replace(fix, runs=fix.runs[::-1])


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_wrong_fix_is_refused(spelling):
    plan = plan_toy(spelling)
    module = next(m for m in plan.modules if m.fixes)
    for number, fix in enumerate(module.fixes):
        for changed in (
            (*module.fixes[:number], wrong(fix), *module.fixes[number + 1 :]),
            module.fixes[:number] + module.fixes[number + 1 :],
        ):
            other = replace(plan, modules=tuple(replace(m, fixes=changed) if m is module else m for m in plan.modules))
            with pytest.raises(autotp.errors.AutoTPError):
                make_plan(toy(spelling), 2, plan=other, inputs=calls())


def test_what_the_proof_can_not_see_gets_no_fix():
    """Over one token the softmax hides queries and keys, so no gradient says what narrowing their scores leaves partial."""
    one = [{"x": torch.randn(2, 1, E)}, {"x": torch.randn(3, 1, E)}]
    plan = make_plan(toy(Biased), 2, inputs=one)
    assert not plan.regions and not fixes_of(plan)


def eager_attention_forward(module, x, width):
    return x.view(*x.shape[:2], HEADS, width).tanh()


class Exchanged(Attention):
    """What is found by this name runs in the proof alone, where another attention is configured."""

    def mix(self, q, k, v):
        return eager_attention_forward(self, v, HEAD).reshape(*v.shape)


def test_code_that_may_be_exchanged_gets_no_fix():
    assert not fixes_of(plan_toy(Exchanged))


def test_another_source_is_refused():
    plan = plan_toy(Local)
    changed = tuple(replace(m, fixes=tuple(replace(f, text="x.view(1)") for f in m.fixes)) for m in plan.modules)
    with pytest.raises(autotp.errors.PlanError, match="source differs"):
        make_plan(toy(Local), 2, plan=replace(plan, modules=changed), inputs=calls())


def test_indices_are_found_by_value():
    whole = torch.randn(6, 5, 8, dtype=torch.float64)
    assert find_held(whole[:, :, 2:4] + 1e-14, whole) == (2, (2, 3))
    assert find_held(whole[:, [0, 3]], whole) == (1, (0, 3))
    assert find_held(whole, whole) == ()
    assert find_held(torch.randn(6, 5, 4, dtype=torch.float64), whole) is None
    assert find_held(torch.zeros(3, 5, 8), torch.zeros(6, 5, 8)) is None  # alike everywhere
    merged = whole[[0, 2, 4]]  # (3, 2) of which each first
    assert target_shape(merged, whole, torch.Size((3, 2, 5, 8))) == (3, 1, 5, 8)
    assert target_shape(whole[:, :, [0, 1, 4, 5]], whole, torch.Size((6, 5, 2, 4))) == (6, 5, 2, 2)
    assert target_shape(whole[[0, 1, 2]], whole, torch.Size((2, 3, 5, 8))) == (1, 3, 5, 8)
    assert target_shape(whole[[0, 1, 2, 3]], whole, torch.Size((2, 3, 5, 8))) is None  # no product


# -- on real ranks ----------------------------------------------------------------------------------------------------------


def trocr():
    from transformers import TrOCRConfig, TrOCRForCausalLM

    sizes = dict(d_model=E, decoder_layers=2, decoder_attention_heads=HEADS, decoder_ffn_dim=48, cross_attention_hidden_size=E)
    config = TrOCRConfig(vocab_size=131, max_position_embeddings=64, dropout=0.0, **sizes)
    inputs = {"input_ids": torch.randint(3, 131, (2, 9)), "encoder_hidden_states": torch.randn(2, 6, E)}
    return TrOCRForCausalLM(config), inputs


def fsmt():
    from transformers import FSMTConfig, FSMTForConditionalGeneration

    layers = dict(encoder_layers=2, decoder_layers=2, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS)
    widths = dict(d_model=E, encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0.0, max_position_embeddings=64)
    config = FSMTConfig(langs=["en", "de"], src_vocab_size=131, tgt_vocab_size=131, **layers, **widths)
    inputs = {"input_ids": torch.randint(3, 131, (2, 9)), "decoder_input_ids": torch.randint(3, 131, (2, 6))}
    return FSMTForConditionalGeneration(config), inputs


def hand_written(spelling):
    return toy(spelling), calls()[0]


MODELS = {"trocr": trocr, "fsmt": fsmt, **{cls.__name__: cls for cls in SPELLINGS}}


def build(name):
    torch.manual_seed(0)
    model, inputs = hand_written(MODELS[name]) if isinstance(MODELS[name], type) else MODELS[name]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.double().eval(), {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def run(model, inputs):
    """The first output, and every gradient of a random sum of it, whole."""
    model.zero_grad()
    output = model(**inputs)
    output = output if isinstance(output, torch.Tensor) else output.logits
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2), dtype=output.dtype)
    (output * weights).sum().backward()
    shards = {f"{name}.{leaf}": (m.tp, s) for name, m in sharded_modules(model) for leaf, s in m.shards.items()}
    grads = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            tp, shard = shards.get(name, (None, None))
            grads[name] = parameter.grad.clone() if shard is None else tp.all_gather(parameter.grad, shard)
    return output.detach(), grads


def check_on_ranks(group, name):
    plain, inputs = build(name)
    expected, grads = run(plain, inputs)
    model = copy.deepcopy(plain)
    classes = {n: type(m) for n, m in model.named_modules()}
    given = calls() if isinstance(MODELS[name], type) else None
    autotp.parallelize(model, group, inputs=given)
    plan = model.__dict__["autotp_plan"]
    fixed = [m.name for m in plan.modules if m.fixes]
    assert fixed and all(type(model.get_submodule(n)) is not classes[n] for n in fixed)
    assert {type(m).__name__ for m in model.modules()} >= {classes[n].__name__ for n in fixed}
    for each in (model, copy.deepcopy(model)):
        got, got_grads = run(each, inputs)
        torch.testing.assert_close(got, expected)
        assert set(got_grads) == set(grads)
        for n, grad in grads.items():
            torch.testing.assert_close(got_grads[n], grad, msg=n)
    autotp.unshard(model)
    assert {n: type(m) for n, m in model.named_modules()} == classes
    assert all(v.equal(plain.state_dict()[k]) for k, v in model.state_dict().items())
    torch.testing.assert_close(run(model, inputs)[0], expected)
    return plan.split_share


@pytest.mark.parametrize("name", list(MODELS))
def test_on_two_ranks(ranks, name):
    share = ranks.run(check_on_ranks, name)[0]
    assert share > 0.75, share
