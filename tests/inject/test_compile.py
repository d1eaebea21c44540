"""torch.compile of a parallelized model: losses and gradients of the unsharded, uncompiled one, over two ranks."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters

import autotp
from tests.inject.test_dropout import make_gpt2
from tests.inject.test_families import full_gradients
from tests.models import batch, tiny


def check_step(run, model, reference, inputs):
    """One training step of `model`, as `run` runs it, against `reference`."""
    model.zero_grad()
    reference.zero_grad()
    loss, expected = (each(**inputs, use_cache=False).loss for each in (run, reference))
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    got, grads = full_gradients(model), {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert set(got) == set(grads)
    worst = max(grad.abs().max() for grad in grads.values())
    for name, grad in grads.items():
        assert (got[name] - grad).abs().max() <= 1e-4 * grad.abs().max() + 1e-6 * worst, name


def check_whole(group, family, sequence_parallel):
    torch.compiler.reset()
    counters.clear()
    reference = tiny(family, num_hidden_layers=1).train()
    model = autotp.parallelize(copy.deepcopy(reference), group, sequence_parallel=sequence_parallel).train()
    compiled = torch.compile(model, backend="aot_eager")
    for length in (12, 13, 15):
        check_step(compiled, model, reference, batch(reference, 0, 3, length))
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 2  # the second length makes it dynamic


@pytest.mark.parametrize("family, sequence_parallel", [("gemma2", False), ("llama", True)])
def test_a_whole_model_is_one_graph_for_every_length(ranks, family, sequence_parallel):
    ranks.run(check_whole, family, sequence_parallel)


def check_experts(group):
    torch.compiler.reset()
    reference = tiny("mixtral", num_hidden_layers=1, num_local_experts=4).train()
    model = autotp.parallelize(copy.deepcopy(reference), group).train()
    model.model.layers[0].mlp.compile(backend="aot_eager")
    check_step(model, model, reference, batch(reference))


def test_compiled_experts(ranks):
    ranks.run(check_experts)


def check_checkpointed(group):
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    model = autotp.parallelize(make_gpt2().double(), group).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, parameter = torch.randint(3, 64, (4, 12)), model.transformer.h[0].ln_1.weight

    def run():
        torch.manual_seed(1)
        return compiled(input_ids=ids, labels=ids, use_cache=False).loss

    # All runs in one setting: where the graph breaks at the checkpoints, other masks are drawn.
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        compiled = torch.compile(model, backend="aot_eager")
        loss = run()
        loss.backward()
        assert not counters["graph_break"]
        assert len(set(model.autotp_group.gather_objects((float(loss.detach()), float(torch.rand(())))))) == 1
        slope, losses = parameter.grad.norm(), []
        for step in (0.05, -0.1):
            with torch.no_grad():
                parameter += step * parameter.grad / slope
                losses.append(run())
    torch.testing.assert_close((losses[0] - losses[1]) / 0.1, slope.float(), rtol=0.01, atol=0)


def test_dropout_in_a_compiled_checkpoint_is_drawn_again(ranks):
    ranks.run(check_checkpointed)
