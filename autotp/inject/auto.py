"""A plan found in the model itself and proved: record, discover, place, prove; what fails the proof is left whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..comm import TPGroup
from ..errors import PlanError, ProofError
from .callsites import ShapeFix
from .discover import Discovery, class_of, find_grouped_maps, find_shared_maps, move_name
from .gathered import plan_gathered
from .hints import Hints
from .module_plan import ModulePlan, NormPlan
from .norms import find_norms
from .placement import Placement
from .plan import Plan, Region
from .prove import prove
from .record import Record, Recorder
from .reference import Reference
from .regions import TOO_FEW, FoundRegion
from .runs import Runs
from .search import Found, Search
from .shadow import Shadow
from .whole import explain_whole

RETRIES = 2  # to form other regions of what did not prove
SEARCH_SECONDS = 40.0  # for the attribute edits of a whole model; a class that needs some finds them in one or two

Assemble = Callable[[dict[str, ModulePlan], tuple[Region, ...], dict[str, str]], Plan]
Rewrite = Callable[[nn.Module, Plan, TPGroup], None]


class Planner:
    """Puts regions together into a plan and proves it; a region that does not run gets edits and fixes, or is left out."""

    def __init__(
        self,
        runs: Runs,
        tp_size: int,
        blocked: set[str],
        sizes: Mapping[str, int],
        assemble: Assemble,
        rewrite: Rewrite,
        hints: Hints | None = None,
        as_trained: bool = False,
    ) -> None:
        """Args:
        blocked: Parameters that follow rules of their own.
        sizes: parameters of the whole model by folded name.
        as_trained: whatever is proved has to prove in training mode too, with the model's own attention implementation.
        """
        self.hints = hints or Hints()
        self.discovery = Discovery(runs.shadow, runs.records, tp_size, blocked)
        self.placement = Placement(self.discovery.tables, tp_size)
        self.tp_size, self.blocked, self.sizes = tp_size, blocked, sizes
        self.gathered: dict[str, ModulePlan] = {}
        self.runs, self.assemble, self.rewrite = runs, assemble, rewrite
        self.norms: dict[str, NormPlan] = {}
        self.as_trained = as_trained
        self.trained: tuple[frozenset[str], Shadow, list[Reference]] | None = None  # what is transparent in it, first
        self.references = runs.references()
        self.reasons: dict[str, str] = {}
        self.seconds_left = SEARCH_SECONDS
        self.edits: dict[str, dict[str, tuple[Any, ...]]] = {}  # module -> attribute -> values
        self.fixes: dict[str, tuple[ShapeFix, ...]] = {}

    def plan(self) -> Plan:
        """The plan of all regions that prove."""
        self.discovery.choose()
        self._choose_with_norms()
        self._choose_with_heads()
        if any(refusal.reason == "dead columns" for refusal in self.discovery.refused.values()):
            seeds = range(1000, 1000 + 4 * len(self.runs.calls))  # zero by chance (a sparse gate) is not zero again
            more = [self._record(self.runs.calls[seed % len(self.runs.calls)], seed, self.norms) for seed in seeds]
            base = self.discovery.tables.records
            self.discovery = Discovery(self.runs.shadow, [*base, *more], self.tp_size, self.blocked, len(base))
            self.placement = Placement(self.discovery.tables, self.tp_size, self.norms)
            self.discovery.choose()
        kept = self._prove_others(self._prove_with_groups(self._prove_all()))
        for refusal in self.discovery.refused.values():
            if refusal.reason == TOO_FEW:
                self.reasons |= {key[0]: str(refusal) for key in refusal.sites if key[0] not in self.reasons}
        self._gather_rest(kept)
        for seed, refusal in self.discovery.refused.items():
            self.reasons.setdefault(seed[0], str(refusal))
        for region in self.discovery.skipped:
            for key in region.sites:
                self.reasons.setdefault(key[0], "too small a region to be worth an all-reduce")
        for name, why in explain_whole(self.placement, self.references).items():
            if name not in self.blocked:
                self.reasons.setdefault(name, why)
        return replace(self.build(kept, whole=True), proof="proved")

    def _choose_with_norms(self) -> None:
        """Again with norms over a whole width seen as elementwise; kept if more is split that way."""
        norms = find_norms(self.discovery.tables)
        if not norms:
            return
        records = [self._record(call, number, norms) for number, call in enumerate(self.runs.calls)]
        other = Discovery(self.runs.shadow, records, self.tp_size, self.blocked)
        other.choose()
        if other.split > self.discovery.split:
            self.discovery, self.norms = other, norms
            self.placement = Placement(other.tables, self.tp_size, norms)

    def _choose_with_heads(self) -> None:
        """Again with maps that all heads share seen as plain Parameters; kept if more is split that way."""
        shadow, names = self.runs.shadow, find_shared_maps(self.discovery.tables)
        if not names:
            return
        shadow.transparent |= names
        other = self._discover_again()
        if other.split <= self.discovery.split:
            shadow.transparent -= names
        else:
            self._take(other)

    def _prove_with_groups(self, kept: list[FoundRegion]) -> list[FoundRegion]:
        """Again with maps of single heads that are in no proved region seen as plain Parameters; kept if more proves that way."""
        shadow, split = self.runs.shadow, {key[0] for region in kept for key in region.sites}
        names = find_grouped_maps(self.discovery.tables) - split
        if not names:
            return kept
        before = dict(vars(self))
        records, weight = self.runs.records, sum(map(self.discovery.weigh, kept))
        shadow.transparent |= names
        self._take(self._discover_again())
        self.edits, self.fixes, self.reasons = {}, {}, {}
        found = self._prove_all()
        if sum(map(self.discovery.weigh, found)) > weight:
            return found
        shadow.transparent -= names
        vars(self).update(before | {"seconds_left": self.seconds_left})
        self.runs.records = records
        return kept

    def _prove_others(self, kept: list[FoundRegion]) -> list[FoundRegion]:
        """`kept`, with regions that sites of those which did not prove can form as well."""
        for _ in range(RETRIES):
            failed = [region for region in self.discovery.regions if not any(region is other for other in kept)]
            if not failed:
                break
            self.discovery.blocked |= {key for region in failed for key in region.rows}  # which may be columns still
            self.discovery.regions = list(kept)
            found = self.discovery.choose()[len(kept) :]
            if not found:
                break
            kept = self._prove_half(kept, self._by_class(found))
        return kept

    def _discover_again(self) -> Discovery:
        records = [self._record(call, number, self.norms) for number, call in enumerate(self.runs.calls)]
        other = Discovery(self.runs.shadow, records, self.tp_size, self.blocked)
        other.choose()
        return other

    def _take(self, other: Discovery) -> None:
        self.discovery, self.placement = other, Placement(other.tables, self.tp_size, self.norms)
        self.runs.records = [self._record(call, number) for number, call in enumerate(self.runs.calls)]
        self.references = self.runs.references()

    def _record(self, call: dict[str, Any], seed: int, norms: Iterable[str] = ()) -> Record:
        recorder = Recorder(self.runs.shadow, seed, norms)
        recorder.run(call)
        return recorder.record

    def build(self, regions: Sequence[FoundRegion], whole: bool = False) -> Plan:
        """The plan of `regions`, not proved yet; of the `whole` model, or of the layers that stand for the others.

        Raises:
            PlanError: no plan can say it.
        """
        modules, listed = self.placement.place(regions)
        modules |= self.gathered
        for name in dict.fromkeys([*self.edits, *self.fixes]):
            base = modules.get(name, ModulePlan(name, "local_params", source="discovered"))
            attrs = {**base.attrs, **self.edits.get(name, {})}
            modules[name] = replace(base, attrs=attrs, fixes=self.fixes.get(name, ()))
        self.hints.add_to(modules, map(self.placement.scope, regions), self.runs.reduction.holds)
        if not whole:
            return self.assemble(modules, listed, self.reasons)
        return self.assemble(*self.runs.reduction.expand(modules, listed), self.runs.reduction.spread(self.reasons))

    def attempt(self, regions: Sequence[FoundRegion]) -> None:
        """Build and prove.

        Raises:
            PlanError, ProofError: why not.
        """
        plan = self.build(regions)
        prove(self.runs.shadow, plan, self.references, self.rewrite)
        if self.as_trained:
            self._prove_as_trained(plan)

    def _prove_as_trained(self, plan: Plan) -> None:
        transparent = frozenset(self.runs.shadow.transparent)
        if self.trained is None or self.trained[0] != transparent:
            runs = self.runs.as_trained()
            if runs is None:
                return
            self.trained = transparent, runs.shadow, runs.references()
        try:
            prove(self.trained[1], plan, self.trained[2], self.rewrite)
        except ProofError as error:
            raise ProofError(f"in training mode, {error}") from error

    def _gather_rest(self, kept: Sequence[FoundRegion]) -> None:
        """Split what no region takes by its columns, where that proves and is worth it."""
        classes = plan_gathered(self.placement, self.placement.place(kept)[0], self.blocked, self.sizes, self.reasons)
        together = {name: plan for plans in classes for name, plan in plans.items()}
        for plans in [together, *classes] if len(classes) > 1 else classes:
            if all(name in self.gathered for name in plans):
                continue
            before = self.gathered
            self.gathered = {**before, **plans}
            try:
                self.attempt(kept)
            except (ProofError, PlanError) as error:
                self.gathered = before
                for name in plans:
                    self.reasons.setdefault(f"{name}.weight", f"not proved: {error}")

    def _prove_all(self) -> list[FoundRegion]:
        """All regions together if they prove; otherwise one class of them after the other, what fails being left out."""
        try:
            self.attempt(self.discovery.regions)
            return self.discovery.regions
        except (ProofError, PlanError):
            if not self.discovery.regions:
                raise
        classes = self._by_class(self.discovery.regions)
        if len(classes) > 1 and self._edit_first(classes):
            return self.discovery.regions
        self.attempt([])  # nothing proves on top of what does not
        return self._prove_half([], classes, failed=True)

    def _by_class(self, regions: Iterable[FoundRegion]) -> list[list[FoundRegion]]:
        classes: dict[Any, list[FoundRegion]] = {}
        for region in regions:
            classes.setdefault(class_of(self.discovery.tables, next(iter(region.rows))), []).append(region)
        return list(classes.values())

    def _edit_first(self, classes: list[list[FoundRegion]]) -> bool:
        """Whether all regions prove together with the edits that each class of them needs to run by itself."""
        done: list[FoundRegion] = []
        try:
            for regions in classes:
                search = self._search(done, regions[0])
                if not search.runs():
                    self._add(regions, next(self._timed(search.candidates())))
                done += regions
            self.attempt(done)
            return True
        except (ProofError, PlanError, StopIteration):
            self.edits, self.fixes = {}, {}
            return False

    def _search(self, kept: Sequence[FoundRegion], region: FoundRegion) -> Search:
        scope = self.placement.scope(region)
        beside = [other for other in kept if self.placement.scope(other) == scope]  # whose edits are in place
        share = min(1.0, max(0.05, self.seconds_left / SEARCH_SECONDS))  # later classes of a model that takes long get less
        plan = self.build([*beside, region])
        return Search(self.placement, region, plan, self.references, self.rewrite, share, self.hints.edits)

    def _prove_half(self, kept: list[FoundRegion], classes: list[list[FoundRegion]], failed: bool = False) -> list[FoundRegion]:
        """What proves of `classes` on top of `kept`, with `kept`: all at once, or else the one half and then the other."""
        regions = [region for members in classes for region in members]
        try:
            if len(classes) == 1:
                self._prove_class(kept, regions)
                return kept + regions
            if not failed:
                self.attempt(kept + regions)
                return kept + regions
        except (ProofError, PlanError) as error:
            if len(regions) == 1:
                for key in regions[0].sites:
                    self.reasons[key[0]] = f"not proved: {error}"
                return kept
        if len(classes) == 1:  # layers of one name that do different things
            classes = [[region] for region in regions]
        half, before = len(classes) // 2, ({name: dict(attrs) for name, attrs in self.edits.items()}, dict(self.fixes))
        first = self._prove_half(kept, classes[:half])
        whole = len(first) == len(kept) + sum(map(len, classes[:half]))
        fine = whole and before == (self.edits, self.fixes)  # so the other half is at fault
        return self._prove_half(first, classes[half:], fine)

    def _prove_class(self, kept: list[FoundRegion], regions: list[FoundRegion]) -> None:
        """`regions`, alike but for their layers, proved on top of `kept`; with edits and fixes if that is what it takes."""
        try:
            self.attempt([*kept, *regions])
            return
        except ProofError as error:
            first = failure = error
        search = self._search(kept, regions[0])
        edits, fixes = dict(self.edits), dict(self.fixes)
        for found in self._timed(search.candidates()):
            if not any(found):
                continue
            try:
                self._add(regions, found)
                self.attempt([*kept, *regions])
                return
            except (ProofError, PlanError) as error:
                self.edits, self.fixes, failure = dict(edits), dict(fixes), error
        if failure is not first:
            raise failure
        raise ProofError(f"{first}; no edit of the integers that its forward reads, or of the sizes that it writes, makes it run")

    def _timed(self, found: Iterator[Found]) -> Iterator[Found]:
        """What is found, the time that it takes being counted."""
        while True:
            start = time.monotonic()
            try:
                each = next(found)
            except StopIteration:
                return
            finally:
                self.seconds_left -= time.monotonic() - start
            yield each

    def _add(self, regions: list[FoundRegion], found: Found) -> None:
        """Take over what was found for the first of `regions`, for all of them."""
        seed = next(iter(regions[0].rows))[0]
        for region in regions:
            other = next(iter(region.rows))[0]
            for (name, key), values in found[0].items():
                moved = self._move(name, seed, other)
                self.edits[moved] = self.edits.get(moved, {}) | {key: values}
            for name, fixes in found[1].items():
                moved = self._move(name, seed, other)
                known = self.fixes.get(moved, ())
                self.fixes[moved] = (*known, *(fix for fix in fixes if fix not in known))

    def _move(self, name: str, seed: str, other: str) -> str:
        moved = move_name(name, seed, other)
        if moved not in self.placement.modules:
            raise ProofError("layers of one name are built differently")
        return moved
