"""What happens to a model between steps: frozen, unfrozen, copied, wrapped for data parallelism; with plans of other rules."""

import copy

import pytest
import torch

import autotp
from autotp.errors import AutoTPError
from tests.inject.test_families import full_gradients
from tests.models import batch, tiny
from tests.ranks import grid

FAMILIES = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},  # stacked experts: entries and one reduction
    "olmo2": {},  # distributed norms
    "phi3": {},  # packed columns
    "qwen3": {"num_key_value_heads": 1},  # summed norms, and a kv head that both ranks hold
}


def freeze(model, parity):
    """Freeze every other parameter, so that of siblings some are frozen and some are not; None freezes none."""
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(parity is None or number % 2 != parity)


def step(model, inputs, forward=None):
    """One step of SGD, which is linear in the gradients; the loss, and every gradient, whole."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    loss = (forward or model)(**inputs).loss
    loss.backward()
    grads = full_gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), grads


def compare_steps(got, expected):
    (loss, grads), (expected_loss, expected_grads) = got, expected
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert set(grads) == set(expected_grads)
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-5 * max(1.0, grad.abs().max().item()), msg=name)


def check_between_steps(group, family):
    reference = tiny(family, **FAMILIES[family]).train()
    model = autotp.parallelize(copy.deepcopy(reference), group)
    for seed, parity in enumerate((0, None, 1, None)):
        freeze(reference, parity)
        freeze(model, parity)
        compare_steps(step(model, batch(reference, seed)), step(reference, batch(reference, seed)))
    twins = copy.deepcopy(reference), copy.deepcopy(model)
    before = [p.clone() for p in model.parameters()]
    for parity in (1, None):
        for twin in twins:
            freeze(twin, parity)
        expected, got = (step(twin, batch(reference, 9)) for twin in twins)
        compare_steps(got, expected)
    assert all(torch.equal(a, b) and b.requires_grad for a, b in zip(before, model.parameters(), strict=True))
    compare_steps(step(model, batch(reference, 8)), step(reference, batch(reference, 8)))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_frozen_unfrozen_and_copied(ranks, family):
    ranks.run(check_between_steps, family)


def check_data_parallel(group, family):
    """DDP over the data axis of a 2x2 mesh; wrapped anew when what is frozen changes, as DDP wants."""
    mesh = grid()
    reference = tiny(family, **FAMILIES[family]).train()
    model = autotp.parallelize(copy.deepcopy(reference), mesh["tp"])
    with pytest.raises(AutoTPError, match="hold different shards"):
        torch.nn.parallel.DistributedDataParallel(model)
    for seed, parity in enumerate((0, None)):
        freeze(reference, parity)
        freeze(model, parity)
        inputs = batch(reference, seed, rows=4)
        mine = {name: value.chunk(2)[mesh["dp"].get_local_rank()] for name, value in inputs.items()}
        wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
        (_, grads), (loss, expected) = step(model, mine, wrapped), step(reference, inputs)
        compare_steps((loss, grads), (loss, expected))
        model = copy.deepcopy(model)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_data_parallel_while_some_are_frozen(ranks, family):
    ranks.run(check_data_parallel, family, size=4)
