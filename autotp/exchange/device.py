"""What moves blocks by copy engines asks of a GPU: memory that peers reach, and operations on streams."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..comm import TPGroup
from ..errors import AutoTPError

NO_TIMING = 2


class CudaDevice:
    """One rank's GPU, and memory of its that the others reach.

    `write`, `wait`, `copy`, `record` and `wait_event` are the driver's operations on streams, called with addresses and handles,
    which return 0 or what `check` raises: torch's own cost the host several times as much.

    Attributes:
        stream: handle of the stream where copies are queued; current_stream(): of the one that torch queues on.
        is_capturing(): whether what is queued becomes a graph.
    """

    def __init__(self, group: TPGroup) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self._symmetric, self._group, self._index = symmetric, group, group.device.index
        self._stream, self._aside = (torch.cuda.Stream(group.device, priority=priority) for priority in (-1, 0))
        self.stream = self._stream.cuda_stream
        self._seen = torch.empty(4096, dtype=torch.int32).pin_memory()  # allocating later might wait for the device
        library = ctypes.CDLL("libcuda.so.1")
        pointer, address = ctypes.c_void_p, ctypes.c_uint64
        self.write = self._find(library, "cuStreamWriteValue32_v2", pointer, address, ctypes.c_uint32, ctypes.c_uint)
        self.wait = self._find(library, "cuStreamWaitValue32_v2", pointer, address, ctypes.c_uint32, ctypes.c_uint)
        self.copy = self._find(library, "cuMemcpyAsync", address, address, ctypes.c_size_t, pointer)
        self.record = self._find(library, "cuEventRecord", pointer, pointer)
        self.wait_event = self._find(library, "cuStreamWaitEvent", pointer, pointer, ctypes.c_uint)
        self.current_stream = partial(torch._C._cuda_getCurrentRawStream, self._index)
        self.is_capturing = torch._C._cuda_isCurrentStreamCapturing
        self._create = self._find(library, "cuEventCreate", ctypes.POINTER(pointer), ctypes.c_uint)

    @staticmethod
    def _find(library: Any, name: str, *types: Any) -> Any:
        function = getattr(library, name)
        function.argtypes, function.restype = types, ctypes.c_int
        return function

    @staticmethod
    def check(code: int | None) -> None:
        """Raise if an operation returned an error.

        Raises:
            AutoTPError: with the driver's code.
        """
        if code:
            raise AutoTPError(f"an operation on a CUDA stream failed with error {code} while rows moved between ranks")

    def make_event(self) -> int:
        event = ctypes.c_void_p()
        self.check(self._create(ctypes.byref(event), NO_TIMING))
        assert event.value is not None
        return event.value

    def allocate(self, n_bytes: int) -> tuple[Tensor, list[int]]:
        """Zeros of this rank's that all reach, and the addresses of every rank's; all ranks ask together."""
        with self._group.together("allocating symmetric memory"):
            memory = self._symmetric.empty(n_bytes, dtype=torch.uint8, device=self._group.device).zero_()
            self.synchronize()
        group: Any = self._group.group
        return memory, self._symmetric.rendezvous(memory, group).buffer_ptrs

    def make_counter(self) -> Tensor:
        """An integer that streams write and the host reads."""
        return torch.zeros(1, dtype=torch.int32).pin_memory()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """In it torch queues where copies are queued, behind what it queued before."""
        self._stream.wait_stream(torch.cuda.current_stream(self._index))
        with torch.cuda.stream(self._stream):
            yield

    def synchronize(self) -> None:
        """Wait on the host until the device is idle."""
        torch.cuda.synchronize(self._index)

    def read(self, flags: Tensor) -> Tensor:
        """`flags` on the host, whatever other streams wait for."""
        with torch.cuda.device(self._index), torch.cuda.stream(self._aside):
            seen = self._seen[: flags.numel()].copy_(flags, non_blocking=True)
            self._aside.synchronize()
        return seen.clone()

    def fill(self, flags: Tensor, value: int) -> None:
        """Set `flags`, whatever other streams wait for."""
        with torch.cuda.device(self._index), torch.cuda.stream(self._aside):
            flags.fill_(value)
            self._aside.synchronize()
