"""Where a plan's attention weights are computed, and which heads' values each rank holds behind them."""

from __future__ import annotations

from ..shard import Cut
from .plan import Plan


def find_values(plan: Plan) -> dict[str, Cut]:
    """Name of each module that holds linears split on their outputs -> the cut of the inputs of the row linear behind them."""
    found: dict[str, Cut] = {}
    for region in plan.regions:
        for holder in {column.rpartition(".")[0] for column in region.columns}:
            inside = [row for row in region.rows if row.startswith(f"{holder}.")] or region.rows
            shards = [plan.by_name[row].shards.get("weight") for row in inside if row in plan.by_name]
            cuts = {shard.cuts for shard in shards if shard is not None}
            if len(cuts) == 1 and len(only := cuts.pop()) == 1:
                found[holder] = only[0]
    return found
