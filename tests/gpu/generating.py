"""`generate()` of a mixture of experts on two GPUs: the unsharded model's logits, from graphs, in little memory."""

import copy

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import autotp
from autotp.generation.engine import find_engine
from tests.gpu.checks import CUDA

ROWS, TOKENS, NEW = (4, 512, 8) if CUDA else (2, 16, 3)
HIDDEN, INSIDE = (512, 2048) if CUDA else (32, 64)


def check_experts():
    """A copy of two experts' weights for every token of the prompt would be some GiB here."""
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=INSIDE, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=512, num_local_experts=8, num_experts_per_tok=2, dtype=torch.bfloat16, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    whole = MixtralForCausalLM(config).to(torch.bfloat16).eval()
    model = autotp.parallelize(copy.deepcopy(whole))
    whole = whole.to(model.device)
    ids = torch.randint(1, 512, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1)).to(model.device)
    want = whole(ids, logits_to_keep=1).logits[:, -1].float()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    options = dict(attention_mask=torch.ones_like(ids), do_sample=False, return_dict_in_generate=True, output_logits=True)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    made = [model.generate(ids, max_new_tokens=NEW, **options) for _ in range(3)]  # run, captured, replayed
    grown = torch.cuda.max_memory_allocated() - before if CUDA else 0
    error = ((made[0].logits[0].float() - want).norm() / want.norm()).item()
    assert error <= 0.05, error
    assert all(torch.equal(each.sequences, made[0].sequences) for each in made)
    engine = find_engine(model)
    assert not engine.broken and engine.special and (engine.captures >= 2 or not CUDA), (engine.broken, engine.captures)
    assert grown < 8 * weights, (grown, weights)
    return f"first logits {error:.1e}, {engine.captures} graphs, {grown / 2**20:.0f} MiB beside {weights / 2**20:.0f} of weights"


CHECKS = (check_experts,)
