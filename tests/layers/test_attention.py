"""Sharded nn.MultiheadAttention against the whole one: outputs, weights and every gradient; torch's encoder around it."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autotp.errors import PlanError
from autotp.groups import resolve_group
from autotp.inject.swap import make_plain
from autotp.layers.attention import (
    attention_shards,
    disable_fast_paths,
    find_heads,
    restore_fast_paths,
    rewrite_attention,
)
from autotp.layers.linear import LinearAllreduce, LinearLayer, rewrite_linear
from autotp.shard import Shard, deal_units

H, D, N, L, S = 4, 3, 2, 5, 6
E = H * D


def seeded(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(**options):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, H, dtype=torch.float64, **options)
    with torch.no_grad():  # biases start as zeros, which hides one that is added twice
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    return module


def shard(module, group, name="attn"):
    """A sharded copy of `module`, and the shards by parameter name."""
    local, tp = copy.deepcopy(module), resolve_group(group)
    shards = attention_shards(local, deal_units(H, tp.tp_size), name)
    rewrite_attention(local, tp, shards, name)
    for key, cut in shards.items():
        parameter = local.get_parameter(key)
        parameter.data = cut.split(parameter.data, tp.tp_rank).clone()
    return local, shards, tp


def inputs(module, same, batched=True, lengths=(L, S)):
    """query, key and value in the module's layout; one tensor for all if `same`."""
    made = []
    for seed, (length, width) in enumerate(zip((lengths[0], lengths[1], lengths[1]), (E, module.kdim, module.vdim), strict=True)):
        x = seeded(N, length, width, seed=seed)
        made.append((x if module.batch_first else x.transpose(0, 1).contiguous()) if batched else x[0])
    return [made[0]] * 3 if same else made


def compare(module, group, args, **kwargs):
    """Outputs, weights and all gradients of the sharded copy equal the whole module's."""
    local, shards, tp = shard(module, group)
    results = []
    for made in (module, local):
        leaves = {id(x): x.clone().requires_grad_() for x in args}
        masks = {k: v.clone().requires_grad_() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in kwargs.items()}
        out, weights = made(*(leaves[id(x)] for x in args), **masks)
        loss = (out * seeded(*out.shape, seed=7)).sum()
        if weights is not None:
            loss = loss + (weights * seeded(*weights.shape, seed=8)).sum()
        loss.backward()
        grads = [x.grad for x in leaves.values()] + [m.grad for m in masks.values() if torch.is_tensor(m) and m.requires_grad]
        results.append((out, weights, grads))
    (out, weights, grads), (got, got_weights, got_grads) = results
    torch.testing.assert_close(got, out)
    assert (weights is None) == (got_weights is None)
    if weights is not None:
        torch.testing.assert_close(got_weights, weights)
    for mine, whole in zip(got_grads, grads, strict=True):
        torch.testing.assert_close(mine, whole)
    for name, parameter in local.named_parameters():
        whole = module.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, shards[name].split(whole, tp.tp_rank) if name in shards else whole)
    module.zero_grad()


KINDS = [
    dict(),
    dict(batch_first=True),
    dict(bias=False, batch_first=True),
    dict(kdim=7, vdim=9, batch_first=True),
    dict(kdim=7, vdim=9, bias=False),
    dict(add_bias_kv=True),
    dict(add_zero_attn=True, batch_first=True),
    dict(add_bias_kv=True, add_zero_attn=True, kdim=7, vdim=9),
]


def check_kinds(group):
    for options in KINDS:
        module = build(**options)
        for same in (False, True) if "kdim" not in options else (False,):
            for batched in (True, False):
                args = inputs(module, same, batched)
                for kwargs in (dict(), dict(need_weights=False), dict(average_attn_weights=False)):
                    compare(module, group, args, **kwargs)
        q, k, _ = inputs(module, False)
        if "kdim" not in options:
            compare(module, group, [q, k, k])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_equals_the_whole_module(ranks, size):
    ranks.run(check_kinds, size=size)


def check_masks(group):
    upper = torch.ones(L, S, dtype=torch.bool).triu(2)
    padding = torch.zeros(N, S, dtype=torch.bool)
    padding[1, -2:] = True
    per_head = torch.rand(N * H, L, S, generator=torch.Generator().manual_seed(3)) < 0.3
    per_head[..., 0] = False
    floating = dict(attn_mask=seeded(L, S), key_padding_mask=seeded(N, S, seed=2))
    for options in (dict(batch_first=True), dict(add_bias_kv=True), dict(add_zero_attn=True)):
        module = build(**options)
        args = inputs(module, False)
        for kwargs in (dict(), dict(need_weights=False), dict(average_attn_weights=False)):
            for masks in (
                dict(attn_mask=upper),
                dict(key_padding_mask=padding),
                dict(attn_mask=upper, key_padding_mask=padding),
                dict(attn_mask=per_head),
                dict(attn_mask=per_head, key_padding_mask=padding),
                dict(attn_mask=seeded(N * H, L, S)),
                floating,
            ):
                compare(module, group, args, **masks, **kwargs)
        single = inputs(module, False, batched=False)
        compare(module, group, single, attn_mask=per_head[:H], key_padding_mask=padding[1])


@pytest.mark.parametrize("size", [2, 3])
def test_masks_of_every_form(ranks, size):
    ranks.run(check_masks, size=size)


def check_causal(group):
    for options in (dict(batch_first=True), dict(add_zero_attn=True)):
        module = build(**options)
        args = inputs(module, True, lengths=(L, L))
        mask = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
        padding = torch.zeros(N, L, dtype=torch.bool)
        padding[0, -1] = True
        for need_weights in (True, False):
            with torch.no_grad():
                local, _, _ = shard(module, group)
                for more in (dict(), dict(key_padding_mask=padding)):
                    kwargs = dict(attn_mask=mask.isinf(), is_causal=True, need_weights=need_weights, **more)
                    torch.testing.assert_close(local(*args, **kwargs)[0], module(*args, **kwargs)[0])
            compare(module, group, args, attn_mask=mask.isinf(), is_causal=True, need_weights=need_weights)
        with pytest.raises(RuntimeError, match="attn_mask"):
            local(*args, is_causal=True)


def test_causal_hint(ranks):
    ranks.run(check_causal)


def check_eval(group):
    """Inference, where the plain module takes its fast path; what is frozen; autocast."""
    module = build(batch_first=True).eval()
    local, shards, tp = shard(module, group)
    x = inputs(module, True)[0]
    with torch.no_grad():
        expected, weights = module(x, x, x)
        got, got_weights = local(x, x, x)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(got_weights, weights)
    for made in (module, local):
        made.in_proj_weight.requires_grad_(False)
        made(x, x, x)[0].square().sum().backward()
    assert local.in_proj_weight.grad is None
    torch.testing.assert_close(local.in_proj_bias.grad, shards["in_proj_bias"].split(module.in_proj_bias.grad, tp.tp_rank))
    with torch.autocast("cpu", torch.bfloat16):
        for need_weights in (True, False):
            half, whole = (made.float()(*[x.float()] * 3, need_weights=need_weights)[0] for made in (local, module))
            assert half.dtype is whole.dtype
            torch.testing.assert_close(half, whole, atol=0.05, rtol=0.05)


def test_inference_frozen_weights_and_autocast(ranks):
    ranks.run(check_eval)


def check_dropout(group):
    module = build(batch_first=True, dropout=0.5)
    local, _, tp = shard(module, group)
    x = inputs(module, True)[0].requires_grad_()
    torch.manual_seed(5)
    start = torch.get_rng_state()
    weights = local(x, x, x, average_attn_weights=False)[1]
    dropped = (weights == 0).transpose(0, 1).flatten(1)  # per head
    assert 0.3 < dropped.double().mean() < 0.7 and len({tuple(d.tolist()) for d in dropped}) == H
    after = torch.get_rng_state()
    assert tp.gather_objects(after.tolist()) == [after.tolist()] * tp.tp_size and not torch.equal(after, start)
    assert not torch.equal(local(x, x, x, average_attn_weights=False)[1], weights)
    torch.set_rng_state(start)
    assert torch.equal(local(x, x, x, average_attn_weights=False)[1], weights)
    grads = []
    for again in (False, True):  # the recomputation of a checkpoint draws the same
        torch.set_rng_state(start)
        x.grad = None
        call = lambda x: local(x, x, x, need_weights=False)[0]  # noqa: E731
        (checkpoint(call, x, use_reentrant=False) if again else call(x)).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)
    local.eval(), module.eval()
    torch.testing.assert_close(local(x, x, x)[0], module(x, x, x)[0])


def test_dropout_differs_by_head_and_is_repeated(ranks):
    ranks.run(check_dropout)


class Scaled(nn.MultiheadAttention):
    """Builds on the plain forward."""

    def forward(self, *args, **kwargs):
        out, weights = super().forward(*args, **kwargs)
        return out * 2, weights


class Other(nn.MultiheadAttention):
    """Replaces it."""

    def forward(self, query, key, value):
        return query @ self.in_proj_weight[:E]


def check_module(group):
    """State dicts, copies, subclasses, and the plain module back."""
    plain = build()
    module = Scaled(E, H, dtype=torch.float64)
    module.load_state_dict(plain.state_dict())
    x = inputs(module, True)
    expected = module(*x)
    local, shards, tp = shard(module, group)
    assert isinstance(local, Scaled) and list(local.state_dict()) == list(module.state_dict())
    torch.testing.assert_close(local(*x), expected)
    torch.testing.assert_close(copy.deepcopy(local)(*x), expected)
    assert f" of [{3 * E}, {E}]" in repr(local)
    with torch.no_grad():
        local.in_proj_weight.zero_(), local.out_proj.weight.zero_()
    local.load_state_dict(module.state_dict())  # whole tensors are split
    torch.testing.assert_close(local(*x), expected)
    for key, cut in shards.items():
        local.get_parameter(key).data = tp.all_gather(local.get_parameter(key).data, cut)
    make_plain(local), make_plain(local.out_proj)
    assert type(local) is Scaled and type(local.out_proj) is type(module.out_proj)
    assert not {"tp", "shards"} & set(local.__dict__) and torch.equal(local(*x)[0], expected[0])
    compiled = torch.compile(shard(module, group)[0], backend="aot_eager")
    torch.testing.assert_close(compiled(*x, need_weights=False)[0], expected[0])


def test_subclasses_copies_and_back(ranks):
    ranks.run(check_module)


def check_refusals(group):
    tp, module = resolve_group(group), build()
    with pytest.raises(PlanError, match="has 4 heads"):
        attention_shards(module, (4, 0))
    shards = attention_shards(module, (1, 3))
    assert find_heads(shards["in_proj_weight"], D, 3) == (((0, 1, 1, 1),), ((1, 3, 3, 1),))
    with pytest.raises(PlanError, match="not an nn"):
        rewrite_attention(nn.Linear(2, 2), tp, shards, "attn")
    with pytest.raises(PlanError, match="Other has a forward of its own"):
        rewrite_attention(Other(E, H), tp, shards, "attn")
    with pytest.raises(PlanError, match="in_proj_bias"):
        rewrite_attention(module, tp, {k: s for k, s in shards.items() if k != "in_proj_bias"}, "attn")
    with pytest.raises(PlanError, match="whole heads"):
        rewrite_attention(module, tp, {**shards, "in_proj_weight": Shard.even((3 * E, E), 0, 2)}, "attn")
    with pytest.raises(PlanError, match="same heads"):
        rewrite_attention(module, tp, {**shards, "out_proj.weight": Shard.even((E, E), 1, 2)}, "attn")
    assert type(module) is nn.MultiheadAttention
    scattered = [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]  # heads 0 and 3, heads 1 and 2
    cuts = {
        key: Shard.from_indices((3 * E, *rest), 0, [[i + p * E for p in range(3) for i in rows] for rows in scattered])
        for key, rest in (("in_proj_weight", (E,)), ("in_proj_bias", ()))
    }
    cuts["out_proj.weight"] = Shard.from_indices((E, E), 1, scattered)
    local = copy.deepcopy(module)
    rewrite_attention(local, tp, cuts, "attn")
    for key, cut in cuts.items():
        local.get_parameter(key).data = cut.split(local.get_parameter(key).data, tp.tp_rank).clone()
    args, mask = inputs(module, False), seeded(N * H, L, S)
    for average in (True, False):
        got, want = (m(*args, attn_mask=mask, average_attn_weights=average) for m in (local, module))
        torch.testing.assert_close(got, want)


def test_what_is_refused_and_heads_dealt_otherwise(ranks):
    ranks.run(check_refusals)


def encoder(norm_first=False, activation="relu"):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 16, 0.0, activation, batch_first=True, norm_first=norm_first, dtype=torch.float64)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)


def shard_encoder(model, group, attention, mlp):
    """The model with its attentions, its MLPs or both sharded in place."""
    tp, shards = resolve_group(group), {}
    for i, layer in enumerate(model.layers):
        name = f"layers.{i}"
        if attention:
            own = attention_shards(layer.self_attn, deal_units(H, tp.tp_size))
            rewrite_attention(layer.self_attn, tp, own, f"{name}.self_attn")
            shards.update({f"{name}.self_attn.{key}": cut for key, cut in own.items()})
        if mlp:
            for child, kind, dim in (("linear1", LinearLayer, 0), ("linear2", LinearAllreduce, 1)):
                linear = getattr(layer, child)
                own = kind.shards_of(Shard.even(tuple(linear.weight.shape), dim, tp.tp_size), True)
                rewrite_linear(linear, kind, tp, own, f"{name}.{child}", None)
                shards.update({f"{name}.{child}.{key}": cut for key, cut in own.items()})
    for key, cut in shards.items():
        model.get_parameter(key).data = cut.split(model.get_parameter(key).data, tp.tp_rank).clone()
    disable_fast_paths(model)
    return shards


def check_encoder(group, attention, mlp):
    rank = resolve_group(group).tp_rank
    padding = torch.zeros(N, L, dtype=torch.bool)
    padding[1, -2:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    for options in (dict(), dict(norm_first=True), dict(activation="gelu")):
        plain = encoder(**options)
        local = copy.deepcopy(plain)
        shards = shard_encoder(local, group, attention, mlp)
        x = seeded(N, L, E)
        for kwargs in (dict(), dict(src_key_padding_mask=padding), dict(mask=causal, is_causal=True)):
            plain.eval(), local.eval()
            with torch.no_grad():
                got, want = local(x, **kwargs), plain(x, **kwargs)
                if "src_key_padding_mask" in kwargs:  # the fast path gives zeros there
                    got, want = got[~padding], want[~padding]
                torch.testing.assert_close(got, want)
            plain.train(), local.train()
            leaves = [x.clone().requires_grad_() for _ in range(2)]
            for made, leaf in zip((plain, local), leaves, strict=True):
                made.zero_grad()
                made(leaf, **kwargs).square().sum().backward()
            torch.testing.assert_close(leaves[1].grad, leaves[0].grad)
            for name, parameter in local.named_parameters():
                whole = plain.get_parameter(name).grad
                torch.testing.assert_close(parameter.grad, shards[name].split(whole, rank) if name in shards else whole)
        torch.testing.assert_close(copy.deepcopy(local)(x), plain(x))


@pytest.mark.parametrize("attention, mlp", [(True, False), (False, True), (True, True)])
def test_an_encoder_calls_its_children(ranks, attention, mlp):
    ranks.run(check_encoder, attention, mlp)


def check_restored(group):
    plain = encoder().eval()
    disable_fast_paths(plain)  # nothing is sharded
    assert type(plain) is nn.TransformerEncoder and type(plain.layers[0]) is nn.TransformerEncoderLayer
    local = copy.deepcopy(plain)
    shard_encoder(local, group, False, True)
    first, kept = local.layers[0], dict(local.layers[0].__dict__)
    assert not local.use_nested_tensor and first.activation_relu_or_gelu == 0
    disable_fast_paths(local)  # twice is once
    restore_fast_paths(local)
    assert type(local) is nn.TransformerEncoder and type(first) is nn.TransformerEncoderLayer
    assert local.use_nested_tensor and first.activation_relu_or_gelu == 1 and first.__dict__ == kept


def test_fast_paths_come_back(ranks):
    ranks.run(check_restored)
