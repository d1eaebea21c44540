"""The proof runs training mode and the model's own attention implementation too, not evaluation with plain attention alone."""

import copy

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import autotp
from autotp.errors import ProofError
from autotp.inject.rules import make_plan
from tests.inject.test_families import full_gradients
from tests.models import tiny

CALLS = []


def plain(module, query, key, value, attention_mask, scaling=None, **kwargs):
    CALLS.append(query.shape[1])
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    weights = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask[..., : key.shape[2]]
    return (weights.softmax(-1) @ value).transpose(1, 2), None


def reads_the_config(module, query, *args, **kwargs):
    """Right for a whole model only."""
    out, _ = plain(module, query, *args, **kwargs)
    return out * (module.config.num_attention_heads / query.shape[1]), None


@pytest.fixture
def register(monkeypatch):
    def put(function):
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "made_here", function)
        monkeypatch.setenv("AUTOTP_CACHE", "off")
        CALLS.clear()
        return tiny("llama", num_hidden_layers=1, attn_implementation="made_here")

    return put


def test_the_own_implementation_is_proved_too(register):
    model = register(plain)
    plan = make_plan(model, 2)
    heads = model.config.num_attention_heads
    assert plan.proof == "proved" and {heads, heads // 2} == set(CALLS)
    CALLS.clear()
    assert make_plan(model, 2, plan=plan).proof == "proved" and {heads, heads // 2} == set(CALLS)


def test_what_an_implementation_that_reads_whole_widths_runs_stays_whole(register):
    model = register(reads_the_config)
    plan = make_plan(model, 2)
    assert plan.proof == "proved" and plan["model.layers.0.mlp.down_proj"].style == "rowwise"
    assert not any("self_attn" in name for region in plan.regions for name in (*region.columns, *region.rows))
    assert plan["model.layers.0.self_attn.o_proj"].style == "colwise_gather_output"  # all of its input is there
    with pytest.raises(ProofError, match="made_here"):
        make_plan(model, 2, plan="hf")


def test_one_that_does_not_run_here_leaves_the_proof_as_it_is(register):
    def fails(*args, **kwargs):
        raise RuntimeError("needs a GPU")

    assert make_plan(register(fails), 2).proof == "proved"


def test_the_usual_implementation_is_no_plain_one(register):
    with torch.device("meta"):
        assert tiny("llama").config._attn_implementation == "sdpa"


class TrainsOtherwise(torch.nn.Module):
    """Mixes the hidden columns, but in training alone; dropout is no such thing."""

    def __init__(self, mixes, dropout=0.5):
        super().__init__()
        self.up, self.down, self.drop = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16), torch.nn.Dropout(dropout)
        self.mixes, self.dropout = mixes, dropout / 5

    def forward(self, x):
        h = torch.relu(self.up(x))
        if self.training and self.mixes:
            h = h.flip(-1).cumsum(-1)
        return self.down(torch.nn.functional.dropout(self.drop(h), self.dropout, self.training))


def test_what_only_training_does_is_proved_too():
    x = torch.randn(3, 16)
    wrong = make_plan(TrainsOtherwise(False), 2, inputs={"x": x})
    assert wrong.proof == "proved" and wrong["up"].style == "colwise"
    with pytest.raises(ProofError, match="training mode"):
        make_plan(TrainsOtherwise(True), 2, inputs={"x": x}, plan=wrong)


def test_what_proves_in_evaluation_alone_stays_whole():
    torch.manual_seed(0)
    model = torch.nn.Sequential(TrainsOtherwise(True), TrainsOtherwise(False))
    plan = make_plan(model, 2, inputs={"input": torch.randn(3, 16)})
    assert plan.proof == "proved" and [region.columns for region in plan.regions] == [("1.up",)]
    assert {"0.up", "0.down"} & set(plan.by_name) <= {m.name for m in plan.modules if m.style == "colwise_gather_output"}


def check_training(group):
    torch.manual_seed(0)
    model = torch.nn.Sequential(TrainsOtherwise(True, 0.0), TrainsOtherwise(False, 0.0))
    x = torch.randn(3, 16)
    sharded = autotp.parallelize(copy.deepcopy(model), group, inputs={"input": x})
    for mode in (True, False):
        expected, seen = model.train(mode)(x), sharded.train(mode)(x)
        torch.testing.assert_close(seen, expected)
        expected.square().sum().backward()
        seen.square().sum().backward()
    expected, seen = full_gradients(model), full_gradients(sharded)
    for name, gradient in expected.items():
        torch.testing.assert_close(seen[name], gradient)


def test_it_trains_as_the_whole_model(ranks):
    ranks.run(check_training)
