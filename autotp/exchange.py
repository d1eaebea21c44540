"""Rows that move between the ranks of a group, in blocks that a product can begin with before the others are there.

M rows, T ranks, R = ceil(M / T): block r is rows `r * R .. min(M, (r + 1) * R)`, and the last ones may be short or empty.

| what | each rank gives | each rank gets |
|---|---|---|
| `gather` | its block `[R, K]` | all blocks `[T * R, K]`, its own first, the others as they arrive |
| `scatter` | a part of every block, each when it is ready | the sum of all ranks' parts of its own block |

Two exchanges do the same. `Exchange` calls the group's collectives, whole and in sequence: on CPUs, and where little is moved.
`CopyExchange` (GPUs of one host) lets copy engines move the blocks while multiprocessors multiply: a rank puts a block into its
symmetric memory and says so in a flag of the receiver's, who fetches it. Streams wait for flags by themselves, by the driver's
stream memory operations, so neither a multiprocessor nor the host does.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .comm import TPGroup
from .errors import AutoTPError, KernelUnsupported
from .kernels.blocks import block_of
from .kernels.moves import SMALLEST_BYTES, Decision, Moves, decide

SLOTS = 2  # buffers of each kind: the next exchange need not wait until all have fetched from the last


class Gather:
    """Blocks on their way here.

    Attributes:
        full: `[T * R, K]`, complete after `wait_all`.
        order: ranks, in the order in which to read their blocks, each after `wait`; empty if all are there at once.
    """

    def __init__(self, full: Tensor, order: Sequence[int] = ()) -> None:
        self.full, self.order = full, order

    def wait(self, rank: int) -> Tensor:
        """`rank`'s block of `full`; what is queued next on this stream may read it."""
        return self.full[block_of(self.full.shape[0], rank, len(self.order))]

    def wait_all(self) -> Tensor:
        """`full`, complete for what is queued next on this stream."""
        return self.full


class Scatter:
    """Partial blocks on their way to their ranks.

    Attributes:
        order: the other ranks, in the order in which to give their blocks; empty if all are given at once, by `reduce`.
    """

    order: Sequence[int] = ()

    def __init__(self, group: TPGroup, dtype: torch.dtype | None) -> None:
        self.group, self.dtype = group, dtype

    def place(self, rank: int) -> Tensor:
        """Where to write this rank's part of `rank`'s block, before `send`."""
        raise NotImplementedError

    def send(self, rank: int) -> None:
        """What was queued on this stream has written `place(rank)`."""
        raise NotImplementedError

    def receive(self) -> Tensor | None:
        """The sum of the others' parts of this rank's block; the caller's to overwrite. None where there are none."""
        raise NotImplementedError

    def reduce(self, parts: Tensor) -> Tensor:
        """This rank's block of the sum of all `parts` `[T * R, K]`."""
        return self.group.reduce_scatter_rows(parts, self.dtype)


class Exchange:
    """Moves blocks by the group's collectives, in sequence.

    Args:
        group: the ranks; why_not: why blocks are not copied between them instead.
    """

    smallest_bytes = SMALLEST_BYTES

    def __init__(self, group: TPGroup, why_not: str = "collectives in sequence were asked for") -> None:
        self.group, self.why_not = group, why_not

    def check(self, moves: Moves, name: str) -> None:
        """Raise where copies are asked for that there can't be; on a CPU, where nothing could hide, all run in sequence.

        Raises:
            KernelUnsupported: the ranks' GPUs don't reach each other's memory.
        """
        if self.why_not and self.group.device.type == "cuda" and True in moves[:4]:
            raise KernelUnsupported(
                f"{name}: copies between the ranks were asked for, but {self.why_not}: set the ub_* options and tp_overlap_comm "
                f"to None or False"
            )

    def decide(self, n_bytes: int, way: bool | None, smallest_bytes: int | None = None) -> Decision:
        """Whether `n_bytes`, of all blocks together, are copied, and why."""
        return decide(n_bytes, way, self.why_not, self.smallest_bytes if smallest_bytes is None else smallest_bytes)

    def beside(self) -> AbstractContextManager[Any]:
        """In it what is queued runs beside what is queued outside from now on, once what was queued before is done."""
        return nullcontext()

    def gather(self, local: Tensor, way: bool | None = None, full: Tensor | None = None) -> Gather:
        """Begin to gather `local` `[R, K]`, this rank's block, as large on all ranks; `way` as in kernels/moves.py.

        Args:
            full: memory that copies may be put into, `[T * R, K]`.
        """
        return Gather(self.group.gather_rows(local))

    def scatter(self, rows: int, width: int, like: Tensor, dtype: torch.dtype | None = None, way: bool | None = None) -> Scatter:
        """Begin to scatter `[rows, width]` of `like`'s dtype, summed in `dtype` if one is named."""
        return Scatter(self.group, dtype)


# -- by copy engines ----------------------------------------------------------------------------------------------------


class _Driver:
    """The driver's operations on streams, called with addresses: torch's own cost the host several times as much."""

    AT_LEAST, NO_TIMING = 0, 2

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        pointer, address = ctypes.c_void_p, ctypes.c_uint64
        self.write = self._find(library, "cuStreamWriteValue32_v2", pointer, address, ctypes.c_uint32, ctypes.c_uint)
        self.wait = self._find(library, "cuStreamWaitValue32_v2", pointer, address, ctypes.c_uint32, ctypes.c_uint)
        self.copy = self._find(library, "cuMemcpyAsync", address, address, ctypes.c_size_t, pointer)
        self.record = self._find(library, "cuEventRecord", pointer, pointer)
        self.wait_event = self._find(library, "cuStreamWaitEvent", pointer, pointer, ctypes.c_uint)
        self._create = self._find(library, "cuEventCreate", ctypes.POINTER(pointer), ctypes.c_uint)

    @staticmethod
    def _find(library: Any, name: str, *types: Any) -> Any:
        def check(code: int, function: Any, arguments: Any) -> None:
            if code:
                raise AutoTPError(f"{name} failed with CUDA error {code} while rows moved between ranks")

        function = getattr(library, name)
        function.argtypes, function.restype, function.errcheck = types, ctypes.c_int, check
        return function

    def make_event(self) -> int:
        event = ctypes.c_void_p()
        self._create(ctypes.byref(event), self.NO_TIMING)
        assert event.value is not None
        return event.value


class _Slot:
    """One symmetric buffer, and who has put what where: flags count uses, so that none has to be reset.

    Attributes:
        uses: how often it was used; pointers: of every rank's buffer; capacity: bytes of each.
        ready, fetched: for each peer, addresses of the flags by which it tells this rank (`here`) and this rank tells it.
        queued: event of this rank's stream when a use begins; arrived: for each rank, when its block has been fetched.
    """

    def __init__(self, exchange: CopyExchange, place: int) -> None:
        self.exchange, self.uses, self.capacity = exchange, 0, 0
        self.buffer: Any = None
        self.pointers: Sequence[int] = ()
        self.views: dict[Any, Tensor] = {}
        size, me = exchange.group.tp_size, exchange.rank

        def flag(owner: int, kind: int, writer: int) -> int:
            return exchange.flag_pointers[owner] + 4 * ((place * 2 + kind) * size + writer)

        self.ready_here, self.ready_there = ([flag(me, 0, p) for p in range(size)], [flag(p, 0, me) for p in range(size)])
        self.fetched_here, self.fetched_there = ([flag(me, 1, p) for p in range(size)], [flag(p, 1, me) for p in range(size)])
        self.queued = exchange.driver.make_event()
        self.arrived = [exchange.driver.make_event() for _ in range(size)]

    def grow(self, n_bytes: int) -> None:
        """Replace the buffer by one of `n_bytes`, on all ranks together."""
        exchange = self.exchange
        exchange.meet()
        self.views, self.buffer = {}, None
        self.buffer = exchange.symmetric.empty(n_bytes, dtype=torch.uint8, device=exchange.group.device)
        process_group: Any = exchange.group.group
        self.pointers = exchange.symmetric.rendezvous(self.buffer, process_group).buffer_ptrs
        self.capacity = n_bytes

    def begin(self, stream: int) -> None:
        """Take the next use of the buffer: `stream` waits until all have fetched what the last one put there."""
        wait, uses = self.exchange.driver.wait, self.uses
        for peer in self.exchange.peers:
            wait(stream, self.fetched_here[peer], uses, _Driver.AT_LEAST)
        self.uses = uses + 1

    def fetch(self, stream: int, peer: int, target: int, source: int, n_bytes: int) -> None:
        """Copy `n_bytes` from `peer`'s buffer once it says that they are there, and tell it."""
        driver = self.exchange.driver
        driver.wait(stream, self.ready_here[peer], self.uses, _Driver.AT_LEAST)
        if n_bytes:
            driver.copy(target, self.pointers[peer] + source, n_bytes, stream)
        driver.write(stream, self.fetched_there[peer], self.uses, 0)
        driver.record(self.arrived[peer], stream)

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
        rank: this rank; stream: where copies are queued, in the same order on every rank.
        smallest_bytes: of all blocks together, from which on they are copied unasked.
    """

    def __init__(self, group: TPGroup) -> None:
        super().__init__(group, "")
        import torch.distributed._symmetric_memory as symmetric

        self.symmetric, self.driver = symmetric, _Driver()
        self.rank, size = group.tp_rank, group.tp_size
        self.peers = tuple((self.rank + i) % size for i in range(1, size))
        self.sources = tuple(reversed(self.peers))
        self._stream = torch.cuda.Stream(group.device, priority=-1)
        self.stream, self.device_index = self._stream.cuda_stream, group.device.index
        process_group: Any = group.group
        flags = symmetric.empty(2 * SLOTS * 2 * size, dtype=torch.int32, device=group.device).zero_()
        torch.cuda.synchronize(group.device)
        self.flags, self.flag_pointers = flags, symmetric.rendezvous(flags, process_group).buffer_ptrs
        self.slots = {kind: [_Slot(self, SLOTS * i + j) for j in range(SLOTS)] for i, kind in enumerate(("gather", "scatter"))}
        self.meet()

    def meet(self) -> None:
        """Wait on the host until every rank is here and its device is idle."""
        torch.cuda.synchronize(self.group.device)
        self.group.gather_objects(None)

    def current_stream(self) -> int:
        """Handle of the stream that torch queues on."""
        return torch._C._cuda_getCurrentRawStream(self.device_index)

    def take_slot(self, kind: str, n_bytes: int) -> _Slot:
        """The next buffer of a kind, grown to `n_bytes` if it is smaller; every rank asks for as many."""
        slots = self.slots[kind]
        slot = slots.pop(0)
        slots.append(slot)
        if slot.capacity < n_bytes:
            slot.grow(n_bytes)
        return slot

    def decide(self, n_bytes: int, way: bool | None, smallest_bytes: int | None = None) -> Decision:
        found = super().decide(n_bytes, way, smallest_bytes)
        if found.copies and torch.cuda.is_current_stream_capturing():
            return Decision(False, "a CUDA graph is being captured, whose replays would not wait for new rows")
        return found

    @contextmanager
    def beside(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self.group.device))
        with torch.cuda.stream(self._stream):
            yield

    def gather(self, local: Tensor, way: bool | None = None, full: Tensor | None = None) -> Gather:
        if not self.decide(self.group.tp_size * local.numel() * local.element_size(), way).copies:
            return super().gather(local)
        return _CopyGather(self, local.contiguous(), full)

    def scatter(self, rows: int, width: int, like: Tensor, dtype: torch.dtype | None = None, way: bool | None = None) -> Scatter:
        if not self.decide(rows * width * like.element_size(), way).copies:
            return super().scatter(rows, width, like, dtype)
        return _CopyScatter(self, rows, width, like, dtype)


class _CopyGather(Gather):
    def __init__(self, exchange: CopyExchange, local: Tensor, full: Tensor | None) -> None:
        size, rows, me = exchange.group.tp_size, local.shape[0], exchange.rank
        full = local.new_empty(size * rows, *local.shape[1:]) if full is None else full
        super().__init__(full, (me, *exchange.sources))
        self.exchange, self.local, self.rank, self.rows = exchange, local, me, rows
        n_bytes, stream, driver = local.numel() * local.element_size(), exchange.stream, exchange.driver
        self.slot = slot = exchange.take_slot("gather", n_bytes)
        source, target = local.data_ptr(), self.full.data_ptr()
        current = exchange.current_stream()
        slot.begin(current)
        # A copy within one GPU runs on its multiprocessors: on the other stream it would wait until the next product leaves some.
        driver.copy(slot.pointers[me], source, n_bytes, current)
        driver.record(slot.queued, current)
        driver.wait_event(stream, slot.queued, 0)
        for peer in exchange.peers:
            driver.write(stream, slot.ready_there[peer], slot.uses, 0)
        for peer in exchange.sources:
            slot.fetch(stream, peer, target + peer * n_bytes, 0, n_bytes)
        driver.copy(target + me * n_bytes, source, n_bytes, stream)
        driver.record(slot.arrived[me], stream)

    def wait(self, rank: int) -> Tensor:
        if rank == self.rank:
            return self.local
        self._wait(rank)
        return self.full[rank * self.rows : (rank + 1) * self.rows]

    def wait_all(self) -> Tensor:
        self._wait(self.rank)
        return self.full

    def _wait(self, rank: int) -> None:
        self.exchange.driver.wait_event(self.exchange.current_stream(), self.slot.arrived[rank], 0)


class _CopyScatter(Scatter):
    def __init__(self, exchange: CopyExchange, rows: int, width: int, like: Tensor, dtype: torch.dtype | None) -> None:
        super().__init__(exchange.group, dtype)
        size = exchange.group.tp_size
        self.exchange, self.rows, self.width, self.part_dtype = exchange, rows, width, like.dtype
        self.order, self.sent = exchange.peers, 0
        self.block_bytes = -(-rows // size) * width * like.element_size()
        own = block_of(rows, exchange.rank, size)
        self.received = [like.new_empty(own.stop - own.start, width) for _ in exchange.peers]
        self.slot = exchange.take_slot("scatter", len(exchange.peers) * self.block_bytes)
        self.slot.begin(exchange.current_stream())

    def _offset(self, sender: int, receiver: int) -> int:
        """Where in `sender`'s buffer the block of `receiver` lies, in bytes."""
        return ((receiver - sender) % self.exchange.group.tp_size - 1) * self.block_bytes

    def place(self, rank: int) -> Tensor:
        block = block_of(self.rows, rank, self.exchange.group.tp_size)
        return self.slot.view((block.stop - block.start, self.width), self.part_dtype, self._offset(self.exchange.rank, rank))

    def send(self, rank: int) -> None:
        exchange, slot = self.exchange, self.slot
        driver, stream = exchange.driver, exchange.stream
        driver.record(slot.queued, exchange.current_stream())
        driver.wait_event(stream, slot.queued, 0)
        driver.write(stream, slot.ready_there[rank], slot.uses, 0)
        sender, target = exchange.sources[self.sent], self.received[self.sent]  # who sends its block of mine as its i-th
        n_bytes = target.numel() * target.element_size()
        slot.fetch(stream, sender, target.data_ptr(), self._offset(sender, exchange.rank), n_bytes)
        self.sent += 1

    def receive(self) -> Tensor | None:
        exchange = self.exchange
        exchange.driver.wait_event(exchange.current_stream(), self.slot.arrived[exchange.sources[-1]], 0)
        total, *others = self.received
        total = total.to(self.dtype or self.part_dtype)
        for part in others:
            total.add_(part)
        return total


def find_exchange(group: TPGroup) -> Exchange:
    """The exchange of `group`, made at its first use, on every rank at the same time."""
    found = group.owned.get("exchange")
    if found is None:
        why_not = why_not_copy(group)
        found = group.owned["exchange"] = Exchange(group, why_not) if why_not else CopyExchange(group)
    return found


def why_not_copy(group: TPGroup) -> str:
    """What keeps copy engines from moving rows between the ranks, empty if nothing does; asked of all ranks together."""
    if group.tp_size == 1 or group.group is None:
        return "there is one rank"
    if group.device.type != "cuda":
        return f"rows move by collectives on {group.device.type}"
    everyone = group.gather_objects((socket.gethostname(), group.device.index))
    hosts, indices = {host for host, _ in everyone}, [index for _, index in everyone]
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts"
    if len(set(indices)) < len(indices):
        return "several ranks share a GPU"
    own = group.device.index
    unreached = [i for i in indices if i != own and not torch.cuda.can_device_access_peer(own, i)]
    far = [(rank, missed) for rank, missed in enumerate(group.gather_objects(unreached)) if missed]
    return f"the GPU of TP rank {far[0][0]} does not reach the memory of GPU(s) {far[0][1]}" if far else ""
