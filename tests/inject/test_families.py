"""Every family with a dense Hugging Face plan, against the unsharded model: logits, gradients, optimizer steps, collectives."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

import autotp
from autotp.comm import ALL_GATHER
from autotp.generation.engine import find_engine
from autotp.layers.base import sharded_modules
from tests.models import DENSE, batch, tiny, tiny_config

# Windows, capped logits, norms in unusual places, partial rotary embeddings, biases: what a static cache must get right.
GENERATING = ("llama", "qwen3", "gemma2", "gemma3_text", "phi", "phi3", "olmo2", "cohere", "gpt_neox", "starcoder2", "glm")


def reorder_noise(model, inputs, plain_logits, plain_grads):
    """How far float32 logits and gradients lie from float64's: the noise of summing in another order."""
    logits, grads = run_once(copy.deepcopy(model).double(), inputs)
    noise = {name: (grad - grads[name]).abs().max().item() for name, grad in plain_grads.items()}
    return (plain_logits - logits).abs().max().item(), noise


def run_once(model, inputs, counters=None):
    """Logits `[B, S, V]` in evaluation, then every gradient of the training loss; `counters` count its forward and backward."""
    forward, backward = counters or (nullcontext(), nullcontext())
    with torch.no_grad():
        logits = model.eval()(input_ids=inputs["input_ids"]).logits
    with forward:
        loss = model.train()(**inputs).loss
    with backward:
        loss.backward()
    return logits, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def full_gradients(model):
    """Every gradient, whole."""
    shards = {f"{n}.{p}": (m.tp, s) for n, m in sharded_modules(model) for p, s in m.shards.items()}
    whole = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            tp, shard = shards.get(name, (None, None))
            whole[name] = tp.all_gather(parameter.grad, shard) if shard is not None else parameter.grad
    return whole


def train(model, batches, clip, steps=3, lr=1e-3):
    """AdamW steps of two micro-batches each, clipped; returns losses and norms."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    seen = []
    model.train()
    for step in range(steps):
        for inputs in batches[2 * step : 2 * step + 2]:
            loss = model(**inputs).loss / 2
            loss.backward()
            seen.append(loss.item())
        seen.append(float(clip(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return seen


class Counter:
    """Counts all-reduces and all-gathers; those of at least `least` elements are of activations."""

    names = ("all_reduce", ALL_GATHER)

    def __init__(self, least):
        self.least, self.count, self.small = least, 0, 0
        self.real = {name: getattr(dist, name) for name in self.names}

    def __enter__(self):
        for name, real in self.real.items():
            setattr(dist, name, self.counted(real))
        return self

    def counted(self, real):
        def call(tensor, *args, **kwargs):
            big = tensor.numel() >= self.least
            self.count, self.small = self.count + big, self.small + (not big)
            return real(tensor, *args, **kwargs)

        return call

    def __exit__(self, *_):
        for name, real in self.real.items():
            setattr(dist, name, real)


def check_family(group, family, overrides):
    reference = tiny(family, **overrides)
    model = autotp.parallelize(copy.deepcopy(reference), group)
    inputs = batch(reference)
    logits, grads = run_once(copy.deepcopy(reference), inputs)
    noise, grad_noise = reorder_noise(reference, inputs, logits, grads)
    least = inputs["input_ids"].numel() * 2  # more than one number a token: an activation
    counters = forward, backward = Counter(least), Counter(least)
    got_logits, _ = run_once(model, inputs, counters)
    got = full_gradients(model)
    assert set(got) == set(grads)
    assert (got_logits - logits).abs().max().item() <= max(1e-5, 4 * noise), family
    worst = max(g.abs().max().item() for g in grads.values())
    for name, grad in grads.items():
        error = (got[name] - grad).abs().max().item()
        assert error <= max(5e-5 * grad.abs().max().item(), 4 * grad_noise[name], 1e-7 * worst), (
            name,
            error,
            grad.abs().max().item(),
        )
    model.zero_grad()
    if family in GENERATING:
        check_generation(model.eval(), reference.eval())
    check_steps(group, model, reference)
    planned = model.autotp_plan.collectives
    return (forward.count - planned[0], backward.count - planned[1], forward.small, backward.small, *planned)


def check_generation(model, reference):
    """Greedy and drawn tokens of rows of which one is padded on the left, in memory for more rows, a step ahead of the host."""
    engine = find_engine(model)
    engine.runs_ahead = engine.pads = True
    ids = batch(reference, seed=3, rows=3, length=9)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for options in (dict(do_sample=False), dict(do_sample=True, top_k=30, repetition_penalty=1.1)):
        options |= dict(attention_mask=mask, max_new_tokens=10, pad_token_id=0)
        torch.manual_seed(1)
        expected = reference.generate(ids, **options)
        torch.manual_seed(1)
        assert torch.equal(model.generate(ids, **options), expected), options
    assert len(engine.steps) == 2 and not engine._said


def check_steps(group, model, reference):
    """Losses, norms and parameters after three AdamW steps. A gradient near zero is noise, of which Adam makes steps of up to
    lr, so parameters are compared with float64's, and the bar is 4 times what the unsharded model is off there."""
    batches = [batch(reference, seed=s) for s in range(6)]
    exact = copy.deepcopy(reference).double()
    train(exact, batches, torch.nn.utils.clip_grad_norm_)
    expected = train(reference, batches, torch.nn.utils.clip_grad_norm_)
    assert train(model, batches, autotp.clip_grad_norm_) == pytest.approx(expected, rel=2e-4)
    weights = autotp.full_state_dict(model)
    if dist.get_rank(group) == 0:
        precise = exact.state_dict()
        noise = {name: (value - precise[name]).abs() for name, value in reference.state_dict().items()}
        largest = max(value.max().item() for value in noise.values())
        for name, value in precise.items():
            off = (weights[name] - value).abs()
            assert off.max() <= max(5e-5, 4 * largest), (name, off.max(), largest)
            assert off.mean() <= 1e-6 + 4 * noise[name].mean(), (name, off.mean(), noise[name].mean())


def skip_without_plan(family):
    if not tiny_config(family).base_model_tp_plan:
        pytest.skip(f"this transformers has no plan for {family}")


@pytest.mark.parametrize("family", DENSE)
def test_matches_the_unsharded_model(ranks, family, capsys):
    skip_without_plan(family)
    forward, backward, small_forward, small_backward, *planned = ranks.run(check_family, family, {})[0]
    with capsys.disabled():
        print(
            f"\n  {family}: 2 layers take {planned[0]} collectives forward, {planned[1]} backward, and {small_forward - 2}, "
            f"{small_backward} small ones",
            end="",
        )
    # What the plan says is what runs, beside two of the embedding and the head forward, one backward, and the loss's two.
    assert (forward, backward) == (2, 1) and small_forward >= 2
    if family in ("llama", "qwen3"):
        assert planned == [4, 4] and small_forward == 2
        assert small_backward <= (4 if family == "qwen3" else 0)


@pytest.mark.parametrize(
    "family, overrides, size",
    [
        ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "tie_word_embeddings": True}, 2),
        ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "tie_word_embeddings": True}, 3),
        ("qwen2", {"intermediate_size": 100}, 3),
        ("gemma2", {}, 4),
    ],
)
def test_matches_uneven_and_more_ranks(ranks, family, overrides, size):
    ranks.run(check_family, family, overrides, size=size)


def check_uneven_experts(group):
    reference = tiny("qwen3_moe", moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
    model = autotp.parallelize(copy.deepcopy(reference), group)
    inputs = batch(reference)
    logits, grads = run_once(reference, inputs)
    got_logits, _ = run_once(model, inputs)
    torch.testing.assert_close(got_logits, logits, atol=1e-5, rtol=1e-4)
    got = full_gradients(model)
    for name, grad in grads.items():
        assert (got[name] - grad).abs().max() <= 1e-4 * grad.abs().max() + 1e-7, name


def test_experts_dealt_unevenly_run_in_their_grouped_kernel(ranks):
    ranks.run(check_uneven_experts, size=3)
