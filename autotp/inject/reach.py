"""Which functions a model's methods lead to: those that they call by a name, by `super()` or through a decorator."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from .source import Rewrite, index_functions

MOST_FUNCTIONS = 500  # how many functions are looked through for the ones to be rewritten


@dataclass
class Found:
    """A function within reach of a module's methods.

    Attributes:
        cells: free variable -> the function it holds; names: id of a Name or Attribute node -> the function it means.
        rewrites: the expressions to change in it, and their nodes; node: its syntax tree, which other functions share; None
            where the function is only passed through.
        cls: name of the class whose body it stands in, for private names; new: cell that holds the rewritten function.
    """

    function: Any
    node: ast.AST | None = None
    cls: str | None = None
    cells: dict[str, FunctionType] = field(default_factory=dict)
    names: dict[int, FunctionType] = field(default_factory=dict)
    supers: set[int] = field(default_factory=set)
    rewrites: list[tuple[Rewrite, ast.AST]] = field(default_factory=list)
    new: CellType = field(default_factory=CellType)

    def callees(self) -> Iterator[FunctionType]:
        yield from self.cells.values()
        yield from self.names.values()


@dataclass(frozen=True)
class NamedCall:
    """A call of a Python function by a global name: who makes it and where, what is called, and its syntax tree."""

    function: str
    span: tuple[int, int, int, int]
    text: str
    callee: FunctionType
    node: ast.Call


def find_functions(cls: type) -> list[Found]:
    """The forward of `cls` and the functions near it that it calls by name, whose source is at hand."""
    forward = next((base.__dict__["forward"] for base in cls.__mro__ if "forward" in base.__dict__), None)
    packages = {base.__module__.split(".")[0] for base in cls.__mro__} - {"torch", "builtins"}
    reached = explore(cls, [forward], packages, near_to(cls)) if isinstance(forward, FunctionType) else {}
    return [found for found in reached.values() if found.node is not None]


def find_calls(cls: type) -> Iterator[NamedCall]:
    """The calls of Python functions by a global name in the forward of `cls` and in what it calls near it."""
    for found in find_functions(cls):
        for node in ast.walk(found.node or ast.Pass()):
            if isinstance(node, ast.Call) and isinstance(callee := found.names.get(id(node.func)), FunctionType):
                yield NamedCall(*place_of(found.function, node), ast.unparse(node), callee, node)


def place_of(function: FunctionType, node: ast.expr) -> tuple[str, tuple[int, int, int, int]]:
    """How a Rewrite names the function, and the span of the expression in it."""
    label = f"{function.__globals__.get('__name__')}:{function.__code__.co_qualname}"
    return label, (node.lineno, node.end_lineno or 0, node.col_offset, node.end_col_offset or 0)


def near_to(cls: type) -> Callable[[str], bool]:
    """Whether a module's code can be a part of the model: it holds one of the class's bases, or lies in the package of `cls`.

    What such code calls elsewhere (masks, wrappers, logging) does not call it back by a name, and is much to read.
    """
    modules, package = {base.__module__ for base in cls.__mro__}, cls.__module__.rpartition(".")[0]
    return lambda module: module in modules or (package != "" and module.rpartition(".")[0] == package)


def explore(cls: type, roots: list[FunctionType], packages: set[str], look: Callable[[str], bool] | None) -> dict[int, Found]:
    """Every function within reach of `roots`: by name in `packages`, if `look` lets it; elsewhere through a wrapper's cells."""
    reached: dict[int, Found] = {}
    todo = list(roots)
    while todo and len(reached) < MOST_FUNCTIONS:
        function = todo.pop(0)
        if id(function) in reached:
            continue
        found = reached[id(function)] = Found(function)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            if isinstance(value := _contents(cell), FunctionType):
                found.cells[name] = value
        module = str(function.__globals__.get("__name__"))
        if module.split(".")[0] in packages and (look is None or look(module)):
            code = function.__code__
            place = index_functions(code.co_filename).get((code.co_firstlineno, code.co_name))
            if place is not None:
                found.node, found.cls = place
                _resolve_names(found, cls, packages)
        todo.extend(found.callees())
    return reached


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty still
        return None


def codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def _resolve_names(found: Found, cls: type, packages: set[str]) -> None:
    """Note which Name and Attribute nodes of the function mean a Python function of `packages`."""
    assert found.node is not None
    codes = list(codes_in(found.function.__code__))
    local = {name for code in codes for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars)}
    for node in ast.walk(found.node):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            value = _look_up(node, found.function, local)
            if value is None and isinstance(node, ast.Attribute):
                value = _look_up_super(node, found.function, cls, local)
                if isinstance(value, FunctionType):
                    found.supers.add(id(node))
            if isinstance(value, FunctionType) and str(value.__globals__.get("__name__")).split(".")[0] in packages:
                found.names[id(node)] = value


def _look_up(node: ast.AST, function: FunctionType, local: set[str]) -> Any:
    """What a global name, or an attribute of a global module or class, means."""
    if isinstance(node, ast.Name):
        return None if node.id in local else function.__globals__.get(node.id)
    if isinstance(node, ast.Attribute):
        base = _look_up(node.value, function, local)
        if isinstance(base, ModuleType | type):
            value = inspect.getattr_static(base, node.attr, None)
            return value.__func__ if isinstance(value, staticmethod) else value
    return None


def _look_up_super(node: ast.Attribute, function: FunctionType, cls: type, local: set[str]) -> Any:
    """What `super().attr`, or `super(Class, self).attr`, means in `function`, for an instance of `cls`."""
    call = node.value
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "super"):
        return None
    if call.args:
        owner = _look_up(call.args[0], function, local)
    else:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        owner = _contents(cells["__class__"]) if "__class__" in cells else None
    if owner not in cls.__mro__:
        return None
    after = cls.__mro__[cls.__mro__.index(owner) + 1 :]
    return next((base.__dict__[node.attr] for base in after if node.attr in base.__dict__), None)
