"""Mixtures of experts in `generate()`: prompts never run where transformers copies an expert's weights for every token."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import autotp
from autotp.generation.engine import find_engine
from tests.generation.test_loop import capture_on_cpu, make_prompt
from tests.models import tiny

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


def generate_all(model, **options):
    """Tokens of a prompt that is padded on the left and of one that is not, greedy and drawn."""
    ids, mask = make_prompt()
    made = []
    for rows in (slice(3), slice(1, 3)):
        for do_sample in (False, True):
            torch.manual_seed(0)
            call = dict(attention_mask=mask[rows], max_new_tokens=5, do_sample=do_sample, **options)
            made.append(model.generate(ids[rows], **call))
    return made


def check_router_logits(group, expected, by_config):
    model = autotp.parallelize(tiny("mixtral", num_local_experts=4, output_router_logits=by_config), group)
    options = {} if by_config else dict(output_router_logits=True)
    assert all(map(torch.equal, generate_all(model, **options), expected))
    capture_on_cpu(find_engine(model))
    for _ in range(2):
        assert all(map(torch.equal, generate_all(model, **options), expected))
    assert find_engine(model).captures > 0  # by our loop
    ids = torch.arange(5, 15)[None]
    assert len(model(ids, **options).router_logits) == 2


@pytest.mark.parametrize("by_config", [True, False])
def test_router_logits_that_config_or_caller_ask_for_are_left_out(ranks, by_config):
    """Their loss takes a mask with an entry for each token of the forward, which a static cache's is not."""
    ranks.run(check_router_logits, generate_all(tiny("mixtral", num_local_experts=4)), by_config)
