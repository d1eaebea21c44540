"""Call sites that write a full width into a shape, rewritten in the forward's own source to write this rank's.

`q.view(B, S, heads, head_dim)` with a local variable `heads` fails on local widths, and there is no attribute to edit. The
call is found from inside a TorchFunctionMode, described as a `ShapeFix` (pure data), and rewritten in the syntax tree of the
function that holds it: `q.view(*fix(B, S, heads, head_dim))`. The function is compiled again under its own file name and
lines, with its own globals and cells, and lives in a subclass made for the one module: copies run their own self, and eager,
`torch.compile` and checkpointing all run plain code.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PlanError
from ..index_runs import Run, take_runs
from .recompile import rewrite_methods
from .source import Rewrite, find_node

Span = tuple[int, int, int, int]  # line, end line, column, end column (bytes) of a call in its file
SHAPE_WORDS = ("size", "shape", "sizes")
SECTION_WORDS = ("split_size", "split_size_or_sections", "split_sizes", "chunks", "sections", "indices", "indices_or_sections")
_OWN = tuple(str(Path(file).absolute()) + os.sep for file in (torch.__path__[0], Path(__file__).parents[1]))


@dataclass(frozen=True)
class CallSite:
    """Where a torch function was called from.

    Attributes:
        filename, first_line: of the function that makes the call; function: `module:qualified name` of it.
        span: of the call in the file; code: the running code object; scope: the globals it reads.
        owner: the module whose method is running; None outside any.
    """

    filename: str
    function: str
    first_line: int
    span: Span
    code: CodeType = field(repr=False, compare=False)
    scope: dict[str, Any] = field(repr=False, compare=False)
    owner: nn.Module | None = field(repr=False, compare=False, default=None)

    def text(self) -> str:
        """The call as written, on one line; empty where the source is not at hand."""
        node = find_node(self.filename, self.span)
        return "" if node is None else ast.unparse(node)

    def operand(self, position: int) -> str:
        """The name, for a fix that narrows, of the torch function's argument at `position`: the tensor of a method is 0."""
        node = find_node(self.filename, self.span)
        if not isinstance(node, ast.Call):
            return ("left", "right")[position]
        first = node.func
        while isinstance(first, ast.Attribute):
            first = first.value
        named = isinstance(first, ast.Name) and isinstance(self.scope.get(first.id), ModuleType)
        if named or isinstance(node.func, ast.Name):
            return str(position)
        return "left" if position == 0 else str(position - 1)

    def fix(self, kind: str, **how: Any) -> ShapeFix:
        """A fix of this call; `how` are the fields of ShapeFix that its kind reads."""
        return ShapeFix(self.function, self.span, kind, self.text(), **how)


@dataclass(frozen=True)
class ShapeFix:
    """What one call must do otherwise on each rank. Pure data.

    Attributes:
        function: `module:qualified name` of the function that holds the call; span: where in the file it stands.
        kind: `shape` (view, reshape, unflatten, expand, zeros, ...), `split` (also chunk and tensor_split), `narrow` (an
            operand is full where the others are local) or `argument` (a number handed to the call by name or position).
        text: the call as written, checked before it is rewritten; empty to skip the check.
        sizes: shape: axis of the written shape -> size on each rank; a written -1 stays. argument: the keyword, or the
            position as a string -> value on each rank.
        full: shape: axis -> what the code writes: multiples of it are scaled, `written // full * sizes[axis][rank]`
            (batch x heads), other numbers stay (keys with fewer heads in the same loop). Without it any number is replaced.
        sections: split: the sizes of the pieces on each rank.
        operand: narrow: `left` (or the tensor whose method is called), `right`, a position as a string, or a keyword.
        dim, size, runs: narrow: the runs of the operand's `dim` that each rank takes; only where it has `size` indices.
    """

    function: str
    span: Span
    kind: str
    text: str = ""
    sizes: dict[int | str, tuple[int, ...]] = field(default_factory=dict)
    full: dict[int, int] = field(default_factory=dict)
    sections: tuple[tuple[int, ...], ...] = ()
    operand: str = ""
    dim: int = 0
    size: int = 0
    runs: tuple[tuple[Run, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers; `from_json` gives an equal fix."""
        data = asdict(self)
        return data | {"sizes": list(data["sizes"].items()), "full": list(data["full"].items())}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ShapeFix:
        """The inverse of `to_json`."""
        fields: dict[str, Any] = {key: _tuples(value) for key, value in data.items()}
        return cls(**{**fields, "sizes": dict(fields["sizes"]), "full": dict(fields["full"])})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list | tuple) else value


def find_call_site(skip_prefixes: Sequence[str] = ()) -> CallSite | None:
    """The innermost call outside torch, autotp and files that start with `skip_prefixes`; to be used in a mode's handler.

    None where a torch module's own forward makes the call (nothing outside wrote the shape), or positions are not known.
    """
    skip = (*_OWN, *skip_prefixes, "<frozen", "<string>")
    frame = caller = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "__torch_function__":
        frame = frame.f_back
    frame = caller if frame is None or frame.f_back is None else frame.f_back
    while frame.f_code.co_filename.startswith(skip):
        if frame.f_code.co_name == "_call_impl" or frame.f_back is None:
            return None
        frame = frame.f_back
    code = frame.f_code
    line, end_line, column, end_column = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None))
    if line is None or end_line is None or column is None or end_column is None:
        return None
    function = f"{frame.f_globals.get('__name__', '')}:{code.co_qualname}"
    span = (line, end_line, column, end_column)
    return CallSite(code.co_filename, function, code.co_firstlineno, span, code, frame.f_globals, _owner(frame))


def _owner(frame: Any) -> nn.Module | None:
    """The module of the innermost running method, else of the running forward; a helper may be handed another module."""
    outermost = None
    while frame is not None and frame.f_code.co_name != "_call_impl":
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(first, nn.Module):
            outermost = first
            if any(code.co_qualname.startswith(f"{base.__qualname__}.") for base in type(first).__mro__):
                break
        frame = frame.f_back
    return outermost


def apply_fixes(module: nn.Module, fixes: Sequence[ShapeFix], rank: int, name: str = "") -> Callable[..., Any]:
    """Rewrite the calls of `fixes` for `rank` in `module`, and in nothing else, and return its new bound forward.

    Its class becomes a subclass of the same name, with the methods that hold a call or lead to one; `plain_class` there is
    the class it had. All fixes of a module are to be handed over together.

    Raises:
        PlanError: a call is not found, or no path of plain Python functions leads from the module's methods to it.
    """
    name, cls = name or module.__dict__.get("full_name") or type(module).__name__, type(module)
    if "forward" in module.__dict__ or any("call_site_fixes" in base.__dict__ for base in cls.__mro__):
        raise PlanError(f"{name}: its forward was replaced already, so its source is not what runs. Undo that first.")
    if not fixes:
        return module.forward
    try:
        module.__class__ = _fixed_class(cls, json.dumps([fix.to_json() for fix in fixes]), rank)
    except PlanError as error:
        raise PlanError(f"{name}: {error}") from None
    return module.forward


@functools.lru_cache(maxsize=256)
def _fixed_class(cls: type, fixes_json: str, rank: int) -> type:
    """One class for all modules alike, so that what is compiled for one layer serves the next."""
    fixes = tuple(ShapeFix.from_json(data) for data in json.loads(fixes_json))
    grouped: dict[tuple[str, Span], list[ShapeFix]] = {}
    for fix in fixes:
        grouped.setdefault((fix.function, fix.span), []).append(fix)
    methods = rewrite_methods(cls, [_rewrite_of(group, rank) for group in grouped.values()])
    added = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "plain_class": cls}
    return type(cls.__name__, (cls,), {**added, "call_site_fixes": fixes, **methods})


def remove_fixes(module: nn.Module) -> None:
    """Give `module` the class that it had before `apply_fixes`; nothing where it has no fixes.

    Raises:
        PlanError: another class was put in front of the rewritten one since.
    """
    cls = type(module)
    if "call_site_fixes" in cls.__dict__:
        module.__class__ = cls.__dict__["plain_class"]
    elif any("call_site_fixes" in base.__dict__ for base in cls.__mro__):
        raise PlanError(f"{cls.__name__}: a class was put in front of its rewritten forward. Undo that first.")


# -- the rewritten calls: what each becomes, and the small functions they run -------------------------------------------


def _rewrite_of(fixes: list[ShapeFix], rank: int) -> Rewrite:
    """One call's change: several fixes of one call must be of the kinds that add up."""
    first = fixes[0]
    make = {"shape": _fix_shape, "split": _fix_split, "narrow": _fix_narrow, "argument": _fix_argument}.get(first.kind)
    alike = all(fix.kind == first.kind and (first.kind != "split" or fix == first) for fix in fixes)
    if make is None or not alike:
        kinds = sorted({fix.kind for fix in fixes})
        raise PlanError(f"`{first.text}` (line {first.span[0]}) can't have the fixes {kinds} together. Leave it whole.")
    return Rewrite(first.function, first.span, first.text, lambda node, give: make(node, give, fixes, rank))


def _apply(helper: ast.expr, value: ast.expr) -> ast.Call:
    return ast.copy_location(ast.Call(helper, [value], []), value)


def _through(helper: ast.expr, node: ast.Call) -> None:
    """`f(a, b)` -> `f(*helper(a, b))`."""
    inner = ast.copy_location(ast.Call(helper, node.args, []), node)
    node.args = [ast.copy_location(ast.Starred(inner, ast.Load()), node)]


def _fix_shape(node: Any, give: Callable[[Any], ast.expr], fixes: list[ShapeFix], rank: int) -> bool:
    if not isinstance(node, ast.Call):
        return False
    edits = [(int(axis), fix.full.get(int(axis), 0), sizes[rank]) for fix in fixes for axis, sizes in fix.sizes.items()]
    edits.sort(key=lambda edit: -edit[1])
    words = [keyword for keyword in node.keywords if keyword.arg in SHAPE_WORDS]
    for keyword in words:
        keyword.value = _apply(give(lambda shape: edit_shape(shape, edits)), keyword.value)
    if not words:
        skip = int(_called(node) == "unflatten" and not any(k.arg == "dim" for k in node.keywords))
        _through(give(lambda *args: edit_arguments(args, skip, edits)), node)
    return True


def edit_arguments(args: tuple[Any, ...], skip: int, edits: Sequence[tuple[int, int, int]]) -> tuple[Any, ...]:
    """The arguments of a call whose shape comes after a tensor (if any) and `skip` others, as one sequence or spelt out."""
    start = skip + int(len(args) > 0 and isinstance(args[0], Tensor))
    if len(args) > start and isinstance(args[start], tuple | list):
        return (*args[:start], edit_shape(args[start], edits), *args[start + 1 :])
    return (*args[:start], *edit_shape(args[start:], edits))


def edit_shape(shape: Sequence[Any], edits: Sequence[tuple[int, int, int]]) -> tuple[Any, ...]:
    """`shape` with the sizes of `edits`: `(axis, full, local)`, the largest `full` first; 0 replaces any number but -1."""
    result, written = list(shape), list(shape)
    for axis, full, local in edits:
        if not -len(result) <= axis < len(result):  # another form of the call
            continue
        if written[axis] != -1 and (full == 0 or written[axis] % full == 0):
            result[axis] = local if full == 0 else written[axis] // full * local
            written[axis] = -1  # an axis is edited once
    return tuple(result)


def _fix_split(node: Any, give: Callable[[Any], ast.expr], fixes: list[ShapeFix], rank: int) -> bool:
    if not isinstance(node, ast.Call):
        return False
    sections = list(fixes[0].sections[rank])
    words = [keyword for keyword in node.keywords if keyword.arg in SECTION_WORDS]
    node.keywords = [keyword for keyword in node.keywords if keyword not in words]
    if isinstance(node.func, ast.Attribute):
        node.func.attr = "split"  # chunk can't say uneven pieces
    else:
        node.func = ast.copy_location(give(torch.split), node.func)
    _through(give(lambda *args: edit_sections(args, sections, bool(words))), node)
    return True


def edit_sections(args: tuple[Any, ...], sections: list[int], named: bool) -> tuple[Any, ...]:
    """The arguments of a split with `sections` in the place of the number, which was given by name or after the tensor."""
    start = int(len(args) > 0 and isinstance(args[0], Tensor))
    return (*args[:start], sections, *args[start + (not named) :])


def _fix_narrow(node: Any, give: Callable[[Any], ast.expr], fixes: list[ShapeFix], rank: int) -> bool:
    for fix in fixes:
        dim, size, runs = fix.dim, fix.size, fix.runs[rank]
        helper = give(lambda value, dim=dim, size=size, runs=runs: narrow_operand(value, dim, size, runs))
        if not _wrap_operand(node, fix.operand, lambda value, helper=helper: _apply(helper, value)):
            return False
    return True


def narrow_operand(value: Any, dim: int, size: int, runs: Sequence[Run]) -> Any:
    """`value` with only `runs` along `dim`, where it has `size` indices there; a local or broadcast one stays."""
    if not isinstance(value, Tensor) or not -value.dim() <= dim < value.dim() or value.shape[dim] != size:
        return value
    return take_runs(value, dim % value.dim(), runs)


def _wrap_operand(node: Any, operand: str, wrap: Callable[[ast.expr], ast.expr]) -> bool:
    """Replace the operand of an expression by what `wrap` makes of it; False where there is no such operand."""
    if isinstance(node, ast.Call):
        if operand == "left" and isinstance(node.func, ast.Attribute):
            node.func.value = wrap(node.func.value)
            return True
        position = 0 if operand == "right" else int(operand) if operand.isdigit() else -1
        if 0 <= position < len(node.args) and not any(isinstance(a, ast.Starred) for a in node.args[: position + 1]):
            node.args[position] = wrap(node.args[position])
            return True
        for keyword in node.keywords:
            if keyword.arg == operand:
                keyword.value = wrap(keyword.value)
                return True
        return False
    if isinstance(node, ast.BinOp) and operand in ("left", "right"):
        setattr(node, operand, wrap(getattr(node, operand)))
    elif isinstance(node, ast.AugAssign) and operand == "right":
        node.value = wrap(node.value)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and operand == "left":
        node.left = wrap(node.left)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and operand == "right":
        node.comparators = [wrap(node.comparators[0])]
    else:
        return False
    return True


def _fix_argument(node: Any, give: Callable[[Any], ast.expr], fixes: list[ShapeFix], rank: int) -> bool:
    for fix in fixes:
        for operand, sizes in fix.sizes.items():
            value = sizes[rank]
            if not _wrap_operand(node, str(operand), lambda old, value=value: ast.copy_location(ast.Constant(value), old)):
                return False
    return isinstance(node, ast.Call)


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
