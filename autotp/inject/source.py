"""Finds functions and expressions in source files, and compiles a module's methods again with some expressions changed."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from ..errors import PlanError

FLAGS = annotations.compiler_flag  # the one future that changes how a function is compiled
EXPRESSIONS = (ast.Call, ast.BinOp, ast.AugAssign, ast.Compare)  # what a Rewrite can change
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # of statements, and of what holds further ones
MOST_FUNCTIONS = 500  # how many functions are looked through for the ones to be rewritten


@dataclass(frozen=True)
class Rewrite:
    """One expression to be changed.

    Attributes:
        function: `module:qualified name` of the code that holds it; span: line, end line, column, end column.
        text: the expression as written; empty to skip that check.
        change: given the node, and a function that turns an object into a name for it, edits the node in place; False
            where the node is not of a form that it can change.
    """

    function: str
    span: tuple[int, int, int, int]
    text: str
    change: Callable[[ast.AST, Callable[[Any], ast.expr]], bool]


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


@functools.lru_cache(maxsize=64)
def parse_file(filename: str) -> ast.Module:
    """The syntax tree of a file; empty where its source is not at hand."""
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return ast.Module([], [])


@functools.lru_cache(maxsize=64)
def index_functions(filename: str) -> dict[tuple[int, str], tuple[ast.AST, str | None]]:
    """The definitions of a file by first line and name, each with the name of the class whose body it stands in."""
    index: dict[tuple[int, str], tuple[ast.AST, str | None]] = {}
    todo: list[tuple[Any, str | None]] = [(parse_file(filename), None)]
    for node, cls in todo:  # grows; parents come before what is in them
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first_line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            index[first_line, node.name] = node, cls
        inside = node.name if isinstance(node, ast.ClassDef) else cls
        for block in BLOCKS:  # a definition is a statement, and no expression holds one
            todo.extend((child, inside) for child in getattr(node, block, ()))
    return index


@functools.lru_cache(maxsize=64)
def index_expressions(filename: str) -> dict[tuple[int, int], list[ast.AST]]:
    """The expressions of a file by their end, outer ones first."""
    index: dict[tuple[int, int], list[ast.AST]] = {}
    for node in ast.walk(parse_file(filename)):
        if isinstance(node, EXPRESSIONS):
            index.setdefault((node.end_lineno or 0, node.end_col_offset or 0), []).append(node)
    return index


def find_node(filename: str, span: tuple[int, int, int, int]) -> Any:
    """The expression that runs at `span` of the file.

    A method call over several lines starts at the method's name in the running code, so a call is known by its end, which
    is its own closing bracket.
    """
    line, end_line, column, end_column = span
    for node in index_expressions(filename).get((end_line, end_column), ()):
        start = (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
        if start == (line, column) or (isinstance(node, ast.Call) and start < (line, column)):
            return node
    return None


def rewrite_methods(cls: type, rewrites: list[Rewrite]) -> dict[str, Any]:
    """The methods (and properties) of `cls` that hold one of `rewrites` or lead to one, rewritten: attribute -> new one.

    Functions that they call by a global name, by `super()` or through a decorator are rewritten for them alone.

    Raises:
        PlanError: an expression is not found, or nothing that can be rewritten leads to it.
    """
    packages = {base.__module__.split(".")[0] for base in cls.__mro__} | {r.function.split(".")[0] for r in rewrites}
    packages = {package.split(":")[0] for package in packages} - {"torch", "builtins"}
    methods, near = _methods_of(cls), _near(cls)
    look = near if all(near(rewrite.function.partition(":")[0]) for rewrite in rewrites) else None
    reached = _explore(cls, [function for _, function, _ in methods], packages, look)
    for rewrite in rewrites:
        _assign(rewrite, reached)
    needed = {key for key, found in reached.items() if found.rewrites}
    while more := {k for k, f in reached.items() if k not in needed and any(id(c) in needed for c in f.callees())}:
        needed |= more
    for key in needed:
        reached[key].new.cell_contents = _rebuild(reached[key], reached, needed)
    for key in needed:
        attributes = reached[key].new.cell_contents.__dict__
        if id(attributes.get("__wrapped__")) in needed:
            attributes["__wrapped__"] = reached[id(attributes["__wrapped__"])].new.cell_contents
    return {attribute: wrap(reached[id(f)].new.cell_contents) for attribute, f, wrap in methods if id(f) in needed}


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
    reached = _explore(cls, [forward], packages, _near(cls)) if isinstance(forward, FunctionType) else {}
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


def _methods_of(cls: type) -> list[tuple[str, FunctionType, Callable[[FunctionType], Any]]]:
    """`(name, function, how to make the class attribute of a function)` for each method that is not torch's own."""
    found, seen = [], set()
    for base in cls.__mro__:
        for name, value in base.__dict__.items():
            if name in seen or name == "__init__":
                continue
            seen.add(name)
            if base.__module__.split(".")[0] in ("torch", "builtins"):
                continue
            if isinstance(value, FunctionType):
                found.append((name, value, lambda function: function))
            elif isinstance(value, staticmethod | classmethod) and isinstance(value.__func__, FunctionType):
                found.append((name, value.__func__, type(value)))
            elif isinstance(value, property) and isinstance(value.fget, FunctionType):
                found.append((name, value.fget, lambda function, old=value: property(function, old.fset, old.fdel)))
    return found


def _near(cls: type) -> Callable[[str], bool]:
    """Whether a module's code can be a part of the model: it holds one of the class's bases, or lies in the package of `cls`.

    What such code calls elsewhere (masks, wrappers, logging) does not call it back by a name, and is much to read.
    """
    modules, package = {base.__module__ for base in cls.__mro__}, cls.__module__.rpartition(".")[0]
    return lambda module: module in modules or (package != "" and module.rpartition(".")[0] == package)


def _explore(cls: type, roots: list[FunctionType], packages: set[str], look: Callable[[str], bool] | None) -> dict[int, Found]:
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


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _resolve_names(found: Found, cls: type, packages: set[str]) -> None:
    """Note which Name and Attribute nodes of the function mean a Python function of `packages`."""
    assert found.node is not None
    codes = list(_codes(found.function.__code__))
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


def _assign(rewrite: Rewrite, reached: dict[int, Found]) -> None:
    """Note the rewrite at the functions whose code holds it: the innermost of a nest of definitions."""
    module, _, qualified = rewrite.function.partition(":")
    place = f"`{rewrite.text}` in {rewrite.function}, line {rewrite.span[0]},"
    holders: list[tuple[int, Found]] = []
    for found in reached.values():
        own = found.function.__code__.co_qualname
        if found.node is None or found.function.__globals__.get("__name__") != module:
            continue
        if qualified == own or qualified.startswith(f"{own}.<locals>."):
            holders.append((len(own), found))
    if not holders:
        raise PlanError(
            f"{place} writes a full width, and no plain Python function leads to it from the module's methods (a function kept "
            f"in a table, a compiled or wrapped callable?). Leave the module whole, or write the shape with -1."
        )
    best = max(length for length, _ in holders)
    matched = 0
    for found in (found for length, found in holders if length == best):
        node = find_node(found.function.__code__.co_filename, rewrite.span)
        inside = any(inner is node for inner in ast.walk(found.node or ast.Pass()))  # not in another of the same name
        if inside and rewrite.text in ("", ast.unparse(node)):
            found.rewrites.append((rewrite, node))
            matched += 1
    if not matched:
        raise PlanError(f"{place} is not there: the source differs from the plan's. Make the plan again.")


# -- compiling ----------------------------------------------------------------------------------------------------------


def _rebuild(found: Found, reached: dict[int, Found], needed: set[int]) -> FunctionType:
    """The function with its rewrites, calling the rewritten ones of `needed`."""
    old = found.function
    cells: dict[str, CellType] = dict(zip(old.__code__.co_freevars, old.__closure__ or (), strict=True))
    cells.update({variable: reached[id(f)].new for variable, f in found.cells.items() if id(f) in needed})
    code = old.__code__
    if found.rewrites or any(id(f) in needed for f in found.names.values()):
        code = _compile(found, reached, needed, cells)
    new = FunctionType(code, old.__globals__, old.__name__, old.__defaults__, tuple(cells[v] for v in code.co_freevars))
    new.__kwdefaults__, new.__qualname__, new.__module__ = old.__kwdefaults__, old.__qualname__, old.__module__
    new.__annotations__, new.__doc__ = dict(old.__annotations__), old.__doc__
    new.__dict__.update(old.__dict__)
    return new


def _compile(found: Found, reached: dict[int, Found], needed: set[int], cells: dict[str, CellType]) -> CodeType:
    """The code of the function's changed tree, with what it needs given as free variables (noted in `cells`)."""
    given: dict[str, CellType] = {}
    copies: dict[int, Any] = {}
    node: Any = copy.deepcopy(found.node, copies)

    def give(value: Any) -> ast.expr:
        variable = f"_autotp_{len(given)}"
        given[variable] = value if isinstance(value, CellType) else CellType(value)
        return ast.Name(variable, ast.Load())

    matched = [(rewrite, copies[id(place)]) for rewrite, place in found.rewrites]
    callees = {id(copies[key]): reached[id(f)].new for key, f in found.names.items() if id(f) in needed}
    node = _PutNames(callees, {id(copies[key]) for key in found.supers}, give, node).visit(node)
    for rewrite, place in matched:
        if not rewrite.change(place, give):
            raise PlanError(
                f"`{rewrite.text}` in {rewrite.function}, line {rewrite.span[0]}, is not written in a form that can be "
                f"rewritten. Leave the module whole, or write the shape with -1."
            )
    old = found.function.__code__
    body: Any = node
    if found.cls:  # so that private names are spelt out, and `super()` finds its class
        body = ast.parse(f"class {found.cls}: pass").body[0]
        body.body = [node]
    parameters = [v for v in (*old.co_freevars, *given) if not (v == "__class__" and found.cls)]
    factory = ast.parse(f"def factory({', '.join(parameters)}): pass")
    factory.body[0].body = [body]  # type: ignore[attr-defined]
    ast.fix_missing_locations(factory)
    compiled = compile(factory, old.co_filename, "exec", flags=old.co_flags & FLAGS, dont_inherit=True)
    code = next(c for c in _codes(compiled) if c.co_name == old.co_name and c.co_firstlineno == old.co_firstlineno)
    cells.update(given)
    return _rename(code, code.co_qualname, old.co_qualname)


def _rename(code: CodeType, old: str, new: str) -> CodeType:
    """`code` and what is nested in it, with `new` for `old` at the start of their qualified names."""
    constants = tuple(_rename(c, old, new) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_consts=constants, co_qualname=new + code.co_qualname[len(old) :])


class _PutNames(ast.NodeTransformer):
    """Puts given names in the place of the nodes that mean rewritten functions."""

    def __init__(self, cells: dict[int, CellType], supers: set[int], give: Callable[[Any], ast.expr], function: Any) -> None:
        self.cells, self.supers, self.give = cells, supers, give
        arguments = [*function.args.posonlyargs, *function.args.args]
        self.own = arguments[0].arg if arguments else ""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._put(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if id(node) in self.cells:
            return self._put(node)
        return self.generic_visit(node)

    def _put(self, node: Any) -> ast.AST:
        if id(node) not in self.cells:
            return node
        name = ast.copy_location(self.give(self.cells[id(node)]), node)
        if id(node) not in self.supers:
            return name
        bind = ast.Attribute(name, "__get__", ast.Load())  # super().forward -> the function bound to this instance
        return ast.copy_location(ast.Call(bind, [ast.Name(self.own, ast.Load())], []), node)
