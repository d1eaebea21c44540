"""Which model types come out right when they are split: every type that transformers registers, as a tiny random model.

    python scripts/coverage.py --kind causal --out coverage.jsonl

Each type runs on `--tp` gloo ranks of its own, against the unsharded model: outputs, every gradient and three AdamW steps.
One line of JSON a type; types that the file holds already are skipped. Exits with 1 if a type is wrong.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import os
import queue
import sys
import tempfile
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from measures import compare, passes_ungathered, prepare
from shrink import KINDS, registered
from torch import nn

import autotp

# -- one type ------------------------------------------------------------------------------------------------------------


def split_model(model: nn.Module, args: argparse.Namespace) -> nn.Module:
    """A sharded copy of `model`, by autotp or by transformers' own plan."""
    if args.impl == "autotp":
        return autotp.parallelize(copy.deepcopy(model), dist.group.WORLD, plan=args.plan)
    assert isinstance(model, transformers.PreTrainedModel)
    with tempfile.TemporaryDirectory() as own:
        box = [own]
        dist.broadcast_object_list(box, src=0)
        if dist.get_rank() == 0:
            model.save_pretrained(own)
        dist.barrier()
        loaded = type(model).from_pretrained(box[0], tp_plan="auto", dtype=torch.float32)
        dist.barrier()
        return loaded.eval()


def measure(kind: str, model_type: str, args: argparse.Namespace) -> dict[str, Any]:
    """The row of one type; on every rank."""
    try:
        model, calls, row = prepare(kind, model_type)
    except Exception as error:
        return {"verdict": "not built", "error": describe(error)}
    if args.build_only:
        return row
    try:
        sharded = split_model(model, args).train(model.training)
        return row | compare(model, sharded, calls)
    except Exception as error:
        return row | {"verdict": "raises", "error": describe(error), "trace": traceback.format_exc()[-1500:]}


def describe(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def serve(rank: int, store: str, job: tuple[str, str], args: argparse.Namespace, answers: Any) -> None:
    """One rank of one type's processes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    size = 1 if args.build_only else args.tp
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="localhost", MASTER_PORT="0")
    if not args.build_only:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    answers.put((rank, measure(*job, args)))
    answers.close()
    answers.join_thread()
    os._exit(0)


def run_type(job: tuple[str, str], args: argparse.Namespace) -> dict[str, Any]:
    """Rank 0's row, or the first that failed; every process is gone when it returns."""
    context = mp.get_context("forkserver")
    answers = context.Queue()
    size = 1 if args.build_only else args.tp
    rows: dict[int, dict[str, Any]] = {}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=serve, args=(r, f"{folder}/store", job, args, answers)) for r in range(size)]
        for process in ranks:
            process.start()
        while len(rows) < size and (left := start + args.timeout - time.monotonic()) > 0:
            failed = any(row["verdict"] in ("raises", "not built") for row in rows.values())
            try:
                rank, row = answers.get(timeout=min(left, 10 if failed else 5))
                rows[rank] = row
            except queue.Empty:
                if failed or not any(process.is_alive() for process in ranks):
                    break
        for process in ranks:
            process.kill()
            process.join()
    bad = [row for row in rows.values() if row["verdict"] in ("raises", "not built")]
    late = {"verdict": "raises", "error": f"no answer from rank(s) {sorted(set(range(size)) - set(rows))} in {args.timeout} s"}
    row = bad[0] if bad else rows[0] if len(rows) == size else late
    return {"kind": job[0], "type": job[1], **row, "seconds": round(time.monotonic() - start, 1)}


# -- all types -----------------------------------------------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default=",".join(KINDS), help="comma-separated: " + ", ".join(KINDS))
    parser.add_argument("--types", help="comma-separated model types; all without it")
    parser.add_argument("--tp", type=int, default=2, help="ranks")
    parser.add_argument("--impl", choices=["autotp", "transformers"], default="autotp")
    parser.add_argument("--plan", default="auto", help="plan of autotp.parallelize")
    parser.add_argument("--build-only", action="store_true", help="build and run the unsharded models only")
    parser.add_argument("--workers", type=int, default=1, help="types at a time")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one type")
    parser.add_argument("--out", type=Path, default=Path("coverage.jsonl"))
    return parser.parse_args()


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summarize(rows: list[dict[str, Any]]) -> None:
    """A table of verdicts by kind, how many pass without layers whose output is gathered, and what is not right."""
    verdicts = ["pass", "partly", "linear-poor", "wrong", "raises", "not built"]
    verdicts += sorted({row["verdict"] for row in rows} - set(verdicts))
    print("kind".ljust(10), *(v.rjust(12) for v in verdicts), "all".rjust(6))
    for kind in dict.fromkeys(r["kind"] for r in rows):
        count = collections.Counter(r["verdict"] for r in rows if r["kind"] == kind)
        print(kind.ljust(10), *(str(count[v]).rjust(12) for v in verdicts), str(count.total()).rjust(6))
    if passing := sum(row["verdict"] == "pass" for row in rows):
        count = sum(map(passes_ungathered, rows))
        print(f"{count} of {passing} pass without what is split only in layers whose output is gathered")
    for row in rows:
        if row["verdict"] in ("wrong", "raises", "not built"):
            errors = {k: row[k] for k in ("output_error", "gradient_error", "worst_gradient", "step_error") if k in row}
            print(f"{row['verdict']}: {row['kind']} {row['type']}: {row.get('error') or errors}"[:300])


def main() -> int:
    args = parse_args()
    mp.get_context("forkserver").set_forkserver_preload(["shrink", "autotp"])
    wanted = set(args.types.split(",")) if args.types else None
    jobs = [(kind, t) for kind in args.kind.split(",") for t in registered(kind) if wanted is None or t in wanted]
    done = {(row["kind"], row["type"]) for row in read_rows(args.out)}
    jobs = [job for job in jobs if job not in done]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as file:
        for row in run_all(jobs, args):
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(row["kind"], row["type"], row["verdict"], row.get("share", ""), row["seconds"], flush=True)
    rows = read_rows(args.out)
    summarize(rows)
    return int(any(row["verdict"] == "wrong" for row in rows))


def run_all(jobs: list[tuple[str, str]], args: argparse.Namespace) -> Any:
    """Rows of `jobs`, `--workers` at a time."""
    if args.workers <= 1:
        yield from (run_type(job, args) for job in jobs)
        return
    with ThreadPoolExecutor(args.workers) as pool:
        yield from pool.map(lambda job: run_type(job, args), jobs)


if __name__ == "__main__":
    sys.exit(main())
