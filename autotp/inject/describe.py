"""A plan as the table a reader sees."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..shard import Shard
    from .plan import ModulePlan, Plan


def describe_plan(plan: Plan, rank: int) -> str:
    """Styles and `rank`'s shapes by name pattern, bytes, collectives, what is whole and why."""
    gib, full = 1 / 2**30, plan.full_bytes
    lines = [
        f"{plan.model} over {plan.tp_size} ranks: {plan.split_share:.1%} of {full * gib:.2f} GiB of parameters split, "
        f"{plan.bytes_of_rank(rank) * gib:.2f} GiB on rank {rank}",
        "",
    ]
    lines += _table(["module", "style", "full", f"rank {rank}", "from"], _rows(plan, rank))
    if plan.head or plan.loss:
        lines += ["", f"loss and logits: {plan.loss}"]
    forward, backward = plan.collectives
    lines += ["", f"collectives of activations between embedding and head: {forward} forward, {backward} backward"]
    if plan.whole:
        lines += ["", "left whole on every rank:"]
        grouped: dict[tuple[str, str], int] = Counter()
        for entry in plan.whole:
            grouped[fold_name(entry.name), entry.reason] += entry.numel
        ordered = sorted(grouped.items(), key=lambda item: -item[1])
        lines += _table(["parameters", "elements", "why"], [[name, f"{n:,}", why] for (name, why), n in ordered])
    return "\n".join(lines)


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


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]]
    return [lines[0], "-" * min(len(lines[0]) + 8, 120), *lines[1:]]
