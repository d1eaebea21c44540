"""The protocol of copies between ranks, on devices that run what is queued in any legal order; and ranks that do not come."""

import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from autotp.errors import AutoTPError
from autotp.exchange.copies import SLOTS, CopyExchange
from autotp.exchange.watch import Watch
from autotp.kernels.blocks import Dealt, block_of, multiply_and_sum, multiply_gathered_rows, sum_scattered, sum_whole
from autotp.kernels.moves import Moves
from tests.exchange.fake import COMPUTE, World


def part(step, rank, rows, width):
    """Whole numbers, so that sums are exact in any order."""
    return torch.randint(-50, 50, (rows, width), generator=torch.Generator().manual_seed(step * 64 + rank)).float()


def move_much(exchange, seed):
    """Gathers, scatters and sums of changing sizes, several at once, in the same order on every rank."""
    draw, rank, size = random.Random(seed), exchange.rank, exchange.group.tp_size
    for step in range(25):
        rows, width, kind = (
            draw.choice((1, 2, 5, 12, 33)),
            draw.choice((1, 4, 9)),
            draw.choice(("gathers", "scatter", "sum", "row")),
        )
        share = -(-rows // size)
        everyone = [part(step, other, rows, width) for other in range(size)]
        dealt = Dealt(exchange, rank, size, (rows,), (share,), moves=Moves(True, True, True, True, step % 2 == 0))
        eye = torch.eye(width)
        if kind == "gathers":  # as many on their way at once as there are buffers, or more; read the other way round
            numbers = range(100, draw.choice((300, 600)), 100)
            locals_, lent = [part(step + i, rank, share, width) for i in numbers], len(numbers) == SLOTS
            begun = [exchange.gather(local.clone(), True, lent=lent) for local in locals_]
            for i, gather in zip(reversed(numbers), reversed(begun), strict=True):
                expected = [part(step + i, other, share, width) for other in range(size)]
                for other in gather.order:
                    assert torch.equal(gather.wait(other), expected[other])
                out = torch.empty(rows, width)
                multiply_gathered_rows(dealt, gather, [eye], [out])
                assert torch.equal(out, torch.cat(expected)[:rows]) and torch.equal(gather.full, torch.cat(expected))
                assert (gather.full.data_ptr() == gather.slot.buffer.data_ptr()) == lent
            continue
        total = sum(everyone)
        own = total[block_of(rows, rank, size)]
        if kind == "scatter":
            got, found = sum_scattered(dealt, [(everyone[rank], eye)], lambda: "done")
            assert found == "done" and torch.equal(got[: len(own)], own) and not got[len(own) :].any()
        elif kind == "sum":
            got, found = sum_whole(dealt, [(everyone[rank], eye), (everyone[rank], eye)], lambda: "done")
            assert found == "done" and torch.equal(got, 2 * total)
        else:
            assert torch.equal(multiply_and_sum(dealt, everyone[rank], [eye, 2 * eye]), torch.cat([total, 2 * total], 1))
    exchange.device.synchronize()
    assert exchange.done.value == exchange.queued > 25 and len(exchange.uses) <= exchange.queued


@pytest.mark.parametrize("size, seeds", [(2, 2), (3, 2), (4, 2), (8, 1)])
def test_what_moves_arrives_whatever_the_order(size, seeds):
    for seed in range(seeds):
        World(size, seed).run(move_much, seed)


def read_late(exchange):
    """Lent rows are still to be read on one stream when another begins to gather into the same buffer."""
    size, device, seen = exchange.group.tp_size, exchange.device, []
    local = torch.full((4, 2), float(exchange.rank))
    for _ in range(SLOTS):  # buffers that have to grow make all wait
        exchange.gather(local, True, lent=True)
    full = exchange.gather(local, True, lent=True).wait_all()
    time_to_read = time.monotonic() + 0.1
    device.queues[COMPUTE].append(lambda: time.monotonic() > time_to_read and (seen.append(full.clone()) or True))
    with device.beside():
        later = [exchange.gather(local + 100 * i, True) for i in range(1, 1 + SLOTS)]
    for i, gather in enumerate(later, 1):
        assert torch.equal(gather.wait_all()[:: len(local), 0], torch.arange(size) + 100.0 * i)
    device.synchronize()
    return seen[0]


def test_lent_rows_are_not_overwritten_before_another_stream_has_read_them():
    for seen in World(3).run(read_late):
        assert torch.equal(seen, torch.arange(3.0).repeat_interleave(4)[:, None].expand(12, 2))


def test_sums_in_a_wider_dtype():
    def run(exchange):
        like = torch.tensor([[1.0 if exchange.rank == 0 else 2.0**-9]], dtype=torch.bfloat16).repeat(4, 1)
        scatter = exchange.scatter(4, 1, like, torch.float64, True)
        for rank in scatter.order:
            scatter.place(rank).copy_(like[:1])
            scatter.send(rank)
        return scatter.receive()

    got = World(4).run(run)
    assert got[0].dtype == torch.float64 and got[0].item() == 3 * 2.0**-9 and got[1].item() == 1 + 2 * 2.0**-9


def test_rows_that_were_half_sent_are_not_forgotten():
    def run(exchange):
        like = torch.zeros(6, 2)
        scatter = exchange.scatter(6, 2, like, None, True)
        scatter.place(scatter.order[0]).zero_()
        scatter.send(scatter.order[0])
        with pytest.raises(AutoTPError, match="half sent"):
            scatter.receive()
        with pytest.raises(AutoTPError, match="half sent"):
            exchange.scatter(6, 2, like, None, True)
        exchange.device.synchronize()  # what was sent is written to memory that is freed after this

    World(3).run(run)


def test_many_parts_are_rounded_once():
    """1 is half of what bfloat16 can add to 256: added one by one they would all be lost."""

    def run(exchange):
        like = torch.full((8, 1), 256.0 if exchange.rank == 3 else 1.0, dtype=torch.bfloat16)
        scatter = exchange.scatter(8, 1, like, None, True)
        for rank in scatter.order:
            scatter.place(rank).copy_(like[:1])
            scatter.send(rank)
        return scatter.receive()

    got = World(8).run(run)
    assert [part.item() for part in got] == [7.0 if rank == 3 else 262.0 for rank in range(8)]
    assert all(part.dtype == torch.bfloat16 for part in got)


def stop_early(exchange, others_are_done):
    """Rank 1 does nothing after two gathers."""
    local = torch.full((4, 2), float(exchange.rank))
    for _ in range(2):
        exchange.gather(local, True).wait_all()
    if exchange.rank == 1:
        others_are_done.wait(20)
        return ""
    watch = Watch(exchange, 0.05)
    watch.start()
    exchange.gather(local, True).wait_all()  # let go, with wrong rows
    with pytest.raises(AutoTPError) as caught:
        exchange.gather(local, True)
    others_are_done.set()
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named_and_waited_for_no_longer(caplog):
    said = World(3, timeout_s=0.3).run(stop_early, threading.Event())
    for rank in (0, 2):
        assert said[rank].startswith(f"gather 3 of rows on TP rank {rank}: TP rank(s) [1] did not come within 0.3 s")
        assert said[rank] in caplog.text


class Stuck:
    """What a Watch looks at."""

    def __init__(self):
        self.done, self.queued, self.broken, self.group = SimpleNamespace(value=0), 0, "", SimpleNamespace(timeout_s=10)

    def find_missing(self):
        return "nobody came"


def test_when_a_watch_gives_up(monkeypatch):
    """The last move counts that was through, not the first; after that flags are set again until all that waits is let go."""
    given_up = []
    exchange = Stuck()
    exchange.give_up = given_up.append
    watch, now = Watch(exchange), 100.0
    looks = [(0, 0), (1, 0), (5, 0), (5, 3), (9, 4), (9, 9), (9, 9), (10, 9), (10, 9)]  # queued, done: 4 s apart
    for queued, done in looks:
        exchange.queued, exchange.done.value = queued, done
        monkeypatch.setattr(time, "monotonic", lambda at=now: at)
        watch.look(exchange)
        now += 4
        assert not given_up
    watch.look(exchange)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watch.look(exchange)
    assert len(given_up) == 1 and given_up[0].startswith("nobody came within 10 s. Every rank must run the same layers")
    exchange.broken = given_up[0]
    watch.look(exchange)
    assert given_up == [exchange.broken] * 2
    exchange.done.value = 10
    watch.look(exchange)
    assert len(given_up) == 2


def test_a_watch_ends_with_its_exchange():
    gone = Watch(CopyExchange.__new__(CopyExchange), 0.01)
    thread = threading.Thread(target=gone._run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
