"""Layers that stand for others: only where regions stay inside their layer."""

import copy

import pytest
import torch
from torch import nn

import autotp
from autotp.inject.reduce import find_reduction
from autotp.inject.rules import make_plan
from autotp.inject.runs import record_runs
from autotp.inject.shadow import Shadow
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


def test_dropped_layers_are_not_copied():
    """A copy of what is in them would take as long as they are many."""
    copied = []

    class Noted(nn.Linear):
        def __deepcopy__(self, memo):
            copied.append(self)
            made = nn.Linear(32, 32)
            memo[id(self)] = made
            return made

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Noted(32, 32)

        def forward(self, x):
            return self.inner(x)

    model = Chain("linear")
    model.layers = nn.ModuleList(Layer() for _ in range(7))
    reduction = find_reduction(model)
    left = Shadow(model, reduction=reduction).model
    assert len(copied) == 2 and [len(list(layer.parameters())) for layer in left.layers] == [2, 2, 0, 0, 0, 0, 0]
    assert all(layer.inner.weight.numel() for layer in model.layers)


def test_one_region_around_many_layers_is_kept():
    """T5's layers share a position bias, so all their attention is one region: what stands for the others may say so."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=6, num_heads=4, dropout_rate=0.0)
    plan = make_plan(T5EncoderModel(config), 2)
    (region,) = [r for r in plan.regions if any(name.endswith("SelfAttention.q") for name in r.columns)]
    assert len(region.rows) == 6 and plan.proof == "proved"


def test_regions_inside_their_layers_need_no_other(monkeypatch):
    from autotp.inject import find_plan

    record, calls = find_plan.record_runs, []
    monkeypatch.setattr(find_plan, "record_runs", lambda *args, **kwargs: calls.append(kwargs) or record(*args, **kwargs))
    make_plan(tiny("llama", num_hidden_layers=6), 2)
    assert calls == [{}]


class Numbered(nn.Module):
    """Layers that know their number and have settings which happen to equal the number of some; every fourth is of another kind.

    The model tells the kinds apart by counting, as `zip(config.layer_types, layers)` does.
    """

    def __init__(self, count=9):
        super().__init__()
        self.layers = nn.ModuleList(self.layer(number) for number in range(count))

    @staticmethod
    def layer(number):
        layer = nn.Sequential(nn.Linear(16, 64), nn.SiLU() if number % 4 == 3 else nn.GELU(), nn.Linear(64, 16))
        layer.index, layer.kernel, layer[0].heads = number, 4, 7
        return layer

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            assert not len(layer) or isinstance(layer[1], nn.SiLU if number % 4 == 3 else nn.GELU)
            x = x + layer(x)
        return x


def test_a_setting_that_equals_a_number_tells_no_layers_apart():
    reduction = find_reduction(Numbered())
    kept = [number for number in range(9) if number not in reduction.dropped["layers"]]
    assert kept == [0, 1, 3, 7]


def test_layers_of_different_settings_are_not_alike():
    model = Numbered()
    model.layers[5].kernel = 3
    assert 5 not in find_reduction(model).dropped["layers"]


def test_layers_keep_their_place_in_a_model_that_counts_them():
    runs = record_runs(Numbered(), inputs={"x": torch.randn(3, 16)})
    assert runs.reduction.emptied and {key[0].split(".")[1] for key in runs.records[0].sites} == set("0137")
    assert make_plan(Numbered(), 2, inputs={"x": torch.randn(3, 16)}).split_share > 0.9
