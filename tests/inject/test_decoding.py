"""A decoding step of parallelized models: its sums wait for the norms behind them, its products take the few-row kernels."""

import inspect
import os

import pytest
import torch
from transformers import StaticCache

import autotp
from autotp.kernels import few_rows, reference
from autotp.kernels.dispatch import select
from autotp.layers.decoding import decoding_step
from autotp.layers.linear import LinearAllreduce
from tests.models import tiny

# family -> the norms computed with the sums of embedding, attention and MLP; the few-row products of a layer, before the head's
FAMILIES = {
    "llama": (["rms", "rms", "rms"], ["", "", "silu", ""]),
    "gemma2": (["", "rms1p", "rms1p"], ["", "", "gelu_tanh", ""]),
    "phi3": (["rms", "rms", "rms"], ["", "", "silu", ""]),
    "gpt_neox": (["", "", ""], ["", "", "", ""]),
}


class GlooPeers:
    """Stands for PeerMemory on CPUs: the same sums over gloo, and a note of which had a norm with them."""

    def __init__(self, tp):
        self.tp, self.kinds = tp, []

    def find_place(self, x):
        return x

    def reduce_rows(self, x, **rest):
        self.kinds.append(rest.get("kind", ""))
        parts = self.tp.gather_rows(x.reshape(1, *x.shape))
        return reference.reduce_rows(list(parts), **rest)

    def sum_small(self, x):
        return self.reduce_rows(x)[0]


@torch.no_grad()
def step(model, ids, last):
    cache = StaticCache(config=model.config, max_cache_len=32)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[0, :3] = 0
    model(input_ids=ids, attention_mask=mask[:, :7], **{name: cache}, use_cache=True)
    with decoding_step():
        output = model(input_ids=last, attention_mask=mask, **{name: cache}, use_cache=True)
    return output.logits


def decode(group, family):
    os.environ["AUTOTP_BACKEND"] = "linear=few_rows,linear_few=triton,attend_cache=triton"
    try:
        reference_model, model = tiny(family, num_hidden_layers=1), autotp.parallelize(tiny(family, num_hidden_layers=1), group)
        tp = next(m for m in model.modules() if isinstance(m, LinearAllreduce)).tp
        tp._peers = peers = GlooPeers(tp)
        ids, last = torch.randint(3, 131, (2, 7), generator=torch.Generator().manual_seed(1)), torch.tensor([[5], [9]])
        want = step(reference_model, ids, last)
        products = []
        few_rows.select = lambda problem: products.append(problem.kind) or select(problem)
        got = step(model, ids, last)
        return (got - want).abs().max().item() / want.abs().max().item(), peers.kinds, products
    finally:
        few_rows.select = select
        del os.environ["AUTOTP_BACKEND"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks interpret their kernels on the CPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_equals_the_unsharded_models(ranks, family):
    for error, kinds, products in ranks.run(decode, family):
        assert error <= 1e-5
        assert (kinds, products) == (FAMILIES[family][0], [*FAMILIES[family][1], ""])
