"""The rows of the forward that runs, dealt to the ranks and made whole again; what may be moved while products run is."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..comm import TPGroup
from ..errors import PlanError
from ..exchange import find_exchange
from ..kernels.dealt import Dealt
from ..kernels.moves import BY_SIZE, Moves
from ..row_collectives import collect_rows, deal_rows, enter_rows, pad_rows, scatter_rows_to_group
from .layouts import Layout
from .product import watches_operations

MOST_LAYOUTS = 256  # of forwards, whose description is kept


class TokenRows:
    """Moves rows as the running forward's layout says.

    Attributes:
        group: the ranks; layout: of the forward that runs, None where it deals nothing.
        local, full: what was gathered last, while its module runs; gathering: that module's name.
        specs: of row linears, by their names: what each was made of, and the spec.
    """

    def __init__(self, group: TPGroup) -> None:
        self.group = group
        self.layout: Layout | None = None
        self.local: Tensor | None = None
        self.full: Tensor | None = None
        self.gathering = ""
        self.specs: dict[str, tuple[Any, Any]] = {}
        self._described: dict[Any, Dealt] = {}
        self._readers: dict[str, Any] = {}  # weak: the linears that read first what a module gathered, by its name

    def split(self, x: Tensor) -> Tensor:
        """This rank's rows of `x`, which all ranks hold."""
        layout = self._layout_of_whole(x)
        rest = x.shape[len(layout.lead) :]
        return deal_rows(x.reshape(layout.rows, *rest), self.group).view(*layout.dealt, *rest)

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' rows of `x`; the same tensor, gathered again in one module, is the same tensor.

        The linears that read it first in this module's last forward begin while it is on its way.
        """
        if x is self.local and self.full is not None:
            return self.full
        if watches_operations() or x.ndim < 2:
            full, hold = self.join(x), None
        else:
            full, hold = self._gather_moving(x)
        self.local, self.full = x, full
        if hold is not None:
            hold(full)
        return full

    def _gather_moving(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], None] | None]:
        """The rows, and what is to be told the tensor that the linears will ask by."""
        layout, hold = self._layout_of_dealt(x), None
        exchange, reader = find_exchange(self.group), self._readers.get(self.gathering)
        siblings = None if reader is None or x.ndim != len(layout.lead) + 1 else reader()
        moves = BY_SIZE if siblings is None else siblings.choose_moves()
        gather = exchange.gather(x.detach().reshape(layout.share, -1), moves.forward)
        if siblings is not None:
            hold = siblings.begin_ahead(x, gather, moves)
        rows = gather.wait_all()
        rows = (rows if rows.shape[0] == layout.rows else rows[: layout.rows]).view(*layout.lead, *x.shape[len(layout.lead) :])
        return (collect_rows(x, self.group, layout.rows, rows) if x.requires_grad and torch.is_grad_enabled() else rows), hold

    def note_reader(self, siblings: Any) -> None:
        """`siblings` read what the running module gathered."""
        self._readers.setdefault(self.gathering, weakref.ref(siblings))

    def describe(self, x: Tensor, dtype: torch.dtype | None, moves: Moves) -> Dealt:
        """How the rows are dealt of which `x` `[..., K]` are all, or one rank's: for products that move them."""
        layout, group = self._layout(), self.group
        key = layout, x.ndim, dtype, moves
        found = self._described.get(key)
        if found is None:
            flat = x.ndim != len(layout.lead) + 1
            shape, local = ((layout.rows,), (layout.share,)) if flat else (layout.lead, layout.dealt)
            found = Dealt(find_exchange(group), group.tp_rank, group.tp_size, shape, local, dtype, moves)
            if len(self._described) > MOST_LAYOUTS:
                self._described.clear()
            self._described[key] = found
        return found

    def join(self, x: Tensor) -> Tensor:
        """All ranks' rows of `x`, whose gradient is complete."""
        layout = self._layout_of_dealt(x)
        rest = x.shape[len(layout.lead) :]
        return collect_rows(x.reshape(layout.share, *rest), self.group, layout.rows).view(*layout.lead, *rest)

    def scatter(self, y: Tensor, dtype: torch.dtype | None) -> Tensor:
        """This rank's rows of the sum over the ranks of `y`, added up in `dtype` if one is named."""
        layout = self._layout_of_whole(y)
        rest = y.shape[len(layout.lead) :]
        rows = pad_rows(y.reshape(layout.rows, *rest), self.group.tp_size)
        return scatter_rows_to_group(rows, self.group, dtype).view(*layout.dealt, *rest)

    def find_local(self, x: Tensor) -> Tensor | None:
        """The rows that `x` was gathered from; None if it was not gathered last."""
        return self.local if self.layout is not None and x is self.full else None

    def enter(self, x: Tensor, dtype: torch.dtype | None) -> Tensor | None:
        """`x` as sharded computation reads it, its gradient reduce-scattered; None if it was not gathered last."""
        local = self.find_local(x)
        return None if local is None else enter_rows(local, x, self.group, dtype)

    def _layout(self) -> Layout:
        assert self.layout is not None
        return self.layout

    def _layout_of_whole(self, x: Tensor) -> Layout:
        """The layout as all rows `x` have it: one dimension of rows may stand for those that the forward has."""
        layout = self._layout()
        if tuple(x.shape[: len(layout.lead)]) == layout.lead:
            return layout
        self._check_rows(x, layout.rows)
        return layout.flat

    def _layout_of_dealt(self, x: Tensor) -> Layout:
        """The same of one rank's rows."""
        layout = self._layout()
        if tuple(x.shape[: len(layout.lead)]) == layout.dealt:
            return layout
        self._check_rows(x, layout.share)
        return layout.flat

    def _check_rows(self, x: Tensor, rows: int) -> None:
        if x.ndim < 1 or x.shape[0] != rows:
            raise PlanError(
                f"a tensor of shape {list(x.shape)} is not one row a token: the forward deals {self.layout} over "
                f"{self.group.tp_size} ranks. Pass sequence_parallel=False, or make the plan again with inputs= like these."
            )

    @contextmanager
    def hiding_rows(self) -> Iterator[None]:
        """Within it what was gathered is a tensor like another, and linears that read it sum its gradient as any other's."""
        before = self.local, self.full
        self.local = self.full = None
        try:
            yield
        finally:
            self.local, self.full = before
