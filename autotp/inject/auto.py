"""A plan found in the model itself and proved: record, discover, place, prove; what fails the proof is left whole."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..comm import TPGroup
from ..errors import AutoTPError, PlanError, ProofError
from .callsites import ShapeFix
from .discover import Discovery, class_of, find_grouped_maps, find_shared_maps, move_name
from .examples import make_examples
from .gathered import plan_gathered
from .norms import find_norms
from .placement import Placement
from .plan import ModulePlan, NormPlan, Plan, Region
from .prove import Reference, make_reference, prove
from .record import Record, Recorder
from .reduce import Reduction, find_reduction
from .regions import FoundRegion
from .search import Found, Search
from .shadow import Shadow
from .whole import explain_whole, spread

SHAPES = ((2, 9), (3, 7))  # batch and length of the two sets of example calls: no plan may hold for one shape alone
WIDE_SHAPES = ((2, 5), (3, 4))  # the same for models of more than WIDE parameters, whose activations take the memory
WIDE = 10**9
SEARCH_SECONDS = 40.0  # for the attribute edits of a whole model; a class that needs some finds them in one or two
SMALLER = 2  # times that smaller regions are looked for in place of those that did not prove

Assemble = Callable[[dict[str, ModulePlan], tuple[Region, ...], dict[str, str]], Plan]
Rewrite = Callable[[nn.Module, Plan, TPGroup], None]


@dataclass
class Runs:
    """A model's example calls, recorded on its shadow."""

    shadow: Shadow
    reduction: Reduction
    calls: list[dict[str, Any]]
    records: list[Record]

    def references(self) -> list[Reference]:
        """The recorded calls with cotangents pulled back, for the proof."""
        return [make_reference(self.shadow, c, r, i) for i, (c, r) in enumerate(zip(self.calls, self.records, strict=True))]


def record_runs(model: nn.Module, inputs: Any = None, reduce: bool = True) -> Runs:
    """Record the example calls `inputs` (a call's keyword arguments, or a list of them), or calls made from the signature.

    Raises:
        PlanError: no call runs.
    """
    reduction = find_reduction(model) if reduce else Reduction({})
    for chosen in [reduction, replace(reduction, emptied=False), Reduction({})] if reduction else [reduction]:
        try:
            return _record_with_buffers(model, chosen, inputs)
        except Exception:
            if not chosen:  # neither with layers that do nothing nor without them: then all are recorded
                raise
    raise AssertionError


def _record_with_buffers(model: nn.Module, reduction: Reduction, inputs: Any) -> Runs:
    try:
        return _record_runs(Shadow(model, reduction=reduction), reduction, model, inputs)
    except AutoTPError:
        raise
    except RuntimeError as error:  # a buffer that is written in place can't take a gradient
        if "requires grad" not in str(error):
            raise
    return _record_runs(Shadow(model, buffers_need_grad=False, reduction=reduction), reduction, model, inputs)


def _record_runs(shadow: Shadow, reduction: Reduction, model: nn.Module, inputs: Any) -> Runs:
    calls: list[dict[str, Any]] = []
    records: list[Record] = []

    def run(call: dict[str, Any]) -> None:
        call = {key: widen(value) for key, value in call.items()}
        recorder = Recorder(shadow, len(records))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            recorder.run(call)
        if not recorder.record.sites:
            raise PlanError("no linear map of a Parameter was seen")
        calls.append(call)
        records.append(recorder.record)

    if inputs is not None:
        for call in [inputs] if isinstance(inputs, dict) else inputs:
            run(dict(call))
    else:
        wide = sum(parameter.numel() for parameter in model.parameters()) > WIDE
        for seed, (batch, length) in enumerate(WIDE_SHAPES if wide else SHAPES):
            first = len(calls)
            make_examples(model, batch, length, seed, run)
            drop_repeats(calls, records, first)
    return Runs(shadow, reduction, calls, records)


def drop_repeats(calls: list[dict[str, Any]], records: list[Record], first: int) -> None:
    """Drop calls from number `first` on that run no site which the others do not run."""
    for number in range(len(calls) - 1, first, -1):
        others = {key for i, record in enumerate(records) if first <= i != number for key in record.sites}
        if set(records[number].sites) <= others:
            del calls[number], records[number]


def widen(value: Any) -> Any:
    """Floating tensors in a nest of dicts, lists and tuples as float64, which is what shadows compute in."""
    if isinstance(value, Tensor):
        return value.detach().cpu().double() if value.is_floating_point() else value.cpu()
    if type(value) in (list, tuple):
        return type(value)(widen(v) for v in value)
    return {k: widen(v) for k, v in value.items()} if type(value) is dict else value


class Planner:
    """Puts regions together into a plan and proves it; a region that does not run gets edits and fixes, or is left out."""

    def __init__(
        self, runs: Runs, tp_size: int, blocked: set[str], sizes: Mapping[str, int], assemble: Assemble, rewrite: Rewrite
    ) -> None:
        """`blocked`: Parameters that follow rules of their own; `sizes`: parameters of the whole model by folded name."""
        self.discovery = Discovery(runs.shadow, runs.records, tp_size, blocked)
        self.placement = Placement(self.discovery.tables, tp_size)
        self.tp_size, self.blocked, self.sizes = tp_size, blocked, sizes
        self.gathered: dict[str, ModulePlan] = {}
        self.runs, self.assemble, self.rewrite = runs, assemble, rewrite
        self.norms: dict[str, NormPlan] = {}
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
        kept = self._prove_smaller(self._prove_with_groups(self._prove_all()))
        self._gather_rest(kept)
        for seed, refusal in self.discovery.refused.items():
            self.reasons.setdefault(seed[0], str(refusal))
        for region in self.discovery.skipped:
            for key in region.sites:
                self.reasons.setdefault(key[0], "too small a region to be worth an all-reduce")
        rest = explain_whole(self.placement, self.references, self.runs.reduction)
        self.reasons = {**rest, **spread(self.reasons, self.runs.reduction)}
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

    def _prove_smaller(self, kept: list[FoundRegion]) -> list[FoundRegion]:
        """Again without the rows of regions that did not prove: smaller regions may take what those had taken."""
        for _ in range(SMALLER):
            proved = set(map(id, kept))
            failed = [region for region in self.discovery.regions if id(region) not in proved]
            if not failed:
                break
            self.discovery.blocked |= {row for region in failed for row in region.rows}
            self.discovery.regions = list(kept)
            self.discovery.choose()
            found = [region for region in self.discovery.regions if id(region) not in proved]
            kept = self._prove_half(kept, self._by_class(found)) if found else kept
        return kept

    def _by_class(self, regions: Sequence[FoundRegion]) -> list[list[FoundRegion]]:
        """`regions`, those that differ in their layers alone together."""
        classes: dict[Any, list[FoundRegion]] = {}
        for region in regions:
            classes.setdefault(class_of(self.discovery.tables, next(iter(region.rows))), []).append(region)
        return list(classes.values())

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
        if whole:
            modules, listed = self.runs.reduction.expand(modules, listed)
        return self.assemble(modules, listed, self.reasons)

    def attempt(self, regions: Sequence[FoundRegion]) -> None:
        """Build and prove.

        Raises:
            PlanError, ProofError: why not.
        """
        plan = self.build(regions)
        prove(self.runs.shadow, plan, self.references, self.rewrite)

    def _gather_rest(self, kept: Sequence[FoundRegion]) -> None:
        """Split what no region takes by its columns, where that proves and is worth it."""
        classes = plan_gathered(self.placement, self.placement.place(kept)[0], self.blocked, self.sizes)
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
                self.reasons |= {f"{name}.weight": f"not proved: {error}" for name in plans}

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
        return Search(self.placement, region, plan, self.references, self.rewrite, share)

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
