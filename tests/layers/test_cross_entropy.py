"""The vocabulary-parallel cross-entropy equals `F.cross_entropy` of the whole logits."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed import all_reduce

from autotp.errors import PlanError
from autotp.groups import resolve_group
from autotp.layers.cross_entropy import vocab_parallel_cross_entropy
from autotp.shard import Shard


def both_ways(group, logits, target, **options):
    """`(loss, gradient of this rank's columns)` of the parallel loss and of F.cross_entropy."""
    shard = Shard.even((logits.shape[-1], 4), 0, group.tp_size)
    columns = shard.cuts[0].indices(group.tp_rank)
    results = []
    local = logits[..., columns].clone().requires_grad_()
    full = logits.clone().requires_grad_()
    got = vocab_parallel_cross_entropy(local, target, shard, group, **options)
    wanted = F.cross_entropy(full.float() if full.dtype == torch.bfloat16 else full, target, **options)
    for loss, leaf in ((got, local), (wanted, full)):
        weight = torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).view(loss.shape)
        (loss * weight).sum().backward()
        results += [loss.detach(), leaf.grad if leaf is local else leaf.grad[..., columns]]
    return results


def compare_options(pg, vocab):
    group = resolve_group(pg)
    torch.manual_seed(0)
    logits = torch.randn(12, vocab) * 5
    target = torch.randint(vocab, (12,))
    target[[2, 7]] = -100
    for smoothing, reduction in itertools.product((0.0, 0.1), ("mean", "sum", "none")):
        loss, grad, wanted, wanted_grad = both_ways(group, logits, target, label_smoothing=smoothing, reduction=reduction)
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(grad, wanted_grad, rtol=1e-5, atol=1e-6)
    loss, _, wanted, _ = both_ways(group, logits, target.where(target >= 0, 3), ignore_index=3)
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    shard = Shard.even((vocab,), 0, group.tp_size)
    bounds = [0, *itertools.accumulate(shard.local_numel(rank) for rank in range(group.tp_size))]
    local = logits[:, bounds[group.tp_rank] : bounds[group.tp_rank + 1]]
    torch.testing.assert_close(
        vocab_parallel_cross_entropy(local, target, bounds, group), F.cross_entropy(logits, target), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(("size", "vocab"), [(2, 33), (3, 32)])
def test_equals_cross_entropy(ranks, size, vocab):
    ranks.run(compare_options, vocab, size=size)


def compare_extremes(pg):
    group = resolve_group(pg)
    torch.manual_seed(0)
    target = torch.tensor([0, 8, 4, 2])
    cases = {
        "large": torch.randn(4, 9) * 1e4,
        "masked columns": torch.randn(4, 9).masked_fill(torch.tensor([0, 1, 0, 1, 0, 0, 1, 0, 0]).bool(), -torch.inf),
        "double": torch.randn(4, 9).double(),
    }
    for logits in cases.values():
        loss, grad, wanted, wanted_grad = both_ways(group, logits, target)
        assert loss.dtype == wanted.dtype
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(grad, wanted_grad, rtol=1e-5, atol=1e-6)
    for masked, shift, dtype in ((range(5), -200, torch.float32), (range(5, 9), -1e4, torch.bfloat16)):  # all of one rank's
        mask = torch.tensor([column in masked for column in range(9)])
        logits = (torch.randn(4, 9) + shift).masked_fill(mask, -torch.inf).to(dtype)
        loss, grad, wanted, wanted_grad = both_ways(group, logits, torch.full((4,), int((~mask).nonzero()[0])))
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(grad, wanted_grad, rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-6)
    loss, grad, wanted, wanted_grad = both_ways(group, cases["large"].bfloat16(), target)
    assert loss.dtype == torch.float32 and grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad, wanted_grad)
    loss, grad, wanted, wanted_grad = both_ways(group, torch.randn(4, 9), torch.full((4,), -100))
    assert loss.isnan() and wanted.isnan() and not grad.any() and not wanted_grad.any()


def test_extreme_logits_dtypes_and_an_ignored_batch(ranks):
    ranks.run(compare_extremes)


def refuse_wrong_input(pg):
    group = resolve_group(pg)
    shard, logits = Shard.even((9, 4), 0, 2), torch.randn(4, 5 - group.tp_rank, requires_grad=True)
    with pytest.raises(RuntimeError, match="index"):  # as F.cross_entropy refuses a target outside the vocabulary
        vocab_parallel_cross_entropy(logits, torch.tensor([0, 9, 1, 1]), shard, group)
    with pytest.raises(ValueError, match="do not fit targets"):
        vocab_parallel_cross_entropy(logits, torch.zeros(5, dtype=torch.int64), shard, group)
    with pytest.raises(PlanError, match="Pass this rank's columns"):
        vocab_parallel_cross_entropy(torch.randn(4, 9), torch.zeros(4, dtype=torch.int64), shard, group)
    with pytest.raises(ValueError, match="not a reduction"):
        vocab_parallel_cross_entropy(logits, torch.zeros(4, dtype=torch.int64), shard, group, reduction="avg")
    loss = vocab_parallel_cross_entropy(logits, torch.zeros(4, dtype=torch.int64), shard, group)
    (grad,) = torch.autograd.grad(loss * torch.ones((), requires_grad=True), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_wrong_input_is_refused(ranks):
    ranks.run(refuse_wrong_input)


def refuse_too_few_columns(pg):
    """More ranks than columns: those that hold one do not wait for those that hold none."""
    group = resolve_group(pg)
    shard, width = Shard.even((2, 4), 0, 3), (1, 1, 0)[group.tp_rank]
    for given in (shard, [0, 1, 2, 2]):
        with pytest.raises(PlanError, match="TP rank 2"):
            vocab_parallel_cross_entropy(torch.randn(4, width), torch.zeros(4, dtype=torch.int64), given, group)


def test_a_vocabulary_smaller_than_the_ranks_is_refused_on_all(ranks):
    ranks.run(refuse_too_few_columns, size=3, timeout_s=60)


def count_all_reduces(pg):
    from unittest import mock

    group = resolve_group(pg)
    shard, logits = Shard.even((8, 4), 0, 2), torch.randn(4, 4, requires_grad=True)
    sizes = []

    def counted(tensor, *args, **kwargs):
        sizes.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    with mock.patch("torch.distributed.all_reduce", counted):
        target = torch.zeros(4, dtype=torch.int64)
        vocab_parallel_cross_entropy(logits, target, shard, group, label_smoothing=0.1).backward()
    return sizes


def test_two_all_reduces_forward_and_none_backward(ranks):
    assert ranks.run(count_all_reduces) == [[4, 12]] * 2
