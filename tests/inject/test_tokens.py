"""Tokens dealt between regions: found, proved, and the unsharded model's numbers over real ranks."""

import copy
import dataclasses
import functools

import pytest
import torch
from measures import whole
from shrink import tiny_model

import autotp
from autotp.errors import AutoTPError, PlanError, ProofError
from autotp.inject.module_plan import TokenPlan
from autotp.layers.token_modules import TokenModule
from tests.models import batch, tiny, tiny_config

LENGTHS = (1, 7, 65)


def make(family):
    if family in ("llama", "mixtral"):
        return tiny(family)
    model = tiny_model(family, "seq2seq" if family == "t5" else "causal")
    model.config.decoder_start_token_id = 2
    return model


def streams_of(model):
    return {id(m.autotp_tokens.stream): m.autotp_tokens.stream for m in model.modules() if isinstance(m, TokenModule)}.values()


def watch(model):
    """The layouts of the forwards from here on, one each."""
    seen = []
    for stream in streams_of(model):
        choose = stream.choose
        stream.choose = lambda x, choose=choose: seen.append(choose(x)) or seen[-1]
    return seen


def gradients(model, calls, order=None):
    model.zero_grad()
    losses = [model(**call).loss for call in calls]
    for index in order or range(len(calls)):
        losses[index].backward()
    return whole({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, model)[0]


def check_close(got, expected, what=""):
    largest = max(grad.abs().max() for grad in expected.values())
    assert set(got) == set(expected)
    for name, grad in expected.items():
        assert (got[name] - grad).abs().max() <= 1e-4 * grad.abs().max() + 1e-6 * largest, (what, name)


def check_parity(group, family, forwards):
    reference = make(family)
    model = autotp.parallelize(copy.deepcopy(reference), group, sequence_parallel=True)
    seen = watch(model)
    calls = [batch(reference, rows, rows, length) for rows in (1, 3) for length in LENGTHS]
    with torch.no_grad():
        for call in calls:
            assert (model(**call).logits - reference(**call).logits).abs().max() <= 1e-4
    check_close(gradients(model, calls), gradients(reference, calls))
    assert sum(layout is not None for layout in seen) == forwards and len(seen) > forwards
    for one in (reference, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9)
        for _ in range(2):
            optimizer.step()
            gradients(one, calls[1:])
    norms = {name: p.detach() for name, p in model.named_parameters() if p.ndim == 1}
    every = model.autotp_group.gather_objects({n: p.clone() for n, p in norms.items() if "norm" in n or "ln" in n})
    assert all(torch.equal(every[0][name], other[name]) for other in every for name in every[0])
    stepped = whole({name: p.detach() for name, p in model.named_parameters()}, model)[0]
    check_close(stepped, {name: p.detach() for name, p in reference.named_parameters()})


@pytest.mark.parametrize("family, size, forwards", [("gpt2", 3, 9), ("mixtral", 2, 9), ("t5", 2, 18)])
def test_dealt_tokens_train_as_the_whole_model(ranks, family, size, forwards):
    ranks.run(check_parity, family, forwards, size=size)


def check_runs(group):
    reference = tiny("llama")
    model = autotp.parallelize(copy.deepcopy(reference), group, sequence_parallel=True)
    calls = [batch(reference, 0, 3, 7), batch(reference, 1, 1, 10), batch(reference, 2, 1, 1)]
    check_checkpoints(model.train(), reference.train(), calls)
    with torch.no_grad():
        collected = [m(**calls[0], output_hidden_states=True).hidden_states for m in (model, reference)]
    for mine, other in zip(*collected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    check_interrupted(model, calls[0])
    check_changed(copy.deepcopy(model), copy.deepcopy(reference))
    twin = copy.deepcopy(model)
    assert not {id(stream) for stream in streams_of(twin)} & {id(stream) for stream in streams_of(model)}
    check_close(gradients(twin, calls[:1]), gradients(reference, calls[:1]), "a deep copy")
    ids, kwargs = calls[0]["input_ids"], dict(max_new_tokens=4, do_sample=False)
    seen = watch(model)
    assert torch.equal(model.eval().generate(ids, **kwargs), reference.eval().generate(ids, **kwargs))
    assert [layout is not None for layout in seen] == [True, False, False, False]
    autotp.unshard(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in reference.modules()]


def check_checkpoints(model, reference, calls):
    """Several forwards before their backwards, in another order, with no checkpoints and with both kinds."""
    seen = watch(model)
    for reentrant in (None, False, True):
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        check_close(gradients(model, calls, (1, 2, 0)), gradients(reference, calls), f"use_reentrant={reentrant}")
        assert all(stream.layout is None and stream.full is None for stream in streams_of(model))
    assert [layout is not None for layout in seen] == [True, True, False] * 3
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda moved: moved):
        loss = model(**calls[0]).loss
    with pytest.raises(AutoTPError, match=r"model.layers.1 runs again within backward.*save_on_cpu"):
        loss.backward()
    model.gradient_checkpointing_disable()
    model.disable_input_require_grads()


def check_interrupted(model, call):
    """A forward that dies between two layers leaves nothing behind; a layer that is called by itself deals nothing."""

    def fail(*_):
        raise KeyError("half way")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        model(**call)
    handle.remove()
    assert all(stream.layout is None and stream.owners == 0 for stream in streams_of(model))
    model.model.norm.__dict__["forward"] = lambda x: x  # rows that nothing joins again
    with pytest.raises(PlanError, match="LlamaModel dealt its tokens, but the module that joins them again did not run"):
        model(**call)
    del model.model.norm.__dict__["forward"]
    x = torch.randn(2, 6, 64)
    embeddings = model.model.rotary_emb(x, torch.arange(6)[None])
    assert model.model.layers[0](x, position_embeddings=embeddings).shape == x.shape


class Scaled(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.scale = inner, torch.nn.Parameter(torch.full((64,), 0.9))

    def forward(self, x):
        return self.inner(x) * self.scale


def check_changed(model, reference):
    """Changed after it was dealt: norms in wraps, a hook that reads the last norm early, the first layer run twice."""
    embeds, labels, found = torch.randn(5, 8, 64), torch.randint(3, 131, (5, 8)), []
    for one in (model, reference):
        one.zero_grad()
        one.gradient_checkpointing_enable({"use_reentrant": False})
        one.model.layers[0].input_layernorm = Scaled(one.model.layers[0].input_layernorm)
        early = []
        one.model.layers[0].register_forward_hook(lambda m, args, out, one=one, early=early: early.append(one.model.norm(out)))
        x = embeds.clone().requires_grad_()
        losses = [one(inputs_embeds=x[part], labels=labels[part]).loss for part in (slice(2), slice(2, 5))]
        (sum(losses) + sum(out.square().mean() for out in early)).backward()
        grads = {name: p.grad for name, p in one.named_parameters() if p.grad is not None}
        found.append({"x": x.grad} | whole(grads, one)[0])
    check_close(*found, "changed")
    model.model.layers.insert(0, model.model.layers[0])
    with pytest.raises(PlanError, match=r"model.layers.0 runs while a forward's tokens are dealt by it already"):
        model(input_ids=labels)


def test_checkpoints_copies_generation_and_forwards_that_die(ranks):
    ranks.run(check_runs)


def check_dropout(group):
    model = tiny_model("gpt2", "causal")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.25
    model = autotp.parallelize(model, group, sequence_parallel=True).train()
    call, masks = batch(model, 0, 3, 21), {}

    def note(name, module, args, out):
        masks.setdefault(name, out.detach() == 0)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(functools.partial(note, name))

    def run(seed):
        masks.clear()
        torch.manual_seed(seed)
        grads = gradients(model, [call])
        return grads, torch.rand(())

    first, after = run(1)
    tp = model.autotp_group
    assert len(set(tp.gather_objects(float(after)))) == 1  # the default generators go on alike
    both = {name: tp.gather_objects(mask) for name, mask in masks.items()}
    agree = {name: (mine == other).float().mean() for name, (mine, other) in both.items() if "attn_dropout" not in name}
    assert agree.pop("transformer.drop") == 1 and len(agree) == 4  # before tokens are dealt
    assert all(abs(share - (0.25**2 + 0.75**2)) < 0.08 for share in agree.values()), agree
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again, _ = run(1)
    check_close(again, first)
    assert any(not torch.equal(grad, first[name]) for name, grad in run(2)[0].items())


def test_dropout_of_dealt_rows_is_each_ranks_own_and_drawn_again(ranks):
    ranks.run(check_dropout)


# -- plans --------------------------------------------------------------------------------------------------------------


def test_plan_says_what_is_dealt():
    plan = autotp.make_plan(tiny_config("llama", num_hidden_layers=6), 2, sequence_parallel="auto")
    whole = autotp.make_plan(tiny_config("llama", num_hidden_layers=6), 2)
    (chain,) = plan.chains
    assert chain.layers == tuple(f"model.layers.{i}" for i in range(6)) and chain.join == "model.norm"
    assert plan["model.layers.5"].tokens.summed == ("input_layernorm.weight", "post_attention_layernorm.weight")
    assert plan["model.layers.5.mlp.down_proj"].tokens.leaves == "scatter"
    assert "2 gathers, 2 reduce-scatters a layer; whole behind model.norm" in str(plan)
    assert whole.collectives == (12, 12) and plan.collectives == (12 + 12 + 1, 12 + 12 + 1) and not whole.chains
    again = autotp.Plan.from_json(plan.to_json())
    assert again == plan and autotp.make_plan(tiny_config("llama", num_hidden_layers=6), 2, plan=again).chains == plan.chains


def test_what_does_not_prove_is_said():
    model = tiny_model("albert", "masked")  # one layer, run twice
    plan = autotp.make_plan(model, 2, sequence_parallel="auto")
    assert not plan.chains and plan.tokens.startswith("not dealt: ") and plan.tokens in str(plan)
    with pytest.raises(PlanError, match=r"not dealt.*sequence_parallel='auto'"):
        autotp.make_plan(model, 2, sequence_parallel=True)


def test_a_missing_sum_does_not_prove():
    config = tiny_config("llama")
    plan = autotp.make_plan(config, 2, sequence_parallel=True)
    wrong = [dataclasses.replace(m, tokens=TokenPlan(m.tokens.chain)) if m.name == "model.layers.1" else m for m in plan.modules]
    with pytest.raises(ProofError, match=r"the gradient of model.layers.1.input_layernorm.weight"):
        autotp.make_plan(config, 2, plan=dataclasses.replace(plan, modules=tuple(wrong)))
