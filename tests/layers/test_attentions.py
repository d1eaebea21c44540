"""Attention weights that are asked for: all heads', as the unsharded model gives them."""

import copy

import pytest
import torch
from shrink import tiny_model

import autotp
from autotp.errors import AutoTPError
from autotp.layers.attentions import gather_heads
from autotp.shard import Cut
from tests.models import batch, tiny


def make(family):
    model = tiny(family) if family == "llama" else tiny_model(family, "seq2seq" if family == "t5" else "causal")
    model.config.decoder_start_token_id = 2
    model.set_attn_implementation("eager")
    return model.eval()


def check_attentions(group, family, sequence_parallel):
    reference = make(family)
    model = autotp.parallelize(copy.deepcopy(reference), group, sequence_parallel=sequence_parallel)
    call = batch(reference, 0, 2, 7)
    mine, other = (one(**call, output_attentions=True) for one in (model, reference))
    names = [name for name in other if name.endswith("attentions")]
    for name in names:
        assert len(mine[name]) == len(other[name]) > 0
        for x, y in zip(mine[name], other[name], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    # Differentiable, and gone when nobody asks.
    grads = []
    for one, output in ((model, mine), (reference, other)):
        sum(x.square().sum() for name in names for x in output[name]).backward()
        grads.append(one.get_input_embeddings().weight.grad)
    if grads[1].shape == grads[0].shape:
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)
    assert all(model(**call).get(name) is None for name in names)
    plain = model(**call, output_attentions=True, return_dict=False), reference(**call, output_attentions=True, return_dict=False)
    shapes = [[list(x.shape) for each in out if isinstance(each, tuple) for x in each if torch.is_tensor(x)] for out in plain]
    assert shapes[0] == shapes[1]
    if family == "llama":
        kept = [
            one.generate(
                call["input_ids"], max_new_tokens=3, output_attentions=True, return_dict_in_generate=True, do_sample=False
            )
            for one in (model, reference)
        ]
        for x, y in zip(*(each.attentions[2] for each in kept), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
        inner = model.model(input_ids=call["input_ids"], output_attentions=True).attentions
        torch.testing.assert_close(inner[1], other.attentions[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family, size, dealt", [("llama", 3, True), ("bloom", 2, False), ("t5", 2, False)])
def test_attentions_are_whole(ranks, family, size, dealt):
    ranks.run(check_attentions, family, dealt, size=size)


class Alone:
    """Two ranks, of which each sees the other have as many heads."""

    tp_size, tp_rank = 2, 0

    def gather_objects(self, value):
        return [value, value]


def test_heads_that_ranks_share_are_refused():
    halves = Cut(1, (((0, 4, 8, 2),), ((4, 4, 8, 2),)))  # each rank holds one half of both heads' values
    with pytest.raises(AutoTPError, match=r"in attentions the ranks have \[2, 2\] heads of a model that has \[2\]"):
        gather_heads(torch.zeros(1, 2, 3, 3), halves, Alone(), [2], "attentions")
