"""The collectives of dealt rows, against autograd in one process. Under a compiler they are run in test_collectives.py."""

import pytest
import torch

from autotp.groups import resolve_group
from autotp.row_collectives import gather_rows_from_group, scatter_rows_to_group


def made(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_dealt_rows(group, dtype):
    """Rows enter a column -> row pair from all ranks and leave it for the rank that they belong to."""
    tp = resolve_group(group)
    for layout in (lambda t: t, lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), lambda t: t[:, :0]):
        weights = [made(10 + rank, 4, 4) for rank in range(tp.tp_size)]
        whole = layout(made(1, 2 * tp.tp_size, 3, 4)).requires_grad_()
        expected = sum(torch.tanh(whole) @ w for w in weights)
        cotangent = made(2, *expected.shape)
        expected.backward(cotangent)
        own = slice(2 * tp.tp_rank, 2 * tp.tp_rank + 2)
        mine = whole.detach()[own].requires_grad_()
        entered = gather_rows_from_group(mine, tp, dtype)
        assert torch.equal(entered, whole)
        got = scatter_rows_to_group(torch.tanh(entered) @ weights[tp.tp_rank], tp, dtype)
        torch.testing.assert_close(got, expected[own])
        got.backward(cotangent[own])
        torch.testing.assert_close(mine.grad, whole.grad[own])


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_dealt_rows_enter_and_leave(ranks, size, dtype):
    ranks.run(check_dealt_rows, dtype, size=size)
