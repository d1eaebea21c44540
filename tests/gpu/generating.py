"""`generate()` on two GPUs: a mixture of experts in little memory, and graphs that are made again where the cache grows."""

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import autotp
from autotp.generation.engine import find_engine
from tests.gpu.checks import CUDA

ROWS, TOKENS, NEW = (8, 512, 8) if CUDA else (2, 16, 3)
HIDDEN, INSIDE = (512, 2048) if CUDA else (32, 64)


def make_model(family):
    """Two small layers in bfloat16, the same on every rank."""
    torch.manual_seed(0)
    shape = dict(hidden_size=HIDDEN, intermediate_size=INSIDE, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4)
    shape |= dict(vocab_size=512, dtype=torch.bfloat16, eos_token_id=None, pad_token_id=0)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape)).to(torch.bfloat16).eval()
    return MixtralForCausalLM(MixtralConfig(num_local_experts=8, num_experts_per_tok=2, **shape)).to(torch.bfloat16).eval()


def check_experts():
    """A copy of two experts' weights for every token of the prompt would be some GiB here."""
    whole = make_model("mixtral")
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
    got = made[0].logits[0].float()
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    error = errors.median().item()  # rounding sends a few tokens to other experts
    assert error <= 0.05, errors
    assert all(torch.equal(each.sequences, made[0].sequences) for each in made)
    engine = find_engine(model)
    assert not engine.broken and engine.special and (engine.captures >= 2 or not CUDA), (engine.broken, engine.captures)
    assert grown < 8 * weights, (grown, weights)
    return f"first logits {error:.1e}, {engine.captures} graphs, {grown / 2**20:.0f} MiB beside {weights / 2**20:.0f} of weights"


@torch.no_grad()
def check_growing(family):
    """Batches that need more cache than the one before, so that all graphs are dropped and made again: none without graphs."""
    model = autotp.parallelize(make_model(family))
    captures, pools = [], set()
    for rows, tokens in ((1, 64), (1, 300), (8, 300), (4, 20), (2, 1500)):
        ids = torch.randint(1, 512, (rows, tokens if CUDA else 8 * rows), generator=torch.Generator().manual_seed(1))
        first, second = (model.generate(ids.to(model.device), max_new_tokens=4, do_sample=False) for _ in range(2))
        assert torch.equal(first, second), (rows, tokens)
        engine = find_engine(model)
        captures.append(engine.captures)
        pools |= {step.graph.pool() for step in engine.steps.values() if step.graph is not None}
        assert not engine.broken, (rows, tokens, engine.broken)
    assert not CUDA or (captures == sorted(set(captures)) and len(pools) > 1), (captures, pools)
    return f"{captures[-1]} graphs in {len(pools)} pools"


CHECKS = ((check_experts, None), (check_growing, "llama"), (check_growing, "mixtral"))
