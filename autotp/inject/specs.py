"""Names and patterns to styles: what a caller's dict and a model's Hugging Face plan say, name by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ..errors import PlanError
from ..layers.overlap import OPTIONS
from . import styles
from .describe import fold_name

Spec = dict[str, Any]


SPEC_KEYS = {"style", "parts", "unit", "attrs", "forward", "reduce_dtype", *OPTIONS}


def read_hf_plan(model: nn.Module) -> dict[str, str]:
    """Transformers' own plan of a model.

    Raises:
        PlanError: it has none.
    """
    found = dict(getattr(model, "_tp_plan", None) or {})
    if not found:
        raise PlanError(
            f"{type(model).__name__} has no Hugging Face tensor-parallel plan. From Python, pass one: "
            f"plan={{'layers.*.mlp.up_proj': 'colwise', 'layers.*.mlp.down_proj': 'rowwise', ...}}"
        )
    return found


def read_spec(key: str, value: Any) -> Spec:
    """One value of a caller's dict as `{style, ...}`.

    Raises:
        PlanError: an unknown style or key.
    """
    spec = {"style": value} if isinstance(value, str) else dict(value) if isinstance(value, Mapping) else None
    if spec is None:
        raise PlanError(f"plan[{key!r}] is {value!r}: expected a style or {{'style': ..., 'parts': ..., 'unit': ...}}")
    for name in spec:
        if name not in SPEC_KEYS:
            raise PlanError(f"plan[{key!r}] has {name!r}; known keys are {sorted(SPEC_KEYS)}")
    style = spec.setdefault("style", "replicate")
    if style not in styles.STYLES:
        near = difflib.get_close_matches(str(style), styles.STYLES, 3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"styles are {', '.join(styles.STYLES)}"
        raise PlanError(f"plan[{key!r}]: unknown style {style!r}; {hint}")
    overlap = [name for name in OPTIONS if name in spec]
    if overlap and style not in styles.COLUMN_STYLES + styles.ROW_STYLES:
        raise PlanError(
            f"plan[{key!r}]: {overlap} are about sharded linears, and its style is {style!r}: name the linear's style"
        )
    return spec


def expand_names(model: nn.Module, specs: dict[str, Spec], source: str) -> dict[str, Spec]:
    """Patterns to full names of modules or parameters; `*` stands for a layer number or any part of a name.

    Raises:
        PlanError: a caller's key matches nothing (the nearest names are given), or two keys disagree about one name.
    """
    names = [name for name, _ in model.named_modules() if name] + [
        name for name, _ in model.named_parameters(remove_duplicate=False)
    ]
    found: dict[str, Spec] = {}
    from_key: dict[str, str] = {}
    for key, spec in specs.items():
        matched = match_names(key, names)
        if not matched and source == "caller":
            folded = sorted({fold_name(name) for name in names})
            near = difflib.get_close_matches(key, folded, 3, cutoff=0.4)
            raise PlanError(
                f"plan key {key!r} matches no module or parameter of {type(model).__name__}; nearest: {', '.join(near)}"
            )
        for name in matched:
            if name in found and found[name] != spec and source == "caller":
                raise PlanError(f"plan keys {from_key[name]!r} and {key!r} both match {name} and disagree")
            found[name], from_key[name] = spec, key
            if source == "hf" and spec["style"] not in styles.STYLES:
                found[name] = {"style": "replicate", "why": f"unknown style {spec['style']!r}"}
    return found


def match_names(key: str, names: Iterable[str]) -> list[str]:
    """The names that `key` matches: in full, or as the end of a name; `*` is one part of a name, or else several."""
    for star in (r"[^.]+", r".+"):
        body = re.escape(key).replace(r"\*", star)
        for prefix in ("", r"(?:.+\.)?"):
            matched = [name for name in names if re.fullmatch(prefix + body, name)]
            if matched:
                return matched
    return []
