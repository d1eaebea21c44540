"""GPUs that are threads: streams run what is queued when they like, in any order that events and flags allow."""

import ctypes
import random
import threading
import time
from collections import deque
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from autotp.exchange import CopyExchange

COMPUTE, COPIES = 1, 2
PATIENCE_S = 20  # after which what waits is a deadlock


class Deadlock(AssertionError):
    """Nothing was left that could run."""


class FakeDevice:
    """One rank's GPU: each stream runs in a thread. What torch computes runs on the host, which waits where its stream waits."""

    stream = COPIES

    def __init__(self, world, rank):
        self.world, self.rank, self.random = world, rank, random.Random(world.seed * 100 + rank)
        self.queues, self.events, self.current, self.kept = {COMPUTE: deque(), COPIES: deque()}, [], COMPUTE, []
        self.failed = None
        for queue in self.queues.values():
            threading.Thread(target=self._run, args=(queue,), daemon=True).start()

    # -- the driver's operations -----------------------------------------------------------------------------------------

    def write(self, stream, address, value, flags):
        self._queue(stream, lambda: _word(address).__setitem__(0, value) or True)

    def wait(self, stream, address, value, flags):
        self._queue(stream, lambda: _word(address)[0] >= value, True)

    def copy(self, target, source, n_bytes, stream):
        self._queue(stream, lambda: ctypes.memmove(target, source, n_bytes) or True)

    def record(self, event, stream):
        self.events[event][0] += 1
        number = self.events[event][0]
        self._queue(stream, lambda: self.events[event].__setitem__(1, max(number, self.events[event][1])) or True)

    def wait_event(self, stream, event, flags):
        number = self.events[event][0]
        self._queue(stream, lambda: self.events[event][1] >= number, True)

    def check(self, code):
        assert not code

    def make_event(self):
        self.events.append([0, 0])  # recorded, reached
        return len(self.events) - 1

    # -- memory ----------------------------------------------------------------------------------------------------------

    def allocate(self, n_bytes):
        memory = torch.full((n_bytes,), 0, dtype=torch.uint8)
        self.kept.append(memory)
        return memory, self.world.exchange_objects(self.rank, memory.data_ptr())

    def make_counter(self):
        return torch.zeros(1, dtype=torch.int32)

    def read(self, flags):
        return flags.clone()

    def fill(self, flags, value):
        flags.fill_(value)

    def current_stream(self):
        return self.current

    @contextmanager
    def beside(self):
        self.current = COPIES
        try:
            yield
        finally:
            self.current = COMPUTE

    def is_capturing(self):
        return False

    def synchronize(self):
        for queue in self.queues.values():
            self._drain(queue)

    # -- running ---------------------------------------------------------------------------------------------------------

    def _queue(self, stream, ready, waits=False):
        self.queues[stream].append(ready)
        if waits and stream == self.current:
            self._drain(self.queues[stream])

    def _drain(self, queue):
        self._until(lambda: not queue)

    def _until(self, ready):
        end = time.monotonic() + PATIENCE_S
        while not ready():
            time.sleep(0)
            if time.monotonic() > end or self.failed:
                raise Deadlock(f"rank {self.rank} waits for ever") from self.failed

    def _pause(self):
        if self.random.random() < 0.2:
            time.sleep(self.random.random() * 0.002)

    def _run(self, queue):
        try:
            while not self.world.over:
                if queue and queue[0]():
                    queue.popleft()
                    self._pause()
                else:
                    time.sleep(0.0001)
        except BaseException as error:  # told to whoever waits
            self.failed = error


def _word(address):
    return ctypes.cast(address, ctypes.POINTER(ctypes.c_int32))


class World:
    """`size` ranks as threads of this process."""

    def __init__(self, size, seed=0, timeout_s=60.0):
        self.size, self.seed, self.timeout_s, self.over = size, seed, timeout_s, False
        self._barrier, self._box = threading.Barrier(size, timeout=PATIENCE_S), [None] * size

    def exchange_objects(self, rank, value):
        self._box[rank] = value
        self._barrier.wait()
        found = list(self._box)
        self._barrier.wait()
        return found

    def make_exchange(self, rank):
        group = SimpleNamespace(
            tp_rank=rank,
            tp_size=self.size,
            timeout_s=self.timeout_s,
            device=torch.device("cpu"),
            arrive=lambda what: self.exchange_objects(rank, what),
        )
        return CopyExchange(group, FakeDevice(self, rank))

    def run(self, fn, *args):
        """`fn(exchange, *args)` on every rank; their results in rank order, or the first error."""
        results, errors = [None] * self.size, []

        def one(rank):
            try:
                results[rank] = fn(self.make_exchange(rank), *args)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.over = True
        if errors:
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
        return results
