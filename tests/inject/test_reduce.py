"""Layers that stand for others: only where regions stay inside their layer."""

import copy

import pytest
import torch
from torch import nn

import autotp
from autotp.inject.reduce import find_reduction
from autotp.inject.rules import make_plan
from tests.models import tiny


class Chain(nn.Module):
    """Seven like layers, each fed by the one before: the columns of one are the rows of the next."""

    def __init__(self, kind):
        super().__init__()
        make = {"linear": lambda: nn.Linear(32, 32), "conv": lambda: nn.Conv1d(32, 32, 3, padding=1)}[kind]
        self.layers = nn.ModuleList(make() for _ in range(7))
        self.head = nn.Linear(32, 32)

    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return self.head(x)


def chain_of(kind):
    torch.manual_seed(0)
    return Chain(kind), torch.randn(3, 32, 32)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_rows_of_a_chain_follow_the_columns_that_feed_them(kind):
    model, x = chain_of(kind)
    assert find_reduction(model)
    plan = make_plan(model, 2, inputs={"x": x})
    order = [f"layers.{i}" for i in range(7)] + ["head"]
    assert len(plan.regions) > 2
    for region in plan.regions:
        (column,), (row,) = region.columns, region.rows
        assert order.index(row) == order.index(column) + 1
    assert make_plan(model, 2, plan=plan, inputs={"x": x}) == plan


def check_chain(group, kind):
    model, x = chain_of(kind)
    sharded = autotp.parallelize(copy.deepcopy(model), group, inputs={"x": x})
    torch.testing.assert_close(sharded(x), model(x))


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_a_chain_runs_as_it_was_proved(ranks, kind):
    ranks.run(check_chain, kind)


def test_one_region_around_many_layers_is_kept():
    """T5's layers share a position bias, so all their attention is one region: what stands for the others may say so."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=6, num_heads=4, dropout_rate=0.0)
    plan = make_plan(T5EncoderModel(config), 2)
    (region,) = [r for r in plan.regions if any(name.endswith("SelfAttention.q") for name in r.columns)]
    assert len(region.rows) == 6 and plan.proof == "proved"


def test_regions_inside_their_layers_need_no_other(monkeypatch):
    from autotp.inject import rules

    record, calls = rules.record_runs, []
    monkeypatch.setattr(rules, "record_runs", lambda *args, **kwargs: calls.append(kwargs) or record(*args, **kwargs))
    make_plan(tiny("llama", num_hidden_layers=6), 2)
    assert calls == [{}]
