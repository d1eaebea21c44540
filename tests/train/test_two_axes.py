"""Data parallelism beside TP, 2 x 2: DDP and FSDP2 on the shards train as the unsharded model does on the whole batch."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import autotp
from autotp.errors import AutoTPError, PlanError
from autotp.layers.stream import map_sharded
from tests.models import batch, tiny
from tests.ranks import grid


def fully(model, **options):
    """FSDP2 over the data axis: each layer, then the rest."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=grid()["dp"], **options)
    return fully_shard(model, mesh=grid()["dp"], **options)


def ddp(model, **options):
    return torch.nn.parallel.DistributedDataParallel(model, **{"process_group": grid()["dp"].get_group(), **options})


def build(family="llama", sequence_parallel=False, **overrides):
    whole = tiny(family, **overrides).train()
    return whole, autotp.parallelize(copy.deepcopy(whole), grid()["tp"], sequence_parallel=sequence_parallel).train()


def halves(inputs):
    return {name: value.chunk(2)[grid()["dp"].get_local_rank()] for name, value in inputs.items()}


def accumulate(wrapped, inputs):
    """Backward of the mean loss in two micro-batches, with the reduction in the second alone."""
    for number in range(2):
        last = number == 1
        if isinstance(wrapped, torch.nn.parallel.DistributedDataParallel):
            context = nullcontext() if last else wrapped.no_sync()
        else:
            wrapped.set_requires_gradient_sync(last)
            context = nullcontext()
        with context:
            (wrapped(**{name: value[number : number + 1] for name, value in inputs.items()}).loss / 2).backward()


def compare_parameters(model, whole, tolerance=2e-4):
    """Every parameter, gathered over both axes, beside the unsharded model's; Adam turns noise into steps of its rate."""
    found = autotp.full_state_dict(model)
    for name, value in found.items():
        torch.testing.assert_close(
            value, whole.state_dict()[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def train(whole, model, wrapped, steps=2, micro=False):
    """Steps of AdamW with clipping, both models side by side."""
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, eps=1e-4) for each in (whole, model)]
    for seed in range(steps):
        inputs = batch(whole, seed=seed, rows=4)
        expected = whole(**inputs).loss
        expected.backward()
        if micro:
            accumulate(wrapped, halves(inputs))
        else:
            loss = wrapped(**halves(inputs)).loss
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=grid()["dp"].get_group())
            torch.testing.assert_close(mean / 2, expected.detach(), rtol=1e-4, atol=1e-5)
        norms = [torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5), autotp.clip_grad_norm_(model.parameters(), 0.5)]
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    compare_parameters(model, whole)
    return optimizers[1]


WRAPS = {
    "ddp, accumulated into bucket views": (ddp, {"gradient_as_bucket_view": True}, {"tie_word_embeddings": True}, True),
    "ddp, unused looked for, dealt tokens": (ddp, {"find_unused_parameters": True}, {"sequence_parallel": True}, False),
    "ddp, static graph": (ddp, {"static_graph": True}, {}, False),
    "fsdp2, a kv head on both ranks": (fully, {}, {"family": "qwen3", "num_key_value_heads": 1}, False),
    "fsdp2, accumulated, not resharded": (fully, {"reshard_after_forward": False}, {}, True),
    "fsdp2, dealt tokens": (fully, {}, {"sequence_parallel": True}, False),
}


def check_training(group, kind):
    wrap, options, model, micro = WRAPS[kind]
    whole, mine = build(**model)
    train(whole, mine, wrap(mine, **options), micro=micro)


@pytest.mark.parametrize("kind", list(WRAPS))
def test_trains_as_the_unsharded_model(ranks, kind):
    ranks.run(check_training, kind, size=4)


def check_mixed_precision(group):
    whole, model = build()
    fully(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    inputs = batch(whole, rows=4)
    loss = model(**halves(inputs)).loss
    loss.backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    whole.bfloat16()(**inputs).loss.backward()
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), expected.float(), rtol=2e-2, atol=1e-3)


def test_mixed_precision_keeps_float32_parameters_and_gradients(ranks):
    ranks.run(check_mixed_precision, size=4)


def check_saved(group, directory):
    whole, model = build(tie_word_embeddings=True)
    fully(model)
    optimizer = train(whole, model, model, steps=1)
    state = autotp.TrainingState(model, optimizer, dp=grid()["dp"])
    state.save(directory / "state", 1)
    model.save_pretrained(directory / "model")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moments = [value.full_tensor().clone() for p in model.parameters() for value in [optimizer.state[p]["exp_avg"]]]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer.state.clear()
    state.load(directory / "state")
    assert all(torch.equal(value.full_tensor(), before[name].full_tensor()) for name, value in model.state_dict().items())
    again = [optimizer.state[p]["exp_avg"].full_tensor() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(moments, again, strict=True))
    # another split of the ranks, without FSDP2
    plain = autotp.parallelize(tiny("llama", tie_word_embeddings=True), grid()["tp"])
    other = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-4)
    autotp.TrainingState(plain, other, dp=grid()["dp"]).load(directory / "state")
    compare_parameters(plain, whole)
    loaded = AutoModelForCausalLM.from_pretrained(directory / "model")
    compare_parameters(plain, loaded, tolerance=0)
    autotp.load_full_state_dict(model, tiny("llama", tie_word_embeddings=True, initializer_range=0.5).state_dict())
    compare_parameters(model, tiny("llama", tie_word_embeddings=True, initializer_range=0.5), tolerance=0)


def test_fully_sharded_is_saved_whole_and_resumed(ranks, tmp_path):
    ranks.run(check_saved, tmp_path, size=4)


def check_wrapped(group, directory):
    whole, model = build()
    wrapped = ddp(model)
    autotp.save_pretrained(wrapped, directory)
    saved = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    assert all(torch.equal(saved[name], value) for name, value in whole.state_dict().items())
    compare_parameters(wrapped, whole, tolerance=0)
    assert bool(autotp.full_state_dict(wrapped)) == (grid()["tp"].get_local_rank() == 0)
    for wrap in (wrapped, torch.compile(wrapped)):
        for parameter in whole.parameters():
            parameter.data.mul_(1.5)
        autotp.load_full_state_dict(wrap, whole.state_dict())
        compare_parameters(model, whole, tolerance=0)
    for call in (
        lambda: autotp.unshard(wrapped),
        lambda: autotp.parallelize(ddp(whole), grid()["tp"]),
        lambda: autotp.parallelize(torch.compile(whole), grid()["tp"]),
    ):
        with pytest.raises(PlanError, match="of the LlamaForCausalLM inside"):
            call()
    wrapped(**halves(batch(whole, rows=4))).loss.backward()
    whole(**batch(whole, rows=4)).loss.backward()
    norms = [autotp.clip_grad_norm_(model.parameters(), 1), torch.nn.utils.clip_grad_norm_(whole.parameters(), 1)]
    torch.testing.assert_close(*norms, rtol=1e-4, atol=1e-5)


def test_weights_go_in_and_out_through_ddp(ranks, tmp_path):
    ranks.run(check_wrapped, tmp_path, size=4)


def check_refused(group):
    whole, model = build()
    accumulating = copy.deepcopy(model)
    autotp.enable_main_grad(accumulating)
    for wrap in (ddp, fully):
        with pytest.raises(AutoTPError, match="main_grad"):
            wrap(accumulating)
    assert not any(isinstance(p, DTensor) for p in accumulating.parameters())
    fully(model)
    name = next(iter(map_sharded(model).values()))[2]
    for call in (
        lambda: autotp.GatherReplacedLayerParams(model.parameters(), model),
        lambda: autotp.unshard(model),
        lambda: autotp.parallelize(model, grid()["tp"]),
        lambda: autotp.enable_main_grad(model),
        lambda: model.load_state_dict(whole.state_dict()),
        lambda: model.resize_token_embeddings(140),
        lambda: autotp.TrainingState(model, dp=False).save("nowhere", 1),
        lambda: dcp.save({"model": model.state_dict()}, checkpoint_id="nowhere"),
    ):
        with pytest.raises(AutoTPError):
            call()
    compare_parameters(model, whole, tolerance=0)
    assert name in dict(model.named_parameters())
    other = tiny("llama")
    third = build()[1]
    with pytest.raises(AutoTPError, match="as copies of one model"):
        ddp(torch.nn.ParameterList(third.parameters()), process_group=grid()["tp"].get_group())
    with pytest.raises(AutoTPError, match="fully_shard"):
        FullyShardedDataParallel(build()[1], process_group=grid()["dp"].get_group())
    fully(other)
    with pytest.raises(AutoTPError, match="call fully_shard after that"):
        autotp.parallelize(other, grid()["tp"])


def check_inner_units(group):
    """Modules wrapped one by one: right where each reads its own, refused where the sum of a gradient would be lost."""
    whole, model = build("qwen3")
    for name, module in list(model.named_modules()):
        if (isinstance(module, torch.nn.Linear) and module is not model.lm_head) or name.endswith("q_norm"):
            fully_shard(module, mesh=grid()["dp"])
    train(whole, model, fully_shard(model, mesh=grid()["dp"]), steps=1)
    whole, model = build(sequence_parallel=True)
    for layer in model.model.layers:
        fully_shard(layer.input_layernorm, mesh=grid()["dp"])
    with pytest.raises(AutoTPError, match=r"layers\.0\.input_layernorm.weight' .* Call fully_shard on model\.layers\.0,"):
        model(**batch(whole))


def test_units_inside_of_layers(ranks):
    ranks.run(check_inner_units, size=4)


def test_what_fully_shard_can_not_do_is_refused(ranks):
    ranks.run(check_refused, size=4)
