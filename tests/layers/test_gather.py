"""Whole weights in a context, streamed, and loaded: exact, in the same storage, and never silently nothing."""

import time

import pytest
import torch
from torch import nn

from autotp.errors import GatherError
from autotp.layers import gather
from autotp.layers.gather import GatherReplacedLayerParams, full_state_dict, iterate_full_tensors, load_full_state_dict
from tests.layers.handmade import build


def pointers(model):
    return [param.data_ptr() for param in model.parameters()]


def assert_equal(model, full):
    for (name, mine), theirs in zip(model.named_parameters(), full.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def raised(function, *args, **kwargs):
    with pytest.raises(GatherError) as info:
        function(*args, **kwargs)
    return str(info.value)


# -- the context --------------------------------------------------------------------------------------------------------


def run_gather(group):
    model, full, _ = build(group)
    shapes, where = [tuple(p.shape) for p in model.parameters()], pointers(model)
    model.up.weight.grad = torch.ones_like(model.up.weight)
    grad = model.up.weight.grad
    with GatherReplacedLayerParams(model.parameters(), model):  # a generator
        assert_equal(model, full)
        kept = model.state_dict()
    assert [tuple(p.shape) for p in model.parameters()] == shapes and pointers(model) == where
    assert model.up.weight.grad is grad
    assert all(torch.equal(kept[name], value) for name, value in full.state_dict().items())
    with GatherReplacedLayerParams(model.up.weight, model):  # one tensor
        assert torch.equal(model.up.weight, full.up.weight) and model.tied.weight is model.up.weight
        assert model.up.bias.shape != full.up.bias.shape
    with GatherReplacedLayerParams([model.norm.weight], model):  # not sharded: left alone
        assert torch.equal(model.norm.weight, full.norm.weight)
    with GatherReplacedLayerParams([], model, enabled=False):
        assert pointers(model) == where
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(model(x), full(x), atol=1e-6)


@pytest.mark.parametrize("size", [2, 3])
def test_gather_shows_whole_tensors_and_restores_the_storage(ranks, size):
    ranks.run(run_gather, size=size)


def run_read_only(group):
    model, full, tp = build(group)
    model.up.bias.data, full.up.bias.data = model.up.bias.data.to(torch.bfloat16), full.up.bias.data.to(torch.bfloat16)
    where, gathers, arrivals = pointers(model), [], []
    gather, arrive = type(tp).all_gather_many, type(tp).arrive
    type(tp).all_gather_many = lambda self, *args: gathers.append(len(args[0])) or gather(self, *args)
    type(tp).arrive = lambda self, *args, **kwargs: arrivals.append(args) or arrive(self, *args, **kwargs)
    try:
        with GatherReplacedLayerParams(model.parameters(), model, read_only=True):
            assert_equal(model, full)
            assert raised(model, torch.randn(3, 6))
    finally:
        type(tp).all_gather_many, type(tp).arrive = gather, arrive
    assert len(gathers) == 1 < gathers[0] and len(arrivals) == 1  # all at once, and no word at the end
    assert pointers(model) == where
    context = GatherReplacedLayerParams(model.parameters(), model, read_only=True)
    with pytest.raises(GatherError, match=r"up\.weight' was changed .* leave read_only out"), context, torch.no_grad():
        model.up.weight.mul_(2)
    with pytest.raises(KeyError), GatherReplacedLayerParams(model.parameters(), model, read_only=True):
        raise KeyError
    assert pointers(model) == where
    with GatherReplacedLayerParams(model.parameters(), model):
        assert_equal(model, full)


@pytest.mark.parametrize("size", [2, 3])
def test_read_only_gathers_many_at_once_and_writes_nothing_back(ranks, size):
    ranks.run(run_read_only, size=size)


def run_batches(group, most):
    model, full, _ = build(group)
    gather._BATCH_BYTES, kept = most, gather._BATCH_BYTES
    try:
        with GatherReplacedLayerParams(model.parameters(), model), torch.no_grad():
            assert_equal(model, full)
            for tensor in {id(p): p for p in (*model.parameters(), *full.parameters())}.values():
                tensor.add_(1)
    finally:
        gather._BATCH_BYTES = kept
    with GatherReplacedLayerParams(model.parameters(), model, read_only=True):
        assert_equal(model, full)


@pytest.mark.parametrize("most", [1, 300])
def test_batches_by_bytes(ranks, most):
    ranks.run(run_batches, most)


def run_snippet(group):
    model, full, _ = build(group)
    for name, module in model.named_modules():
        if len(list(module.children())) > 0:
            continue
        with GatherReplacedLayerParams(list(module.parameters(recurse=False)), module, enabled=True):
            state = module.state_dict()
        expected = full.get_submodule(name).state_dict()
        assert list(state) == list(expected) and all(torch.equal(state[key], expected[key]) for key in expected)


def test_snippet_of_deepspeeds_documentation(ranks):
    ranks.run(run_snippet)


def run_nested(group):
    model, full, _ = build(group)
    where = pointers(model)
    with GatherReplacedLayerParams([model.up.weight], model):
        with GatherReplacedLayerParams(list(model.parameters()), model):
            assert_equal(model, full)
            model.up.weight.data.mul_(2)
            model.down.weight.data.mul_(3)
        assert torch.equal(model.up.weight, 2 * full.up.weight)  # still whole: the outer context holds it
        assert model.down.weight.shape != full.down.weight.shape
        assert "is whole inside" in raised(model.up, torch.zeros(1, 6))
    assert pointers(model) == where
    full.up.weight.data.mul_(2)
    full.down.weight.data.mul_(3)
    with GatherReplacedLayerParams(model.parameters(), model):
        assert_equal(model, full)


def test_contexts_nest(ranks):
    ranks.run(run_nested)


def run_changes(group):
    model, full, _ = build(group)
    where, objects = pointers(model), list(model.parameters())
    version = model.up.weight._version
    with GatherReplacedLayerParams(model.parameters(), model):
        model.up.weight.data = model.up.weight.data + 1  # another storage
        model.up.bias.detach().numpy()[:] = 5  # behind autograd's back
        model.down.weight = nn.Parameter(torch.full((6, 7), 3.0))  # another object
        with torch.no_grad():
            model.copied.weight[3] = 7
    full.up.weight.data += 1
    full.up.bias.data.fill_(5)
    full.down.weight.data.fill_(3)
    full.copied.weight.data[3] = 7
    assert pointers(model) == where and all(a is b for a, b in zip(objects, model.parameters(), strict=True))
    assert model.up.weight._version > version
    with GatherReplacedLayerParams(model.parameters(), model):
        assert_equal(model, full)


def test_what_the_body_changed_is_split_again(ranks):
    ranks.run(run_changes)


CONVERSIONS = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "to a wider one": lambda model: model.to(torch.float64),
    "one of them, by its data": lambda model: setattr(model.up.weight, "data", model.up.weight.data.double()),
    "to and back": lambda model: model.double().float(),
}


def run_conversion(group, kind):
    convert = CONVERSIONS[kind]
    model, full, tp = build(group)
    for each in (model, full):
        nn.init.zeros_(each.up.bias)  # whose bits are alike in all dtypes
    before, objects = [p.dtype for p in model.parameters()], list(model.parameters())
    model.up.bias.grad = torch.ones_like(model.up.bias)
    with GatherReplacedLayerParams(model.parameters(), model):
        convert(model)
    convert(full)
    assert all(a is b for a, b in zip(objects, model.parameters(), strict=True)) and model.tied.weight is model.up.weight
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in full.parameters()]
    assert model.up.weight.shape[0] < full.up.weight.shape[0] and model.up.bias.grad.dtype == model.up.bias.dtype
    with GatherReplacedLayerParams(model.parameters(), model, read_only=True):
        assert_equal(model, full)
    if full.up.weight.dtype == full.norm.weight.dtype:
        x = torch.randn(3, 6, dtype=full.norm.weight.dtype, generator=torch.Generator().manual_seed(2))
        loose = {} if x.dtype.itemsize > 2 else {"rtol": 0.05, "atol": 0.01}
        torch.testing.assert_close(model(x), full(x), **loose)
    if [p.dtype for p in full.parameters()] == before:
        return
    model, full, _ = build(group)
    with pytest.raises(GatherError, match=r"was changed .* leave read_only out"):
        with GatherReplacedLayerParams(model.parameters(), model, read_only=True):
            convert(model)
    model, full, _ = build(group)
    with pytest.raises(GatherError, match=r"rank\(s\) \[1\] changed 'up.weight' .* rank\(s\) \[0\] did not"):
        with GatherReplacedLayerParams(model.up.weight, model):
            if tp.tp_rank == 1:
                convert(model)
    assert model.up.weight.dtype == torch.float32 and model.up.weight.shape[0] < full.up.weight.shape[0]


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_what_the_body_converted_stays_so(ranks, kind):
    ranks.run(run_conversion, kind)


def run_flat_optimizer(group):
    """An optimizer in the manner of a flat bf16 buffer with fp32 master weights: parameters are views into it."""
    model, full, _ = build(group, dtype=torch.bfloat16)
    params = list(model.parameters())
    flat = torch.cat([p.detach().flatten() for p in params])
    master, offset = flat.float(), 0
    for param in params:
        param.data = flat[offset : offset + param.numel()].view(param.shape)
        offset += param.numel()
    with GatherReplacedLayerParams(params, model):
        assert torch.equal(model.up.weight, full.up.weight)
    master += 1  # a step
    flat.copy_(master)
    with GatherReplacedLayerParams(params, model):
        assert torch.equal(model.up.weight, (full.up.weight.float() + 1).bfloat16())
        model.up.weight.data.zero_()
    assert flat.data_ptr() == params[0].data_ptr() and model.up.weight.abs().sum() == 0
    assert model.up.weight.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_flat_buffer_optimizer_keeps_working(ranks):
    ranks.run(run_flat_optimizer)


def run_disagreement(group):
    model, full, tp = build(group)
    where = pointers(model)

    def change(values):
        with GatherReplacedLayerParams(model.parameters(), model):
            if values[tp.tp_rank] is not None:
                model.up.weight.data.fill_(values[tp.tp_rank])

    assert "rank(s) [0] changed 'up.weight'" in raised(change, [0.0, None])
    assert "rank(s) [0, 1] changed 'up.weight'" in raised(change, [0.0, 1.0])

    def reshape():
        with GatherReplacedLayerParams(model.parameters(), model):
            if tp.tp_rank == 1:
                model.up.weight.data = torch.zeros(2, 2)

    assert "(2, 2)" in raised(reshape)
    assert pointers(model) == where
    with GatherReplacedLayerParams(model.parameters(), model):
        assert_equal(model, full)
    assert model.up(torch.zeros(1, 6)).shape == (1, model.up.weight.shape[0])


def test_ranks_that_change_a_tensor_differently_are_named(ranks):
    ranks.run(run_disagreement)


def run_exception(group):
    model, full, tp = build(group)

    def fail(who):
        with GatherReplacedLayerParams(model.parameters(), model):
            model.up.weight.data.zero_()
            if tp.tp_rank in who:
                raise KeyError("seeded")

    with pytest.raises(KeyError, match="seeded"):
        fail([0, 1])
    if tp.tp_rank == 1:
        with pytest.raises(KeyError, match="seeded"):
            fail([1])
    else:
        text = raised(fail, [1])
        assert "rank(s) [1]" in text and "seeded" in text
    with GatherReplacedLayerParams(model.parameters(), model):
        assert_equal(model, full)


def test_an_exception_restores_and_writes_nothing(ranks):
    ranks.run(run_exception)


def run_absent(group, absent):
    model, _, tp = build(group, timeout_s=1.0)
    if tp.tp_rank == absent:
        next(tp._arrivals)
        time.sleep(1.5)
        return "stayed away"
    return raised(GatherReplacedLayerParams(model.parameters(), model).__enter__)


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_come_is_named(ranks, absent):
    answers = ranks.run(run_absent, absent)
    assert f"rank(s) [{absent}] did not come within 1 s" in answers[1 - absent]


def run_misuse(group):
    model, _, tp = build(group)
    assert "module.parameters()" in raised(GatherReplacedLayerParams, [], model)
    used = model.parameters()
    list(used)
    assert "module.parameters()" in raised(GatherReplacedLayerParams, used, model)
    assert "tuple" in raised(GatherReplacedLayerParams, model.named_parameters(), model)
    params = [model.up.weight] if tp.tp_rank == 0 else [model.down.weight]
    assert "other tensors" in raised(GatherReplacedLayerParams(params, model).__enter__)
    with GatherReplacedLayerParams([model.up.weight], model):
        assert "'up.weight' is whole" in raised(model, torch.zeros(1, 6))
    model(torch.zeros(1, 6))
    one = GatherReplacedLayerParams([model.up.weight], model)
    with one:
        assert "entered already" in raised(one.__enter__)
    with one:
        pass
    model(torch.zeros(1, 6))


def test_misuse_is_refused(ranks):
    ranks.run(run_misuse)


# -- whole state dicts --------------------------------------------------------------------------------------------------


def run_state_dict(group):
    model, full, tp = build(group)
    state, expected = full_state_dict(model), full.state_dict()
    if tp.tp_rank != 0:
        assert state == {}
    else:
        assert list(state) == list(expected) and all(torch.equal(state[name], value) for name, value in expected.items())
        assert state["tied.weight"].data_ptr() == state["up.weight"].data_ptr()
        state["norm.weight"].zero_()  # a copy
        assert model.norm.weight.abs().sum() > 0
    names = [name for name, _ in iterate_full_tensors(model)]
    assert names == [name for name in expected if name != "tied.weight"]
    with GatherReplacedLayerParams(model.up.weight, model):
        inside = full_state_dict(model)
    if tp.tp_rank == 0:
        assert torch.equal(inside["up.weight"], full.up.weight)


@pytest.mark.parametrize("size", [2, 3])
def test_full_state_dict(ranks, size):
    ranks.run(run_state_dict, size=size)


def run_load(group):
    model, full, tp = build(group)
    where = pointers(model)
    new = {
        name: torch.randn(value.shape, generator=torch.Generator().manual_seed(3)) for name, value in full.state_dict().items()
    }
    del new["tied.weight"]  # one name of a tied tensor is enough
    load_full_state_dict(model, new if tp.tp_rank == 0 else None)
    full.load_state_dict(new, strict=False)
    assert pointers(model) == where and torch.equal(model.steps, full.steps)
    with GatherReplacedLayerParams(model.parameters(), model):
        assert_equal(model, full)
    wrong = {**new, "up.weight": torch.zeros(2, 2)}
    assert "'up.weight' has shape (2, 2)" in raised(load_full_state_dict, model, wrong if tp.tp_rank == 0 else {})
    missing = {name: value for name, value in new.items() if name != "norm.weight"}
    assert "norm.weight" in raised(load_full_state_dict, model, missing if tp.tp_rank == 0 else {})
    result = load_full_state_dict(model, missing if tp.tp_rank == 0 else {}, strict=False)
    assert result.missing_keys == ["norm.weight"]


def test_load_full_state_dict(ranks):
    ranks.run(run_load)


def run_stop(group):
    model, _, tp = build(group)

    def consume():
        stream = iterate_full_tensors(model)
        for name, _ in stream:
            if name == "up.weight" and tp.tp_rank == 0:
                stream.close()
                return "stopped"
        return "finished"

    return consume() if tp.tp_rank == 0 else raised(consume)


def test_a_consumer_that_stops_is_named(ranks):
    assert "rank(s) [0] stopped" in ranks.run(run_stop)[1]
