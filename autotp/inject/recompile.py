"""Compiles a model's methods again with some of their expressions changed, and what lies between these and them."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any

from ..errors import PlanError
from .reach import Found, codes_in, explore, near_to
from .source import Rewrite, find_node

FLAGS = annotations.compiler_flag  # the one future that changes how a function is compiled


def rewrite_methods(cls: type, rewrites: list[Rewrite]) -> dict[str, Any]:
    """The methods (and properties) of `cls` that hold one of `rewrites` or lead to one, rewritten: attribute -> new one.

    Functions that they call by a global name, by `super()` or through a decorator are rewritten for them alone.

    Raises:
        PlanError: an expression is not found, or nothing that can be rewritten leads to it.
    """
    packages = {base.__module__.split(".")[0] for base in cls.__mro__} | {r.function.split(".")[0] for r in rewrites}
    packages = {package.split(":")[0] for package in packages} - {"torch", "builtins"}
    methods, near = _methods_of(cls), near_to(cls)
    look = near if all(near(rewrite.function.partition(":")[0]) for rewrite in rewrites) else None
    reached = explore(cls, [function for _, function, _ in methods], packages, look)
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
    code = next(c for c in codes_in(compiled) if c.co_name == old.co_name and c.co_firstlineno == old.co_firstlineno)
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
