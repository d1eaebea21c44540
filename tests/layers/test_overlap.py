"""The options of overlap: what they say of each move, what they exclude, and layers whose rows come in blocks."""

import pytest
import torch

from autotp import LayerNormLinear, Linear
from autotp.comm import resolve_group
from autotp.errors import KernelUnsupported, PlanError
from autotp.exchange import Exchange
from autotp.kernels.moves import Moves
from autotp.layers.overlap import explain_overlap, read_moves
from tests.kernels.test_dealt import BlockExchange
from tests.layers.test_linear_by_size import check_modes
from tests.layers.test_norm_linear import SPLITS, check_dealt, check_frozen_dealt


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
    layer = column()
    layer.ub_bulk_wgrad, layer.ub_overlap_rs_dgrad = True, True  # set on any instance, seen when it is read
    with pytest.raises(PlanError, match="excludes"):
        read_moves(layer)


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
        "  gather of x: copy engines (64 MiB, at least 24 MiB)",
        "  gather of x in backward: copy engines (64 MiB, at least 24 MiB)",
        "  sum of dx where rows are whole: copy engines (64 MiB, at least 64 MiB)",
        "  scatter of dx: collectives in sequence (asked for: False)",
    ]
    layer = LayerNormLinear(
        64, 4096, parallel_mode="row", tp_group=tp, sequence_parallel=True, ub_name="down", ub_overlap_ag=True
    )
    assert explain_overlap(layer, 1024, torch.bfloat16).splitlines() == [
        "down, row, 1024 x 4096, 2 ranks on cpu",
        "  scatter of y: collectives in sequence (8 MiB, fewer than 24 MiB: launching copies costs more than they hide)",
        "  gather of dy in backward: copy engines (asked for: True)",
        "  sum of y where rows are whole: collectives in sequence (8 MiB, fewer than 64 MiB: "
        "launching copies costs more than they hide)",
    ]
    far = Exchange(tp, "the ranks are on 2 hosts")
    far.check(read_moves(layer), "down")  # a CPU has nothing to hide behind
    tp.device = torch.device("cuda", 0)
    with pytest.raises(KernelUnsupported, match=r"down: copies between the ranks were asked for, but the ranks are on 2 hosts"):
        far.check(read_moves(layer), "down")
    layer.ub_overlap_ag = False
    far.check(read_moves(layer), "down")


def test_moves_are_explained_and_refused_where_they_can_not_be(ranks):
    ranks.run(check_explained)


def in_blocks(group):
    tp = resolve_group(group)
    tp.owned["exchange"] = BlockExchange(tp)
    return tp


def check_linears_in_blocks(group):
    for mode in ("column", "row"):
        for main_grad in (False, True):
            check_modes(in_blocks(group), mode, True, True, main_grad)


def check_norm_linears_in_blocks(group):
    tp = in_blocks(group)
    for split in SPLITS:
        for mode in ("column", "row"):
            for delay in (False, True):
                check_dealt(tp, "LayerNorm", False, split, mode, True, delay)
    check_frozen_dealt(tp)


def test_layers_whose_rows_come_in_blocks(ranks):
    ranks.run(check_linears_in_blocks, size=3)
    ranks.run(check_norm_linears_in_blocks, size=3)
