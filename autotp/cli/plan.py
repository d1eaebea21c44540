"""`autotp plan`: what would be split, from a config alone."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from ..train.options import WHEN_DEALT
from ..train.setup import load_config, read_plan
from .screen import paint_plan, show_progress, width_of

if TYPE_CHECKING:
    from ..inject.plan import Plan


def run_plan(args: argparse.Namespace) -> int:
    """Print the plan of `args.model`; 1 if it splits nothing."""
    plan = make_plan_of(args)
    if args.json:
        print(plan.to_json(indent=1))
    else:
        text = f"{plan.describe(width=width_of(sys.stdout))}\n\nproof: {plan.proof or 'not needed for one rank'}"
        print(paint_plan(text, sys.stdout))
    if args.tp > 1 and not plan.shards:
        print(f"autotp: nothing of {args.model} would be split over {args.tp} ranks", file=sys.stderr)
        return 1
    return 0


def make_plan_of(args: argparse.Namespace) -> Plan:
    """The plan in the file `args.plan`, proved; without one the plan found in the model.

    Raises:
        AutoTPError: no config, no such file or no plan in it, or it does not compute what the model does.
    """
    from ..inject.rules import make_plan

    given = "auto" if args.plan is None else read_plan(args.plan)
    config, dealt = load_config(args.model), WHEN_DEALT[args.sequence_parallel]
    with show_progress(f"planning {args.model} over {args.tp} ranks"):
        return make_plan(config, args.tp, plan=given, few_units=args.few_units, sequence_parallel=dealt, precision=args.precision)
