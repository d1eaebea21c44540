"""Imports go down: scripts, cli, train, inject, checkpoint, layers, collectives, groups, comm, peers, kernels, shard."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEIGHT = dict(
    **dict(errors=0, version=0, index_runs=0, shard=1, kernels=1, peers=2, comm=3, groups=4, collectives=4, exchange=4),
    **dict(row_collectives=5, places=5, layers=6, checkpoint=7, generation=7, inject=8, train=9, cli=10, __init__=11),
)


def imported_modules(text: str, package: tuple[str, ...]) -> set[str]:
    """Full names of what the source `text`, a module of `package`, imports from autotp, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "autotp"}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            name = [*base, *(node.module or "").split(".")] if node.module else list(base)
            if name and name[0] == "autotp":
                found |= {".".join([*name, alias.name]) if len(name) == 1 else ".".join(name) for alias in node.names}
    return found


def upward_imports(text: str, package: tuple[str, ...], own: str) -> list[str]:
    """The imports of a module in part `own` that do not go down (or stay in it)."""
    wrong = []
    for name in sorted(imported_modules(text, package)):
        part = name.split(".")[1] if "." in name else "__init__"
        height = HEIGHT.get(part, HEIGHT["__init__"])  # a public name imported from the top is an arrow up too
        if part != own and height >= HEIGHT[own]:
            wrong.append(name)
    return wrong


FILES = sorted((ROOT / "autotp").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(ROOT)) for p in FILES])
def test_imports_go_down(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    own = parts[1]
    assert own in HEIGHT, f"{path} is in no known layer: add it to HEIGHT"
    wrong = upward_imports(path.read_text(), parts[:-1], own)
    assert not wrong, f"{path.relative_to(ROOT)} imports upwards: {', '.join(wrong)}"


@pytest.mark.parametrize(
    "text, package, own, wrong",
    [
        ("from ..layers.base import x", ("autotp", "kernels"), "kernels", ["autotp.layers.base"]),
        ("from ..comm import x", ("autotp", "kernels"), "kernels", ["autotp.comm"]),
        ("from .collectives import x", ("autotp",), "comm", ["autotp.collectives"]),
        ("def f():\n    from ..inject import plan", ("autotp", "layers"), "layers", ["autotp.inject"]),
        ("from .. import parallelize", ("autotp", "layers"), "layers", ["autotp.parallelize"]),
        ("import autotp", ("autotp", "layers"), "layers", ["autotp"]),
        ("from ..shard import Shard\nfrom . import base", ("autotp", "layers"), "layers", []),
        ("from .errors import AutoTPError\nimport torch", ("autotp",), "comm", []),
    ],
)
def test_finds_upward_imports(text, package, own, wrong):
    assert upward_imports(text, package, own) == wrong
