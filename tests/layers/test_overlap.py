"""The options of overlap: what they say of each move, what they exclude, and layers whose rows come in blocks."""

import itertools
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from autotp import LayerNormLinear, Linear, LinearAllreduce, LinearLayer
from autotp.errors import KernelUnsupported, PlanError
from autotp.exchange import Exchange
from autotp.groups import resolve_group
from autotp.kernels.moves import Moves
from autotp.layers.linear import Conv1DLayer
from autotp.layers.overlap import explain_overlap, read_moves
from autotp.layers.siblings import SiblingInput
from tests.kernels.test_dealt import BlockExchange
from tests.layers.test_linear_by_size import check_modes
from tests.layers.test_merged import made
from tests.layers.test_norm_linear import SPLITS, check_dealt, check_frozen_dealt


def linear_of(columns, out, seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(columns, out, dtype=torch.float64)


def column(**options):
    return Linear(6, 4, **options)


def row(**options):
    layer = Linear(6, 4)
    layer.cut_dim = 1
    for name, value in options.items():
        setattr(layer, name, value)
    return layer


@pytest.mark.parametrize(
    "make, options, moves",
    [
        (column, {}, Moves()),
        (column, dict(ub_overlap_ag=True, ub_bulk_dgrad=False), Moves(forward=True, gather=False)),
        (column, dict(ub_overlap_rs_dgrad=True, ub_bulk_wgrad=False), Moves(scatter=True, early=True)),
        (column, dict(ub_overlap_rs_dgrad=False, ub_bulk_wgrad=True), Moves(scatter=True)),
        (column, dict(ub_bulk_wgrad=False), Moves(scatter=False)),
        (column, dict(ub_overlap_rs=True, tp_overlap_comm=True), Moves(sums=True)),
        (row, dict(ub_overlap_ag=True, ub_overlap_rs=False), Moves(forward=False, gather=True)),
        (row, dict(ub_bulk_wgrad=True, ub_bulk_dgrad=True, tp_overlap_comm=False), Moves(sums=False)),
    ],
)
def test_what_options_say_of_each_move(make, options, moves):
    assert read_moves(make(**options)) == moves


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(PlanError, match=r"up: ub_overlap_rs_dgrad=True .* excludes ub_bulk_dgrad=True"):
        column(ub_name="up", ub_overlap_rs_dgrad=True, ub_bulk_dgrad=True)
    with pytest.raises(PlanError, match=r"Linear: ub_overlap_ag is None .*, True or False, got 1"):
        column(ub_overlap_ag=1)
    with pytest.raises(PlanError, match="no option 'ub_overlap_all'; the overlap options are ub_overlap_ag, "):
        LayerNormLinear(6, 4, ub_overlap_all=True)
    with pytest.raises(PlanError, match="Linear: symmetric_ar_type: multimem_all_reduce needs NVLink multicast"):
        column(symmetric_ar_type="multimem_all_reduce")
    with pytest.raises(PlanError, match="'ring' is none of push, one_shot, two_shot"):
        LayerNormLinear(6, 4, symmetric_ar_type="ring")
    layer = column()
    layer.ub_bulk_wgrad, layer.ub_overlap_rs_dgrad = True, True  # set on any instance, seen when it is read
    with pytest.raises(PlanError, match="excludes"):
        read_moves(layer)


def check_region(group, main_grad):
    """Siblings and the row linear behind them, whose sums are made in blocks, against the same in one process."""
    tp = in_blocks(group)
    layers = []
    shared = SiblingInput(tp, 2)
    for i, out in enumerate((8, 4)):
        layers.append(LinearLayer(linear_of(6, out, i), tp, name=f"up{i}"))
        layers[i].siblings = shared
        shared.add(layers[i])
    down = LinearAllreduce(linear_of(8, 6, 3), tp, name="down")
    for layer in (*layers, down):
        layer.tp_overlap_comm, layer.accumulate_into_main_grad = True, main_grad
        for parameter in layer.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
    whole = [linear_of(6, 8, 0), linear_of(6, 4, 1), linear_of(8, 6, 3)]
    x = made(1, 2, 3, 6).requires_grad_()
    leaf = x.detach().clone().requires_grad_()
    up, side = (layer(leaf) for layer in layers)
    got = (down(up), tp.all_reduce(side.detach().sum((0, 1))[:1]))
    want, other = whole[2](whole[0](x)), whole[1](x)
    torch.testing.assert_close(got[0], want)
    torch.autograd.backward([want, other], [made(2, *want.shape), torch.ones_like(other)])
    torch.autograd.backward([got[0], side], [made(2, *want.shape), torch.ones_like(side)])
    torch.testing.assert_close(leaf.grad, x.grad)
    for layer, plain in zip((*layers, down), whole, strict=True):
        for name, parameter in plain.named_parameters():
            shard, mine = layer.shards.get(name), layer.get_parameter(name)
            expected = parameter.grad if shard is None else shard.split(parameter.grad, tp.tp_rank)
            torch.testing.assert_close(mine.main_grad if main_grad else mine.grad, expected)
    layers[0].tp_overlap_comm = None
    with pytest.raises(PlanError, match=r"up0 and up1 read one input .* options differ"):
        layers[0](leaf.detach().requires_grad_())


@pytest.mark.parametrize("main_grad", [False, True])
def test_sums_of_a_region_in_blocks(ranks, main_grad):
    ranks.run(check_region, main_grad)


def check_symmetric(group):
    """Which sums are asked for in another way, and that they are the same."""
    tp, asked = resolve_group(group), []
    small = tp.all_reduce_small
    tp.all_reduce_small = lambda tensor, kind: (asked.append(kind), small(tensor, kind))[1]
    whole, x = linear_of(8, 6, 3), made(1, 5, 8)
    columns = slice(4 * tp.tp_rank, 4 * tp.tp_rank + 4)
    layer = LinearAllreduce(linear_of(8, 6, 3), tp, name="down")
    layer.symmetric_ar_type = "one_shot"
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(layer(x[:, columns]), whole(x))
    sized = Linear(8, 6, dtype=torch.float64, tensor_parallel_mode="row", tensor_parallel_group=tp, symmetric_ar_type="two_shot")
    sized.load_state_dict(whole.state_dict())
    sized.reduce_dtype = torch.float32
    torch.testing.assert_close(sized(x[:, columns]), whole(x), rtol=1e-5, atol=1e-5)
    layer = LayerNormLinear(8, 6, parallel_mode="row", tp_group=tp, params_dtype=torch.float64)
    want = layer(x[:, columns])
    layer.symmetric_ar_type = "two_shot"
    assert torch.equal(layer(x[:, columns]), want)
    assert asked == ["one_shot", "one_shot", "two_shot", "two_shot"]


def test_small_sums_over_symmetric_memory(ranks):
    ranks.run(check_symmetric)


class Reaching(Exchange):
    """What GPUs have whose memory is in reach."""

    def __init__(self, group):
        super().__init__(group, "")


def check_explained(group):
    tp = resolve_group(group)
    layer = Linear(4096, 64, tensor_parallel_mode="column", tensor_parallel_group=tp, sequence_parallel=True, ub_bulk_wgrad=False)
    lines = explain_overlap(layer, 4096).splitlines()
    assert lines[0] == "Linear, column, 4096 x 4096, 2 ranks on cpu" and len(lines) == 5
    assert all(line.endswith("collectives in sequence (rows move by collectives on cpu)") for line in lines[1:])
    tp.owned["exchange"] = Reaching(tp)
    assert explain_overlap(layer, 4096).splitlines()[1:] == [
        "  gather of x: copy engines (64 MiB, at least 16 MiB)",
        "  gather of x in backward: copy engines (64 MiB, at least 16 MiB)",
        "  sum of dx where rows are whole: collectives in sequence (tp_overlap_comm=True asks for copies)",
        "  scatter of dx: collectives in sequence (asked for: False)",
    ]
    layer = LayerNormLinear(
        64, 4096, parallel_mode="row", tp_group=tp, sequence_parallel=True, ub_name="down", ub_overlap_ag=True
    )
    layer.tp_overlap_comm = True
    assert explain_overlap(layer, 1024, torch.bfloat16).splitlines() == [
        "down, row, 1024 x 4096, 2 ranks on cpu",
        "  scatter of y: collectives in sequence (8 MiB, fewer than 16 MiB: launching copies costs more than they hide)",
        "  gather of dy in backward: copy engines (asked for: True)",
        "  sum of y where rows are whole: copy engines (asked for: True)",
    ]
    eight = Reaching(SimpleNamespace(tp_size=8))
    assert eight.decide((64 << 20) - 1, None).reason.endswith("fewer than 64 MiB: launching copies costs more than they hide")
    assert eight.decide(64 << 20, None).copies  # 8 MiB a rank, whatever their number
    layer = Conv1DLayer(Conv1D(8, 4), tp, name="c_attn")
    assert explain_overlap(layer, 10).splitlines()[0] == "c_attn, column, 10 x 4, 2 ranks on cpu"
    layer = LayerNormLinear(64, 4096, parallel_mode="row", tp_group=tp, ub_name="down", ub_overlap_ag=True, tp_overlap_comm=True)
    far = Exchange(tp, "the ranks are on 2 hosts")
    far.check(read_moves(layer), "down")  # a CPU has nothing to hide behind
    tp.device = torch.device("cuda", 0)
    with pytest.raises(KernelUnsupported, match=r"down: copies between the ranks were asked for, but the ranks are on 2 hosts"):
        far.check(read_moves(layer), "down")
    layer.ub_overlap_ag = layer.tp_overlap_comm = False
    far.check(read_moves(layer), "down")


def test_moves_are_explained_and_refused_where_they_can_not_be(ranks):
    ranks.run(check_explained)


def in_blocks(group):
    tp = resolve_group(group)
    tp.owned["exchange"] = BlockExchange(tp)
    return tp


@contextmanager
def summing_in_blocks(*classes):
    """In it layers sum rows that are whole in blocks too."""
    for each in classes:
        each.tp_overlap_comm = True
    try:
        yield
    finally:
        for each in classes:
            del each.tp_overlap_comm


def check_linears_in_blocks(group):
    with summing_in_blocks(Linear):
        for mode, main_grad, dealt in itertools.product(("column", "row"), (False, True), (False, True)):
            check_modes(in_blocks(group), mode, dealt, True, main_grad)


def check_norm_linears_in_blocks(group):
    tp = in_blocks(group)
    with summing_in_blocks(LayerNormLinear):
        for split, mode, dealt, delay in itertools.product(SPLITS, ("column", "row"), (False, True), (False, True)):
            check_dealt(tp, "LayerNorm", False, split, mode, dealt, delay)
        check_frozen_dealt(tp)


def test_layers_whose_rows_come_in_blocks(ranks):
    ranks.run(check_linears_in_blocks, size=3)
    ranks.run(check_norm_linears_in_blocks, size=3)
