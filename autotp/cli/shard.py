"""`autotp shard`, `merge` and `reshard`: a checkpoint cut for a number of ranks, and whole again, in this process alone."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..errors import AutoTPError
from ..train.setup import read_plan
from .screen import show_progress


def run_shard(args: argparse.Namespace) -> int:
    """Cut the checkpoint `args.model`, plain or cut already, for `args.tp` ranks into `args.out`."""
    from ..checkpoint.load import find_shards, order_names
    from ..checkpoint.offline import check_free, shard_checkpoint
    from ..checkpoint.open import open_checkpoint
    from ..inject.load import build_empty, find_checkpoint
    from ..inject.rules import make_plan

    out, directory = Path(args.out), find_checkpoint(args.model)
    check_free(out)
    with open_checkpoint(directory) as source:
        model = build_empty(source, None)
        whole, names = order_names(model, source)
        given = "auto" if args.plan is None else read_plan(args.plan)
        with show_progress(f"planning {args.model} over {args.tp} ranks"):
            plan = make_plan(model, args.tp, given)
        with show_progress(f"writing {args.tp} parts into {out}"):
            shards = find_shards(model, names, plan.shards)
            shard_checkpoint(whole, out, names, shards, args.tp, json.loads(plan.to_json()), directory)
    print(f"{out}: {len(names)} tensors over {args.tp} ranks, {len(shards)} of them split, {say_bytes(out)}")
    return 0


def run_reshard(args: argparse.Namespace) -> int:
    """`run_shard` of a checkpoint that is cut already."""
    _check_cut(args.model, f"use `autotp shard {args.model} {args.out}`")
    return run_shard(args)


def run_merge(args: argparse.Namespace) -> int:
    """Put the cut checkpoint `args.sharded` together as a plain one in `args.out`."""
    from ..checkpoint.offline import merge_checkpoint
    from ..checkpoint.sharded import ShardedSource

    out = Path(args.out)
    _check_cut(args.sharded, "its weights are whole, or none")
    with ShardedSource(args.sharded) as source, show_progress(f"writing {out}"):
        merge_checkpoint(source, out, args.max_shard_size)
    print(f"{out}: {len(source.names())} tensors, {say_bytes(out)}")
    return 0


def _check_cut(directory: str, way_out: str) -> None:
    from ..checkpoint.sharded import MANIFEST_NAME

    if not (Path(directory) / MANIFEST_NAME).is_file():
        raise AutoTPError(f"{directory} is not a directory that `autotp shard` made: {way_out}")


def say_bytes(directory: Path) -> str:
    """Bytes of weights in a directory, in gigabytes."""
    return f"{sum(path.stat().st_size for path in directory.glob('*.safetensors')) / 1e9:.2f} GB"
