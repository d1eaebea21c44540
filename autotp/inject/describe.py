"""A plan as the table a reader sees."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..shard import Shard
    from .module_plan import ModulePlan
    from .plan import Plan


def describe_plan(plan: Plan, rank: int, width: int | None = None) -> str:
    """Styles and `rank`'s shapes by name pattern, bytes, collectives, what is whole and why; in lines of `width` or less."""
    gib, full = 1 / 2**30, plan.full_bytes
    lines = [
        f"{plan.model} over {plan.tp_size} ranks: {plan.split_share:.1%} of {full * gib:.2f} GiB of parameters split, "
        f"{plan.bytes_of_rank(rank) * gib:.2f} GiB on rank {rank}",
        "",
    ]
    lines += _table(["module", "style", "full", f"rank {rank}", "from"], _rows(plan, rank), width)
    if plan.head or plan.loss:
        lines += ["", f"loss and logits: {plan.loss}"]
    forward, backward = plan.collectives
    lines += ["", f"collectives of activations between embedding and head: {forward} forward, {backward} backward"]
    lines += _describe_tokens(plan)
    own = Counter(fold_name(each.name) for each in plan.draws if each.inside in ("apart", "either"))
    lines += [f"dropout of its own on each rank: {', '.join(own)}"] if own else []
    if plan.fused:
        kinds = Counter(f"{fusion.describe()}: {fold_name(fusion.name)}" for fusion in plan.fused)
        lines += ["", "fused:", *(f"{what} ({n}x)" if n > 1 else what for what, n in kinds.items())]
    lines += _describe_products(plan, width)
    if plan.whole:
        lines += ["", "left whole on every rank:"]
        grouped: dict[tuple[str, str], int] = Counter()
        for entry in plan.whole:
            grouped[fold_name(entry.name), entry.reason] += entry.numel
        ordered = sorted(grouped.items(), key=lambda item: -item[1])
        lines += _table(["parameters", "elements", "why"], [[name, f"{n:,}", why] for (name, why), n in ordered], width)
    return "\n".join(part for line in lines for part in _wrap_line(line, width))


def _describe_products(plan: Plan, width: int | None) -> list[str]:
    """Which linears multiply in FP8, and which do not, and why; nothing where it was not asked for."""
    if not plan.products:
        return []
    counts: dict[tuple[str, str], int] = Counter()
    for product in plan.products:
        said = product.recipe.describe() if product.recipe is not None else f"own dtype: {product.why or 'as asked'}"
        counts[fold_name(product.name), said] += 1
    rows = [[f"{name} ({n}x)" if n > 1 else name, said] for (name, said), n in counts.items()]
    return ["", *_table(["linear", "product"], rows, width)]


def _describe_tokens(plan: Plan) -> list[str]:
    """One line a chain: what is dealt between its regions; and why nothing is elsewhere. Nothing where it was not asked for."""
    lines = [f"tokens: {plan.tokens}"] if plan.tokens else []
    for chain in plan.chains:
        parts = [m.tokens for m in plan.modules if m.tokens is not None and m.tokens.chain == chain.name]
        counts = {
            "gathers": sum(bool(part.gathers) for part in parts),
            "reduce-scatters": sum(part.leaves == "scatter" for part in parts),
            "outputs dealt": sum(part.leaves == "slice" for part in parts),
        }
        said = ", ".join(f"{n / len(chain.layers):.2g} {what}" for what, n in counts.items() if n)
        when = "" if plan.sequence_parallel is True else " where they are many"
        lines.append(f"tokens dealt{when} between the regions of {chain.name}: {said} a layer; whole behind {chain.join}")
    return lines


def describe_extras(module: ModulePlan, rank: int) -> str:
    """What is done beside the style, in short: `sums weight; enters hidden_states; num_heads=4; own sizes in 2 calls`."""
    said = [f"{word} {', '.join(names)}" for word, names in (("sums", module.summed), ("rank 0's", module.once)) if names]
    for entry in module.inputs:
        did = ["enters"] * entry.sums + [f"takes its part of dim {entry.dim} of"] * (entry.dim is not None)
        said.append(f"{' and '.join(did)} {entry.argument}")
    said += [f"columns {start}-{stop} enter" for start, stop in module.columns]
    said += [f"reduces output {index}" for index in module.outputs]
    said += [f"{module.norm.kind} norm over {module.norm.width} dealt columns"] if module.norm else []
    said += [_describe_copies(name, shard) for name, shard in module.shards.items() if shard.has_copies]
    said += [f"{name}={values[rank]}" for name, values in module.attrs.items()]
    if module.tokens is not None:
        said += [f"gathers tokens of {name}" for name, _ in module.tokens.gathers]
        said += {"scatter": ["reduce-scatters tokens"], "slice": ["deals its output's tokens"]}.get(module.tokens.leaves, [])
        said += [f"sums {', '.join(module.tokens.summed)}"] if module.tokens.summed else []
    said += [f"forward {module.forward}"] if module.forward else []
    said += [f"own sizes in {len({fix.span for fix in module.fixes})} calls"] if module.fixes else []
    return "; ".join(said)


def _describe_copies(name: str, shard: Shard) -> str:
    ranks = max((len(ranks) for _, ranks, _ in shard.holders), default=1) if len(shard.cuts) == 1 else 1
    return f"copies of {name}" + (f" on up to {ranks} ranks" if ranks > 1 else "")


def fold_name(name: str) -> str:
    """`name` with its layer numbers as `*`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _rows(plan: Plan, rank: int) -> list[list[str]]:
    rows: dict[tuple[str, ...], int] = {}
    for module in plan.modules:
        shard = module.shards.get("weight") or next(iter(module.shards.values()), None)
        full = "x".join(map(str, shard.shape)) if shard else "-"
        local = "x".join(map(str, shard.local_shape(rank))) if shard else "whole"
        said = "; ".join(filter(None, (module.why, describe_extras(module, rank))))
        key = (fold_name(module.name), module.style, full, local, module.source + (f": {said}" if said else ""))
        rows[key] = rows.get(key, 0) + 1
    return [[f"{key[0]} ({n}x)" if n > 1 else key[0], *key[1:]] for key, n in rows.items()]


def _table(head: list[str], rows: list[list[str]], width: int | None = None) -> list[str]:
    """Rows in columns. Wider than `width`: layers are headings, and cells go on in the next line."""
    widths = _measure([head, *rows])
    if width is not None and sum(widths) + 2 * (len(head) - 1) > width:
        rows = _under_headings(rows)
        widths = _fit(_measure([head, *rows]), width - 2 * (len(head) - 1))
    lines = _lay_out(head, widths)
    lines.append("-" * min(max(map(len, lines)) + 8, width or 120))
    return lines + [line for row in rows for line in ([row[0]] if len(row) == 1 else _lay_out(row, widths))]


def _measure(rows: list[list[str]]) -> list[int]:
    return [max(len(row[i]) for row in rows if len(row) > 1) for i in range(len(rows[0]))]


def _under_headings(rows: list[list[str]]) -> list[list[str]]:
    """Names inside numbered layers without their common start, which is said once above them, in a row of one cell."""
    found, above = [], ("", "")
    for name, *cells in rows:
        prefix, rest, count = re.fullmatch(r"((?:.*\*\.)?)(.*?)((?: \(\d+x\))?)", name).groups()  # type: ignore[union-attr]
        if prefix and (prefix, count) != above:
            found.append([prefix[:-1] + count])
        found.append([f"  {rest}" if prefix else name, *cells])
        above = (prefix, count)
    return found


def _lay_out(row: list[str], widths: list[int]) -> list[str]:
    cells = [_wrap_cell(cell, size) for cell, size in zip(row, widths, strict=True)]
    parts = zip_longest(*cells, fillvalue="")
    return ["  ".join(part.ljust(size) for part, size in zip(line, widths, strict=True)).rstrip() for line in parts]


def _fit(widths: list[int], room: int, least: int = 11) -> list[int]:
    """Column widths that sum to `room`: what is too much is taken from the last, which is prose, then from the widest."""
    widths = list(widths)
    while sum(widths) > room and max(widths) > least:
        widths[-1 if widths[-1] > least else widths.index(max(widths))] -= 1
    return widths


def _wrap_cell(cell: str, width: int) -> list[str]:
    """`cell` in pieces of at most `width`, broken after a space, dot, comma, underscore or `x`, or wherever it must be."""
    indent = len(cell) - len(cell.lstrip())
    pieces = []
    while len(cell) > width:
        ends = [match.end() for match in re.finditer(r"(?<=\S)(?:[ .,_]|x(?=\d))", cell[: width + 1])]
        end = max((end for end in ends if len(cell[:end].rstrip()) <= width), default=width)
        pieces.append(cell[:end].rstrip())
        cell = " " * indent + cell[end:].strip()
    return [*pieces, cell]


def _wrap_line(line: str, width: int | None) -> list[str]:
    """A line of prose; what is a table fits already."""
    return textwrap.wrap(line, width, subsequent_indent="  ") if width is not None and len(line) > width else [line]
