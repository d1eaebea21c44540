"""How a forward's tokens are dealt to the ranks, and in which forward's way the rows lie that some memory holds."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Layout(NamedTuple):
    """How one forward's tokens are dealt: `lead` sizes before the columns, `rows` of them in all, `share` on each rank."""

    lead: tuple[int, ...]
    rows: int
    share: int

    @property
    def dealt(self) -> tuple[int, ...]:
        """The sizes before the columns of this rank's rows."""
        return (*[1] * (len(self.lead) - 1), self.share)

    @property
    def flat(self) -> Layout:
        """The same rows in one dimension."""
        return Layout((self.rows,), self.rows, self.share)


class LayoutMemory:
    """Which layout the rows in a tensor's memory had when it was noted; forgotten when that memory is freed."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[StorageWeakRef, Layout | None]] = {}
        self._most = 1024

    def note(self, x: Tensor, layout: Layout | None) -> None:
        """The rows of `x` are dealt by `layout`; None: they are not dealt."""
        place = _place(x)
        known = self._known.get(place)
        if known is None or known[0].expired():
            self._known[place] = StorageWeakRef(x.untyped_storage()), layout
        elif known[1] is not layout:
            self._known[place] = known[0], layout
        if len(self._known) > self._most:
            self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}
            self._most = 2 * len(self._known) + 1024

    def find(self, x: Tensor) -> tuple[bool, Layout | None]:
        """Whether the memory of `x` was noted, and the layout if so."""
        found = self._known.get(_place(x))
        return (False, None) if found is None or found[0].expired() else (True, found[1])


def _place(x: Tensor) -> tuple[Any, ...]:
    """The memory of `x`; micro-batches may be views of one storage."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape
