"""Source files: the functions and expressions in them, and what is to be changed of those."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

EXPRESSIONS = (ast.Call, ast.BinOp, ast.AugAssign, ast.Compare)  # what a Rewrite can change
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # of statements, and of what holds further ones


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
