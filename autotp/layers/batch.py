"""Notices ranks of one TP group that were given different batches, which would train on mixed-up numbers in silence."""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm import TPGroup
from ..errors import AutoTPError

_ODD = -7046029254386353131  # any odd constant: odd weights lose no bit of a difference modulo 2**64


def as_words(tensor: Tensor) -> Tensor:
    """The bytes of `tensor` (any dtype) as int64 `[n]`, padded with zeros; a view where that is possible."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.numel() % 8:
        return F.pad(data, (0, 8 - data.numel() % 8)).view(torch.int64)
    return (data.clone() if data.storage_offset() % 8 else data).view(torch.int64)


def hash_tensors(tensors: dict[str, Tensor], device: torch.device) -> Tensor:
    """int64 `[2]` on `device`: names, shapes and dtypes; then all bytes weighted by their position. No host sync."""
    form = zlib.crc32(repr([(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]).encode())
    words = torch.cat([as_words(t).to(device, non_blocking=True) for t in tensors.values()])
    weights = torch.arange(1, words.numel() + 1, device=device).mul_(_ODD).bitwise_or_(1)
    return torch.stack([torch.full((), form, dtype=torch.int64, device=device), words.mul(weights).sum()])


def plain_tensors(args: tuple, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors among a forward's own arguments, by name or position; caches and other objects are each rank's own."""
    named = {**{str(i): value for i, value in enumerate(args)}, **dict(sorted(kwargs.items()))}
    return {name: t for name, t in named.items() if type(t) in (Tensor, torch.nn.Parameter) and not t.is_meta and t.numel()}


class BatchCheck:
    """Compares a hash of every rank's batch: on CPU at once, on GPU without stopping the host, at a later forward."""

    def __init__(self, group: TPGroup) -> None:
        self.group = group
        self.pending: tuple[Any, ...] | None = None
        self.stream: Any = None

    def __deepcopy__(self, memo: dict) -> BatchCheck:
        return BatchCheck(self.group)

    def start(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Begin to compare this forward's tensors, and judge the comparison before it.

        Raises:
            AutoTPError: some ranks' batches differ, now (CPU) or in the forward checked last (GPU).
        """
        if self.stream is not None and torch.cuda.is_current_stream_capturing():
            return  # nothing may be waited for: what is pending is judged after the capture
        self.judge()
        tensors = plain_tensors(args, kwargs)
        lengths = [t.shape[1] for t in tensors.values() if t.dim() > 1]
        if not tensors or not (torch.is_grad_enabled() or max(lengths, default=2) > 1):
            return  # a decoding step
        device = next(iter(tensors.values())).device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        hashes = hash_tensors(tensors, device)
        every, work = self.group.start_gather(hashes)
        if device.type != "cuda":
            work.wait()
            self.compare(every)
            return
        self.stream = self.stream or torch.cuda.Stream(device)
        with torch.cuda.stream(self.stream):  # the copy waits for the gather here, and the model's own stream does not
            work.wait()
            there = torch.empty(every.shape, dtype=every.dtype, pin_memory=True)
            there.copy_(every, non_blocking=True)
            done = self.stream.record_event()
        self.pending = (there, done, every, hashes)  # the last two so that their memory is not given away

    def judge(self) -> None:
        """Judge the comparison that is pending.

        Never by asking whether it is done, which ranks would answer differently and one would raise while the others went on.
        It is waited for: it was done when the GPU began that forward, whose whole step is still queued.
        """
        if self.pending is not None:
            there, done = self.pending[:2]
            self.pending = None
            done.synchronize()
            self.compare(there)

    def compare(self, every: Tensor) -> None:
        """Raise if the rows of `every` `[tp_size, 2]` are not all equal."""
        rows = [tuple(row) for row in every.tolist()]
        usual = Counter(rows).most_common(1)[0][0]
        odd = [rank for rank, row in enumerate(rows) if row != usual]
        if odd:
            what = "tensors' names, shapes or dtypes" if len({row[0] for row in rows}) > 1 else "tensors' values"
            raise AutoTPError(
                f"the batch differs inside the TP group: the {what} of TP rank(s) {odd} are not those of rank "
                f"{rows.index(usual)}. All {self.group.tp_size} ranks {list(self.group.ranks)} must get the same batch: give the "
                f"sampler the data-parallel rank, not the global one, and seed the collator alike."
            )
