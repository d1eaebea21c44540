"""verify: passes on a right model, names what is wrong on a wrong one, and leaves no trace."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autotp.errors import AutoTPError
from autotp.inject.rewrite import parallelize
from autotp.train.verify import verify


def build(dropout=0.0):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=dropout,
    )
    return LlamaForCausalLM(config)


def make_batch():
    return {"input_ids": torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))}


def run_right(group, dropout):
    model = parallelize(build(dropout), group)
    mark = torch.ones_like(model.model.norm.weight)
    model.model.norm.weight.grad = mark
    model.eval()
    report = verify(model, make_batch())
    assert report.passed, str(report)
    assert len(report.errors) == 3 + len(list(model.parameters())) and "passed" in str(report)
    assert model.model.norm.weight.grad is mark and not model.training
    assert all(p.grad is None for p in model.parameters() if p is not model.model.norm.weight)
    assert model.model.layers[0].self_attn.attention_dropout == dropout
    assert not verify(model, make_batch(), gradient_tolerance=0.0).passed
    return str(report), report.worst_name


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_right_model_passes(ranks, dropout):
    answers = ranks.run(run_right, dropout)
    assert answers[0] == answers[1]


def run_wrong(group):
    model = parallelize(build(), group)
    layer = model.model.layers[1].self_attn.o_proj
    layer.weight.register_hook(lambda grad: grad * 2)  # a gradient that is twice too large, on every rank
    report = verify(model, make_batch())
    assert not report.passed
    assert report.worst_name == "model.layers.1.self_attn.o_proj.weight" and report.worst_name in str(report)
    assert abs(report.worst_error - 1) < 1e-3
    assert report.errors["loss"] <= report.tolerances["loss"]


def test_the_worst_name_is_printed(ranks):
    ranks.run(run_wrong)


def test_a_plain_model_is_refused():
    with pytest.raises(AutoTPError, match="not parallelized"):
        verify(build(), make_batch())
