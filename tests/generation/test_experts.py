"""Mixtures of experts in `generate()`: prompts never run where transformers copies an expert's weights for every token."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import autotp

TOKENS, NEW = 9, 4


def make_model():
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=96,
        num_local_experts=4, num_experts_per_tok=2, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return MixtralForCausalLM(config).eval()


def check_experts(group, fused, expected):
    """Which tokens ran while transformers' copying experts were in force."""
    model = autotp.parallelize(make_model(), group)
    assert any(fusion.kind == "experts" for fusion in model.autotp_plan.fused)
    if not fused:
        model = autotp.parallelize(make_model(), group, plan=replace(model.autotp_plan, fused=()))
    copies, ran = [False], []

    @contextmanager
    def optimize():
        copies[0] = True
        yield
        copies[0] = False

    model._optimize_model_for_decode = optimize
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: ran.append((kwargs["input_ids"].shape[1], copies[0])), with_kwargs=True
    )
    ids = torch.arange(1, TOKENS + 1)[None]
    assert torch.equal(model.generate(ids, max_new_tokens=NEW, do_sample=False), expected)
    return ran


@pytest.mark.parametrize("fused", [True, False])
def test_weights_are_copied_for_no_prompt_and_where_ours_read_them_for_no_step(ranks, fused):
    expected = make_model().generate(torch.arange(1, TOKENS + 1)[None], max_new_tokens=NEW, do_sample=False)
    for ran in ranks.run(check_experts, fused, expected):
        assert ran == [(TOKENS, False), *[(1, not fused)] * (NEW - 1)]
