"""Memory that ranks write to each other: what fits it, and what is done with it; here one rank that writes to itself."""

import os
from types import SimpleNamespace

import pytest
import torch

from autotp.errors import AutoTPError
from autotp.kernels import reference
from autotp.kernels.triton_peers import Inbox
from autotp.peers import ROWS, PeerMemory

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="one rank alone has no inbox on a GPU")


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.setenv("AUTOTP_BACKEND", "reduce_rows=triton,best_columns=triton")
    assert os.environ["TRITON_INTERPRET"] == "1"
    made = PeerMemory(SimpleNamespace(tp_rank=0, tp_size=1, timeout_s=600, device=torch.device("cpu")))
    made._refused = "one rank needs no more"
    memory = torch.zeros(2 * ROWS * 2048, dtype=torch.int64)
    made._memory.append(memory)
    made._lost = torch.zeros(1, dtype=torch.int32)
    addresses = torch.tensor([memory.data_ptr(), made._lost.data_ptr()])
    made._inboxes[2048] = Inbox(addresses, torch.zeros(ROWS + 1, dtype=torch.int32), 2048, 0, 1, 1 << 30)
    return made


def test_rows_that_lie_at_odd_addresses_are_summed_too(peers):
    x, residual, weight = torch.randn(2, 1, 6).half(), torch.randn(2, 1, 6).half(), torch.randn(7).half()[1:]
    assert weight.data_ptr() % 4 == 2
    rest = dict(residual=residual, weight=weight, eps=1e-5, kind="rms")
    total, y = peers.reduce_rows(x, **rest)
    expected = reference.reduce_rows([x], **rest)
    assert torch.equal(total, expected[0])
    torch.testing.assert_close(y, expected[1], rtol=2e-3, atol=2e-3)


def test_what_does_not_fit_is_left_alone(peers):
    for x in (
        torch.randn(ROWS + 1, 4),
        torch.randn(1, 3).half(),
        torch.randn(2, 4).double(),
        torch.ones(4, dtype=torch.int64),
        torch.randn(0, 4),
        torch.tensor(1.0),
        torch.randn(1, 8193),
    ):
        assert peers.find_place(x) is None and peers.sum_small(x) is None and peers.sum_small(x, "one_shot") is None
    assert torch.equal(peers.sum_small(torch.ones(5)), torch.ones(5))


def test_the_largest_column_is_chosen(peers):
    logits = torch.tensor([[1.0, 3.0, 3.0], [float("nan"), 2.0, 9.0]])
    tokens, halted = peers.best_columns(logits, 10, torch.tensor([4]))
    assert tokens.tolist() == [11, 10] and halted.tolist() == [4]
    assert peers.best_columns(logits.t().contiguous().t(), 10, torch.tensor([4])) is None


def test_nothing_goes_on_once_a_ranks_part_did_not_come(peers):
    peers.check()
    peers._lost.fill_(1)
    for call in (peers.check, lambda: peers.sum_small(torch.ones(4))):
        with pytest.raises(AutoTPError, match=r"TP rank 0 did not give its part of a sum within about 600 s"):
            call()
