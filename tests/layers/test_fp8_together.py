"""Weights of many FP8 linears quantised at once: how often, and never what they were before."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import autotp
from autotp.kernels.fp8 import Recipe
from autotp.layers import fp8, fp8_kept, fp8_together
from autotp.layers.fp8 import ScaledLinear, Scaling
from autotp.layers.fp8_together import Together
from tests.models import batch, tiny
from tests.ranks import grid

WIDTH, COUNT = 128, 5
ROWS = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))


def make_linears(scaling="tensorwise"):
    torch.manual_seed(0)
    together, linears = Together(), nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(COUNT)))
    for number, linear in enumerate(linears):
        linear.__class__ = ScaledLinear
        linear.scaling = Scaling(Recipe(scaling), f"probe.{number}", together=together)
    return linears


def alone(linear, x):
    """What a linear gives that has never been quantised before."""
    twin = ScaledLinear(WIDTH, WIDTH, bias=False)
    twin.weight, twin.scaling = nn.Parameter(linear.weight.detach().clone()), Scaling(linear.scaling.recipe, "twin")
    return twin(x)


def check_fresh(linears):
    """Each gives what its weight is now; returns the last output."""
    x = ROWS
    for linear in linears:
        y = linear(x)
        assert torch.equal(y, alone(linear, x))
        x = y.detach().requires_grad_()
    return y


@pytest.fixture
def counts(monkeypatch):
    """Stacks that were quantised at once, call by call."""
    found, quantise = [], fp8_together.quantise_stacks
    monkeypatch.setattr(
        fp8_together, "quantise_stacks", lambda stacks, share: found.append(len(stacks)) or quantise(stacks, share)
    )
    return found


def train(linears, steps=4):
    optimizer, found = torch.optim.SGD(linears.parameters(), lr=0.1), []
    for _ in range(steps):
        for micro in (ROWS, -2 * ROWS):
            loss = linears(micro.clone().requires_grad_()).square().mean()
            loss.backward()
            found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_the_first_that_has_changed_brings_all_others(counts, monkeypatch):
    losses = train(make_linears())
    assert counts == [COUNT] * 4  # no optimizer had stepped in the first: its second micro-batch quantises again, as in others
    monkeypatch.setattr(fp8_together, "LEAST", 1000)
    assert losses == train(make_linears()) and len(counts) == 4


@pytest.mark.parametrize("scaling", ["rowwise", "blockwise"])
def test_other_scalings_go_alone(counts, scaling):
    train(make_linears(scaling), 2)
    assert not counts


def test_a_weight_that_changes_in_between_is_read_again(counts):
    linears = make_linears()
    train(linears, 1)
    del counts[:]

    def double(module, args):
        with torch.no_grad():
            module.weight.mul_(2)

    hook = linears[3].register_forward_pre_hook(double)
    check_fresh(linears)
    hook.remove()
    assert counts == [COUNT]
    old, linears[2].weight = linears[2].weight, nn.Parameter(linears[2].weight.detach() * 3)
    check_fresh(linears).sum().backward()
    linears[1].weight.data = linears[1].weight.data * 2
    check_fresh(linears)
    assert old.shape == linears[2].weight.shape


def test_what_forward_skips_is_let_go_of_and_left_out(counts):
    linears = make_linears()
    x = ROWS.clone().requires_grad_()
    for _ in range(2):
        linears(x).sum().backward()
    fewer = nn.Sequential(*linears[:2], *linears[3:])
    for _ in range(3):
        fewer(x).sum().backward()  # the first brings the third, too
    assert counts == [COUNT, COUNT, COUNT - 1, COUNT - 1] and linears[2].scaling.kept.operands == (None, None)
    linears[2].weight.data.mul_(3)  # no version counter sees it
    check_fresh(linears)
    assert all(linear.scaling.kept.operands[0] is not None for linear in linears)
    linears(x).sum().backward()
    check_fresh(linears)
    assert counts[-1] == COUNT


@pytest.mark.parametrize("frozen", [False, True])
def test_edits_unseen_between_forwards_are_read(frozen):
    """As of adapters that are merged into a weight's `.data`, of weights that no optimizer holds."""
    linears = make_linears().requires_grad_(not frozen)
    for factor in (1.0, 2.0, 3.0):
        for linear in linears:
            linear.weight.data.mul_(factor)
        expected = ROWS
        for linear in linears:
            expected = alone(linear, expected)
        assert torch.equal(linears(ROWS), expected)  # no backward follows


def test_weights_that_a_parametrization_makes_are_read_in_each_forward():
    linears = make_linears()
    scales = [torch.nn.utils.parametrize.register_parametrization(each, "weight", Factor()) for each in linears]
    for factor in (1.0, 2.0, 3.0):
        for linear in scales:
            linear.parametrizations.weight[0].factor = factor
        check_fresh(linears)


def test_other_memory_is_seen_and_memory_that_comes_back_elsewhere_is_not():
    """As FSDP frees and fills it: addresses differ between ranks, and so must not say whether they reduce."""
    linears = make_linears()
    train(linears, 1)
    check_fresh(linears)
    counted, weight = [], linears[0].weight
    for linear in linears:
        quantise = linear.scaling._quantise
        linear.scaling._quantise = lambda *args, quantise=quantise: counted.append(1) or quantise(*args)
    memory = weight.detach().clone().numpy()
    for _ in range(2):
        weight.data = torch.from_numpy(memory)  # at one address
        check_fresh(linears)
        memory *= 2
    assert len(counted) == 2
    weight.data = torch.from_numpy(memory).clone()
    linears(ROWS).sum().backward()
    del counted[:]
    storage, values, address, others = weight.untyped_storage(), weight.detach().clone(), weight.data_ptr(), []
    while weight.data_ptr() in (0, address):
        storage.resize_(0)
        others.append(torch.empty_like(values))
        storage.resize_(values.nbytes)
    weight.data.copy_(values)
    check_fresh(linears)
    assert not counted


class Factor(nn.Module):
    factor = 1.0

    def forward(self, weight):
        return weight * self.factor


def test_a_model_is_freed_with_its_last_reference():
    linears = make_linears()
    train(linears, 2)
    gc.collect()
    gc.disable()
    try:
        found = [weakref.ref(each) for each in (linears[1], linears[1].weight, linears[1].scaling, linears[1].scaling.together)]
        del linears
        assert [each() for each in found] == [None] * 4
    finally:
        gc.enable()


def test_what_a_graph_changes_after_its_capture_is_read(counts, monkeypatch):
    """Its replays step an optimizer that the host does not see, and so do not count."""
    linears = make_linears()
    train(linears)
    assert counts
    counts.clear()
    with monkeypatch.context() as patch:
        patch.setattr(fp8, "is_captured", lambda weight: True)
        linears[:3](ROWS.clone().requires_grad_()).sum().backward()
    linears[1](ROWS.clone().requires_grad_())
    for linear in linears[:3]:
        linear.weight.data.mul_(2)
    check_fresh(linears)
    assert counts == []
    twin = copy.deepcopy(linears)  # whose weights no graph changes
    train(twin)
    assert counts and set(counts) == {COUNT}


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_what_a_graph_of_the_optimizer_alone_changes_is_read(scaling, monkeypatch):
    """Forwards go on as before, and nothing counts what its replays do."""
    linears = make_linears(scaling)
    train(linears)
    optimizer = torch.optim.SGD(linears[:3].parameters(), lr=0.1)
    check_fresh(linears).sum().backward()
    with monkeypatch.context() as patch:
        patch.setattr(fp8_kept, "is_captured", lambda weight: True)
        optimizer.step()
    check_fresh(linears).sum().backward()
    for linear in linears[:3]:
        linear.weight.data.mul_(2)
    check_fresh(linears)
    assert [linear.scaling.captured for linear in linears] == [True] * 3 + [False] * 2


@pytest.mark.parametrize("how", [None, False, True])
def test_edits_unseen_after_a_backward_are_read(how):
    """`how`: whether a checkpoint is reentrant."""
    linears = make_linears()
    for factor in (1.0, 2.0, 3.0):
        for linear in linears:
            linear.weight.data.mul_(factor)
        x = ROWS.clone().requires_grad_()
        if how is None:
            check_fresh(linears).sum().backward()
        for _ in range(2):
            y = linears(x) if how is None else checkpoint(linears, x, use_reentrant=how)
            expected = x
            for linear in linears:
                expected = alone(linear, expected)
            assert torch.equal(y, expected)
            y.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_backward_runs_again(counts, reentrant):
    found = []
    for how in (dict(), dict(use_reentrant=reentrant)):
        linears = make_linears()
        for _ in range(3):
            linears.zero_grad()
            x = ROWS.clone().requires_grad_()
            for linear in linears:
                x = checkpoint(linear, x, **how) if how else linear(x)
            x.square().mean().backward()
        found.append([linear.weight.grad for linear in linears])
        assert counts == [COUNT] * (2 if not how or not reentrant else 0)
        del counts[:]
    assert all(map(torch.equal, *found))


def test_copies_have_their_own(counts):
    linears = make_linears()
    train(linears, 1)
    assert len({linear.scaling.together for linear in copy.deepcopy(linears)} | {linears[0].scaling.together}) == 2
    assert isinstance(pickle.loads(pickle.dumps(linears[0].scaling)).together, Together)
    twin = copy.deepcopy(linears)
    twin.load_state_dict({name: 2 * value for name, value in linears.state_dict().items()})
    check_fresh(twin)
    check_fresh(linears)


def share_of_ranks(group):
    """All-reduces of a forward of two layers' first step and its third, with an optimizer."""
    model = tiny("llama").train()
    inputs = batch(model)
    inputs["labels"] = inputs["input_ids"]
    autotp.parallelize(model, group, plan="auto", precision=Recipe(least=16))
    optimizer, found, tp = torch.optim.SGD(model.parameters(), lr=0.01), [], model.autotp_group
    reduce, shared = tp.all_reduce, []
    tp.all_reduce = lambda x, *args, **kwargs: (
        (kwargs.get("op") == "max" and shared.append(x.numel())) or reduce(x, *args, **kwargs)
    )
    for _ in range(3):
        del shared[:]
        loss = model(**inputs).loss
        found.append((len(shared), max(shared)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del tp.all_reduce
    return dist.get_rank(group), found


def test_ranks_agree_on_all_scales_in_one_collective(ranks):
    for _, (first, *later) in ranks.run(share_of_ranks):
        assert later[0] == later[1] and later[0][1] >= 8  # qkv, o, gate with up, down; two layers
        assert later[0][0] <= first[0] - 7 and first[1] == 1


def fully_sharded(group, keeps):
    """`train_fully_sharded`, also with operands that are made anew wherever they are read."""
    mesh, read = grid(2), Scaling._read
    with pytest.MonkeyPatch.context() as patch:
        if not keeps:
            patch.setattr(Scaling, "_read", lambda self, *args: read(self, *args[:2], False, *args[3:]))
        return train_fully_sharded(mesh)


def train_fully_sharded(mesh):
    """Losses of forwards with and without backward, of checkpointed layers that FSDP2 shards beside TP."""
    model = tiny("llama").train()
    inputs = batch(model)
    autotp.parallelize(model, mesh["tp"].get_group(), plan="auto", precision=Recipe(least=16))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh["dp"])
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.01), []
    for _ in range(2):
        for _ in range(3):
            found.append(model(**inputs).loss.item())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.05)
        loss = model(**inputs).loss
        loss.backward()
        found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_fully_sharded_weights_come_and_go(ranks):
    kept, fresh = (ranks.run(fully_sharded, keeps, size=4, timeout_s=60) for keeps in (True, False))
    assert kept == fresh == [fresh[0]] * 4


def lose_a_layer(group):
    """Losses of a model that loses a layer, which one rank alone keeps alive."""
    model = tiny("llama", num_hidden_layers=3).train()
    inputs = batch(model)
    autotp.parallelize(model, group, plan="auto", precision=Recipe(least=16))
    optimizer, graphs, found = torch.optim.SGD(model.parameters(), lr=0.01), [], []
    for step in range(4):
        loss = model(**inputs).loss
        loss.backward()
        found.append(loss.item())
        if dist.get_rank(group) == 0:
            graphs.append(loss)
        del loss
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            model.model.layers, model.config.num_hidden_layers = model.model.layers[:2], 2
            gc.collect()
    return found


def test_ranks_quantise_the_same_weights_whatever_each_keeps_alive(ranks):
    first, second = ranks.run(lose_a_layer, timeout_s=60)
    assert first == second and torch.tensor(first).isfinite().all()
