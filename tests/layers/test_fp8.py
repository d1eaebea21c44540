"""FP8 linears over ranks against the same recipe unsharded, and how long quantised weights are kept."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D

import autotp
from autotp.comm import TPGroup
from autotp.groups import resolve_group
from autotp.kernels.fp8 import Recipe
from autotp.layers.fp8 import ScaledLinear, Scaling, scalings_of
from autotp.layers.linear import Conv1DLayer, LinearAllreduce, LinearLayer
from tests.models import batch, tiny

SCALINGS = ("tensorwise", "rowwise", "blockwise")
COLUMNS = dict.fromkeys(["*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"], "colwise")
STYLES = {**COLUMNS, **dict.fromkeys(["*.o_proj", "*.down_proj"], "rowwise")}
WIDTH = 768  # of three ranks, each with whole blocks


def whole_linear(recipe, bias=True):
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, WIDTH, bias=bias)
    linear.__class__ = ScaledLinear
    linear.scaling = Scaling(recipe, "probe")
    return linear


def check_equal(group, scaling, row):
    recipe = Recipe(scaling)
    whole, group = whole_linear(recipe), resolve_group(group)
    plain = nn.Linear(WIDTH, WIDTH)
    plain.load_state_dict(whole.state_dict())
    layer = (LinearAllreduce if row else LinearLayer)(plain, group, name="probe")
    layer.scaling = Scaling(recipe, "probe", group, 1 if row else 0)
    part = autotp.Shard.even((WIDTH,), 0, group.tp_size).cuts[0].indices(group.tp_rank)
    x = torch.randn(2, 20, WIDTH, generator=torch.Generator().manual_seed(1)) * 3
    dy = torch.randn(2, 20, WIDTH, generator=torch.Generator().manual_seed(2)) * 1e-3
    dy[..., -1] *= 100  # one rank has the largest value
    x[..., 0] *= 10
    expected_x, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = whole(expected_x)
    expected.backward(dy)
    y = layer(mine[..., part] if row else mine)
    y.backward(dy if row else dy[..., part])
    close = dict(rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(y, expected if row else expected[..., part], **close)
    dx = group.all_reduce(mine.grad) if row else mine.grad
    torch.testing.assert_close(dx, expected_x.grad, rtol=1e-4, atol=1e-6)
    for name, parameter in layer.named_parameters():
        shard, grad = layer.shards.get(name), whole.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, shard.split(grad, group.tp_rank) if shard else grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("row", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_ranks_multiply_as_one_does(ranks, scaling, row, size):
    ranks.run(check_equal, scaling, row, size=size)


def sharded_run(group, scaling, dealt, steps):
    model = tiny("llama").train()
    inputs = batch(model)
    inputs["labels"] = inputs["input_ids"]
    plan = STYLES if dist.get_world_size(group) == 1 else "auto"  # siblings are one product on one rank, too
    autotp.parallelize(model, group, plan=plan, precision=Recipe(scaling, least=16), sequence_parallel=dealt, logits="full")
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    tp, shards = resolve_group(group), model.autotp_plan.shards
    grads = {n: tp.all_gather(p.grad, shards[n]) if n in shards else p.grad for n, p in model.named_parameters()}
    report = autotp.fp8_report(model)
    assert not report and len(scalings_of(model)) == 14 and not scalings_of(autotp.unshard(model))
    return losses, grads


@pytest.mark.parametrize(
    ("scaling", "dealt", "steps", "close"),
    [("tensorwise", False, 2, 1e-4), ("tensorwise", True, 1, 0.05), ("rowwise", False, 1, 0.05), ("rowwise", True, 1, 0.05)],
)
def test_a_model_over_ranks_trains_as_on_one(ranks, scaling, dealt, steps, close):
    """Sums of another order round some values to their neighbours, and the layers below see that: FP8 itself is 0.15 off."""
    ((losses, grads),) = ranks.run(sharded_run, scaling, False, steps, size=1)
    for found, found_grads in ranks.run(sharded_run, scaling, dealt, steps, size=2):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=close / 20, atol=0)
        for name, grad in found_grads.items():
            assert (grad - grads[name]).norm() <= close * grads[name].norm(), name


def gathered_run(group):
    """Gradients where rows of output gradients are gathered in 8 bits, and where they are quantised afterwards; the gathers."""
    found, tp = [], resolve_group(group)
    for narrow in (True, False):
        model = tiny("llama").train()
        inputs = batch(model, rows=3, length=5)  # rows that can't be dealt evenly
        inputs["labels"] = inputs["input_ids"]
        precision = Recipe("tensorwise", least=16)
        autotp.parallelize(model, tp, plan="auto", precision=precision, sequence_parallel=True, logits="full")
        moved, gather = [], model.autotp_group.gather_rows
        model.autotp_group.gather_rows = lambda rows, moved=moved, gather=gather: moved.append(rows.dtype) or gather(rows)
        with pytest.MonkeyPatch.context() as patch:
            if not narrow:
                patch.setattr(Scaling, "gathers_values", False)
            found.append((gradients(model, inputs), moved.count(torch.uint8)))
        del model.autotp_group.gather_rows
    return found


def test_gradients_are_gathered_in_8_bits_and_are_the_same(ranks):
    for (narrow, count), (wide, none) in ranks.run(gathered_run):
        assert count == 4 and none == 0  # of two row linears in each of two layers
        assert all(torch.equal(grad, wide[name]) for name, grad in narrow.items())


def test_weights_are_quantised_once_a_step_and_never_stale():
    linear = whole_linear(Recipe(), bias=False)
    counted, quantise = [], linear.scaling._quantise
    linear.scaling._quantise = lambda *args: counted.append(1) or quantise(*args)
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD([linear.weight], lr=0.1)

    def micro_step():
        y = linear(x)
        y.square().mean().backward()
        return y.detach()

    for _ in range(3):
        micro_step()
        optimizer.step()
    counted.clear()
    for _ in range(2):
        micro_step()
    assert len(counted) == 1
    optimizer.step()
    micro_step()
    assert len(counted) == 2

    linear_before = micro_step()
    with torch.no_grad():
        linear.weight.mul_(2)  # counted by the tensor
    torch.testing.assert_close(micro_step(), 2 * linear_before)

    other = copy.deepcopy(linear)  # no optimizer holds its weight: any backward may be followed by an update unseen
    before = other(x)
    before.sum().backward()
    other.weight.data.mul_(2)
    torch.testing.assert_close(other(x).detach(), 2 * before.detach())
    other.weight.data.mul_(2)
    with torch.no_grad():
        torch.testing.assert_close(other(x), 4 * before.detach())


def test_what_is_not_finite_is_reported():
    linear = nn.Sequential(whole_linear(Recipe("rowwise")))
    x = torch.randn(16, WIDTH)
    assert linear(x).isfinite().all() and autotp.fp8_report(linear) == {}
    x[3, 5] = float("inf")
    y = linear(x)
    assert y[3].isnan().all() and y[:3].isfinite().all()
    y.sum().backward()
    found = autotp.fp8_report(linear, reset=True)
    assert found == {"0": {"inputs": 2, "weights": 0, "gradients": 0}}  # of a row, and of a column
    assert autotp.fp8_report(linear) == {}


def test_counts_go_on_from_inference_mode():
    linear, x = nn.Sequential(whole_linear(Recipe("rowwise"))), torch.full((16, WIDTH), float("nan"))
    with torch.inference_mode():
        linear(x)
    linear(x).sum().backward()
    found = autotp.fp8_report(linear, reset=True)["0"]
    assert found["inputs"] == 16 + 16 + WIDTH and autotp.fp8_report(linear) == {}  # rows twice, and columns for the backward


def gradients(model, inputs):
    model.zero_grad()
    model(**inputs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_are_the_same_however_they_are_reached():
    """Checkpoints of both kinds, a copy, frozen weights, main_grad."""
    model = tiny("llama").train()
    inputs = batch(model)
    inputs["labels"] = inputs["input_ids"]
    autotp.parallelize(
        model, TPGroup(None, torch.device("cpu")), plan=STYLES, precision=Recipe("rowwise", least=16), logits="full"
    )
    expected = gradients(model, inputs)

    def check(found):
        assert found and all(torch.equal(grad, expected[name]) for name, grad in found.items())

    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        check(gradients(model, inputs))
        model.gradient_checkpointing_disable()
    check(gradients(copy.deepcopy(model), inputs))
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    autotp.enable_main_grad(model)
    gradients(model, inputs)
    check({name: p.main_grad for name, p in model.named_parameters() if getattr(p, "grad_added_to_main_grad", False)})
    autotp.enable_main_grad(model, False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    check(gradients(model, inputs))


def test_weights_that_lie_turned_are_the_same_linear():
    whole, group = whole_linear(Recipe("rowwise")), TPGroup(None, torch.device("cpu"))
    turned = Conv1D(WIDTH, WIDTH)
    turned.weight, turned.bias = nn.Parameter(whole.weight.detach().t().contiguous()), nn.Parameter(whole.bias.detach().clone())
    layer = Conv1DLayer(turned, group, name="probe")
    layer.scaling = Scaling(Recipe("rowwise"), "probe", group, 0, transposed=True)
    x = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(1))
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = layer(mine), whole(other)
    torch.testing.assert_close(y, expected)
    for out in (y, expected):
        out.square().mean().backward()
    torch.testing.assert_close(mine.grad, other.grad)
    torch.testing.assert_close(layer.weight.grad.t(), whole.weight.grad)


def test_options_that_move_rows_beside_products_are_refused():
    layer = LinearLayer(nn.Linear(WIDTH, WIDTH), TPGroup(None, torch.device("cpu")), name="probe")
    layer.scaling = Scaling(Recipe(), "probe", layer.tp, 0)
    layer.tp_overlap_comm = True
    with pytest.raises(autotp.PlanError, match="probe: rows move"):
        layer(torch.randn(4, WIDTH))


def compiled_run(group, recipe, **options):
    """How far gradients are from those without FP8: where each decoder layer is compiled as one graph, and where none is."""
    torch.compiler.reset()
    tp = resolve_group(group)
    model = tiny("llama", num_hidden_layers=1).train()
    inputs = batch(model, rows=3, length=8)
    inputs["labels"] = inputs["input_ids"]
    plain = gradients(autotp.parallelize(copy.deepcopy(model), tp, plan="auto", logits="full", **options), inputs)
    autotp.parallelize(model, tp, plan="auto", precision=recipe, logits="full", **options)
    eager = gradients(model, inputs)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    compiled = gradients(model, inputs)
    assert compiled.keys() == eager.keys() == plain.keys()

    def measure(found):
        away, whole = (sum(g.norm() ** 2 for g in each) for each in ([found[n] - g for n, g in plain.items()], plain.values()))
        return (away / whole).sqrt().item()

    return measure(compiled), measure(eager)


@pytest.mark.parametrize(
    ("recipe", "dealt"), [(Recipe("tensorwise", least=16), False), (Recipe("rowwise", least=16, agree=False), True)]
)
def test_a_compiled_layer_is_one_graph_and_trains_as_well(ranks, recipe, dealt):
    """Siblings have a scale each there, so what is rounded away is not the same, but no more of it."""
    for compiled, eager in ranks.run(partial(compiled_run, sequence_parallel=dealt), recipe):
        assert 0 < compiled < 1.1 * eager


def compiled_layers_run(group, scaling):
    """A column and a row linear: outputs and gradients, compiled as one graph, and not."""
    torch.compiler.reset()
    tp = resolve_group(group)
    torch.manual_seed(0)
    column, row = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    net = nn.Sequential(LinearLayer(column, tp, name="column"), LinearAllreduce(row, tp, name="row"))
    for layer, cut in zip(net, (0, 1), strict=True):
        layer.scaling = Scaling(Recipe(scaling, fast_gradients=True), "net", tp, cut)
    found = []
    for run in (net, torch.compile(net, backend="aot_eager", fullgraph=True)):
        x = torch.randn(5, 7, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = run(x)
        y.square().sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in net.parameters())])
        net.zero_grad()
    return found


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_compiled_product_is_the_same(ranks, scaling):
    for eager, compiled in ranks.run(compiled_layers_run, scaling):
        assert len(eager) == 6 and all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
