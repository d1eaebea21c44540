"""Models that are not transformers': how much of each is split over two ranks, and whether the numbers are the model's own.

    python scripts/foreign.py [NAME ...]

Small random models of timm, diffusers and x-transformers (whichever are installed) are planned from two example calls, split
over two gloo ranks, and compared with the unsharded model in float32: every output, relative to the largest output of its
call, and every gradient, relative to the largest of its own. Prints a table and why large parameters stay whole; exits with 1
if a model raises or is off by more than `OUTPUTS` or `GRADIENTS`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from foreign_models import MODELS
from torch import Tensor, nn

import autotp

RANKS, OUTPUTS, GRADIENTS = 2, 1e-4, 1e-3
SHOWN = 6  # parameters that are whole, a model
VANISHES = 1e-6  # a gradient of less than this part of the largest is rounding alone: that of a key's bias, say


def find_tensors(value: Any) -> Iterator[Tensor]:
    """The float tensors of an output, in order."""
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for part in inside:
        yield from find_tensors(part)


def run(model: nn.Module, calls: list[dict[str, Any]]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs of all calls, and every gradient of their product with fixed random numbers. Gradients of shards are local."""
    generator = torch.Generator().manual_seed(1)
    outputs, dtype = [], next(model.parameters()).dtype
    for call in calls:
        cast = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in call.items()}
        outputs += find_tensors(model(**cast))
    sum((out * torch.randn(out.shape, generator=generator).to(dtype)).mean() for out in outputs).backward()
    return [out.detach() for out in outputs], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def gather_gradients(model: nn.Module, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole gradients: put where the weights were, and gathered as weights are. On rank 0; empty on the others."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(found.get(name, torch.zeros_like(parameter)))
    return {name: value for name, value in autotp.full_state_dict(model).items() if name in found}


def build(library: str, name: str) -> tuple[nn.Module, list[dict[str, Any]]]:
    """The model and its calls; equal each time. Built anew for each use: functions that close over a model are not copied."""
    torch.manual_seed(0)
    model, calls = MODELS[library][name]()
    with torch.no_grad():  # zeros that training starts from would hide what lies behind them
        for parameter in model.eval().parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model, calls


def compare(library: str, name: str, sharded: nn.Module) -> dict[str, Any]:
    """Errors of outputs and gradients; on rank 0."""
    model, calls = build(library, name)
    outputs, grads = run(model, calls)
    exact = run(build(library, name)[0].double(), calls)[1]
    got_outputs, local = run(sharded, calls)
    got = gather_gradients(sharded, local)
    if dist.get_rank():
        return {}
    least = VANISHES * max(g.abs().max() for g in exact.values())
    seen = [n for n in grads if exact[n].abs().max() > least]
    errors = {n: ((got[n] - grads[n]).abs().max() / grads[n].abs().max()).item() if n in got else float("inf") for n in seen}
    off = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got_outputs, outputs, strict=True))
    worst = max(errors, key=lambda n: errors[n])
    right = off < OUTPUTS and errors[worst] < GRADIENTS
    return {"output": off, "gradient": errors[worst], "compared": len(seen), "verdict": "right" if right else f"wrong: {worst}"}


def shares(model: nn.Module, plan: autotp.Plan) -> dict[str, Any]:
    """How much is split of matrices and kernels that are no lookup tables; how much in layers whose output is gathered."""
    tables = {f"{n}.weight" for n, module in model.named_modules() if isinstance(module, nn.Embedding)}
    sizes = {n: p.numel() for n, p in model.named_parameters() if p.ndim > 1 and n not in tables}
    gathered = {f"{m.name}.{p}" for m in plan.modules if m.style == "colwise_gather_output" for p in m.shards}
    total = sum(sizes.values())
    return {
        "share": sum(size for n, size in sizes.items() if n in plan.shards) / total,
        "gathered": sum(size for n, size in sizes.items() if n in gathered) / total,
        "whole": sorted([w for w in plan.whole if w.name in sizes], key=lambda w: -w.numel),
    }


def measure(library: str, name: str) -> dict[str, Any]:
    """The row of one model; on every rank."""
    model, calls = build(library, name)
    start = time.monotonic()
    plan = autotp.make_plan(model, RANKS, inputs=calls)
    row: dict[str, Any] = {"seconds": time.monotonic() - start, **shares(model, plan)}
    return row | compare(library, name, autotp.parallelize(model, plan=plan, inputs=calls))


def serve(rank: int, store: str, jobs: list[tuple[str, str]]) -> None:
    """One of the ranks: measures all `jobs`; rank 0 prints."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    bad = 0
    for library, name in jobs:
        try:
            row = measure(library, name)
        except Exception as error:
            traceback.print_exc()
            row = {"verdict": f"raises {type(error).__name__}: {' '.join(str(error).split())[:300]}", "whole": []}
        bad += row.get("verdict", "right") != "right"
        if rank == 0:
            form = "{share:.1%} | {gathered:.1%} | {output:.0e} | {gradient:.0e} | {compared} | {seconds:.1f}"
            numbers = form.format(**row) if "share" in row else "| | | | |"
            print(f"| {library} | {name} | {row['verdict']} | {numbers} |", flush=True)
            for entry in row["whole"][:SHOWN]:
                print(f"    {entry.name} ({entry.numel:,}): {entry.reason}", flush=True)
    dist.destroy_process_group()
    raise SystemExit(bool(bad))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models or libraries; all without it")
    names = parser.parse_args().names
    found = [library for library in MODELS if importlib.util.find_spec(library)]
    print("not installed:", ", ".join(library for library in MODELS if library not in found) or "none")
    jobs = [(library, name) for library in found for name in MODELS[library] if not names or {library, name} & set(names)]
    with tempfile.TemporaryDirectory() as folder:
        print("| library | model | verdict | split | of it gathered | outputs | gradients | compared | plan s |")
        print("|---|---|---|---|---|---|---|---|---|", flush=True)
        try:
            mp.spawn(serve, (f"{folder}/store", jobs), nprocs=RANKS)
        except mp.ProcessExitedException as error:
            raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
