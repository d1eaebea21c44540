"""`autotp verify`: a checkpoint unsharded and parallelized, compared in ranks started here."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import TYPE_CHECKING, Any

import torch

from ..errors import AutoTPError
from ..train.launch import under_torchrun
from ..train.setup import load_config
from .plan import make_plan_of
from .ranks import run_ranks
from .screen import paint

if TYPE_CHECKING:
    from ..inject.plan import Plan
    from ..train.verify import VerifyReport

DTYPES = ("float32", "bfloat16", "float16", "float64")


def run_verify(args: argparse.Namespace) -> int:
    """Compare the parallelized model with the unsharded one in ranks started here; 1 if they differ."""
    from ..checkpoint.open import open_checkpoint
    from ..checkpoint.sharded import ShardedSource
    from ..inject.load import find_checkpoint

    if under_torchrun():
        raise AutoTPError("verify starts its own ranks: run it without torchrun")
    load_config(args.model)
    with open_checkpoint(find_checkpoint(args.model)) as source:  # what is wrong with the files is known before the ranks start
        if isinstance(source, ShardedSource):
            raise AutoTPError(f"{args.model} is cut: `autotp merge` makes it whole, which is what verify compares with")
        plan = make_plan_of(args)
    if not args.json:
        print(f"{plan.model} over {plan.tp_size} ranks: {plan.split_share:.1%} of the parameters split\n"
              f"proof: {plan.proof or 'not needed for one rank'}", flush=True)  # fmt: skip
    report, inputs = run_ranks(verify_rank, args.tp, args.model, plan.to_json(), args.dtype)
    if args.json:
        print(json.dumps(report_json(args, plan, report, inputs)))
    else:
        text, verdict = report_text(args, report, inputs).rsplit("\n", 1)
        print(f"{text}\n{paint(verdict, 'green' if report.passed else 'red', sys.stdout)}")
    return 0 if report.passed else 1


def verify_rank(model: str, plan_json: str, dtype: str) -> tuple[VerifyReport, str]:
    """One rank's part of `autotp verify`."""
    from ..inject.plan import Plan
    from ..train.compare import compare_checkpoint

    return compare_checkpoint(model, Plan.from_json(plan_json), getattr(torch, dtype))


def report_json(args: argparse.Namespace, plan: Plan, report: VerifyReport, inputs: str) -> dict[str, Any]:
    """The report as data; an error that is not a finite number is null, as JSON has none."""

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    worst = {"name": report.worst_name, "error": finite(report.worst_error), "tolerance": report.tolerance(report.worst_name)}
    return {
        **{"model": args.model, "class": plan.model, "tp_size": plan.tp_size, "dtype": args.dtype, "inputs": inputs},
        **{"split_share": plan.split_share, "proof": plan.proof, "passed": report.passed, "worst": worst},
        **{"loss": finite(report.loss), "reference_loss": finite(report.reference_loss), "tolerances": report.tolerances},
        "errors": {name: finite(error) for name, error in report.errors.items()},
    }


def report_text(args: argparse.Namespace, report: VerifyReport, inputs: str, most: int = 8) -> str:
    """The report as lines: both losses, then the worst relative errors, each beside what is allowed."""
    others = ["loss", "logits", "grad_norm"]
    gradients = [name for name in report.errors if name not in others]
    gradients.sort(key=lambda name: -report.errors[name] if report.errors[name] == report.errors[name] else -math.inf)
    lines = [
        f"inputs: {inputs}; {args.dtype}",
        f"loss: {report.loss:.6f} parallelized, {report.reference_loss:.6f} unsharded",
        "",
    ]
    lines += [f"{'relative error':>14}  {'allowed':>7}  of"]
    for name in [*others, *gradients[:most]]:
        what = name if name in others else f"gradient of {name}"
        lines.append(f"{report.errors[name]:>14.1e}  {report.tolerance(name):>7.0e}  {what}")
    lines += [f"... {len(gradients) - most} more gradients, none worse"] if len(gradients) > most else []
    over = sum(not error <= report.tolerance(name) for name, error in report.errors.items())
    verdict = "passed" if report.passed else f"FAILED: {over} of {len(report.errors)} comparisons are beyond what is allowed"
    return "\n".join([*lines, "", f"verify {verdict}"])
