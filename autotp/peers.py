"""Memory that the GPUs of one host write to directly, for sums without NCCL: allocated, checked and addressed here.

NVLink multicast stays off: a program that leaves it in disorder can put the host's GPUs out of service for everybody.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .errors import AutoTPError
from .kernels.dispatch import Problem, select

log = logging.getLogger(__name__)
ROWS = 64  # of one call whose words carry its number: an inbox holds them, a board more
WORDS = (2048, 8192)  # of 4 bytes in a row, in the inboxes that may be made
ARENA_BYTES = 1 << 20  # of PyTorch's own one-shot and two-shot sums
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BOARD_BYTES = 1 << 26  # of one sum of more rows: a prompt of 4096 tokens, 8192 wide
PROGRAMS = 2  # a multiprocessor
KINDS = ("push", "one_shot", "two_shot")
LOOKS_A_SECOND = 2_500_000  # about what a program that waits for words manages


class PeerMemory:
    """What the ranks of one group write to each other: made at its first use, kept as long as the group.

    Every rank must come here for the same sums, in the same order and on one stream at a time, as with any collective.

    Args:
        tp: the TPGroup whose ranks these are.
    """

    def __init__(self, tp: Any) -> None:
        self.tp = tp
        self._inboxes: dict[int, Any] = {}
        self._board: Any = None
        self._memory: list[Tensor] = []  # which the inboxes only know the addresses of
        self._arena: Tensor | None = None
        self._refused = ""
        self._lost: Tensor | None = None  # which rank's words did not come, plus one: written by kernels, read by the host

    def check(self) -> None:
        """Refuse to go on where a rank's part of an earlier sum did not come in time.

        Raises:
            AutoTPError: naming that rank.
        """
        lost = 0 if self._lost is None else int(self._lost.item())
        if lost:
            raise AutoTPError(
                f"TP rank {lost - 1} did not give its part of a sum within about {self.tp.timeout_s:g} s, so it has died or runs "
                f"something else: look for its error. What was computed since is wrong: end this process and load the model again"
            )

    def sum_small(self, tensor: Tensor, kind: str = "push") -> Tensor | None:
        """The sum over the ranks of a contiguous `tensor`, as a new one; None, and nothing done, where it is too large.

        Args:
            kind: "push": each rank writes its part to all, or of more rows than ROWS to who adds them up; "one_shot", "two_shot":
                PyTorch's symmetric-memory kernels.
        """
        if kind == "push":
            found = self.reduce_rows(tensor)
            return None if found is None else found[0]
        if self._arena is None and self._can_make():
            self._arena = self._try(self._make_arena, ARENA_BYTES)
        if self._arena is None or tensor.nbytes > ARENA_BYTES or tensor.nbytes % (16 * self.tp.tp_size):
            return None
        operations: Any = torch.ops.symm_mem
        mine, flat, name = self._arena[: tensor.nbytes].view(tensor.dtype), tensor.view(-1), self.tp.group.group_name
        if kind == "one_shot":
            return operations.one_shot_all_reduce_copy(mine, flat, "sum", name).view(tensor.shape)
        mine.copy_(flat)
        return operations.two_shot_all_reduce_(mine, "sum", name).clone().view(tensor.shape)

    def reduce_rows(self, x: Tensor, **rest: Any) -> tuple[Tensor, Tensor | None] | None:
        """`(total, y)`: the sum over the ranks of a contiguous `x` `[..., N]`, and what `reference.reduce_rows` does besides.

        None, and nothing done, where the rows are too many or too wide, or no memory was made for them before a capture.
        """
        place = self.find_place(x)
        if place is None:
            return None
        # Words are read, so odd addresses won't do; they may differ from rank to rank, so they decide nothing else.
        x, rest = _place_evenly(x), {name: _place_evenly(value) for name, value in rest.items()}
        width = x.shape[-1]
        rows = x.numel() // width
        kind = "reduce_rows" if rows <= ROWS else "sum_rows"
        return select(Problem(kind, x.device.type, x.dtype, rows=rows, width=width))(x, place, **rest)

    def best_columns(self, logits: Tensor, start: int, halt: Tensor) -> tuple[Tensor, Tensor] | None:
        """Tokens int64 `[R]` of the largest of all ranks' `logits` `[R, V_r]`, and the sum of their halts; None if it can't be.

        Args:
            start: the first column here; halt: int64 `[1]`, less than 2^31.
        """
        rows, columns = logits.shape
        inbox = self._find_inbox(rows, 4) if columns and logits.stride(1) == 1 and logits.dtype in DTYPES else None
        if inbox is None:
            return None
        return select(Problem("best_columns", logits.device.type, logits.dtype, "", rows, columns))(logits, inbox, start, halt)

    def find_place(self, x: Tensor) -> Any:
        """The `triton_peers.Inbox`, or for many rows the `triton_sums.Board`, that holds rows like those of `x`, or None.

        It is made if it is not there yet and no graph is being captured.
        """
        row_bytes = x.shape[-1] * x.element_size() if x.ndim and x.dtype in DTYPES else 0
        rows = x.nbytes // row_bytes if row_bytes else 0
        return self._find_inbox(rows, row_bytes) if rows <= ROWS else self._find_board(rows, row_bytes)

    def _find_inbox(self, rows: int, row_bytes: int) -> Any:
        words = next((words for words in WORDS if 0 < row_bytes <= 4 * words), 0)
        if not words or row_bytes % 4 or not 0 < rows <= ROWS:
            return None
        self.check()
        if words not in self._inboxes and self._can_make():
            self._inboxes[words] = self._try(self._make_inbox, words)
        return self._inboxes.get(words)

    def _find_board(self, rows: int, row_bytes: int) -> Any:
        from .kernels.triton_sums import holds

        if row_bytes % 4 or row_bytes > 4 * WORDS[-1] or rows * row_bytes > BOARD_BYTES or not holds(rows, self.tp.tp_size):
            return None
        self.check()
        if self._board is None and self._can_make():
            self._board = self._try(self._make_board, BOARD_BYTES)
        return self._board

    def _can_make(self) -> bool:
        """Whether memory may be allocated now; what the ranks could not make once they don't try again."""
        return not self._refused and not torch.cuda.is_current_stream_capturing()

    def _try(self, make: Callable[[int], Any], size: int) -> Any:
        try:
            return make(size)
        except Exception as error:  # no peer access, no symmetric memory in this build, another host: sums run on NCCL
            self._refused = f"{type(error).__name__}: {error}"
            log.warning("sums run on NCCL, since the GPUs can't write to each other: %s", self._refused)
            return None

    def _make_arena(self, n_bytes: int) -> Tensor:
        return self._make_memory(n_bytes)[self.tp.tp_rank]

    def _make_inbox(self, words: int) -> Any:
        from .kernels.triton_peers import Inbox

        addresses, counters, patience = self._address(self._make_memory(2 * self.tp.tp_size * ROWS * words * 8), ROWS)
        return Inbox(addresses, counters, words, self.tp.tp_rank, self.tp.tp_size, patience)

    def _make_board(self, n_bytes: int) -> Any:
        from .kernels.triton_launch import count_processors
        from .kernels.triton_sums import Board, measure_board

        size, part_words = measure_board(n_bytes, 4 * WORDS[-1], self.tp.tp_size)
        addresses, counters, patience = self._address(self._make_memory(size), PROGRAMS * count_processors(self.tp.device))
        return Board(addresses, counters, part_words, self.tp.tp_rank, self.tp.tp_size, patience)

    def _address(self, parts: list[Tensor], counted: int) -> tuple[Tensor, Tensor, int]:
        """Where every rank's memory begins and a loss is told to the host, `counted` counters and one more, and the patience."""
        if self._lost is None:
            self._lost = torch.zeros(1, dtype=torch.int32, pin_memory=True)  # a GPU reaches it by the host's address
        places = [each.data_ptr() for each in (*parts, self._lost)]
        addresses = torch.tensor(places, dtype=torch.int64, device=self.tp.device)
        counters = torch.zeros(counted + 1, dtype=torch.int32, device=self.tp.device)
        return addresses, counters, min(2**31 - 1, int(self.tp.timeout_s * LOOKS_A_SECOND))

    def _make_memory(self, n_bytes: int) -> list[Tensor]:
        """Zeros of every rank, as this one sees them, the same ones for all; a failure on one rank is one on all."""
        import torch.distributed._symmetric_memory as symmetric

        tp = self.tp
        hosts = set(tp.gather_objects(socket.gethostname()))
        if len(hosts) > 1:
            raise AutoTPError(f"the ranks are on {len(hosts)} hosts")
        with tp.together("allocating symmetric memory"):
            memory = symmetric.empty(n_bytes, dtype=torch.uint8, device=tp.device)
        self._memory.append(memory)
        handle = symmetric.rendezvous(memory, tp.group)
        with tp.together("mapping peers' memory"):
            parts = [handle.get_buffer(rank, (n_bytes,), torch.uint8) for rank in range(tp.tp_size)]
            memory.fill_(tp.tp_rank + 1)
            torch.cuda.synchronize(tp.device)
        with tp.together("reading peers' memory"):
            seen = [(int(part[0]), int(part[-1])) for part in parts]
            if seen != [(rank + 1, rank + 1) for rank in range(tp.tp_size)]:
                raise AutoTPError(f"the ranks' memory does not lie where it should: {seen}")
        with tp.together("clearing peers' memory"):
            memory.zero_()
            torch.cuda.synchronize(tp.device)
        return parts


def _place_evenly(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.data_ptr() % 4 else value


def check_kind(kind: str) -> None:
    """Refuse a way to sum that is not one.

    Raises:
        AutoTPError: an unknown kind, or one that needs NVLink multicast.
    """
    if kind.startswith("multimem"):
        raise AutoTPError(
            f"{kind} needs NVLink multicast, which autotp leaves off: a program that dies while using it can put the host's GPUs "
            f"out of service. Take {', '.join(KINDS)}."
        )
    if kind not in KINDS:
        raise AutoTPError(f"a small all-reduce of kind {kind!r} is none of {', '.join(KINDS)}")
