"""Blocks moved by copy engines: a rank puts one into its symmetric memory and sets a flag of the receiver's, who fetches it.

Streams wait for flags by themselves, by the driver's stream memory operations, so neither a multiprocessor nor the host does.
Every rank queues the same moves in the same order; a rank that does not come is noticed by a Watch (watch.py).

Buffers of a kind take turns, two of them. A rank says that it has put something into the one only after it has fetched all that
it wanted from the other, as its copies run in order. So what was put there last has been fetched by all once everything of the
use in between is here: nobody has to say so.

Rows that are lent lie in such a buffer, the others' blocks beside the one that this rank put there: it is not copied again, as a
copy within one GPU takes multiprocessors from the products. The next use waits for the stream that reads them.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..comm import TPGroup
from ..errors import AutoTPError
from ..kernels.blocks import block_of
from ..kernels.moves import Decision, decide
from .base import Exchange, Gather, Scatter
from .device import CudaDevice
from .watch import Watch

SLOTS = 2  # buffers of each kind; with one, who has fetched from it would have to be told
AT_LEAST = 0  # how a stream compares a flag
NEVER = 2**30  # more than any flag counts
Code = int | None  # of the first operation that failed


class _Slot:
    """One symmetric buffer, and who has put what where: flags count uses, so that none has to be reset.

    Attributes:
        uses: how often it was used; pointers: of every rank's buffer; capacity: bytes of each.
        ready_here, ready_there: for each peer, the address of the flag by which it tells this rank, and this rank tells it.
        place: where this rank's flags begin.
        queued: event of this rank's stream when a use begins; arrived: for each rank, when its block has been fetched.
        complete: event of when all of the last use has, None until that is queued; waits: the stream that waits for it already.
        reader: the stream that reads the buffer itself, where the last use lent it.
    """

    def __init__(self, exchange: CopyExchange, place: int) -> None:
        self.exchange, self.uses, self.capacity = exchange, 0, 0
        self.buffer: Any = None
        self.pointers: Sequence[int] = ()
        self.views: dict[Any, Tensor] = {}
        size, me = exchange.group.tp_size, exchange.rank

        self.place = place * size

        def flag(owner: int, writer: int) -> int:
            return exchange.flag_pointers[owner] + 4 * (self.place + writer)

        self.ready_here, self.ready_there = ([flag(me, p) for p in range(size)], [flag(p, me) for p in range(size)])
        self.queued = exchange.device.make_event()
        self.arrived = [exchange.device.make_event() for _ in range(size)]
        self.complete: int | None = self.queued
        self.waits: int | None = None
        self.reader: int | None = None

    def grow(self, n_bytes: int) -> None:
        """Replace the buffer by one of `n_bytes`, on all ranks together."""
        exchange = self.exchange
        exchange.meet()
        self.views, self.buffer = {}, None
        self.buffer, self.pointers = exchange.device.allocate(n_bytes)
        self.capacity = n_bytes

    def wait_complete(self, stream: int) -> Code:
        """`stream` waits until all of the last use is here.

        Raises:
            AutoTPError: it was not sent.
        """
        if stream == self.waits:
            return 0
        if self.complete is None:
            raise AutoTPError(
                "rows began to move while others were only half sent: a product of dealt rows raised an error, or two were "
                "computed at once. The other ranks wait for those rows: load the last checkpoint and start all ranks again"
            )
        self.waits = stream
        return self.exchange.device.wait_event(stream, self.complete, 0)

    def fetch(self, stream: int, peer: int, target: int, source: int, n_bytes: int) -> Code:
        """Copy `n_bytes` from `peer`'s buffer once it says that they are there."""
        driver = self.exchange.device
        return (
            driver.wait(stream, self.ready_here[peer], self.uses, AT_LEAST)
            or (n_bytes and driver.copy(target, self.pointers[peer] + source, n_bytes, stream))
            or driver.record(self.arrived[peer], stream)
        )

    def view(self, shape: tuple[int, int], dtype: torch.dtype, offset: int) -> Tensor:
        """This rank's buffer from byte `offset` on as a tensor."""
        key = shape, dtype, offset
        found = self.views.get(key)
        if found is None:
            n_bytes = shape[0] * shape[1] * dtype.itemsize
            found = self.views[key] = self.buffer[offset : offset + n_bytes].view(dtype).view(shape)
        return found


class CopyExchange(Exchange):
    """Moves blocks by copy engines over peer pointers, beside what computes.

    Attributes:
        peers: the other ranks, nearest after this one first; sources: nearest before it first.
        rank: this rank; device: its GPU; stream: where copies are queued, in the same order on every rank.
        flags: this rank's, which the others write; done: how many uses of its slots are through, written by the copies' stream.
        queued: how many are queued; uses: those that may not be through: number, kind, slot, and how often that was used.
        broken: why nothing moves any more, empty as long as it does.
    """

    def __init__(self, group: TPGroup, device: Any = None) -> None:
        super().__init__(group, "")
        self.device = device or CudaDevice(group)
        self.rank, size, self.stream = group.tp_rank, group.tp_size, self.device.stream
        self.peers = tuple((self.rank + i) % size for i in range(1, size))
        self.sources = tuple(reversed(self.peers))
        memory, self.flag_pointers = self.device.allocate(4 * 2 * SLOTS * size)
        self.flags, self.counter, self.broken = memory.view(torch.int32), self.device.make_counter(), ""
        self.done_pointer = self.counter.data_ptr()
        self.done = ctypes.c_int32.from_address(self.done_pointer)
        self.uses: deque[tuple[int, str, _Slot, int]] = deque()
        self.queued = 0
        self.slots = {kind: [_Slot(self, SLOTS * i + j) for j in range(SLOTS)] for i, kind in enumerate(("gather", "scatter"))}
        self.device.fill(self.flags, 0)  # now: a kernel that is loaded while a stream waits may wait itself
        self.device.read(self.flags)
        self.meet()
        Watch(self).start()

    def meet(self) -> None:
        """Wait on the host until every rank is here and its device is idle.

        Raises:
            GatherError: naming the ranks that did not come in time.
        """
        self.device.synchronize()
        self.group.arrive("moving rows between ranks")

    def finish_use(self, kind: str, slot: _Slot) -> Code:
        """All of one use of a slot is queued."""
        self.uses.append((self.queued + 1, kind, slot, slot.uses))
        self.queued += 1
        return self.device.write(self.stream, self.done_pointer, self.queued, 0)

    def find_missing(self) -> str:
        """Which ranks the oldest use that is not through waits for, and where."""
        number, kind, slot, uses = next(use for use in list(self.uses) if use[0] > self.done.value)
        flags = self.device.read(self.flags).tolist()
        missing = sorted(rank for rank in self.peers if flags[slot.place + rank] < uses)
        who = f"TP rank(s) {missing} did not come" if missing else "its GPU did not finish what was queued before"
        return f"{kind} {number} of rows on TP rank {self.rank}: {who}"

    def give_up(self, reason: str) -> None:
        """Let go of what waits for the others; the next call raises."""
        self.broken = reason
        self.device.fill(self.flags, NEVER)

    def take_slot(self, kind: str, n_bytes: int, stream: int) -> _Slot:
        """The next buffer of a kind, grown to `n_bytes` if it is smaller; every rank asks for as many.

        `stream` waits until all have fetched what was put there last.
        """
        slots, uses, done = self.slots[kind], self.uses, self.done.value
        while uses and uses[0][0] <= done:
            uses.popleft()
        slot, between = slots
        self.slots[kind] = [between, slot]
        self.device.check(between.wait_complete(stream))
        if slot.capacity < n_bytes:
            slot.grow(n_bytes)
        if slot.reader not in (None, stream):
            self.device.check(self.device.record(slot.queued, slot.reader) or self.device.wait_event(stream, slot.queued, 0))
        slot.uses += 1
        slot.complete = slot.waits = slot.reader = None
        return slot

    def decide(self, n_bytes: int, way: bool | None) -> Decision:
        if self.broken:
            raise AutoTPError(self.broken)
        found = decide(n_bytes, way, "", self.smallest_bytes)
        if found.copies and self.device.is_capturing():
            return Decision(False, "a CUDA graph is being captured, whose replays would not wait for new rows")
        return found

    def beside(self) -> AbstractContextManager[Any]:
        return self.device.beside()

    def gather(self, local: Tensor, way: bool | None = None, full: Tensor | None = None, lent: bool = False) -> Gather:
        if not self.decide(self.group.tp_size * local.numel() * local.element_size(), way).copies:
            return super().gather(local)
        return _CopyGather(self, local.contiguous(), full, lent)

    def scatter(self, rows: int, width: int, like: Tensor, dtype: torch.dtype | None = None, way: bool | None = None) -> Scatter:
        if not self.decide(rows * width * like.element_size(), way).copies:
            return super().scatter(rows, width, like, dtype)
        return _CopyScatter(self, rows, width, like, dtype)


class _CopyGather(Gather):
    """Blocks on their way into `full`, or `lent` into the buffer that holds this rank's for the others: one copy less."""

    def __init__(self, exchange: CopyExchange, local: Tensor, full: Tensor | None, lent: bool) -> None:
        assert full is None or not lent
        size, rows, me = exchange.group.tp_size, local.shape[0], exchange.rank
        n_bytes, stream, driver = local.numel() * local.element_size(), exchange.stream, exchange.device
        if full is None and not lent:
            full = local.new_empty(size * rows, *local.shape[1:])
        current, step = driver.current_stream(), n_bytes if lent else 0  # from one rank's place in its buffer to the next one's
        self.slot = slot = exchange.take_slot("gather", n_bytes + (size - 1) * step, current)
        if full is None:
            slot.reader, full = current, slot.view((size * rows, local.shape[1]), local.dtype, 0)
        super().__init__(full, (me, *exchange.sources))
        self.exchange, self.local, self.rank, self.rows = exchange, local, me, rows
        source, target = local.data_ptr(), full.data_ptr()
        # A copy within one GPU runs on its multiprocessors: on the other stream it would wait until the next product leaves some.
        code = driver.copy(slot.pointers[me] + me * step, source, n_bytes, current)
        code = code or driver.record(slot.queued, current) or driver.wait_event(stream, slot.queued, 0)
        for peer in exchange.peers:
            code = code or driver.write(stream, slot.ready_there[peer], slot.uses, 0)
        for peer in exchange.sources:
            code = code or slot.fetch(stream, peer, target + peer * n_bytes, peer * step, n_bytes)
        slot.complete = slot.arrived[exchange.sources[-1] if lent else me]
        if not lent:
            code = code or driver.copy(target + me * n_bytes, source, n_bytes, stream) or driver.record(slot.complete, stream)
        driver.check(code or exchange.finish_use("gather", slot))

    def wait(self, rank: int) -> Tensor:
        if rank == self.rank:
            return self.local
        device = self.exchange.device
        device.check(device.wait_event(device.current_stream(), self.slot.arrived[rank], 0))
        return self.full[rank * self.rows : (rank + 1) * self.rows]

    def wait_all(self) -> Tensor:
        device = self.exchange.device
        device.check(self.slot.wait_complete(device.current_stream()))
        return self.full


class _CopyScatter(Scatter):
    def __init__(self, exchange: CopyExchange, rows: int, width: int, like: Tensor, dtype: torch.dtype | None) -> None:
        super().__init__(exchange.group, dtype)
        size = exchange.group.tp_size
        self.exchange, self.rows, self.width, self.part_dtype = exchange, rows, width, like.dtype
        self.order, self.sent = exchange.peers, 0
        self.block_bytes = -(-rows // size) * width * like.element_size()
        own = block_of(rows, exchange.rank, size)
        self.received = like.new_empty(len(exchange.peers), own.stop - own.start, width)  # a peer's after another's
        stream = exchange.device.current_stream()
        self.slot = exchange.take_slot("scatter", len(exchange.peers) * self.block_bytes, stream)

    def _offset(self, sender: int, receiver: int) -> int:
        """Where in `sender`'s buffer the block of `receiver` lies, in bytes."""
        return ((receiver - sender) % self.exchange.group.tp_size - 1) * self.block_bytes

    def place(self, rank: int) -> Tensor:
        block = block_of(self.rows, rank, self.exchange.group.tp_size)
        return self.slot.view((block.stop - block.start, self.width), self.part_dtype, self._offset(self.exchange.rank, rank))

    def send(self, rank: int) -> None:
        exchange, slot = self.exchange, self.slot
        driver, stream = exchange.device, exchange.stream
        code = driver.record(slot.queued, driver.current_stream()) or driver.wait_event(stream, slot.queued, 0)
        code = code or driver.write(stream, slot.ready_there[rank], slot.uses, 0)
        sender, target = exchange.sources[self.sent], self.received[self.sent]  # who sends its block of mine as its i-th
        n_bytes = target.numel() * target.element_size()
        code = code or slot.fetch(stream, sender, target.data_ptr(), self._offset(sender, exchange.rank), n_bytes)
        self.sent += 1
        if self.sent == len(exchange.peers):
            slot.complete = slot.arrived[sender]
            code = code or exchange.finish_use("scatter", slot)
        driver.check(code)

    def receive(self) -> Tensor | None:
        device = self.exchange.device
        device.check(self.slot.wait_complete(device.current_stream()))
        dtype = self.dtype or self.part_dtype
        # One pass over all parts, which adds them up in float32 at least; a single part is not copied.
        return self.received[0].to(dtype) if len(self.received) == 1 else self.received.sum(0, dtype=dtype)
