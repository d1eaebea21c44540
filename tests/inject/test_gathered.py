"""Layers that no region takes are split by their columns and gathered, and tied modules are planned alike."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import autotp
from tests.inject.test_families import full_gradients

STYLE = "colwise_gather_output"


class Mixing(nn.Module):
    """Nothing here can stay on a rank: every step mixes all columns. Two linears read one input; a convolution follows."""

    def __init__(self, width=12):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width + 1, bias=False)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.last = nn.Linear(width, 5)

    def forward(self, x):
        y = self.first(x).softmax(-1) + self.second(x).softmax(-1)[..., 1:]
        y = self.conv(y.transpose(-1, -2)).transpose(-1, -2)
        return self.last(y.softmax(-1)).softmax(-1)


class Shared(nn.Module):
    """Two module instances with the same Parameters, each called once."""

    def __init__(self, width=16):
        super().__init__()
        self.blocks = nn.ModuleList(self.block(width) for _ in range(2))
        for name, parameter in list(self.blocks[0].named_parameters()):
            layer, _, leaf = name.rpartition(".")
            setattr(self.blocks[1].get_submodule(layer), leaf, parameter)

    @staticmethod
    def block(width):
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class TiedHead(nn.Module):
    """A model that names its embedding but not its head, a plain linear with the embedding's weight."""

    def __init__(self, width=12, vocab=23):
        super().__init__()
        self.embed, self.mix = nn.Embedding(vocab, width), nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)
        self.head.weight = self.embed.weight

    def get_input_embeddings(self):
        return self.embed

    def forward(self, x):
        ids = x[..., 0].abs().mul(100).long() % self.embed.num_embeddings
        return self.head(self.mix(self.embed(ids) + x).softmax(-1))


class Halves(nn.Module):
    """Two columns of units side by side: dealt in order, each rank would hold all of one and none of the other."""

    def __init__(self, width=16):
        super().__init__()
        self.left, self.right = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        both = torch.cat([self.left(x), self.right(x.roll(1, 0))], -1)
        return self.down(both.unflatten(-1, (4, -1)).softmax(-1).flatten(-2))


def sizes_of(layer):
    return [getattr(layer, key, None) for key in ("in_features", "out_features", "in_channels", "out_channels")]


def check_model(group, cls, shape):
    """Styles by module name, after outputs, gradients and gathered weights were compared with the unsharded model's."""
    torch.manual_seed(0)
    reference = cls()
    x = torch.randn(shape)
    model = autotp.parallelize(copy.deepcopy(reference), group, inputs={"x": torch.randn(3, 7, shape[-1])})
    for name in (m.name for m in model.autotp_plan.modules if m.style == STYLE):  # they show what they return
        assert sizes_of(model.get_submodule(name)) == sizes_of(reference.get_submodule(name))
    outputs, grads = [], []
    for each in (reference, model):
        own = x.clone().requires_grad_()
        y = each(own)
        (y * torch.arange(y.numel()).view(y.shape).sin()).sum().backward()
        outputs.append(y.detach())
        grads.append({"x": own.grad, **full_gradients(each)})
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-6, rtol=1e-5)
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, atol=1e-5, rtol=1e-4, msg=name)
    styles = {module.name: module.style for module in model.autotp_plan.modules}
    autotp.unshard(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    return styles


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shape", [(2, 5, 12), (5, 12)])
def test_what_no_region_takes_is_gathered(ranks, shape, size):
    styles = ranks.run(check_model, Mixing, shape, size=size)[0]
    assert styles == dict.fromkeys(("first", "second", "conv", "last"), STYLE)


def test_layers_that_read_one_input_enter_it_together():
    plan = autotp.make_plan(Mixing(), 2, inputs={"x": torch.randn(2, 5, 12)})
    assert plan["first"].siblings == plan["second"].siblings != plan["conv"].siblings
    assert plan.collectives == (4, 3)
    assert plan.split_share == 1


def test_layers_of_small_share_stay_whole():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(16, 4), nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x):
            return self.down(self.up(x).relu()) * self.gate(x).softmax(-1).sum(-1, keepdim=True)

    plan = autotp.make_plan(Small(), 2, inputs={"x": torch.randn(2, 5, 16)})
    assert {m.name for m in plan.modules} == {"up", "down"}
    assert "gate.weight" in {whole.name for whole in plan.whole}


def test_tied_modules_are_split_alike(ranks):
    styles = ranks.run(check_model, Shared, (2, 5, 16))[0]
    expected = {f"blocks.{block}.{layer}": style for block in (0, 1) for layer, style in ((1, "colwise"), (3, "rowwise"))}
    assert styles == expected


def test_a_head_that_the_model_does_not_name_enters_its_input(ranks):
    styles = ranks.run(check_model, TiedHead, (2, 5, 12))[0]
    assert (styles["embed"], styles["head"]) == ("embedding_rowwise", STYLE)


def test_a_head_that_does_not_enter_its_input_is_refused():
    model, inputs = TiedHead(), {"x": torch.randn(2, 5, 12)}
    plan = autotp.make_plan(model, 2, inputs=inputs)
    wrong = replace(plan, modules=tuple(replace(m, siblings=None) if m.name == "head" else m for m in plan.modules))
    with pytest.raises(autotp.errors.ProofError, match="gradient"):
        autotp.make_plan(model, 2, plan=wrong, inputs=inputs)


def test_no_rank_is_left_without_columns(ranks):
    plan = autotp.make_plan(Halves(), 2, inputs={"x": torch.randn(2, 5, 16)})
    assert all(shard.local_numel(rank) for shard in plan.shards.values() for rank in range(2))
    ranks.run(check_model, Halves, (2, 5, 16))
