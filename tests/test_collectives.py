"""Differentiable collectives: gradients as in one process, and sums of what several ranks hold."""

import pytest
import torch

from autotp.collectives import (
    copy_columns_to_group,
    copy_to_group,
    gather_columns_from_group,
    gather_from_group,
    keep_on_first,
    reduce_from_group,
    reduce_owned_from_group,
    split_columns_to_group,
    split_to_group,
    sum_copies,
)
from autotp.errors import PlanError
from autotp.groups import resolve_group
from autotp.row_collectives import collect_rows, deal_rows, gather_rows_from_group, scatter_rows_to_group
from autotp.shard import Cut, Shard


def made(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- compiled, against the same calls by themselves -----------------------------------------------------------------------


def check_compiled(group):
    """Functions whose output is made in place, or is a view of what was, lost its gradient under some compilers."""
    tp = resolve_group(group)
    size, rank = tp.tp_size, tp.tp_rank
    columns, rows = Shard.even((4, 5), 1, size), Shard.even((5, 4), 0, size)
    copied, cut = Shard((4, 3), size, (Cut(1, (((0, 2, 1, 1),), ((1, 2, 1, 1),))),)), columns.cuts[0]
    calls = {
        "copy": (lambda x: copy_to_group(x, tp), (4, 5)),
        "copy columns": (lambda x: copy_columns_to_group(x, tp, ((1, 3),)), (4, 5)),
        "reduce": (lambda x: reduce_from_group(x, tp), (4, 5)),
        "reduce in float64": (lambda x: reduce_from_group(x, tp, torch.float64), (4, 5)),
        "reduce owned": (lambda x: reduce_owned_from_group(x * 2, tp), (4, 5)),
        "gather columns": (lambda x: gather_from_group(x, tp, columns), columns.local_shape(rank)),
        "gather rows of a shard": (lambda x: gather_from_group(x, tp, rows), rows.local_shape(rank)),
        "split": (lambda x: split_to_group(x, tp, columns), (4, 5)),
        "split columns": (lambda x: split_columns_to_group(x, tp, cut), (4, 5)),
        "join columns": (lambda x: gather_columns_from_group(x, tp, cut, 5), columns.local_shape(rank)),
        "keep": (lambda x: keep_on_first(x, tp), (4, 5)),
        "sum copies": (lambda x: sum_copies(x, tp, copied), copied.local_shape(rank)),
        "gather rows": (lambda x: gather_rows_from_group(x, tp), (4, 5)),
        "scatter rows": (lambda x: scatter_rows_to_group(x, tp), (4 * size, 5)),
        "deal": (lambda x: deal_rows(x, tp), (5, 3)),
        "collect": (lambda x: collect_rows(deal_rows(x, tp), tp, 5), (5, 3)),
    }
    wrong = []
    for name, (call, shape) in calls.items():
        found = []
        for run in (call, torch.compile(call, backend="eager")):
            x = made(7 + rank, *shape).requires_grad_()
            y = run(x * 3)
            (y * made(9 + rank, *y.shape)).sum().backward()
            found.append((y, x.grad))
        if not all(torch.equal(*pair) for pair in zip(*found, strict=True)):
            wrong.append(name)
        torch._dynamo.reset()
    assert not wrong, wrong


def test_compiled_collectives_keep_their_gradients(ranks):
    ranks.run(check_compiled)


# -- gradients, against autograd in one process -------------------------------------------------------------------------


def check_copy_then_reduce(group, dtype):
    """`sum over ranks of f_r(x)` for an x that all hold: the shape of a column -> row pair."""
    tp = resolve_group(group)
    weights = [made(10 + rank, 4, 4) for rank in range(tp.tp_size)]
    whole = made(1, 3, 4).requires_grad_()
    expected = sum(torch.tanh(whole) @ w for w in weights)
    expected.backward(made(2, 3, 4))
    for reduce in (reduce_from_group, reduce_owned_from_group):
        mine = made(1, 3, 4).requires_grad_()
        entered = copy_to_group(mine, tp, dtype)
        got = reduce(torch.tanh(entered) @ weights[tp.tp_rank], tp, dtype)
        torch.testing.assert_close(got, expected)
        got.backward(made(2, 3, 4))
        torch.testing.assert_close(mine.grad, whole.grad)


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_copy_and_reduce_are_each_others_transpose(ranks, size, dtype):
    ranks.run(check_copy_then_reduce, dtype, size=size)


def check_owned_layouts(group):
    tp = resolve_group(group)
    for name in ("transposed", "view of a product", "no grad"):
        x = made(3, 4, 4).requires_grad_()
        product = x @ made(4 + tp.tp_rank, 4, 4)
        whole = made(3, 4, 4).requires_grad_()
        expected = sum(whole @ made(4 + rank, 4, 4) for rank in range(tp.tp_size))
        if name == "no grad":
            with torch.no_grad():
                assert not reduce_owned_from_group(x @ made(4 + tp.tp_rank, 4, 4), tp).requires_grad
            continue
        view = (lambda t: t.t()) if name == "transposed" else (lambda t: t.view(2, 2, 4))
        got = reduce_owned_from_group(view(product), tp)
        torch.testing.assert_close(got, view(expected))
        (got * got).sum().backward()
        (expected * expected).sum().backward()
        torch.testing.assert_close(tp.all_reduce(x.grad), whole.grad)


def test_the_reduction_in_place_keeps_the_gradient(ranks):
    ranks.run(check_owned_layouts)


def check_split_then_gather(group):
    tp = resolve_group(group)
    for shard in (Shard.even((5, 7), 1, tp.tp_size), Shard.even((7, 5), 0, tp.tp_size), Shard.even((4, 6), 1, tp.tp_size)):
        scale = made(5, *shard.shape)
        whole = made(6, *shard.shape).requires_grad_()
        expected = torch.tanh(whole * 2) * scale
        expected.backward(made(7, *shard.shape).t().contiguous().t())
        mine = made(6, *shard.shape).requires_grad_()
        local = split_to_group(mine * 2, tp, shard)
        assert tuple(local.shape) == shard.local_shape(tp.tp_rank)
        got = gather_from_group(torch.tanh(local), tp, shard) * scale
        torch.testing.assert_close(got, expected)
        got.backward(made(7, *shard.shape).t().contiguous().t())
        torch.testing.assert_close(mine.grad, whole.grad)
    alone = made(8, 4, 6).requires_grad_()
    shard = Shard.even((4, 6), 1, tp.tp_size)
    gather_from_group(split_to_group(alone, tp, shard), tp, shard).sum().backward()  # an expanded gradient
    assert torch.equal(alone.grad, torch.ones(4, 6))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_split_and_gather_are_each_others_transpose(ranks, size):
    ranks.run(check_split_then_gather, size=size)


def check_copies_refused(group):
    tp = resolve_group(group)
    shard = Shard.from_indices((6,), 0, [[0, 1, 2, 3], [2, 3, 4, 5]])
    local = shard.split(made(0, 6), tp.tp_rank)
    for function, x in ((gather_from_group, local), (split_to_group, made(0, 6))):
        with pytest.raises(PlanError, match="held"):
            function(x, tp, shard)


def test_parts_held_twice_have_no_gradient_here(ranks):
    ranks.run(check_copies_refused)


def check_twice_differentiated(group):
    tp = resolve_group(group)
    x = made(9, 3).requires_grad_()
    (grad,) = torch.autograd.grad(copy_to_group(x * x, tp).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_a_second_derivative_is_refused_not_wrong(ranks):
    ranks.run(check_twice_differentiated)


# -- what only some ranks hold, or only one reads -----------------------------------------------------------------------

COPIED = {
    "pairs": ([0, 1], [0, 1], [2, 3]),
    "all": ([0, 1, 2, 3],) * 3,
    "some": ([3, 0], [1, 3], [2, 1, 0]),
    "none": ([0], [1, 3], [2]),
}


def check_copies(group, layout, dim, dtype):
    tp, owned = resolve_group(group), COPIED[layout]
    shape = (4, 3) if dim == 0 else (2, 4, 3)
    shard = Shard.from_indices(shape, dim, owned)
    # 256 + 1 + 1 in float32 is 258, in bfloat16 256: copies are added up in float32 at least
    values = [torch.full(shard.local_shape(rank), (256.0, 1.0, 1.0)[rank], dtype=dtype) for rank in range(3)]
    total = torch.zeros(shape, dtype=torch.float64)
    for rank, value in enumerate(values):
        total.index_add_(dim, shard.cuts[0].indices(rank), value.double())
    leaf = made(tp.tp_rank, *shard.local_shape(tp.tp_rank)).to(dtype).requires_grad_()
    x = sum_copies(leaf, tp, shard)
    assert torch.equal(x, leaf) and (x is leaf) == (layout == "none")
    grad = values[tp.tp_rank].transpose(0, -1).contiguous().transpose(0, -1)  # strided
    before = grad.clone()
    x.backward(grad)
    assert torch.equal(grad, before) and torch.equal(leaf.grad, shard.split(total, tp.tp_rank).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("layout", list(COPIED))
def test_gradients_of_copies_are_summed_over_their_holders(ranks, layout, dim, dtype):
    ranks.run(check_copies, layout, dim, dtype, size=3)


def check_some_columns(group):
    tp = resolve_group(group)
    leaf = made(0, 3, 7).requires_grad_()
    y = copy_columns_to_group(leaf, tp, ((1, 3), (6, 7)))
    assert torch.equal(y, leaf)
    grads = [made(rank + 1, 3, 7) for rank in range(tp.tp_size)]
    before, total = grads[tp.tp_rank].clone(), torch.stack(grads).sum(0)
    y.backward(grads[tp.tp_rank])
    expected = grads[tp.tp_rank].clone()
    expected[:, [1, 2, 6]] = total[:, [1, 2, 6]]
    torch.testing.assert_close(leaf.grad, expected)
    assert torch.equal(grads[tp.tp_rank], before)
    leaf.grad = None
    y = keep_on_first(leaf, tp)
    assert torch.equal(y, leaf if tp.tp_rank == 0 else torch.zeros_like(leaf))
    y.backward(grads[tp.tp_rank])
    assert torch.equal(leaf.grad, grads[0])


@pytest.mark.parametrize("size", [1, 3])
def test_some_columns_and_a_parameter_read_once(ranks, size):
    ranks.run(check_some_columns, size=size)
