"""Linear by its sizes: the whole layer's initial weights, every mode's values and gradients, and what it loads."""

import copy
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autotp
from autotp.errors import AutoTPError, PlanError
from autotp.groups import resolve_group
from autotp.layers.linear_by_size import Linear
from autotp.shard import Shard
from tests.layers.test_merged import made

SIZES = 14, 10  # in, out: neither a multiple of 3, nor of 4


def build(group, bias=True, **options):
    """The plain layer that one rank draws, and this rank's part of the same."""
    torch.manual_seed(3)
    plain = nn.Linear(*SIZES, bias=bias, dtype=torch.float64)
    after = torch.rand(1)
    torch.manual_seed(3)
    mine = Linear(*SIZES, bias, dtype=torch.float64, tensor_parallel_group=group, **options)
    assert torch.equal(torch.rand(1), after)  # the generator has moved on as far
    return plain, mine


def own(shard, value, rank):
    return value if shard is None else shard.split(value, rank)


def check_modes(group, mode, sequence_parallel, bias, main_grad):
    plain, mine = build(
        group, bias, tensor_parallel_mode=mode, sequence_parallel=sequence_parallel, accumulate_into_main_grad=main_grad
    )
    tp = resolve_group(group)
    rank, size = (0, 1) if mode is None else (tp.tp_rank, tp.tp_size)
    for name, parameter in mine.named_parameters():
        assert torch.equal(parameter, own(mine.shards.get(name), plain.get_parameter(name), rank))
        parameter.main_grad = torch.zeros_like(parameter)
    assert (mine.out_features, mine.in_features) == tuple(mine.weight.shape) and f"mode={mode}" in repr(mine)
    columns = Shard.even((14,), 0, size).cuts[0].indices(rank) if mode == "row" else slice(None)
    outs = Shard.even((10,), 0, size).cuts[0].indices(rank) if mode == "column" else slice(None)
    rows = Shard.even((12,), 0, size).cuts[0].indices(rank) if sequence_parallel else slice(None)
    for seed in range(2):
        x, cotangent = made(seed, 12, 2, 14), made(seed + 5, 12, 2, 10)
        whole, leaf = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected = plain(whole)
        expected.backward(cotangent)
        entered = leaf[..., columns] if mode == "row" else leaf[rows]
        got = mine(entered)
        wanted, given = (t[rows] if mode == "row" else t[..., outs] for t in (expected, cotangent))
        torch.testing.assert_close(got, wanted)
        got.backward(given)
        grad = tp.all_reduce(leaf.grad) if mode == "row" or (mode == "column" and sequence_parallel) else leaf.grad
        torch.testing.assert_close(grad, whole.grad)
    for name, parameter in mine.named_parameters():
        wanted = own(mine.shards.get(name), plain.get_parameter(name).grad, rank)
        torch.testing.assert_close(parameter.main_grad if main_grad else parameter.grad, wanted)
        assert not main_grad or (parameter.grad_added_to_main_grad and not parameter.grad.any())
    with torch.no_grad():
        torch.testing.assert_close(mine(entered), got.detach())


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "mode, sequence_parallel", [(None, False), ("column", False), ("row", False), ("column", True), ("row", True)]
)
def test_values_and_gradients_of_each_mode(ranks, mode, sequence_parallel, bias, main_grad):
    ranks.run(check_modes, mode, sequence_parallel, bias, main_grad, size=3)
    if mode is not None:
        ranks.run(check_modes, mode, sequence_parallel, bias, main_grad, size=1)


def check_states(group):
    rank = dist.get_rank(group)
    for mode in (None, "column", "row"):
        for bias in (True, False):
            plain, mine = build(group, bias, tensor_parallel_mode=mode)
            assert list(mine.state_dict(prefix="block.")) == [f"block.{name}" for name in plain.state_dict()]
            other = {name: value + 1 for name, value in plain.state_dict().items()}
            mine.load_state_dict(other, strict=True)
            for name, parameter in mine.named_parameters():
                assert torch.equal(parameter, own(mine.shards.get(name), other[name], rank if mode else 0))
            full = autotp.full_state_dict(mine)
            if mode is None or rank == 0:
                plain.load_state_dict(full, strict=True)
                assert all(torch.equal(plain.state_dict()[name], other[name]) for name in other)
            older = {f"basic_ops.{i}.{name}": value - 1 for i, (name, value) in enumerate(plain.state_dict().items())}
            before = dict(older)
            mine.load_state_dict(older | {"_extra_state": None, "basic_ops.0._extra_state": None}, strict=True)
            assert older == before
            expected = own(mine.shards.get("weight"), older["basic_ops.0.weight"], rank if mode else 0)
            assert torch.equal(mine.weight, expected)
            model = nn.Sequential(mine)
            model.load_state_dict({f"0.{name}": value for name, value in other.items()}, strict=True)
            for wrong in ({**other, "more": other["weight"]}, {**other, "basic_ops.0.scale": other["weight"]}, {}):
                with pytest.raises(RuntimeError, match=r"Unexpected key|Missing key"):
                    mine.load_state_dict(wrong, strict=True)
            missing = {"weight": other["weight"]}
            if bias:
                with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
                    mine.load_state_dict(missing, strict=True)
            else:
                mine.load_state_dict(missing, strict=True)
                with pytest.raises(RuntimeError, match=r"Unexpected key.*bias"):
                    mine.load_state_dict({**missing, "bias": torch.zeros(10)}, strict=True)


def test_state_dicts_from_and_to_plain_linears_and_older_keys(ranks):
    ranks.run(check_states)


def check_meta(group):
    rank = dist.get_rank(group)
    for mode in ("column", "row"):
        plain, _ = build(group, tensor_parallel_mode=mode)
        torch.manual_seed(3)
        mine = Linear(*SIZES, device="meta", dtype=torch.float64, tensor_parallel_mode=mode, tensor_parallel_group=group)
        assert all(p.is_meta for p in mine.parameters())
        mine.to_empty(device="cpu").reset_parameters()
        assert torch.equal(mine.weight, mine.shards["weight"].split(plain.weight, rank))
        mine = Linear(*SIZES, device="meta", dtype=torch.float64, tensor_parallel_mode=mode, tensor_parallel_group=group)
        mine.load_state_dict(plain.state_dict(), assign=True)
        assert torch.equal(mine.weight, mine.shards["weight"].split(plain.weight, rank))
        local = nn.Parameter(torch.zeros_like(mine.weight))
        mine.register_parameter("weight", local)
        assert mine.weight is local
        with pytest.raises(PlanError, match=r"holds .* of weight \(10, 14\), and was given \(10, 14\)"):
            mine.register_parameter("weight", nn.Parameter(torch.zeros(10, 14)))


def test_meta_and_registered_parameters(ranks):
    ranks.run(check_meta)


class Tracker:
    """A stream of random numbers of its own, as Megatron's trackers hold."""

    def __init__(self, seed):
        self.seed = seed

    @contextmanager
    def fork(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            yield


def check_tracker(group):
    torch.manual_seed(11)
    expected = nn.Linear(*SIZES)
    torch.manual_seed(5)
    before = torch.rand(1)
    torch.manual_seed(5)
    mine = Linear(
        *SIZES, tensor_parallel_mode="column", tensor_parallel_group=group, rng_state_tracker_function=lambda: Tracker(11)
    )
    assert torch.equal(torch.rand(1), before)
    for name, parameter in mine.named_parameters():
        assert torch.equal(parameter, mine.shards[name].split(expected.get_parameter(name), dist.get_rank(group)))


def test_initial_weights_from_a_tracker(ranks):
    ranks.run(check_tracker)


def test_without_a_mode_it_is_the_plain_linear():
    torch.manual_seed(0)
    plain = nn.Linear(5, 3)
    torch.manual_seed(0)
    mine = Linear(5, 3)
    x = made(0, 4, 5, dtype=torch.float32)
    assert torch.equal(mine(x), plain(x)) and isinstance(mine, nn.Linear)
    twin = copy.deepcopy(mine)
    assert torch.equal(twin(x), plain(x))
    assert Linear(5, 3, False).bias is None and Linear(5, 3, device="meta").weight.is_meta
    with pytest.raises(PlanError, match="tensor_parallel_mode is one of"):
        Linear(5, 3, tensor_parallel_mode="rows")
    accumulating = Linear(5, 3, accumulate_into_main_grad=True, name="head")
    with pytest.raises(AutoTPError, match=r"head\.weight is trained"):
        accumulating(x).sum().backward()


def check_refusals(group):
    row = Linear(*SIZES, tensor_parallel_mode="row", tensor_parallel_group=group, sequence_parallel=True, name="down")
    with pytest.raises(PlanError, match=r"down: sequence_parallel deals dim 0 of \[3, 7\] to 2 ranks"):
        row(torch.zeros(3, 7))
    assert row(torch.zeros(0, 3, 7)).shape == (0, 3, 10)
    column = Linear(*SIZES, tensor_parallel_mode="column", tensor_parallel_group=group, sequence_parallel=True, name="up")
    with pytest.raises(PlanError, match=r"up: .* the input \[14\] has none"):
        column(torch.zeros(14))
    with pytest.raises(PlanError, match=r"up takes \[..., 14\], got \[4, 13\]"):
        column(torch.zeros(4, 13))
    rank, x = resolve_group(group).tp_rank, torch.randn(4, 14)
    fused = autotp.LayerNormLinear(14, 10, parallel_mode="column", tp_group=group, sequence_parallel=True, name="qkv")
    for layer, give in ((column, x), (row, x[:, :7]), (fused, x)):
        y = layer(give)
        with pytest.raises(AutoTPError, match=rf"{layer.full_name}: .* TP ranks 0 to 1 have \[[48], [2468]\]: pad them to"):
            layer(give[: 4 - 2 * rank])
        assert torch.equal(layer(give), y)  # and no rank waits


def test_rows_that_can_not_be_dealt_are_refused(ranks):
    ranks.run(check_refusals)
