"""Example calls of a model, recorded on its shadow: on a few of its layers and experts where these stand for the others."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import Tensor, nn

from ..errors import AutoTPError, PlanError
from .discover import MOST_FILLED
from .examples import make_examples
from .forwards import Forward, replace_forward
from .plan import Plan
from .record import Record, Recorder
from .reduce import Reduction, find_reduction, reads_emptied, share_unrun
from .reference import Reference, make_reference
from .shadow import Shadow

SHAPES = ((2, 9), (3, 7))  # batch and length of the two sets of example calls: no plan may hold for one shape alone
WIDE_SHAPES = ((2, 5), (3, 4))  # the same for models of more than WIDE parameters, whose activations take the memory
WIDE = 10**9
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # which no forward calls
NUMBER = re.compile(r"\d+")
SHARE_ROUNDS = 3  # other modules in one layer can change what the next one picks


@dataclass
class Runs:
    """A model's example calls, recorded on its shadow."""

    shadow: Shadow
    reduction: Reduction
    calls: list[dict[str, Any]]
    records: list[Record]
    recording: Recording

    @property
    def ran(self) -> set[str]:
        return names_run(self.records)

    def half_run(self) -> set[str]:
        """Parameters held in several places of which no call reaches some: what fits the others need not fit there."""
        modules = dict(self.shadow.model.named_modules(remove_duplicate=False))
        ran = {id(modules[name]) for name in self.ran}
        names: dict[int, list[str]] = {}
        for name, parameter in self.shadow.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)

        def is_reached(name: str) -> bool:
            parts = name.split(".")[:-1]
            holders = [modules[".".join(parts[:depth])] for depth in range(1, len(parts) + 1)]
            return all(id(holder) in ran or isinstance(holder, CONTAINERS) for holder in holders)

        return {held[0] for held in names.values() if len(held) > 1 and not all(map(is_reached, held))}

    def references(self) -> list[Reference]:
        """The recorded calls with cotangents pulled back, for the proof."""
        return [make_reference(self.shadow, c, r, i) for i, (c, r) in enumerate(zip(self.calls, self.records, strict=True))]

    def with_cut_maps(self, plan: Plan) -> Runs:
        """The same calls, maps of which `plan` cuts neither inputs nor outputs (one map a head, say) seen as plain Parameters."""
        names = set()
        for site in (site for record in self.records for site in record.sites.values() if site.parameter in plan.shards):
            shard = plan.shards[site.parameter]
            between = any(cut.dim not in (*site.in_dims, *site.out_dims) for cut in shard.cuts)
            if between and site.kind != "embedding" and prod(shard.shape) <= MOST_FILLED:
                names.add(site.parameter)
        if not names:
            return self
        return replace(self.recording, inputs=self.calls, transparent=frozenset(names)).run(self.reduction)

    def as_trained(self) -> Runs | None:
        """The first call in training mode, with the attention that the config names; None if that does not run here."""
        own = replace(self.recording, as_trained=True, inputs=self.calls[:1], transparent=frozenset(self.shadow.transparent))
        try:
            return own.run(self.reduction)
        except Exception:  # made for a GPU, say
            return None


def record_runs(
    model: nn.Module,
    inputs: Any = None,
    reduce: bool = True,
    forwards: Mapping[str, Forward] | None = None,
    tell: Callable[[str], Any] | None = None,
    shapes: Sequence[tuple[int, int]] | None = None,
) -> Runs:
    """Record the example calls `inputs` (a call's keyword arguments, or a list of them), or calls made from the signature.

    Args:
        reduce: whether layers may stand for others.
        forwards: they stand for those of the modules that they are named by.
        tell: of a module's name, what like modules must have in common to share one where a forward runs only some of them.
        shapes: batch and length of each set of calls that are made here; None for the usual ones.

    Raises:
        PlanError: no call runs.
    """
    reduction = find_reduction(model) if reduce else Reduction({})
    if inputs is not None:
        inputs = read_inputs(inputs)
    recording = Recording(model, inputs, forwards or {}, shapes=shapes)
    left = [reduction, replace(reduction, emptied=False), Reduction({})] if reduction else [reduction]
    while True:
        chosen = left.pop(0)
        try:
            return recording.run_shared(chosen, tell)
        except Exception as error:
            if not left:  # neither with layers that do nothing nor without them: then all are recorded
                raise
            if reads_emptied(error):  # from outside the layer: taken out, nothing would show what is done with it
                left = left[-1:]


@dataclass(frozen=True)
class Recording:
    """What is recorded: which model's calls, with which forwards in place of their own, and with whose attention kernel.

    Attributes:
        as_trained: in training mode, without dropout, and with the attention implementation that the model's config names;
            otherwise in evaluation, attention as plain arithmetic.
        transparent: names of linear maps that are seen as plain Parameters.
        shapes: batch and length of each set of calls; None for the usual ones.
    """

    model: nn.Module
    inputs: Any
    forwards: Mapping[str, Forward]
    as_trained: bool = False
    transparent: frozenset[str] = frozenset()
    shapes: Sequence[tuple[int, int]] | None = None

    def run_shared(self, reduction: Reduction, tell: Callable[[str], Any] | None) -> Runs:
        """The calls, like modules sharing a few where not all of them ran."""
        runs = self.run(reduction)
        for _ in range(SHARE_ROUNDS):
            chosen = share_unrun(self.model, runs.reduction, runs.ran, tell)
            if chosen.shared == runs.reduction.shared:
                break
            runs = self.run(chosen)
        return runs

    def run(self, reduction: Reduction) -> Runs:
        try:
            return self._run(self._make_shadow(reduction, True), reduction)
        except AutoTPError:
            raise
        except RuntimeError as error:  # a buffer that is written in place can't take a gradient
            if "requires grad" not in str(error):
                raise
        return self._run(self._make_shadow(reduction, False), reduction)

    def _make_shadow(self, reduction: Reduction, buffers_need_grad: bool) -> Shadow:
        shadow = Shadow(self.model, 0, buffers_need_grad, reduction, self.as_trained)
        shadow.transparent |= self.transparent
        for name in filter(reduction.holds, self.forwards):
            replace_forward(shadow.model.get_submodule(name), name, self.forwards[name])
        return shadow

    def _run(self, shadow: Shadow, reduction: Reduction) -> Runs:
        calls: list[dict[str, Any]] = []
        records: list[Record] = []

        def run(call: dict[str, Any]) -> None:
            call = {key: widen(value) for key, value in call.items()}
            recorder = Recorder(shadow, len(records))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                recorder.run(call)
            if not recorder.record.sites:
                raise PlanError(f"no linear map of a Parameter was seen in {type(self.model).__name__}, so nothing can be split")
            calls.append(call)
            records.append(recorder.record)

        if self.inputs is not None:
            for call in self.inputs:
                run(dict(call))
        else:
            for seed, (batch, length) in enumerate(self.shapes or usual_shapes(self.model)):
                first = len(calls)
                make_examples(self.model, batch, length, seed, run, lambda first=first: runs_like(shadow, records[first:]))
                drop_repeats(calls, records, first)
        return Runs(shadow, reduction, calls, records, self)


def usual_shapes(model: nn.Module) -> tuple[tuple[int, int], tuple[int, int]]:
    """Batch and length of the two sets of example calls of a model."""
    return WIDE_SHAPES if sum(parameter.numel() for parameter in model.parameters()) > WIDE else SHAPES


def uneven_shapes(model: nn.Module, tp_size: int) -> tuple[tuple[int, int], ...]:
    """The same, but such that the tokens of one set can't be dealt evenly to `tp_size` ranks, and there are more than ranks."""
    first, second = usual_shapes(model)
    batches = ((batch, second[1] + more) for more in range(64) for batch in (3, 2))
    return first, next((b, n) for b, n in batches if b * n > tp_size and (b * n) % tp_size)


def read_inputs(inputs: Any) -> list[Mapping[str, Any]]:
    """The calls that a caller's `inputs` stand for.

    Raises:
        PlanError: they are neither one call's keyword arguments nor a list of such.
    """
    calls = [inputs] if isinstance(inputs, Mapping) else inputs
    if not isinstance(calls, (list, tuple)) or not calls or not all(isinstance(call, Mapping) for call in calls):
        given = f"{type(inputs).__name__}{' of no calls' if isinstance(calls, (list, tuple)) and not calls else ''}"
        raise PlanError(f"inputs= is a {given}: pass a dict of keyword arguments of the model's forward, or a list of them")
    return list(calls)


def names_run(records: Sequence[Record]) -> set[str]:
    """Names of the modules that some call runs, and of those whose Parameters it uses without them."""
    sites = {key[0].rpartition(".")[0] for record in records for key in record.sites}
    return sites.union(*(record.module_calls for record in records))


def runs_like(shadow: Shadow, records: Sequence[Record]) -> bool:
    """Whether, of modules that differ in their numbers alone, the calls run all or none: no expert is left without a token."""
    ran = names_run(records)
    idle = {name.rpartition(".")[0] for name in shadow.parameters} - ran
    alike = {NUMBER.sub("*", name) for name in ran}
    return not any(NUMBER.sub("*", name) in alike for name in idle)


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
