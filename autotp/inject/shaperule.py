"""Finds calls that write a full width into a shape, and what each rank must write there, by comparing with the whole run.

A module runs whole once, and what goes into each call of a shape function is noted by call site and occurrence. On a rank, a
call whose input has another shape than in the note gets its target from the note, not from its arguments: the values of the
local tensor say which indices of the whole one it holds, and these, written over the output's axes, are a product of sets
whose sizes are the target. Where the code writes something else, that is a `ShapeFix`. An operand that stayed full beside a
local one is narrowed to the indices that the local one holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import torch
from torch import Tensor

from ..errors import PlanError
from ..index_runs import compress_indices
from .callsites import SECTION_WORDS, SHAPE_WORDS, CallSite, ShapeFix, edit_arguments, edit_sections, edit_shape, find_call_site
from .indices import axis_mask, find_held, shrunk_axis, target_shape
from .intercept import Interceptor

SHAPES = {"view", "reshape", "unflatten", "expand"}
SPLITS = {"split", "split_with_sizes", "chunk", "tensor_split"}
EXCHANGED = {"eager_attention_forward"}  # what the proof runs in the place of the attention that the config names
BATCHED = {"matmul", "bmm", "__matmul__", "__rmatmul__"}  # their last two axes are no batch

Place = tuple[str, CallSite]  # name of the module whose method makes the call, and where it stands
Response = Callable[..., Tensor]


@dataclass
class Noted:
    """A call in the whole run.

    Attributes:
        tensors: its tensors by position or keyword; attached: those of them that depend on something, with their graph.
        shapes: of what it returned.
        unproved: tensors that depend on something whose gradient was zero: where they are used, it can't be proved.
    """

    tensors: dict[int | str, Tensor]
    attached: dict[int | str, Tensor]
    shapes: list[torch.Size]
    unproved: set[int | str] = field(default_factory=set)


@dataclass
class Seen:
    """A call on one rank: what its code wrote and what it should, in numbers or as `(operand, dim, size)` -> indices."""

    kind: str
    written: tuple[int, ...] = ()
    target: tuple[int, ...] = ()
    narrowed: dict[tuple[str, int, int], tuple[int, ...]] = field(default_factory=dict)


class Watch(Interceptor):
    """An interceptor that knows a call by its place and by its number there; `call` handles the outermost torch function."""

    def __init__(self, shadow: Any, respond: Response) -> None:
        super().__init__(shadow, respond)
        self.names = {id(module): name for name, module in shadow.model.named_modules()}
        self.numbers: Counter[Place] = Counter()
        self.count, self.inside = 0, False

    def __torch_function__(self, func, types_, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.count += 1
        tensors = {} if self.inside else self._tensors_of(getattr(func, "__name__", ""), args, kwargs)
        site = find_call_site() if tensors else None
        if site is None or id(site.owner) not in self.names or site.code.co_name in EXCHANGED:
            return super().__torch_function__(func, types_, args, kwargs)
        place = (self.names[id(site.owner)], site)
        number = self.numbers[place]
        self.numbers[place] += 1
        parent = super().__torch_function__

        def run(args: tuple, kwargs: dict[str, Any]) -> Any:
            self.inside = True
            try:
                return parent(func, types_, args, kwargs)
            finally:
                self.inside = False

        return self.call(func.__name__, place, number, tensors, run, args, kwargs)

    def _tensors_of(self, name: str, args: tuple, kwargs: dict[str, Any]) -> dict[int | str, Tensor]:
        """The tensors of a call that may be of interest, by position or keyword."""
        tensors = {key: v for key, v in [*enumerate(args), *kwargs.items()] if isinstance(v, Tensor)}
        wanted = len(tensors) >= (1 if name in SHAPES or name in SPLITS else 2) and name not in ("__get__", "__set__")
        return tensors if wanted and not any(t.is_meta for t in tensors.values()) else {}

    def call(self, name: str, place: Place, number: int, tensors: dict, run: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What the call gives; `run` runs it."""
        raise NotImplementedError


class WholeRun(Watch):
    """Notes the calls of the whole module."""

    def __init__(self, shadow: Any, respond: Response) -> None:
        super().__init__(shadow, respond)
        self.notes: dict[tuple[Place, int], Noted] = {}

    def call(self, name: str, place: Place, number: int, tensors: dict, run: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        before = {key: tensor.detach().clone() for key, tensor in tensors.items()}  # some are written in place later
        made = run(args, kwargs)
        shapes = [t.shape for t in (made if isinstance(made, list | tuple) else [made]) if isinstance(t, Tensor)]
        attached = {key: tensor for key, tensor in tensors.items() if tensor.requires_grad}
        self.notes[place, number] = Noted(before, attached, shapes)
        return made

    def mark_unproved(self, dead: Sequence[Tensor]) -> None:
        """Mark operands that depend on one of `dead`, and let go of the graph."""
        for note in self.notes.values():
            for key, tensor in note.attached.items() if dead else ():
                grads = torch.autograd.grad(tensor.sum(), dead, retain_graph=True, allow_unused=True)
                if any(grad is not None for grad in grads):
                    note.unproved.add(key)
            note.attached = {}


class LocalRun(Watch):
    """Gives each call of one rank the sizes that follow from the notes, and keeps what was seen."""

    def __init__(self, shadow: Any, respond: Response, notes: Mapping[tuple[Place, int], Noted]) -> None:
        super().__init__(shadow, respond)
        self.notes = notes
        self.seen: dict[tuple[Place, int], Seen] = {}

    def call(self, name: str, place: Place, number: int, tensors: dict, run: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        note = self.notes.get((place, number))
        if note is None or list(note.tensors) != list(tensors):
            return run(args, kwargs)
        if name in SHAPES:
            seen, args, kwargs = write_shape(name, note, args, kwargs)
        elif name in SPLITS:
            seen, args, kwargs = write_sections(note, args, kwargs)
        else:
            seen, args, kwargs = narrow_operands(name, place[1], note, args, kwargs)
        if seen is not None:
            self.seen[place, number] = seen
        return run(args, kwargs)


# -- what a call should write ---------------------------------------------------------------------------------------------

Changed = tuple[Seen | None, tuple, dict[str, Any]]  # and the arguments to run with


def write_shape(name: str, note: Noted, args: tuple, kwargs: dict[str, Any]) -> Changed:
    """A view, reshape, expand or unflatten with the sizes that the local tensor should be given."""
    word = next((key for key in SHAPE_WORDS if key in kwargs), None)
    skip = int(name == "unflatten" and "dim" not in kwargs)
    start = skip + int(bool(args) and isinstance(args[0], Tensor))
    written = kwargs[word] if word else args[start] if isinstance(args[start], tuple | list) else args[start:]
    whole, made = next(iter(note.tensors.values())), note.shapes[0]
    local = args[0] if args and isinstance(args[0], Tensor) else kwargs.get("input", kwargs.get("self"))
    if isinstance(written, torch.dtype) or not isinstance(local, Tensor):
        return None, args, kwargs
    written = tuple(map(int, written))
    if name == "unflatten":
        dim = (args[1] if skip else kwargs["dim"]) % whole.dim()
        axes = range(dim, dim + len(written))
    else:
        axes = range(len(made))
    free = name == "expand" and local.shape == whole.shape  # to be as wide as what it meets: the code may know
    shape = None if free else target_shape(local, whole, made)
    if shape is None or len(axes) != len(written):
        return None, args, kwargs
    target = tuple(-1 if n == -1 else shape[axis] for n, axis in zip(written, axes, strict=True))
    seen = Seen("shape", written, target)
    edits = [(axis, 0, n) for axis, n in enumerate(target) if n not in (-1, written[axis])]
    if edits and word:
        kwargs = {**kwargs, word: edit_shape(kwargs[word], edits)}
    elif edits:
        args = edit_arguments(args, skip, edits)
    return seen, args, kwargs


def write_sections(note: Noted, args: tuple, kwargs: dict[str, Any]) -> Changed:
    """A split with the sizes of the local tensor's pieces."""
    whole, local = next(iter(note.tensors.values())), args[0] if args else None
    word = next((key for key in SECTION_WORDS if key in kwargs), None)
    dim = kwargs.get("dim", args[2 - bool(word)] if len(args) > 2 - bool(word) else 0)
    if not isinstance(local, Tensor) or not isinstance(dim, int):
        return None, args, kwargs
    held = find_held(local, whole)
    if held is None or (held and held[0] != dim % whole.dim()):
        return None, args, kwargs
    sizes = [shape[dim] for shape in note.shapes]
    mask = axis_mask(held[1], sum(sizes)) if held else torch.ones(sum(sizes), dtype=torch.bool)
    target = tuple(int(piece.sum()) for piece in mask.split(sizes))
    given = kwargs[word] if word else args[1]
    written = tuple(given) if isinstance(given, list | tuple) else _pieces(local.shape[dim], given, sizes)
    if written != target:
        rest = {key: value for key, value in kwargs.items() if key != word}
        return Seen("split", written, target), edit_sections(args, list(target), bool(word)), rest
    return Seen("split", target, target), args, kwargs


def _pieces(width: int, given: int, sizes: list[int]) -> tuple[int, ...]:
    """What a number of pieces, or a size of each, makes of `width`: told apart by what it made of the whole."""
    step = given if sizes[0] == given else -(-width // given)
    return tuple(min(step, width - start) for start in range(0, width, step)) if step > 0 else ()


def narrow_operands(name: str, site: CallSite, note: Noted, args: tuple, kwargs: dict[str, Any]) -> Changed:
    """An elementwise call (or the batch of a product) with only those parts of full operands that the local ones meet."""
    operands = {key: args[key] if isinstance(key, int) else kwargs[key] for key in note.tensors}
    last = -2 if name in BATCHED else 0
    if name not in BATCHED and not _is_elementwise(note):
        return None, args, kwargs
    seen = Seen("narrow")
    for smaller, local in operands.items():
        whole = note.tensors[smaller]
        axis = shrunk_axis(local, whole)
        if axis is None or axis - whole.dim() >= last:
            continue
        dim, size = axis - whole.dim(), whole.shape[axis]
        proved = {key: tensor for key, tensor in operands.items() if key not in note.unproved}
        full = [k for k, t in proved.items() if t.dim() >= -dim and t.shape == note.tensors[k].shape and t.shape[dim] == size]
        held = find_held(local, whole) if full else None
        for key in full if held else ():
            indices = torch.tensor(held[1])  # type: ignore[index]
            operands[key] = operands[key].index_select(dim, indices)
            seen.narrowed[site.operand(key) if isinstance(key, int) else key, dim, size] = held[1]  # type: ignore[index]
    if not seen.narrowed:
        return seen, args, kwargs
    args = tuple(operands.get(i, value) for i, value in enumerate(args))
    return seen, args, {key: operands.get(key, value) for key, value in kwargs.items()}


def _is_elementwise(note: Noted) -> bool:
    try:
        return note.shapes == [torch.broadcast_shapes(*(t.shape for t in note.tensors.values()))]
    except RuntimeError:
        return False


# -- fixes ----------------------------------------------------------------------------------------------------------------

Row = tuple[Seen, ...]  # one call, on each rank


def make_fixes(runs: Sequence[Sequence[Mapping[tuple[Place, int], Seen]]]) -> dict[str, tuple[ShapeFix, ...]]:
    """Module -> the fixes that do to its calls what was done in all runs: `runs[rank][number of reference]`.

    Raises:
        PlanError: no fix says it for all of a call's occurrences, shapes and ranks.
    """
    rows: dict[Place, list[Row]] = {}
    for by_rank in zip(*runs, strict=True):
        for place, number in dict.fromkeys(key for seen in by_rank for key in seen):
            row = tuple(seen[place, number] for seen in by_rank if (place, number) in seen)
            rows.setdefault(place, []).append(row)
    fixes: dict[str, tuple[ShapeFix, ...]] = {}
    for (owner, site), each in rows.items():
        if any(seen.written != seen.target or seen.narrowed for row in each for seen in row):
            if any(len(row) < len(runs) for row in each):
                raise _no_fix(site)
            make = {"shape": _fix_shape, "split": _fix_split, "narrow": _fix_narrow}[each[0][0].kind]
            fixes[owner] = (*fixes.get(owner, ()), *make(site, each))
    return fixes


def _no_fix(site: CallSite) -> PlanError:
    return PlanError(f"`{site.text()}` (line {site.span[0]} of {site.function}) would need several fixes at once")


def _fix_shape(site: CallSite, rows: list[Row]) -> Iterator[ShapeFix]:
    for axis in range(max(len(seen.written) for row in rows for seen in row)):
        pairs = set()  # what is written on each rank, and what should be
        for row in rows:
            if all(axis < len(seen.written) and seen.written[axis] != -1 for seen in row):
                pairs.add((tuple(seen.written[axis] for seen in row), tuple(seen.target[axis] for seen in row)))
        if all(written == target for written, target in pairs):
            continue
        targets = {target for _, target in pairs}
        scaled = _scale(pairs)
        if not scaled and len(targets) > 1:
            raise _no_fix(site)
        for full, sizes in scaled.items():
            yield site.fix("shape", sizes={axis: sizes}, full={axis: full})
        if not scaled:
            yield site.fix("shape", sizes={axis: targets.pop()})


def _scale(pairs: set[tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[int, tuple[int, ...]]:
    """`{full: sizes}` that turn multiples of `full` into those of `sizes`: one for all, or one for each number; {} if none do."""
    changed = {written[0]: target for written, target in pairs if written != target}
    kept = {written[0] for written, target in pairs if written == target}
    if any(len(set(written)) > 1 for written, _ in pairs) or len(changed) < sum(a != b for a, b in pairs):
        return {}
    full = gcd(*changed)
    scaled = {tuple(t * full // written for t in target) for written, target in changed.items()}
    exact = all(t * full % written == 0 for written, target in changed.items() for t in target)
    found = {full: scaled.pop()} if len(scaled) == 1 and exact else changed
    return {} if any(number % each == 0 for number in kept for each in found) else found


def _fix_split(site: CallSite, rows: list[Row]) -> Iterator[ShapeFix]:
    targets = {tuple(seen.target for seen in row) for row in rows}
    if len(targets) > 1:
        raise _no_fix(site)
    yield site.fix("split", sections=targets.pop())


def _fix_narrow(site: CallSite, rows: list[Row]) -> Iterator[ShapeFix]:
    found: dict[tuple[str, int], set[tuple[int, tuple[tuple[int, ...], ...]]]] = {}
    for row in rows:
        for operand, dim, size in row[0].narrowed:
            indices = tuple(seen.narrowed.get((operand, dim, size), ()) for seen in row)
            found.setdefault((operand, dim), set()).add((size, indices))
    for (operand, dim), ways in found.items():
        if len(ways) > 1:
            raise _no_fix(site)
        size, indices = ways.pop()
        runs = tuple(compress_indices(each) for each in indices)
        yield site.fix("narrow", operand=operand, dim=dim, size=size, runs=runs)
