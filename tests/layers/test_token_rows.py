"""Rows of the forward that runs: dealt, gathered, joined and scattered in each shape that a module may give them."""

import pytest
import torch

from autotp.errors import PlanError
from autotp.groups import resolve_group
from autotp.layers.layouts import Layout
from autotp.layers.token_rows import TokenRows

LAYOUT = Layout((2, 3), 6, 3)


def made(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_moves(group):
    rows = TokenRows(resolve_group(group))
    rows.layout = LAYOUT
    rank = rows.group.tp_rank
    for shape in ((2, 3, 4), (6, 4), (2, 3, 2, 5), (6, 2, 5), (2, 3), (6,)):
        whole, lead = made(0, *shape), 2 if shape[0] == 2 else 1
        own = rows.split(whole)
        assert own.shape == (*((1, 3) if lead == 2 else (3,)), *shape[lead:]), shape
        assert torch.equal(own.flatten(0, lead - 1), whole.flatten(0, lead - 1)[3 * rank : 3 * rank + 3]), shape
        assert torch.equal(rows.gather(own), whole) and rows.gather(own) is rows.full, shape
        assert rows.find_local(rows.full) is own and rows.find_local(whole) is None, shape
        assert torch.equal(rows.join(own), whole), shape
        partial = [made(seed, *shape) for seed in (1, 2)]
        torch.testing.assert_close(rows.scatter(partial[rank], None), rows.split(partial[0] + partial[1]))
    for move in (rows.split, rows.gather, rows.join):
        with pytest.raises(PlanError, match=r"shape \[5, 4\] is not one row a token"):
            move(made(0, 5, 4))


def test_rows_move_in_each_shape(ranks):
    ranks.run(check_moves)
