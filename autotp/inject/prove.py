"""Proves a plan before a weight is touched: all ranks run in one process, as threads, on stand-ins for the weights.

What runs is the rewritten model itself, with its real layers and real collectives between the threads. Only the sites are
answered from the record of the whole model: a column site returns its rank's columns, a row site a part of the whole
output, and each site's input is compared with what the whole model saw there. Backward goes the same way from random
cotangents: complete ones at whole sites, a rank's columns at row sites, parts that add up at column sites. Then every
gradient must be that of the whole model: one reduction too few, or too many, is a number that does not fit.
"""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import TPGroup
from ..errors import ProofError
from ..shard import Shard
from .intercept import Interceptor, flatten, keep_state, running
from .plan import ATTENTION_STYLES, ModulePlan, Plan
from .record import Call, Record, Site, add_terms
from .shadow import Shadow, copy_model
from .sites import Operands
from .threads import SoloGroup, ThreadGroup, ThreadRanks

NOISE = 1e-14  # what is left of a gradient that is zero but for rounding
TOLERANCE = 1e-7  # of the largest number of a tensor, in float64; a wrong column is off by about 1


def cut_shadow(shadow: Shadow, shards: dict[str, Shard], rank: int) -> Shadow:
    """A copy of `shadow` that holds `rank`'s slices; numbers are shared where nothing is cut."""
    memo: dict[int, Any] = {}
    for name, parameter in shadow.model.named_parameters(remove_duplicate=False):
        source = shadow.leaf(name) if name in shadow.parameters else parameter
        value = source.detach()
        if name in shards:
            value = shards[name].split(value, rank).clone()
        memo.setdefault(id(parameter), nn.Parameter(value, parameter.requires_grad))
    for name, buffer in shadow.model.named_buffers():
        value = buffer.detach()
        memo.setdefault(id(buffer), shards[name].split(value, rank).clone() if name in shards else value.clone())
    made = copy.copy(shadow)
    made.model = copy_model(shadow.model, memo)
    made.real, made.generator = {}, torch.Generator().manual_seed(0)
    made.index()
    return made


@dataclass
class Reference:
    """The whole model's run of one call: its record, random cotangents, and the gradients they give."""

    call: dict[str, Any]
    record: Record
    site_grads: list[Tensor | None]
    output_grads: list[Tensor]
    y_grads: Sequence[Tensor | None]
    parameter_grads: Mapping[str, Tensor | None]
    input_grads: Mapping[str, Tensor | None]
    by_parameter: dict[str, list[int]] = field(default_factory=dict)

    def entry(self, index: int) -> tuple[Site, Call]:
        key, number = self.record.order[index]
        return self.record.sites[key], self.record.sites[key].calls[number]


def make_reference(shadow: Shadow, call: dict[str, Any], record: Record, seed: int = 0) -> Reference:
    """Pull random cotangents of every site's input and of the outputs back through the whole model's cut graph."""
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64)

    calls = [record.sites[key].calls[number] for key, number in record.order]
    site_grads = [draw(c.x) if c.x.requires_grad else None for c in calls]
    output_grads = [draw(t) for t in record.outputs]
    targets = [(c.x, g) for c, g in zip(calls, site_grads, strict=True) if g is not None]
    targets += [(t, g) for t, g in zip(record.outputs, output_grads, strict=True) if t.requires_grad]
    names = [n for n in shadow.parameters if not shadow.leaf(n).is_meta and shadow.leaf(n).requires_grad]
    inputs = {k: v for c in record.module_calls.get("", []) for k, v in c.constants.items() if k in call}
    at = [c.y for c in calls] + [shadow.leaf(n) for n in names] + list(inputs.values())
    tensors, cotangents = zip(*targets, strict=True)
    grads = iter(torch.autograd.grad(tensors, at, cotangents, retain_graph=True, allow_unused=True))
    y_grads = [next(grads) for _ in calls]
    named, given = ({n: next(grads) for n in keys} for keys in (names, inputs))
    made = Reference(call, record, site_grads, output_grads, y_grads, named, given)
    for index, (key, _) in enumerate(record.order):
        made.by_parameter.setdefault(key[0], []).append(index)
    return made


class RankRun:
    """One rank's run of one call against a reference."""

    def __init__(
        self,
        reference: Reference,
        shadow: Shadow,
        shards: dict[str, Shard],
        rank: int,
        parts: Sequence[float],
        values: bool = True,
    ) -> None:
        """`values=False` compares shapes alone, where a norm over all ranks can't be right on one."""
        self.reference, self.shadow, self.shards, self.rank, self.values = reference, shadow, shards, rank, values
        self.part = parts[rank]
        self.seen: dict[str, int] = defaultdict(int)
        self.leaves: list[tuple[int, Tensor]] = []
        self.targets: list[tuple[Tensor, Tensor]] = []
        self.inputs = {k: reference.call[k].detach().double().requires_grad_() for k in reference.input_grads}
        self.input_grads: Mapping[str, Tensor | None] = {}

    def arguments(self) -> dict[str, Any]:
        """The call, its floating tensors such that a gradient reaches them; copies, as the forward may write into them."""
        return self.reference.call | {name: leaf.clone() for name, leaf in self.inputs.items()}

    def respond(self, op: Operands, name: str, func: Any, args: tuple, kwargs: dict) -> Tensor:
        """What a site returns on this rank, its input checked."""
        order = self.reference.by_parameter.get(name, [])
        if self.seen[name] >= len(order):
            raise ProofError(f"{name}: rank {self.rank} calls it more often than the whole model does")
        index = order[self.seen[name]]
        self.seen[name] += 1
        site, call = self.reference.entry(index)
        cotangent = self.reference.site_grads[index]
        rows, cols = self.role(site)
        x, expected = op.x, call.x
        if rows is not None:
            expected, cotangent = (
                take(expected, call.x_axes, rows, site, call.x_start),
                (None if cotangent is None else take(cotangent, call.x_axes, rows, site, call.x_start)),
            )
        known = self.values and not self.looks_up(site)  # a rank counts ids from its own first row
        compare(x, expected if known or x.shape != expected.shape else x, f"{name}: the input", self.rank)
        if cotangent is not None and x.requires_grad:
            self.targets.append((x, cotangent * self.part if cols is not None else cotangent))
        value = call.y.detach()
        if cols is not None:
            value = take(value, call.y_axes, cols, site, call.y_start)
        leaf = value.clone().requires_grad_()
        self.leaves.append((index, leaf))
        mix = self.check_weight(op, site, call, rows, cols)
        return add_terms(leaf * self.part if rows is not None else leaf.clone(), op, self.shadow, mix)

    def check_weight(self, op: Operands, site: Site, call: Call, rows: Any, cols: Any) -> Tensor | None:
        """Compare a weight that this rank computed with its part of the whole one; that part of the coefficients of the whole."""
        if (call.op is None) != (self.shadow.find(op.weight) is not None):
            raise ProofError(f"{site.parameter}: rank {self.rank} does not compute its weight as the whole model does")
        if call.op is None or call.mix is None:
            return None
        expected, mix = call.op.weight, call.mix
        if rows is not None:
            expected, mix = (take(t, call.op.w_in, rows, site, call.x_start) for t in (expected, mix))
        if cols is not None:
            expected, mix = (take(t, call.op.w_out, cols, site, call.y_start) for t in (expected, mix))
        same = op.weight.shape == expected.shape and not self.values
        compare(op.weight, op.weight if same else expected, f"{site.parameter}: the weight computed from it", self.rank)
        return mix

    def role(self, site: Site) -> tuple[Any, Any]:
        """`(dim, indices)` of a cut of the site's input columns, and of its output columns, for this rank."""
        shard = self.shards.get(site.parameter)
        rows = cols = None
        for cut in shard.cuts if shard else ():
            if cut.dim in site.in_dims:
                rows = (site.in_dims, cut.dim, cut.indices(self.rank))
            elif cut.dim in site.out_dims:
                cols = (site.out_dims, cut.dim, cut.indices(self.rank))
            elif not self.looks_up(site):
                raise ProofError(f"{site.parameter}: dim {cut.dim} is cut, which is neither its inputs nor its outputs")
        return rows, cols

    def looks_up(self, site: Site) -> bool:
        """Whether a site finds the rows of some ids in this rank's part of a vocabulary, to be summed with the others' finds."""
        shard = self.shards.get(site.parameter)
        return site.kind == "embedding" and shard is not None and any(cut.dim not in site.out_dims for cut in shard.cuts)

    def finish(self, outputs: Sequence[Tensor]) -> tuple[Sequence[Tensor | None], Mapping[str, Tensor | None]]:
        """Compare the outputs, then pull the cotangents back: gradients at the sites' outputs and at the Parameters."""
        expected = self.reference.record.outputs
        if len(outputs) != len(expected):
            raise ProofError(f"rank {self.rank} returns {len(outputs)} floating tensors, the whole model {len(expected)}")
        for i, (value, whole) in enumerate(zip(outputs, expected, strict=True)):
            compare(value, whole, f"output {i} of the model", self.rank)
        for name, order in self.reference.by_parameter.items():
            if self.seen[name] != len(order):
                raise ProofError(f"{name}: rank {self.rank} calls it {self.seen[name]} times, the whole model {len(order)} times")
        targets = self.targets + [(t, g) for t, g in zip(outputs, self.reference.output_grads, strict=True) if t.requires_grad]
        names = [n for n in self.shadow.parameters if not self.shadow.leaf(n).is_meta and self.shadow.leaf(n).requires_grad]
        at = [leaf for _, leaf in self.leaves] + [self.shadow.leaf(n) for n in names] + list(self.inputs.values())
        tensors, cotangents = zip(*targets, strict=True)
        grads = iter(torch.autograd.grad(tensors, at, cotangents, allow_unused=True))
        y_grads = [next(grads) for _ in self.leaves]
        named = {n: next(grads) for n in names}
        self.input_grads = {n: next(grads) for n in self.inputs}
        return y_grads, named


def take(tensor: Tensor, axes: Sequence[int], role: tuple, site: Site, start: int) -> Tensor:
    """The part of `tensor` along a site's column `axes` that a cut of one of the Parameter's dims leaves."""
    dims, cut_dim, indices = role
    sizes = [site.shape[d] for d in dims]
    place = dims.index(cut_dim)
    if len(axes) == len(dims):
        own = indices - (start // _size(sizes[1:]) if place == 0 else 0)
        own = own[(own >= 0) & (own < tensor.shape[axes[place]])]
        return tensor.index_select(axes[place], own)
    mask = torch.zeros(sizes, dtype=torch.bool)
    mask.index_fill_(place, indices, True)
    own = mask.flatten().nonzero().flatten() - start
    own = own[(own >= 0) & (own < tensor.shape[axes[0]])]
    return tensor.index_select(axes[0], own)


def _size(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def compare(value: Tensor, expected: Tensor, what: str, rank: int | None = None) -> None:
    """Raise unless `value` has the shape of `expected` and equals it to rounding.

    Raises:
        ProofError: naming `what`, the rank and the numbers.
    """
    where = f"{what} on rank {rank}" if rank is not None else what
    if value.shape != expected.shape:
        raise ProofError(f"{where} has shape {list(value.shape)}, not {list(expected.shape)}")
    if value.numel() == 0 or value is expected:
        return
    if not value.is_floating_point():
        if not torch.equal(value, expected):
            raise ProofError(f"{where} differs")
        return
    value, expected = value.detach(), expected.detach()
    scale = float(expected.abs().nan_to_num(0, 0, 0).max()) or 1.0
    difference = (value - expected).abs()
    same = (value == expected) | (value.isnan() & expected.isnan())
    error = float(difference.masked_fill(same, 0).max())
    if not error <= max(TOLERANCE * scale, NOISE):
        raise ProofError(f"{where} is off by {error / scale:.2g} of its scale")


Rewrite = Callable[[nn.Module, Plan, TPGroup], None]


def prove(shadow: Shadow, plan: Plan, references: Sequence[Reference], rewrite: Rewrite) -> None:
    """Run every rank of `plan` on every reference, forward and backward.

    Args:
        rewrite: swaps the modules' forwards, given model, plan and group.

    Raises:
        ProofError: naming the first site, tensor or parameter that differs, on which rank and by how much.
    """
    inner = leave_out(plan, lambda module: module.style in ATTENTION_STYLES)  # torch's own attention has a rule of its own
    locals_ = [cut_shadow(shadow, inner.shards, rank) for rank in range(plan.tp_size)]
    threads = ThreadRanks(plan.tp_size)
    for rank, local in enumerate(locals_):
        rewrite(local.model, inner, ThreadGroup(threads, rank))
    for reference in references:
        threads.barrier.reset()
        results = _run_ranks(reference, locals_, inner, threads)
        _check_gradients(reference, inner, results)


def try_rewrite(shadow: Shadow, plan: Plan, rewrite: Rewrite) -> None:
    """Rewrite a copy of the first and of the last rank's part, so that what a module refuses is known before any is changed.

    Raises:
        PlanError: a module is not what its plan needs.
    """
    for rank in sorted({0, plan.tp_size - 1}):
        rewrite(cut_shadow(shadow, plan.shards, rank).model, plan, SoloGroup(rank, plan.tp_size))


def leave_out(plan: Plan, which: Callable[[ModulePlan], bool]) -> Plan:
    """The plan less some modules, and less the regions whose rows they are."""
    modules = tuple(m for m in plan.modules if not which(m))
    kept = {m.name for m in modules}
    regions = tuple(r for r in plan.regions if set(r.rows) <= kept)
    return replace(plan, modules=modules, regions=regions, head=plan.head if plan.head in kept else None)


def make_parts(size: int) -> list[float]:
    """Unequal weights of the ranks that add up to 1, none of them 0."""
    weights = [1.0 + 0.37 * rank for rank in range(size)]
    return [w / sum(weights) for w in weights]


def _run_ranks(reference: Reference, locals_: list[Shadow], plan: Plan, threads: ThreadRanks) -> list[Any]:
    parts = make_parts(len(locals_))
    results: list[Any] = [None] * len(locals_)
    errors: list[BaseException | None] = [None] * len(locals_)

    def work(rank: int) -> None:
        run = RankRun(reference, locals_[rank], plan.shards, rank, parts)
        try:
            with torch.enable_grad():
                with keep_state(locals_[rank].model), Interceptor(locals_[rank], run.respond):
                    output = locals_[rank].model(**run.arguments())
                outputs = [t for t in flatten(output) if t.is_floating_point()]
                results[rank] = (run, *run.finish(outputs))
        except BaseException as error:
            errors[rank] = error
            threads.barrier.abort()

    with running():
        workers = [threading.Thread(target=work, args=(rank,)) for rank in range(len(locals_))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    real = [e for e in errors if e is not None and not isinstance(e, threading.BrokenBarrierError)]
    if real or any(errors):
        error = real[0] if real else ProofError("the ranks do not meet in the same collectives")
        if isinstance(error, ProofError):
            raise error
        raise ProofError(
            f"the sharded forward fails: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    return results


def _check_gradients(reference: Reference, plan: Plan, results: list[Any]) -> None:
    for place in range(len(reference.record.order)):
        index = results[0][0].leaves[place][0]
        site, call = reference.entry(index)
        expected = reference.y_grads[index]
        _check_site(reference, plan, site, call, expected, place, results)
    for name, expected in reference.parameter_grads.items():
        for run, _, grads in results:
            grad = grads.get(name)
            if expected is None and grad is None:
                continue
            like = grad if expected is None else expected
            full = torch.zeros_like(like) if expected is None else expected
            if name in plan.shards and expected is not None:
                full = plan.shards[name].split(expected, run.rank)
            grad = torch.zeros_like(full) if grad is None else grad
            compare_gradient(grad, full, f"the gradient of {name}", run.rank)
    for name, expected in reference.input_grads.items():
        for run, _, _ in results:
            zero = torch.zeros_like(run.inputs[name])
            got, full = (zero if grad is None else grad for grad in (run.input_grads[name], expected))
            compare_gradient(got, full, f"the gradient of the input {name}", run.rank)


def _check_site(reference, plan: Plan, site: Site, call: Call, expected: Tensor | None, place: int, results: list[Any]) -> None:
    """Gradients at one site's output: complete on every rank, or adding up over the holders of each column."""
    total = torch.zeros_like(call.y)
    for run, grads, _ in results:
        grad = grads[place]
        rows, cols = run.role(site)
        if cols is not None:
            if grad is not None:
                _add_columns(total, grad, call, cols, site)
            continue
        grad = torch.zeros_like(call.y) if grad is None else grad
        if run.looks_up(site):
            total += grad
            continue
        full = torch.zeros_like(call.y) if expected is None else expected
        compare_gradient(
            grad / run.part if rows is not None else grad, full, f"{site.parameter}: the gradient at its output", run.rank
        )
    if cols is not None or run.looks_up(site):
        full = torch.zeros_like(call.y) if expected is None else expected
        compare_gradient(total, full, f"{site.parameter}: the gradient at its output, summed over ranks", None)


def compare_gradient(value: Tensor, expected: Tensor, what: str, rank: int | None) -> None:
    """As `compare`, with a gradient that is zero but for rounding taken as zero."""
    if float(expected.abs().max() if expected.numel() else 0) < 1e-9 and float(value.abs().max() if value.numel() else 0) < 1e-9:
        return
    compare(value, expected, what, rank)


def _add_columns(total: Tensor, grad: Tensor, call: Call, role: tuple, site: Site) -> None:
    dims, cut_dim, indices = role
    place = torch.arange(total.numel()).view(total.shape)
    local = take(place, call.y_axes, (dims, cut_dim, indices), site, call.y_start)
    total.view(-1).index_add_(0, local.reshape(-1), grad.reshape(-1))
