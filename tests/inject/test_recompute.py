"""Checkpoints of parts of a layer whose tokens are dealt: the gradients of the same model without them."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import autotp
from tests.inject.test_tokens import check_close, gradients, make
from tests.models import batch

PARTS = {
    "llama": ["input_layernorm", "self_attn.q_proj", "self_attn.o_proj"],
    "gpt2": ["attn", "attn.c_attn", "mlp.c_proj"],
}


def put_checkpoint(module, reentrant):
    """Make `module` run again in backward."""
    forward = module.forward

    def run(*args, **kwargs):
        tensors = {key: value for key, value in kwargs.items() if isinstance(value, torch.Tensor)}
        rest = {key: value for key, value in kwargs.items() if key not in tensors}

        def again(*given):
            return forward(*given[: len(args)], **dict(zip(tensors, given[len(args) :], strict=True)), **rest)

        return checkpoint(again, *args, *tensors.values(), use_reentrant=reentrant)

    module.__dict__["forward"] = run


def check_parts(group, family):
    reference = make(family)
    for module in reference.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.25
    model = autotp.parallelize(copy.deepcopy(reference), group, sequence_parallel=True).train()
    layers = model.model.layers if family == "llama" else model.transformer.h
    calls = [batch(reference, 0, 3, 7) | {"use_cache": False}, batch(reference, 1, 1, 10) | {"use_cache": False}]

    def run():
        torch.manual_seed(3)
        return gradients(model, calls, (1, 0))

    expected = run()
    if family == "llama":
        check_close(expected, gradients(reference.train(), calls))
    for name in PARTS[family]:
        for reentrant in (True, False):
            part = layers[0].get_submodule(name)
            put_checkpoint(part, reentrant)
            check_close(run(), expected, f"{name}, use_reentrant={reentrant}")
            del part.__dict__["forward"]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_parts_of_a_dealt_layer_run_again_as_they_ran(ranks, family):
    ranks.run(check_parts, family)
