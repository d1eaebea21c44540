"""Dropout over two ranks: other masks on split values, the same on replicated ones, drawn again alike under checkpoints."""

import functools
import random

import pytest
import torch
import transformers

import autotp
from autotp.layers.draws import DrawModule
from tests.models import tiny

RATE = 0.25
CHANCE = RATE**2 + (1 - RATE) ** 2  # of two masks that know nothing of each other to agree


def independent(mine, other):
    """Whether two masks agree as often as chance has it."""
    share = (mine == other).double().mean()
    return abs(share - CHANCE) < 5 * (CHANCE * (1 - CHANCE) / mine.numel()) ** 0.5


# -- attention: one-hot values and equal scores show its mask in what the output projection reads ---------------------------


def telling_llama(**config):
    """A llama of one layer of four heads of size 16, where column j of a head's output is 0 if key j was dropped."""
    sizes = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=16, vocab_size=64)
    model = tiny("llama", num_hidden_layers=1, attention_dropout=RATE, **sizes, **config).train()
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(64) + 0.1)
        model.model.layers[0].input_layernorm.weight.fill_(1.0)
        attention.q_proj.weight.zero_()
        attention.v_proj.weight.copy_(torch.eye(64)[:16].repeat(4, 1) + 0.1)
    return model


def watch(module, seen):
    module.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))


def check_heads(group, implementation, compiled):
    model = autotp.parallelize(telling_llama(attn_implementation=implementation), group)
    (opened,) = model.autotp_plan.draws
    assert (opened.name, opened.parts, opened.rates) == ("model.layers.0.self_attn", (0, 1), ("attention_dropout",))
    seen, ids = [], torch.arange(16).expand(24, 16)
    layer = model.model.layers[0]
    watch(layer.self_attn.o_proj, seen)
    if compiled:
        layer.compile(backend="aot_eager", fullgraph=True)
    torch.manual_seed(3)
    out = model(ids, labels=ids).loss
    out.backward()
    state = torch.get_rng_state()
    again = model(ids, labels=ids).loss
    assert not torch.equal(*seen[:2])
    torch.manual_seed(3)
    assert torch.equal(model(ids, labels=ids).loss, out) and torch.equal(seen[2], seen[0])
    torch.set_rng_state(state)  # gone on from, as from a saved state
    assert torch.equal(model(ids, labels=ids).loss, again) and torch.equal(seen[3], seen[1])
    tp = model.autotp_group
    assert len(set(tp.gather_objects((float(out.detach()), float(torch.rand(())))))) == 1
    visible = torch.ones(16, 16).tril().bool()
    weights = [solve_weights(read.unflatten(-1, (2, 16)).transpose(1, 2)) for read in tp.gather_objects(seen[0])]
    masks = [(each > 1e-3)[..., visible] for each in weights]  # [B, h, pairs of query and key]
    assert all(abs(mask.double().mean() - (1 - RATE)) < 0.02 for mask in masks)
    assert all(independent(masks[0][:, a], masks[1][:, b]) for a in range(2) for b in range(2))
    layer.self_attn.attention_dropout = 0.0
    before = torch.get_rng_state()
    model(ids)
    assert torch.equal(torch.get_rng_state(), before)


def solve_weights(read):
    """Weights `[..., keys]` of what one head returns, `weights @ values`."""
    hidden = torch.eye(64)[:16] + 0.1
    hidden = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)
    return read @ torch.linalg.inv(hidden @ (torch.eye(64)[:16] + 0.1).T)


@pytest.mark.parametrize("implementation, compiled", [("sdpa", False), ("eager", False), ("sdpa", True)])
def test_attention_drops_other_weights_on_each_rank(ranks, implementation, compiled):
    ranks.run(check_heads, implementation, compiled)


# -- whole models ---------------------------------------------------------------------------------------------------------

SIZES = dict(vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def make_gpt2():
    rates = dict(attn_pdrop=RATE, resid_pdrop=RATE, embd_pdrop=RATE)
    config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=32, **rates, **SIZES)
    return transformers.GPT2LMHeadModel(config)


def make_bart():
    """Activations are dropped, and residuals, in the forward of one module; layers are left out by chance."""
    rates = dict(dropout=RATE, activation_dropout=RATE, attention_dropout=RATE, encoder_layerdrop=0.4, decoder_layerdrop=0.4)
    heads = dict(encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48)
    layers = dict(encoder_layers=3, decoder_layers=3, d_model=32, max_position_embeddings=32, decoder_start_token_id=2)
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**rates, **heads, **layers, **SIZES))


def make_t5():
    config = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu", dropout_rate=RATE)
    return transformers.T5ForConditionalGeneration(transformers.T5Config(decoder_start_token_id=0, **config, **SIZES))


def make_beit():
    """Stochastic depth: whole branches are left out, of the same images on all ranks."""
    sizes = dict(image_size=16, patch_size=8, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64)
    rates = dict(drop_path_rate=0.5, hidden_dropout_prob=RATE, attention_probs_dropout_prob=RATE)
    return transformers.BeitForImageClassification(transformers.BeitConfig(out_indices=[1, 2, 3, 4], **sizes, **rates))


MAKERS = {"gpt2": (make_gpt2, 0), "bart": (make_bart, 6), "t5": (make_t5, 4), "beit": (make_beit, 0)}


def calls_of(model):
    if model.config.model_type == "beit":
        return {"pixel_values": torch.randn(8, 3, 16, 16), "labels": torch.arange(8) % 2}
    ids = torch.randint(3, 64, (8, 12))
    return {"input_ids": ids, "labels": ids}


def train_once(model, call, seed):
    """Loss and gradients of one call under a seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    model.zero_grad()
    loss = model(**call, use_cache=False).loss if model.config.model_type != "beit" else model(**call).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def note_zeros(zeros, name, module, args, out=None):
    zeros.setdefault(name, (args[0] if out is None else out).detach() == 0)


def check_model(group, kind):
    make, dropped = MAKERS[kind]
    torch.manual_seed(0)
    model = make()
    call = calls_of(model)
    model = autotp.parallelize(model, group).train()
    tp, opened = model.autotp_group, {each.name for each in model.autotp_plan.draws if each.inside in ("apart", "either")}
    rows, zeros, handles = {row for region in model.autotp_plan.regions for row in region.rows}, {}, []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and name not in opened and module.p > 0:
            handles.append(module.register_forward_hook(functools.partial(note_zeros, zeros, name)))
        elif name in rows:
            handles.append(module.register_forward_pre_hook(functools.partial(note_zeros, zeros, name)))
    first = train_once(model, call, 1)
    own = 0
    for name, mine in zeros.items():
        one, two = tp.gather_objects(mine)
        if name not in rows:
            assert torch.equal(one, two), name
        elif abs(one.double().mean() - RATE) < 0.05:
            own += 1
            assert independent(one, two), name
    assert own == dropped or (kind == "bart" and 0 < own < dropped)  # some layers were left out
    for handle in handles:
        handle.remove()
    for seed, same in ((1, True), (2, False)):
        again = train_once(model, call, seed)
        assert torch.equal(again["loss"], first["loss"]) is same
    assert len(set(tp.gather_objects((float(first["loss"]), float(torch.rand(())), random.random())))) == 1
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        again = train_once(model, call, 1)
        assert set(again) == set(first)
        for name, grad in first.items():
            assert (again[name] - grad).abs().max() <= 1e-5 * grad.abs().max() + 1e-7, (name, reentrant)
    assert all(not draws.frames for draws in {m.autotp_draws.draws for m in model.modules() if isinstance(m, DrawModule)})


@pytest.mark.parametrize("kind", list(MAKERS))
def test_models_drop_alike_where_values_are_whole(ranks, kind):
    ranks.run(check_model, kind)
