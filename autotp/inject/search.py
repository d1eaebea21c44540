"""Finds the integers that a forward must read differently on each rank, by trying: only sets that run and prove are kept.

The module that holds a region runs alone, on the arguments that the whole model gave it. Which integers it reads is noted
in one run; each is offered the values that its size has on the rank (a width, a number of heads, a ratio of two). A trial
that fails later than the one before is a step in the right direction. Where integers alone don't do it, calls are given the
sizes that the whole run says (`shaperule`), alone and together with integers.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import PlanError
from .arguments import copy_arguments
from .attributes import restore_attributes, set_attributes
from .callsites import ShapeFix
from .describe import fold_name
from .intercept import Interceptor, keep_state, running
from .placement import Placement
from .plan import Plan
from .prove import Rewrite, leave_out
from .rank_run import RankRun, cut_shadow
from .reads import log_reads, sizes_in, with_sizes
from .record import ModuleCall, SiteKey, columns
from .reference import Reference
from .regions import FoundRegion, _classes, _patterns
from .shaperule import LocalRun, Noted, Seen, WholeRun, make_fixes
from .shaperule import Place as CallPlace
from .sites import Operands
from .styles import ATTENTION_STYLES
from .threads import SoloGroup

Place = tuple[str, str]  # a module's name, its layer numbers as "*", and an attribute
Edits = dict[Place, tuple[Any, ...]]  # its value on each rank
Fixes = dict[str, tuple[ShapeFix, ...]]  # by module name
Found = tuple[dict[tuple[str, str], tuple[Any, ...]], Fixes]  # edits by full module name and attribute, and fixes
MAX_TRIALS = 1500
FIRST_SECONDS = 5.0  # for integers alone, then with fixes, then for integers alone again
FIXING_SECONDS = 8.0
LAST_SECONDS = 12.0


class Search:
    """The attribute edits, and fixes of call sites, that let one region's module run on every rank."""

    def __init__(
        self,
        placement: Placement,
        region: FoundRegion,
        plan: Plan,
        references: Sequence[Reference],
        rewrite: Rewrite,
        share: float = 1.0,
        fixed: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """`share`: of the time that a search may take; `fixed`: module -> attributes that the caller gave values."""
        self.fixed = fixed or {}
        self.tables, self.region, self.tp_size = placement.tables, region, plan.tp_size
        self.scope = placement.scope(region)
        self.references = references
        self.inner = leave_out(
            plan, lambda m: m.why == "vocabulary" or m.style in ATTENTION_STYLES
        )  # what one rank can't run alone
        self.values = all(module.norm is None for module in plan.modules)
        shadow = placement.tables.shadow
        self.locals = [cut_shadow(shadow, self.inner.shards, rank) for rank in range(plan.tp_size)]
        for rank, local in enumerate(self.locals):
            rewrite(local.model, self.inner, SoloGroup(rank, plan.tp_size))
        self.sites = {key[0] for key in placement.tables.sites}
        self.fixing, self.notes, self.fixes = False, [], {}
        self.share = share

    def runs(self) -> bool:
        """Whether the module runs, and sees what it should, as it is."""
        return self._progress({}) is None

    def candidates(self) -> Iterator[Found]:
        """What lets the module run, the plainest first: edits, fixes with or without edits, edits by a longer search."""
        while self._progress({}) is None and self.scope:  # the fault lies in what calls it
            self.scope = self.scope.rpartition(".")[0]
        offers = self._offers()
        plain = self._climb(offers)
        found = self._first(plain, FIRST_SECONDS)
        if found is not None:
            yield self._finish(found)
        self.fixing, self.notes = True, self._note_all()
        fixed = self._first(self._climb(offers), FIXING_SECONDS)
        if fixed is not None:
            yield self._finish(fixed)
        self.fixing = False
        if found is None and (found := self._first(plain, LAST_SECONDS)) is not None:
            yield self._finish(found)

    def _first(self, climb: Iterator[Edits | None], seconds: float) -> Edits | None:
        """The first edits that `climb` finds in a time; it can be gone on with."""
        start = time.monotonic()
        for trials, found in enumerate(climb):
            if found is not None:
                return found
            if trials >= MAX_TRIALS or time.monotonic() - start > seconds * self.share:
                break
        return None

    def _finish(self, found: Edits) -> Found:
        """`found` less what is not needed, in full, with its fixes."""
        for place in list(found):
            fewer = {k: v for k, v in found.items() if k != place}
            if self._progress(fewer) is None:
                found = fewer
        self._progress(found)  # the last one tried leaves its fixes
        edits = {(module, place[1]): values for place, values in found.items() for module in self.modules_of[place]}
        return edits, dict(self.fixes) if self.fixing else {}

    # -- trials ---------------------------------------------------------------------------------------------------------

    def _progress(self, edits: Edits) -> int | None:
        """None if every rank runs and sees what it should; otherwise how far the first one that fails gets."""
        reached = 0
        runs: list[list[dict[tuple[CallPlace, int], Seen]]] = [[] for _ in range(self.tp_size)]
        for rank in range(self.tp_size):
            for number in range(len(self.references)):
                failed = self._try_rank(rank, number, edits, runs[rank])
                if failed is not None:
                    return reached + failed
                reached += 1_000_000
        try:
            self.fixes = make_fixes(runs)
        except PlanError:
            return reached
        return None

    def _try_rank(self, rank: int, number: int, edits: Edits, seen: list[dict[tuple[CallPlace, int], Seen]]) -> int | None:
        reference = self.references[number]
        local = self.locals[rank]
        calls = reference.record.module_calls.get(self.scope, [])
        if not calls:
            return None
        run = RankRun(reference, local, self.inner.shards, rank, [1.0] * self.tp_size, self.values)
        counter = LocalRun(local, run.respond, self.notes[number]) if self.fixing else Counting(local, run.respond)
        by_module: dict[str, dict[str, tuple[Any, ...]]] = {}
        for place, values in edits.items():
            for module in self.modules_of[place]:
                by_module.setdefault(module, {})[place[1]] = values
        edited = []
        try:
            for name, attrs in by_module.items():
                module = local.model.get_submodule(name)
                set_attributes(module, name, attrs, rank)
                edited.append(module)
            args, kwargs = _detached(calls[0])
            with keep_state(local.model), running(), torch.no_grad(), counter:
                local.model.get_submodule(self.scope)(*args, **kwargs)
        except Exception as error:  # whatever a wrong number leads to: this set does not run
            self.last = str(error)[:100]
            return counter.count
        else:
            seen.append(counter.seen if isinstance(counter, LocalRun) else {})
        finally:
            for module in edited:
                restore_attributes(module)
        return None

    def _climb(self, offers: dict[Place, list[tuple[Any, ...]]]) -> Iterator[Edits | None]:
        """After each trial the edits, or None: the likeliest sets first; then one edit more, from the set that got furthest."""
        first = {place: values[0] for place, values in offers.items()}
        exact = {place: values[0] for place, values in offers.items() if len(set(self._sizes.get(self.reads[place], []))) > 0}
        heap: list[tuple[int, int, int, Edits]] = []
        seen: set[frozenset] = set()

        def visit(edits: Edits) -> Edits | None:
            """`edits` if they do it; if not they are kept for later, the further they get the sooner."""
            seen.add(frozenset(edits.items()))
            reached = self._progress(edits)
            if reached is not None:
                heapq.heappush(heap, (-reached, len(edits), len(seen), edits))
            return edits if reached is None else None

        for edits in ({}, exact, first):
            if frozenset(edits.items()) not in seen:
                yield visit(edits)
        while heap:
            base = heapq.heappop(heap)[3]
            for edits in self._neighbours(base, offers):
                if frozenset(edits.items()) not in seen:
                    yield visit(edits)

    def _neighbours(self, base: Edits, offers: dict[Place, list[tuple[Any, ...]]]) -> Iterator[Edits]:
        """Sets that differ from `base` in one edit."""
        for place, values in offers.items():
            if place in base:
                yield {k: v for k, v in base.items() if k != place}
            for value in values:
                if base.get(place) != value:
                    yield {**base, place: value}

    # -- what may be edited, and to what --------------------------------------------------------------------------------

    def _offers(self) -> dict[Place, list[tuple[Any, ...]]]:
        """`(module, attribute)` -> values to try on each rank, the likeliest first."""
        self.reads, self.modules_of = {}, {}
        for (module, key), value in self._read_integers().items():
            place = (fold_name(module), key)
            if self.reads.setdefault(place, value) != value:  # layers that differ are edited one by one
                place = (module, key)
                self.reads[place] = value
            self.modules_of.setdefault(place, []).append(module)
        self._sizes = self._known_sizes()
        offers = {}
        for place, value in self.reads.items():
            options = self._values_of(value) if isinstance(value, int) else self._nests_of(value)
            options = [o for o in dict.fromkeys(options) if any(v != value for v in o)]
            if options:
                offers[place] = options
        return offers

    def _nests_of(self, value: tuple) -> list[tuple[tuple, ...]]:
        """As `_values_of` for a nest of sizes: the likeliest value of all at once, then values of one alone."""
        sizes = sizes_in(value)
        known = [self._values_of(size) for size in sizes]
        choices = [[each[0] if each else (size,) * self.tp_size for size, each in zip(sizes, known, strict=True)]]
        for i, each in enumerate(known):
            choices += [[each_own if j == i else (s,) * self.tp_size for j, s in enumerate(sizes)] for each_own in each]
        return [
            tuple(with_sizes(value, iter([own[rank] for own in choice])) for rank in range(self.tp_size)) for choice in choices
        ]

    def _values_of(self, value: int) -> list[tuple[int, ...]]:
        options = list(self._sizes.get(value, []))
        pairs = [(full, local) for full, each in self._sizes.items() for local in each]
        for full, local in pairs:
            for other, below in pairs:
                if other < full and full == value * other and all(a % b == 0 for a, b in zip(local, below, strict=True)):
                    options.append(tuple(a // b for a, b in zip(local, below, strict=True)))
        for full, local in pairs:
            if value % full == 0 or full % value == 0:
                scaled = [value * part for part in local]
                if all(s % full == 0 and s for s in scaled):
                    options.append(tuple(s // full for s in scaled))
        return list(dict.fromkeys(options))

    def _known_sizes(self) -> dict[int, list[tuple[int, ...]]]:
        """Full size -> what it is on each rank: widths of rows and columns, of their classes, and numbers of units."""
        found: dict[int, list[tuple[int, ...]]] = {}

        def note(full: int, local: Sequence[int]) -> None:
            if full > 1 and all(local) and tuple(local) not in found.setdefault(full, []):
                found[full].append(tuple(local))

        for key, held in self.region.rows.items():
            note(self.tables.sites[key].in_size, [len(h) for h in held])
            for call in self.references[0].record.sites[key].calls if key in self.references[0].record.sites else []:
                width = columns(call.x, call.x_axes).shape[1]
                note(width, [int(((h >= call.x_start) & (h < call.x_start + width)).sum()) for h in held])
        for key, held in self.region.cols.items():
            note(self.tables.sites[key].out_size, [len(h) for h in held])
        for key, held in self.region.cols.items():
            for row in self.region.rows:
                if key in self.tables.reach(row):
                    self._note_classes(key, row, held, note)
        note(sum(self.region.units), self.region.units)
        for shard in self.inner.shards.values():  # Parameters and buffers beside the sites: a convolution, a table of heads
            for cut in shard.cuts:
                note(shard.shape[cut.dim], [shard.local_shape(rank)[cut.dim] for rank in range(self.tp_size)])
        return found

    def _note_classes(self, key: SiteKey, row: SiteKey, held: list[Tensor], note: Any) -> None:
        """Widths and numbers of patterns of each class of columns: heads of q, of k."""
        table = self.tables.table(row, self.tables.block_size(row))[key]
        local = [_patterns(table[:, h]) for h in held]
        every = _patterns(table)
        for members in _classes(every).values():
            note(sum(every[p] for p in members), [sum(n for p, n in each.items() if p in members) for each in local])
            note(len(members), [sum(p in each for p in members) for each in local])

    def _read_integers(self) -> dict[tuple[str, str], Any]:
        """Integers (and short lists of them) that the scope's modules and their configs hold and the forward reads."""
        local = self.locals[0]
        scope = local.model.get_submodule(self.scope)
        reference = next(r for r in self.references if r.record.module_calls.get(self.scope))
        seen: dict[tuple[str, str], Any] = {}
        with log_reads(self.tables.shadow.model.get_submodule(self.scope), self.scope, seen):
            whole = RankRun(reference, self.tables.shadow, {}, 0, [1.0])
            args, kwargs = _detached(reference.record.module_calls[self.scope][0])
            model = self.tables.shadow.model
            with keep_state(model), running(), torch.no_grad(), Interceptor(self.tables.shadow, whole.respond):
                model.get_submodule(self.scope)(*args, **kwargs)
        del scope
        free = {(name, key): value for (name, key), value in seen.items() if key not in self.fixed.get(name, {})}
        return {place: value for place, value in free.items() if f"{place[0]}.weight" not in self.sites}

    def _note_all(self) -> list[dict[tuple[CallPlace, int], Noted]]:
        """The shapes and values in the whole module's run, for each reference."""
        runs = [self._note(reference) for reference in self.references]
        alive = {key for _, found in runs for key, _, hit in found if hit}
        for watch, found in runs:
            watch.mark_unproved([leaf for key, leaf, _ in found if key not in alive])
        return [watch.notes for watch, _ in runs]

    def _note(self, reference: Reference) -> tuple[WholeRun, list[tuple[SiteKey, Tensor, bool]]]:
        """One whole run, and the sites that the region's rows depend on: the output, and whether its gradient is not zero."""
        shadow, inputs = self.tables.shadow, []
        whole = RankRun(reference, shadow, {}, 0, [1.0])

        def respond(op: Operands, name: str, *call: Any) -> Tensor:
            if any(name == key[0] for key in self.region.rows) and op.x.requires_grad:
                inputs.append(op.x)
            return whole.respond(op, name, *call)

        watch = WholeRun(shadow, respond)
        for call in reference.record.module_calls.get(self.scope, [])[:1]:
            args, kwargs = _detached(call)
            with keep_state(shadow.model), running(), watch:
                shadow.model.get_submodule(self.scope)(*args, **kwargs)
        if not inputs:
            return watch, []
        leaves = [leaf for _, leaf in whole.leaves]
        sums = [self.tables.random_like(x) for x in inputs]
        grads = torch.autograd.grad(inputs, leaves, sums, retain_graph=True, allow_unused=True)
        found = [
            (reference.record.order[index][0], leaf, bool(grad.ne(0).any()))
            for (index, leaf), grad in zip(whole.leaves, grads, strict=True)
            if grad is not None
        ]
        return watch, found


class Counting(Interceptor):
    """An interceptor that counts what it sees."""

    count = 0

    def __torch_function__(self, func, types_, args=(), kwargs=None):
        self.count += 1
        return super().__torch_function__(func, types_, args, kwargs)


def _detached(call: ModuleCall) -> tuple[tuple, dict]:
    return copy_arguments((call.args, call.kwargs), lambda tensor: tensor.detach().clone())
