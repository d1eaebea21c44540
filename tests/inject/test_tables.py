"""Dependence tables: the few passes that make one give what looking at every row does."""

import pytest
import torch
from torch import nn

from autotp.inject import discover, tables
from autotp.inject.discover import find_grouped_maps, find_shared_maps
from autotp.inject.record import Recorder
from autotp.inject.regions import deal_aligned
from autotp.inject.rules import make_plan
from autotp.inject.runs import record_runs
from autotp.inject.shadow import Shadow
from tests.models import tiny

BUILD = {
    "llama": dict(intermediate_size=100),
    "phi3": dict(intermediate_size=100),
    "gpt_neox": {},
    "mixtral": dict(num_local_experts=3, num_experts_per_tok=2),
    "qwen3": dict(num_attention_heads=6, num_key_value_heads=2, head_dim=20),
}


def make_tables(model, inputs=None):
    runs = record_runs(model, inputs)
    made = tables.Tables(runs.shadow, runs.records)
    return {key: made.table(key, 1) for key, site in made.sites.items() if site.in_dims and made.is_structured(key)}


@pytest.mark.parametrize("family", list(BUILD))
def test_few_passes_give_the_table_of_all(monkeypatch, family):
    model = tiny(family, **BUILD[family])
    passes = []
    pull = tables.Tables.pull
    monkeypatch.setattr(tables.Tables, "pull", lambda *args: passes.append(1) or pull(*args))
    quick = make_tables(model)
    few = len(passes)
    monkeypatch.setattr(tables, "FEW_ROWS", 10**9)
    slow = make_tables(model)
    assert few < len(passes) - few
    assert quick.keys() == slow.keys()
    for key, table in slow.items():
        assert quick[key].keys() == table.keys()
        assert all(torch.equal(quick[key][source], expected) for source, expected in table.items()), key


class TwoReLUs(nn.Module):
    """What leaves a ReLU is positive: a negative scale closes the next one for every input."""

    def __init__(self, kind, width=24):
        super().__init__()
        self.up, self.scale, self.down = nn.Linear(16, width), nn.Parameter(torch.ones(width)), nn.Linear(width, 16)
        self.kind = kind

    def forward(self, x):
        act = getattr(torch, self.kind, None) or getattr(nn.functional, self.kind)
        return self.down(act(act(self.up(x)) * self.scale))


@pytest.mark.parametrize("kind", ["relu", "relu_", "relu6", "hardtanh", "hardswish"])
def test_flat_activations_hide_no_column(kind):
    plan = make_plan(TwoReLUs(kind), 2, inputs=[{"x": torch.randn(3, 4, 16)}])
    assert plan["up"].style == "colwise" and plan["down"].style == "rowwise" and plan.proof == "proved"


class Separable(nn.Module):
    """Pointwise, depthwise, pointwise: the channels of the one in the middle are split with those around it."""

    def __init__(self, groups):
        super().__init__()
        self.up, self.down = nn.Conv2d(8, 24, 1), nn.Conv2d(24, 8, 1)
        self.depth = nn.Conv2d(24, 24, 3, padding=1, groups=groups)

    def forward(self, x):
        return self.down(nn.functional.relu6(self.depth(nn.functional.relu6(self.up(x)))))


@pytest.mark.parametrize("groups", [24, 6])
def test_the_groups_of_a_convolution_follow_its_shard(groups):
    plan = make_plan(Separable(groups), 2, inputs=[{"x": torch.randn(3, 8, 5, 5)}, {"x": torch.randn(2, 8, 7, 3)}])
    assert plan["depth"].attrs == {"groups": (groups // 2,) * 2}
    assert plan["up"].style == "colwise" and plan["down"].style == "rowwise"


def test_only_maps_of_parts_are_grouped():
    class Maps(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.heads = nn.Conv1d(8, 8, 3), nn.Parameter(torch.randn(2, 4, 4))

        def forward(self, x):
            y = self.conv(x.transpose(1, 2)).transpose(1, 2)
            return torch.bmm(y.unflatten(-1, (2, 4)).flatten(0, 1).transpose(0, 1), self.heads)

    shadow = Shadow(Maps())
    recorder = Recorder(shadow)
    recorder.run({"x": torch.randn(2, 5, 8, dtype=torch.float64)})
    assert find_grouped_maps(tables.Tables(shadow, [recorder.record])) == {"heads"}


def test_numbers_are_made_for_small_maps_alone(monkeypatch):
    """A trial that sees a map as a plain Parameter fills it: never one of a size that takes memory."""
    runs = record_runs(tiny("mixtral", num_local_experts=3, num_experts_per_tok=2))
    made = tables.Tables(runs.shadow, runs.records)
    found = find_shared_maps(made)
    assert found
    largest = max(made.shadow.parameters[name].numel() for name in found)
    monkeypatch.setattr(discover, "MOST_FILLED", largest - 1)
    assert all(made.shadow.parameters[name].numel() < largest for name in find_shared_maps(made))


@pytest.mark.parametrize(
    "units, size, dealt",
    [(32, 3, (12, 12, 8)), (24, 2, (12, 12)), (100, 3, (36, 32, 32)), (17, 3, (6, 6, 5)), (512, 3, (176, 168, 168))],
)
def test_columns_are_dealt_as_aligned_as_the_whole(units, size, dealt):
    assert deal_aligned(units, size) == dealt


def test_sites_alike_are_looked_at_once_for_structure():
    model = tiny("llama", num_hidden_layers=4)
    runs = record_runs(model)
    shared, alone = (tables.Tables(runs.shadow, runs.records) for _ in range(2))
    found = {key: shared.is_structured(key) for key, site in shared.sites.items() if site.in_dims}
    looked = {key for key, _ in shared._tables}
    alike = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(1, 4)]  # the first layer reads the embedding alone
    assert [any(key[0] == name for key in looked) for name in alike] == [True, False, False]
    for key, expected in found.items():
        alone._structured.clear()
        assert alone.is_structured(key) == expected
    assert any(found.values()) and not all(found.values())
