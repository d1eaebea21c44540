"""Log-probabilities from a split head equal those of the whole one; a loss that reads a split head's weight itself is refused."""

import copy
import types

import pytest
import torch
from torch import nn

import autotp
from autotp.groups import resolve_group
from autotp.layers import fused_head
from autotp.layers.embedding import VocabParallelHead
from autotp.layers.fused_head import OUTPUTS, LogProbs, Scaling, vocab_parallel_log_probs
from tests.layers.test_embedding import shard_module
from tests.models import batch, tiny


def whole_log_probs(hidden, head, target, scaling):
    z = head(hidden) * scaling.scale
    z = (z if scaling.softcap is None else scaling.softcap * torch.tanh(z / scaling.softcap)) / scaling.temperature
    log_p = z.log_softmax(-1)
    picked = log_p.gather(-1, target[:, None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return LogProbs(picked, entropy, (2 * log_p).logsumexp(-1).detach(), z.mean(-1).detach(), z.argmax(-1) == target)


def compare_log_probs(pg, bias, scaling):
    group = resolve_group(pg)
    fused_head.ROWS = 5
    torch.manual_seed(0)
    whole = nn.Linear(6, 11, bias=bias)
    with torch.no_grad():
        whole.weight[7] = whole.weight[2]  # equal logits, of other ranks too: only the first is the best
        if bias:
            whole.bias[7] = whole.bias[2]
    local = shard_module(copy.deepcopy(whole), VocabParallelHead, group)
    x = torch.randn(13, 6, requires_grad=True)
    target = whole(x).argmax(-1)
    target[::3] = torch.randint(11, (5,))
    target[(target == 2).nonzero()[:1]] = 7
    copied = x.detach().clone().requires_grad_()
    wanted = whole_log_probs(x, whole, target, scaling)
    got = vocab_parallel_log_probs(copied, local, local.weight, local.bias, target, scaling)
    assert torch.equal(got.is_top1, wanted.is_top1) and 0 < got.is_top1.sum() < 13
    for name in ("log_probs", *OUTPUTS[:-1]):
        torch.testing.assert_close(getattr(got, name), getattr(wanted, name), rtol=1e-5, atol=1e-6, msg=name)
    weights = torch.linspace(-1, 1, 13)
    for each in (got, wanted):
        (each.log_probs * weights + each.entropy * weights.flip(0)).sum().backward()
    torch.testing.assert_close(copied.grad, x.grad, rtol=1e-5, atol=1e-6)
    for name, parameter in local.named_parameters():
        slice_ = local.shards[name].split(getattr(whole, name).grad, group.tp_rank)
        torch.testing.assert_close(parameter.grad, slice_, rtol=1e-5, atol=1e-6, msg=name)
    alone = vocab_parallel_log_probs(copied, local, local.weight, local.bias, target, scaling, ("entropy",))
    assert alone.log_sum_sq_probs is alone.mean_logits is alone.is_top1 is None
    local.weight.requires_grad_(False)
    alone.log_probs.sum().backward()


@pytest.mark.parametrize(("size", "bias", "scaling"), [(2, False, Scaling(1.0, None, 1.0)), (3, True, Scaling(1.7, 2.0, 0.6))])
def test_log_probs_equal_those_of_the_whole_head(ranks, size, bias, scaling):
    ranks.run(compare_log_probs, bias, scaling, size=size)


def read_weight(self, input_ids, labels=None):
    """A loss in the manner of fused ones: the head's weight is multiplied past its forward."""
    logits = self.model(input_ids).last_hidden_state @ self.lm_head.weight.T
    loss = None if labels is None else nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten() % 65)
    return types.SimpleNamespace(loss=loss)


def check_bypass(pg):
    given = batch(tiny())
    expected = read_weight(tiny(), **given).loss
    for options, fails in (({}, True), ({"head": "whole"}, False)):
        for training in (True, False):
            model = autotp.parallelize(tiny(), pg, **options).train(training)
            model.forward = types.MethodType(read_weight, model)
            if fails:
                with pytest.raises(autotp.AutoTPError, match=r"lm_head did not run: .* of \[131, 64\] .*head='whole'"):
                    model(**given)
            else:
                torch.testing.assert_close(model(**given).loss, expected, rtol=1e-5, atol=1e-5)
            model(given["input_ids"])  # without labels nothing is judged


def test_a_loss_that_reads_a_split_heads_weight_is_refused(ranks):
    ranks.run(check_bypass)
