"""A model made by hand with everything that a plan can say, against its unsharded twin."""

import copy

import pytest
import torch
import torch.distributed as dist

import autotp
from autotp.layers.base import find_group
from tests.layers.regions import HEADS, Net, plan_of

CASES = [(2, False), (2, True), (4, False), (4, True)]


def made(group, late=False, dtype=torch.float32):
    """`(sharded, unsharded)`."""
    whole = Net().to(dtype)
    mine = autotp.parallelize(copy.deepcopy(whole), group, plan=plan_of(dist.get_world_size(group), late))
    return mine, whole


def inputs(seed=0, dtype=torch.float32, rows=2):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.randn(rows, HEADS, 5, 5, generator=generator, dtype=dtype)
    return torch.randn(rows, 5, 12, generator=generator, dtype=dtype), mask


def whole_gradients(model):
    """Every gradient, gathered; copies are compared bit for bit on the way."""
    found = {}
    for name, parameter in model.named_parameters():
        path, _, own = name.rpartition(".")
        shard = getattr(model.get_submodule(path), "shards", {}).get(own)
        grad, tp = parameter.grad, find_group(model)
        if grad is None:
            continue
        found[name] = grad if shard is None else tp.all_gather(grad, shard)
        local = found[name] if shard is None else shard.split(found[name], tp.tp_rank)
        assert torch.equal(local, grad), f"{name}: the holders' gradients differ"
        if shard is None:
            every = tp.gather_objects(grad)
            assert all(torch.equal(grad, other) for other in every), f"{name}: the ranks' gradients differ"
    return found


def step(model, seed=0, dtype=torch.float32, scale=1.0):
    x, mask = inputs(seed, dtype)
    x.requires_grad_()
    y = model(x, mask)
    (y * torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y)).sum().mul(scale).backward()
    return y.detach(), x.grad


def compare(mine, whole, seed=0, dtype=torch.float32, missing=()):
    got, want = step(mine, seed, dtype), step(whole, seed, dtype)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    grads = whole_gradients(mine)
    for name, parameter in whole.named_parameters():
        if parameter.grad is None:
            assert name not in grads, name
        else:
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-4, atol=2e-5 * max(1, scale), msg=name)


def check_everything(group, late):
    mine, whole = made(group, late)
    compare(mine, whole)
    x, mask = inputs(3)
    with torch.no_grad():
        torch.testing.assert_close(mine(x, mask), whole(x, mask), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine(x), whole(x), rtol=1e-4, atol=1e-5)  # an argument that is None
        torch.testing.assert_close(mine(x, mask[:, :1]), whole(x, mask[:, :1]), rtol=1e-4, atol=1e-5)  # one that broadcasts
    compare(mine, whole, seed=1)  # accumulates on the first gradients
    mine.zero_grad(), whole.zero_grad()
    named = {"gate": torch.ones(2, 5, 6), "mask": None, "alibi": inputs(4)[1][..., 0].reshape(2 * HEADS, 1, 5), "x": x}
    torch.testing.assert_close(mine.attn(**named)[0], whole.attn(**named)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size, late", CASES)
def test_forward_and_every_gradient(ranks, size, late):
    ranks.run(check_everything, late, size=size)
