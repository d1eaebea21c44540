"""verify: passes on a right model, names what is wrong on a wrong one, and leaves no trace."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autotp.errors import AutoTPError
from autotp.inject.rewrite import parallelize
from autotp.train.verify import _ExactCrossEntropy, verify


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


def run_reference(group):
    """A model loaded with other weights than the reference, which a copy of it can't tell."""
    model, reference = parallelize(build(), group), build()
    assert verify(model, make_batch(), reference=reference).passed
    with torch.no_grad():
        reference.model.layers[0].mlp.up_proj.weight[3] += 1
    report = verify(model, make_batch(), reference=reference)
    assert not report.passed and report.errors["logits"] > 1e-2
    assert verify(model, make_batch()).passed
    return True


def test_against_a_reference_loaded_apart(ranks):
    assert ranks.run(run_reference) == [True, True]


def run_without_labels(group):
    whole = parallelize(build().model, group)  # no logits and no loss: its first output
    report = verify(whole, {**make_batch(), "labels": None})
    assert report.passed, str(report)
    model = parallelize(build(), group)
    report = verify(model, {**make_batch(), "labels": None})
    assert report.passed and abs(report.loss - float(model(**make_batch()).logits.pow(2).mean())) < 1e-6
    return True


def test_without_labels_the_first_output_is_compared(ranks):
    assert ranks.run(run_without_labels) == [True, True]


def test_cross_entropy_is_exact_inside():
    """49152 columns, as a rank of few sums them better than torch sums all on the CPU."""
    logits = torch.randn(4, 49152, generator=torch.Generator().manual_seed(0)) * 3
    target = torch.tensor([1, 2, 3, 49151])
    exact = float(torch.nn.functional.cross_entropy(logits.double(), target))
    with _ExactCrossEntropy():
        found = torch.nn.functional.cross_entropy(logits, target)
        assert torch.nn.functional.cross_entropy(input=logits, target=target) == found
    assert found.dtype == torch.float32 and abs(float(found) - exact) <= 1e-7 * exact
