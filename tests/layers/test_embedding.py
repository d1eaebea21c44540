"""Vocabulary- and hidden-parallel embeddings and the head equal the plain modules: values, gradients, edge cases."""

import copy

import pytest
import torch
from torch import nn

from autotp.errors import GatherError, PlanError
from autotp.groups import resolve_group
from autotp.layers.base import insert_class
from autotp.layers.embedding import (
    HiddenParallelEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
    check_embedding,
    vocab_range,
)
from autotp.shard import Shard


def shard_module(module, layer, group, dim=0):
    """`module` rewritten in place by hand, every parameter cut on `dim`."""
    insert_class(module, layer)
    module.tp, module.full_name, module.shards = group, "it", {}
    for name, parameter in module.named_parameters():
        shard = Shard.even(parameter.shape, dim, group.tp_size)
        module.shards[name] = shard
        parameter.data = shard.split(parameter.data, group.tp_rank).clone()
    return module


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 3


def compare_embedding(pg, layer, dim, cls, padding):
    group = resolve_group(pg)
    torch.manual_seed(0)
    plain = cls(11, 6, padding_idx=padding)
    local = shard_module(copy.deepcopy(plain), layer, group, dim)
    ids = torch.tensor([[0, 3, 10, 3], [5, 10, 4, 9]])
    scale = torch.randn(2, 4, 6)
    expected, got = plain(ids), local(ids)
    (expected * scale).sum().backward()
    (got * scale).sum().backward()
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    wanted = local.shards["weight"].split(plain.weight.grad, group.tp_rank)
    torch.testing.assert_close(local.weight.grad, wanted, rtol=0, atol=1e-7)
    for bad in (11, -1):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            local(torch.tensor([[bad]]))
    assert local(ids.int()).shape == (2, 4, 6)
    assert local.padding_idx == padding
    assert (local.num_embeddings, local.embedding_dim) == (11, 6)  # what it takes and returns
    return repr(local)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("cls", [nn.Embedding, Scaled])
@pytest.mark.parametrize(("layer", "dim"), [(VocabParallelEmbedding, 0), (HiddenParallelEmbedding, 1)])
def test_embedding_equals_plain(ranks, layer, dim, cls, size):
    shown = ranks.run(compare_embedding, layer, dim, cls, None, size=size)
    assert f"tp=1/{size}" in shown[1] and "of [11, 6]" in shown[1]


@pytest.mark.parametrize(("layer", "dim"), [(VocabParallelEmbedding, 0), (HiddenParallelEmbedding, 1)])
@pytest.mark.parametrize("padding", [0, 10])
def test_padding_row_gets_no_gradient(ranks, layer, dim, padding):
    ranks.run(compare_embedding, layer, dim, nn.Embedding, padding)


def compare_head(pg, bias, tied):
    group = resolve_group(pg)
    torch.manual_seed(0)
    table, head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=bias)
    if tied:
        head.weight = table.weight
    plain = nn.ModuleList([table, head])
    local = copy.deepcopy(plain)
    insert_class(local[0], VocabParallelEmbedding)
    insert_class(local[1], VocabParallelHead)
    shards = {name: Shard.even(p.shape, 0, group.tp_size) for name, p in local.named_parameters(remove_duplicate=False)}
    for name, parameter in local.named_parameters():
        parameter.data = shards[name].split(parameter.data, group.tp_rank).clone()
    for i, module in enumerate(local):
        module.tp, module.full_name = group, str(i)
        module.shards = {name.partition(".")[2]: s for name, s in shards.items() if name.startswith(f"{i}.")}
    assert (local[0].weight is local[1].weight) == tied
    assert (local[1].out_features, local[1].in_features) == (11, 6)
    ids, scale = torch.tensor([[0, 3, 10], [5, 4, 9]]), torch.randn(2, 3, 11)
    for pair in (plain, local):
        pair.out = pair[1](torch.tanh(pair[0](ids)))
        (pair.out * scale).sum().backward()
    torch.testing.assert_close(local.out, plain.out)
    for (name, full), part in zip(plain.named_parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(part.grad, shards[name].split(full.grad, group.tp_rank), rtol=1e-5, atol=1e-6)
    local[1].keep_sharded = True
    assert local[1](torch.zeros(2, 3, 6)).shape == (2, 3, len(local[1].weight))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("bias", "tied"), [(False, True), (True, False), (True, True)])
def test_head_equals_plain(ranks, bias, tied, size):
    ranks.run(compare_head, bias, tied, size=size)


def run_whole_weight(pg):
    group = resolve_group(pg)
    local = shard_module(nn.Embedding(11, 6), VocabParallelEmbedding, group)
    local.weight.data = torch.zeros(11, 6)
    with pytest.raises(GatherError, match=r"it: forward with a weight of shape \(11, 6\)"):
        local(torch.tensor([1]))


def test_forward_on_gathered_weight_is_refused(ranks):
    ranks.run(run_whole_weight)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}])
def test_unsupported_options_are_refused(option):
    with pytest.raises(PlanError, match=rf"model.embed .*{next(iter(option))}.*'whole'"):
        check_embedding(nn.Embedding(4, 4, **option), "model.embed")
    check_embedding(nn.Embedding(4, 4), "model.embed")


def test_vocabulary_must_be_one_block_a_rank():
    assert [vocab_range(Shard.even((11, 4), 0, 3), rank) for rank in range(3)] == [(0, 4), (4, 8), (8, 11)]
    strided = Shard.from_indices((4, 2), 0, [[0, 2], [1, 3]])
    for shard in (strided, Shard.even((2, 4), 0, 3)):
        with pytest.raises(PlanError, match="one block of neighbouring rows"):
            check_embedding(nn.Embedding(4, 2), "embed", shard)
