"""States that outlive a forward: caches passed on, tensors left on modules, and a backward that evaluation has not."""

import enum

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaModel

import autotp
from autotp.inject.arguments import copy_arguments
from autotp.inject.rules import make_plan
from tests.models import tiny


class Store:
    """What a cache is to its model: an object that the forward writes to."""

    def __init__(self):
        self.kept = []

    def add(self, x):
        self.kept.append(x)
        return torch.cat(self.kept, 1)


class Mode(enum.Enum):
    ONE = 1


def test_objects_are_copied_and_tensors_are_shared():
    store, x = Store(), torch.ones(2)
    store.add(x[None])
    module = nn.Linear(2, 2)
    made = copy_arguments((store, {"a": [x, x], "b": module, "c": Mode.ONE}, torch.float32))
    assert made[0] is not store and made[0].kept is not store.kept and made[0].kept[0] is store.kept[0]
    assert made[1]["a"][0] is x and made[1]["b"] is module and made[1]["c"] is Mode.ONE and made[2] is torch.float32
    twice = copy_arguments([store, store], torch.clone)
    assert twice[0] is twice[1] and twice[0].kept[0] is not store.kept[0]
    store.kept.append(store)
    assert copy_arguments(store).kept[1] is not store


class Attention(nn.Module):
    """Heads that need an attribute edited, over keys that are kept in a store."""

    def __init__(self):
        super().__init__()
        self.heads, self.q, self.v, self.o = 4, nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x, store):
        q, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.v))
        keys = store.add(q.transpose(1, 2)).transpose(1, 2)
        return self.o((torch.softmax(q @ keys.mT, -1) @ v).transpose(1, 2).flatten(2))


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.left = Attention(), None

    def forward(self, x):
        self.left = self.attention(x, Store())
        return x + self.left


def test_a_store_is_as_empty_when_its_module_runs_again():
    plan = make_plan(Cached(), 2, inputs=[{"x": torch.randn(3, 5, 32)}, {"x": torch.randn(2, 7, 32)}])
    assert plan["attention"].attrs == {"heads": (2, 2)} and plan["attention.o"].style == "rowwise"


def check_left(group):
    model, x = Cached(), torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(0))
    model.load_state_dict({n: torch.full_like(p, 0.1) for n, p in model.state_dict().items()})
    expected = model(x)
    assert not model.left.is_leaf
    torch.testing.assert_close(autotp.parallelize(model, group, inputs={"x": x})(x), expected)


def test_a_model_that_keeps_its_last_output_can_be_split(ranks):
    ranks.run(check_left)


class OneWay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError("put the model into training mode")


class Closed(nn.Module):
    def forward(self, x):
        return OneWay.apply(x)


def test_without_a_backward_nothing_is_split():
    model = tiny("llama")
    model.model.norm = nn.Sequential(model.model.norm, Closed())
    plan = make_plan(model, 2)
    assert plan.proof.startswith("not proved: its backward does not run")
    assert not plan.modules and not plan.regions
    assert any("training mode" in entry.reason for entry in plan.whole)


# -- edges --------------------------------------------------------------------------------------------------------------


class Reading(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.inner = nn.Linear(*weight.shape[::-1], bias=False)
        self.inner.weight = weight

    def forward(self, x):
        return x @ torch.cat([self.inner.weight.t()], 0)


class RawLookup(LlamaModel):
    def forward(self, input_ids=None, **kwargs):
        return super().forward(**kwargs | {"inputs_embeds": nn.functional.embedding(input_ids, self.embed_tokens.weight)})


@pytest.mark.parametrize("case", ["embedding", "head"])
def test_a_vocabulary_that_is_read_outside_its_module_stays_whole(case):
    model = tiny("llama", tie_word_embeddings=False)
    if case == "head":
        reading = Reading(model.lm_head.weight)
        model.lm_head = reading
        model.get_output_embeddings = lambda: reading.inner
        name = "lm_head.inner"
    else:
        model.model.__class__ = RawLookup
        name = "model.embed_tokens"
    plan = make_plan(model, 2)
    assert f"{name}.weight" not in plan.shards and "model.layers.0.mlp.up_proj.weight" in plan.shards
    assert any(entry.reason == "its weight is read outside its forward" for entry in plan.whole if entry.name == f"{name}.weight")
