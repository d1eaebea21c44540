"""The group of ranks that share a model: the only file that starts collectives of `torch.distributed`.

No gradient passes through its collectives: `autotp/collectives.py` has those that autograd knows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import AutoTPError, GatherError
from .kernels.decode import is_decoding
from .peers import PeerMemory, check_kind
from .shard import Shard

_counter = itertools.count()
# Newer torch gave the collectives other names and warns of the old ones.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


class TPGroup:
    """The ranks that share one sharded model.

    One is made per `parallelize` call; there is no current group, so models of different sizes live in one process. A
    group of one rank is the identity and needs no `torch.distributed`. Deep copies of a module share its group;
    pickling refuses, since a process group means nothing in another process.

    Attributes:
        group: the process group, or None for a single rank.
        tp_rank, tp_size: this rank's place in it and the number of ranks.
        ranks: global ranks of the members, in group order.
        device: where this rank's shards live.
        timeout_s: seconds after which a rank that does not arrive is named.
        owned: what is made once for these ranks and lives as long as they do: buffers that move data between them.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, timeout_s: float = 600) -> None:
        self.group = group
        self.device = device
        self.timeout_s = timeout_s
        self.tp_rank = 0 if group is None else dist.get_rank(group)
        self.tp_size = 1 if group is None else dist.get_world_size(group)
        self.ranks = (0,) if group is None else tuple(dist.get_process_group_ranks(group))
        self.owned: dict[str, Any] = {}
        self._store = None
        self._arrivals = itertools.count()
        self._left: list[str] = []  # this rank's notes in the store that some rank may not have read yet
        self._peers: PeerMemory | None = None
        if group is not None:
            number = next(_counter)
            # Every member makes its groups in the same order, but may hold others too: the first one names the store.
            prefix = self.gather_objects(number)[0]
            self._store = dist.PrefixStore(f"autotp/{self.ranks}/{prefix}", dist.distributed_c10d._get_default_store())

    def __repr__(self) -> str:
        return f"TPGroup(tp_rank={self.tp_rank}, tp_size={self.tp_size}, ranks={list(self.ranks)}, device={self.device})"

    def __deepcopy__(self, memo: dict) -> TPGroup:
        return self

    def __reduce__(self) -> Any:
        raise AutoTPError(
            "a parallelized module can't be pickled: its process group means nothing in another process. "
            "Save with autotp.save_pretrained or autotp.full_state_dict, or call autotp.unshard(model) first."
        )

    # -- agreement, on the host ---------------------------------------------------------------------------------------

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value` (picklable), in rank order, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.tp_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Rank `source`'s `value` (picklable) on every rank."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self.ranks[source], group=self.group)
        return box[0]

    @contextmanager
    def together(self, doing: str):
        """Run a block with no collective inside on every rank, then raise on all ranks if it raised on any.

        Without it, a rank that fails alone leaves the others waiting in their next collective.

        Raises:
            the rank's own error where it failed; AutoTPError naming those ranks and their first error elsewhere.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # every failure is voted on, whatever its type
            error = caught
        errors = self.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = [rank for rank, text in enumerate(errors) if text]
        if failed:
            raise AutoTPError(f"{doing} failed on TP rank(s) {failed}; rank {failed[0]} said: {errors[failed[0]]}")

    def arrive(self, what: str, note: str = "", wait: bool = True) -> list[str]:
        """Wait until every rank has come here, before any collective; returns every rank's `note`.

        With `wait=False` only leaves the note for the others and returns [], for a rank that gives up on an error.

        Raises:
            GatherError: naming the ranks that did not come within `timeout_s`.
        """
        if self._store is None:
            return [note]
        key = f"arrive/{next(self._arrivals)}"
        self._store.set(f"{key}/{self.tp_rank}", f"{what}|{note}")
        self._left.append(f"{key}/{self.tp_rank}")
        if not wait:
            return []
        missing, notes = [], []
        for rank in range(self.tp_size):
            if rank == self.tp_rank:  # each look at the store is a trip to another process
                notes.append(note)
                continue
            try:
                # The first absent rank costs the timeout; whoever else is absent by then gets no second one.
                self._store.wait([f"{key}/{rank}"], timedelta(seconds=0.05 if missing else self.timeout_s))
                there, _, text = self._store.get(f"{key}/{rank}").decode().partition("|")
            except (RuntimeError, dist.DistError):
                missing.append(rank)
                continue
            if there != what:
                raise GatherError(f"TP rank {rank} is in {there} while rank {self.tp_rank} is in {what}: call both on all ranks")
            notes.append(text)
        if missing:
            raise GatherError(
                f"{what}: TP rank(s) {missing} did not come within {self.timeout_s:g} s. "
                f"Every rank of the TP group must call it, rank 0 included."
            )
        while len(self._left) > 1:  # all ranks are here, so they have read what was left for them before
            self._store.delete_key(self._left.pop(0))
        return notes

    # -- collectives without gradient ---------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: str = "sum", dtype: torch.dtype | None = None) -> Tensor:
        """The sum, max or min of `tensor` over the ranks, as a new tensor; summed in `dtype` if one is named."""
        if op == "sum" and dtype in (None, tensor.dtype) and (total := self._sum_decoding(tensor)) is not None:
            return total
        out = tensor.to(dtype or tensor.dtype, copy=True, memory_format=torch.contiguous_format)
        return self.all_reduce_owned(out, op).to(tensor.dtype)

    def all_reduce_owned(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """The same, reusing `tensor`'s memory: only for a tensor that the caller made and nobody else reads."""
        if self.tp_size == 1 or tensor.numel() == 0:
            return tensor
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        if op == "sum" and (total := self._sum_decoding(tensor)) is not None:
            return total
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op.upper()), group=self.group)
        return tensor

    def _sum_decoding(self, tensor: Tensor) -> Tensor | None:
        """The sum as a new tensor, while decoding, where the memory that the ranks write to each other holds it."""
        peers = self.find_peers() if self.tp_size > 1 and is_decoding() and tensor.is_contiguous() else None
        return None if peers is None else peers.sum_small(tensor)

    def all_reduce_small(self, tensor: Tensor, kind: str = "push") -> Tensor:
        """The sum over the ranks of a contiguous tensor, in few steps between the GPUs: for CUDA graphs.

        Where the GPUs can't write to each other, or the tensor is too large, NCCL sums it, in `tensor`'s memory.

        Args:
            kind: "push": each rank writes its part to all, or of more rows than 64 to who adds them up; "one_shot", "two_shot":
                PyTorch's symmetric-memory kernels.

        Raises:
            AutoTPError: an unknown kind, or "multimem_all_reduce".
        """
        check_kind(kind)
        if self.tp_size == 1 or tensor.numel() == 0:
            return tensor
        peers = self.find_peers()
        total = None if peers is None else peers.sum_small(tensor, kind)
        if total is None:
            dist.all_reduce(tensor, group=self.group)
        return tensor if total is None else total

    def find_peers(self) -> PeerMemory | None:
        """The memory that the ranks write to each other; None on a CPU."""
        if self._peers is None and self.tp_size > 1 and self.device.type == "cuda":
            self._peers = PeerMemory(self)
        return self._peers

    def all_gather(self, local: Tensor, shard: Shard) -> Tensor:
        """The full tensor of which every rank holds its part of `shard`; bitwise, uneven parts included."""
        if self.tp_size == 1:
            return shard.join([local])
        sizes = [shard.local_numel(rank) for rank in range(self.tp_size)]
        flat = local.new_zeros(max(sizes))
        flat[: local.numel()] = local.reshape(-1)
        every = local.new_empty(self.tp_size * max(sizes))
        # As bytes: backends know some dtypes only, and nothing is computed.
        getattr(dist, ALL_GATHER)(every.view(torch.uint8), flat.view(torch.uint8), group=self.group)
        parts = every.view(self.tp_size, -1)
        return shard.join([parts[r, : sizes[r]].view(shard.local_shape(r)) for r in range(self.tp_size)])

    def all_gather_many(self, locals_: Sequence[Tensor], shards: Sequence[Shard]) -> list[Tensor]:
        """The full tensors of several sharded ones on the same device, in one collective; bitwise, uneven parts included.

        Takes memory for all parts twice, once side by side: for many small tensors, not for large ones.
        """
        if self.tp_size == 1:
            return [shard.join([local]) for local, shard in zip(locals_, shards, strict=True)]
        if len(shards) == 1:
            return [self.all_gather(locals_[0], shards[0])]
        begins: list[list[int]] = []  # of each rank's parts in its bytes
        widths = [0] * self.tp_size
        for local, shard in zip(locals_, shards, strict=True):
            begins.append(list(widths))
            for rank in range(self.tp_size):  # at a multiple of what the widest dtype needs
                widths[rank] += -(-shard.local_numel(rank) * local.element_size() // 16) * 16
        width = max(widths)
        flat = torch.zeros(width, dtype=torch.uint8, device=locals_[0].device)
        for local, begin in zip(locals_, begins, strict=True):
            own = local.detach().contiguous().view(-1).view(torch.uint8)
            flat[begin[self.tp_rank] : begin[self.tp_rank] + own.numel()] = own
        every = flat.new_empty(self.tp_size * width)
        getattr(dist, ALL_GATHER)(every, flat, group=self.group)
        fulls = []
        for local, shard, begin in zip(locals_, shards, begins, strict=True):
            parts = []
            for rank in range(self.tp_size):
                start, size = rank * width + begin[rank], shard.local_numel(rank) * local.element_size()
                parts.append(every[start : start + size].view(local.dtype).view(shard.local_shape(rank)))
            fulls.append(shard.join(parts))
        return fulls

    def gather_to_host(self, local: Tensor, shard: Shard, rank: int, ready: Callable[[], Any]) -> Tensor | None:
        """The full tensor of every rank's `local` part, in `rank`'s host memory, and None elsewhere; bitwise, uneven parts too.

        On a GPU, `rank` needs memory for one full tensor. All of it is taken before `ready` is called, in which the ranks agree
        to go on: a rank without enough of it raises while the others can still hear of it.
        """
        if self.tp_size == 1:
            return shard.join([local]).cpu()
        sizes = [shard.local_numel(r) for r in range(self.tp_size)]
        flat = local.reshape(-1)
        if local.numel() < max(sizes):
            flat = torch.cat([flat, flat.new_zeros(max(sizes) - local.numel())])
        parts = [torch.empty_like(flat) for _ in sizes] if rank == self.tp_rank else None
        ready()
        # As bytes: backends know some dtypes only, and nothing is computed.
        lists = None if parts is None else [part.view(torch.uint8) for part in parts]
        dist.gather(flat.contiguous().view(torch.uint8), lists, dst=self.ranks[rank], group=self.group)
        if parts is None:
            return None
        full = torch.empty(shard.shape, dtype=local.dtype)
        for r in reversed(range(self.tp_size)):
            part = parts.pop()[: sizes[r]].view(shard.local_shape(r)).cpu()
            shard.paste(full, part, r)
        return full

    def scatter_from_host(self, full: Tensor | None, own: Tensor, shard: Shard | None) -> Tensor:
        """`own`, filled with this rank's part of rank 0's `full` (in host memory; None elsewhere), or with all of it.

        One part at a time is on rank 0's device; the others take no memory but `own`, which is contiguous.
        """
        if full is not None:
            own.copy_(full if shard is None else shard.split(full, 0))
        bits = own.view(-1).view(torch.uint8)
        if shard is None:
            return own if not own.numel() else self.broadcast(bits).view(own.dtype).view(own.shape)
        for rank in range(1, self.tp_size):
            if not shard.local_numel(rank):
                continue
            if full is not None:
                part = shard.split(full, rank).contiguous().to(own.device)
                dist.send(part.view(-1).view(torch.uint8), dst=self.ranks[rank], group=self.group)
            elif rank == self.tp_rank:
                dist.recv(bits, src=self.ranks[0], group=self.group)
        return own

    def start_gather(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Begin to gather every rank's `tensor` as `[tp_size, *shape]`; `wait()` on the second value before reading it."""
        every = tensor.new_empty(self.tp_size * tensor.numel())
        work = getattr(dist, ALL_GATHER)(every, tensor.reshape(-1), group=self.group, async_op=True)
        return every.view(self.tp_size, *tensor.shape), work

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Every rank's `rows` `[R, ...]`, as many on each, one rank's after another's: `[tp_size * R, ...]`."""
        if self.tp_size == 1:
            return rows
        every = rows.new_empty(self.tp_size * rows.shape[0], *rows.shape[1:])
        if every.numel():
            getattr(dist, ALL_GATHER)(every, rows.contiguous(), group=self.group)
        return every

    def reduce_scatter_rows(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """This rank's block `[R, ...]` of the sum of all ranks' `rows` `[tp_size * R, ...]`; summed in `dtype` if one is named.

        Raises:
            AutoTPError: the rows can't be dealt evenly.
        """
        if self.tp_size == 1:
            return rows
        if rows.shape[0] % self.tp_size:
            raise AutoTPError(f"{rows.shape[0]} rows can't be scattered evenly over {self.tp_size} ranks: pad dim 0")
        source = rows.to(dtype or rows.dtype).contiguous()
        own = source.new_empty(rows.shape[0] // self.tp_size, *rows.shape[1:])
        if own.numel():
            getattr(dist, REDUCE_SCATTER)(own, source, group=self.group)
        return own.to(rows.dtype)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Rank `source`'s `tensor`; the others give one of the same shape and dtype, which is written."""
        if self.tp_size > 1:
            dist.broadcast(tensor, src=self.ranks[source], group=self.group)
        return tensor
