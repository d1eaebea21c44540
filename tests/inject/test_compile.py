"""torch.compile of a parallelized model: logits and gradients of the unsharded, uncompiled one, over two ranks."""

import copy

import pytest
import torch

import autotp
from tests.inject.test_families import full_gradients, run_once
from tests.models import batch, tiny


def check_compiled(group, family, overrides, backend):
    torch.compiler.reset()
    reference = tiny(family, **overrides)
    model = autotp.parallelize(copy.deepcopy(reference), group)
    inputs = batch(reference)
    logits, grads = run_once(reference, inputs)
    for layer in model.model.layers:
        layer.compile(backend=backend)
    got_logits, _ = run_once(model, inputs)
    got = full_gradients(model)
    assert (got_logits - logits).abs().max() <= 1e-5 * logits.abs().max()
    assert set(got) == set(grads)
    worst = max(grad.abs().max() for grad in grads.values())
    for name, grad in grads.items():
        assert (got[name] - grad).abs().max() <= 1e-4 * grad.abs().max() + 1e-6 * worst, name


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_compiled_layers(ranks, family):
    ranks.run(check_compiled, family, {}, "aot_eager")


def test_compiled_experts(ranks):
    ranks.run(check_compiled, "mixtral", {}, "aot_eager")
