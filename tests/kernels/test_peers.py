"""Sums of rows that ranks write into each other's memory, in Triton's interpreter: here a file that all of them map."""

import os
import tempfile

import pytest
import torch
import torch.distributed as dist

from autotp.kernels import reference, reference_decode

ROWS, WORDS = 4, 32
FORMS = [
    (torch.float32, "", False),
    (torch.float32, "layernorm", True),
    (torch.float16, "rms", True),
    (torch.float16, "rms1p", False),
    (torch.float16, "layernorm", True),
]


def open_inbox(folder: str, rank: int, size: int, patience: int = 2**31 - 1):
    """`(the Inbox, what must stay alive with it)`."""
    from autotp.kernels.triton_peers import Inbox

    count = 2 * size * ROWS * WORDS
    parts = [torch.from_file(f"{folder}/{r}", shared=True, size=count, dtype=torch.int64) for r in range(size)]
    parts.append(torch.zeros(1, dtype=torch.int32))
    addresses = torch.tensor([part.data_ptr() for part in parts])
    return Inbox(addresses, torch.zeros(ROWS + 1, dtype=torch.int32), WORDS, rank, size, patience), parts


def draw_call(call: int, size: int):
    """What all ranks give in a call, and what follows the sum."""
    return draw_parts(call, size, 1 + call % 3, 2 * (3 + call % 14))


def draw_parts(call: int, size: int, rows: int, width: int):
    generator = torch.Generator().manual_seed(call)
    dtype, kind, residual = FORMS[call % len(FORMS)]
    parts = [torch.randn(rows, width, generator=generator).to(dtype) for _ in range(size)]
    names = ["bias"] * residual + ["weight"] * (kind != "") + ["shift"] * (kind == "layernorm")
    rest = {name: torch.randn(width, generator=generator).to(dtype) for name in names}
    if residual:
        rest["residual"] = torch.randn(rows, width, generator=generator).to(dtype)
    return parts, dict(rest, eps=1e-5, kind=kind)


def sum_calls(group, folder: str, calls: int):
    from autotp.kernels.triton_choose import best_columns
    from autotp.kernels.triton_peers import reduce_rows

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    inbox, parts = open_inbox(folder, rank, size)
    dist.barrier(group)
    found = []
    for call in range(calls):
        given, rest = draw_call(call, size)
        found.append(reduce_rows(given[rank], inbox, **rest))
    for call in range(6):
        logits, starts, halts = draw_logits(call, size)
        found.append(best_columns(logits[rank], inbox, starts[rank], halts[rank]))
    del parts
    return found


def draw_logits(call: int, size: int):
    """Columns of which several are the largest, dealt unevenly; NaN, zeros of both signs and infinities among them."""
    generator = torch.Generator().manual_seed(call)
    whole = torch.randint(-3, 4, (1 + call % 3, 40), generator=generator).to([torch.float16, torch.float32][call % 2])
    if call == 3:
        whole[:, 31] = float("nan")
    elif call == 4:
        whole = torch.where(whole > 0, float("-inf"), whole * -0.0)
    elif call == 5:
        whole.fill_(float("-inf"))
    sizes = {2: [17, 23], 3: [17, 3, 20], 4: [17, 3, 1, 19], 8: [17, 3, 1, 1, 1, 9, 4, 4]}[size]
    starts = [sum(sizes[:rank]) for rank in range(size)]
    return whole.split(sizes, 1), starts, [torch.tensor([rank * call]) for rank in range(size)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks interpret their kernels on the CPU")
@pytest.mark.parametrize("size, calls", [(2, 15), (3, 15), (4, 5), (8, 5)])
def test_ranks_sum_rows_norm_them_and_choose(request, size, calls):
    pool = request.getfixturevalue("eight_ranks" if size > 4 else "ranks")
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(size):
            with open(os.path.join(folder, str(rank)), "wb") as file:
                file.truncate(2 * size * ROWS * WORDS * 8)
        found = pool.run(sum_calls, folder, calls, size=size)
    for call in range(calls):
        parts, rest = draw_call(call, size)
        total, y = reference.reduce_rows(parts, **rest)
        for mine in found:
            assert torch.equal(mine[call][0], found[0][call][0]), "all ranks have the same bits"
            torch.testing.assert_close(mine[call][0], total)
            assert (y is None) == (mine[call][1] is None)
            if y is not None:
                torch.testing.assert_close(mine[call][1], y, rtol=2e-3, atol=2e-3)
    for call in range(6):
        tokens, halted = reference_decode.best_columns(*draw_logits(call, size))
        for mine in found:
            assert torch.equal(mine[calls + call][0], tokens) and torch.equal(mine[calls + call][1], halted), call


BOARD_ROWS, BOARD_WORDS, PROGRAMS = 31, 16, 3


def open_board(folder: str, rank: int, size: int, patience: int = 2**31 - 1):
    """`(the Board, what must stay alive with it)`; the files are made where they are not there."""
    from autotp.kernels.triton_sums import Board, measure_board

    n_bytes, part_words = measure_board(4 * BOARD_ROWS * BOARD_WORDS, 4 * BOARD_WORDS, size)
    parts = [torch.from_file(f"{folder}/{r}", shared=True, size=n_bytes, dtype=torch.uint8) for r in range(size)]
    parts.append(torch.zeros(1, dtype=torch.int32))
    addresses = torch.tensor([part.data_ptr() for part in parts])
    return Board(addresses, torch.zeros(PROGRAMS + 1, dtype=torch.int32), part_words, rank, size, patience), parts


def draw_many(call: int, size: int):
    """The same as `draw_call`, of more rows: groups that are not whole, fewer of them than ranks, and ranks without any."""
    return draw_parts(call, size, (1, 5, 31, 18, 9, 13, 26)[call % 7], 2 * (3 + call % 6))


def sum_many(group, folder: str, calls: int):
    from autotp.kernels.triton_sums import sum_rows

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    board, parts = open_board(folder, rank, size)
    dist.barrier(group)
    found = []
    for call in range(calls):
        given, rest = draw_many(call, size)
        found.append(sum_rows(given[rank], board, **rest))
    del parts
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks interpret their kernels on the CPU")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_sum_many_rows_and_norm_them(ranks, size):
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(size):
            open_board(folder, rank, size)
        found = ranks.run(sum_many, folder, 14, size=size)
    for call in range(14):
        parts, rest = draw_many(call, size)
        total, y = reference.reduce_rows(parts, **rest)
        for mine in found:
            assert torch.equal(mine[call][0], found[0][call][0]), "all ranks have the same bits"
            torch.testing.assert_close(mine[call][0], total)
            assert (y is None) == (mine[call][1] is None)
            if y is not None:
                torch.testing.assert_close(mine[call][1], y, rtol=2e-3, atol=2e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are interpreted on the CPU")
def test_a_rank_whose_rows_do_not_come_is_named(tmp_path):
    from autotp.kernels.triton_sums import sum_rows

    board, parts = open_board(str(tmp_path), 0, 2, patience=9)
    x = torch.ones(20, 4).half()
    total, y = sum_rows(x, board, weight=torch.ones(4).half(), eps=1e-5, kind="rms")
    assert total.isnan().all() and y.isnan().all() and parts[-1].tolist() == [2]  # rank 1, plus one
    assert sum_rows(x, board._replace(patience=2**31 - 1))[0].isnan().all()  # never again


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are interpreted on the CPU")
def test_a_rank_whose_words_do_not_come_is_named(tmp_path):
    from autotp.kernels.triton_choose import best_columns
    from autotp.kernels.triton_peers import reduce_rows

    for rank in range(2):
        with open(tmp_path / str(rank), "wb") as file:
            file.truncate(2 * 2 * ROWS * WORDS * 8)
    inbox, parts = open_inbox(str(tmp_path), 0, 2, patience=9)
    total, _ = reduce_rows(torch.ones(3, 4), inbox)
    assert total.isnan().all() and parts[-1].tolist() == [2]  # rank 1, plus one
    inbox = inbox._replace(patience=2**31 - 1)  # never again
    logits = torch.tensor([[-1.0, -3.0], [0.0, 5.0]])
    tokens, halted = best_columns(logits, inbox, 7, torch.tensor([0]))
    assert ((tokens == 0) | ((tokens >= 7) & (tokens < 9))).all() and halted.item() != 0
    assert reduce_rows(torch.ones(1, 4).half(), inbox)[0].isnan().all()
