"""`autotp generate`: text from a checkpoint, streamed from ranks started here, and how fast it came."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ..errors import AutoTPError
from ..train.launch import under_torchrun
from ..train.setup import check_model, load_tokenizer
from .plan import make_plan_of
from .ranks import run_ranks
from .screen import paint, show_progress


def run_generate(args: argparse.Namespace) -> int:
    """Print what the model says, token by token, then time to the first token, tokens a second, and memory."""
    if under_torchrun():
        raise AutoTPError("generate starts its own ranks: run it without torchrun")
    check_model(args.model)
    load_tokenizer(args.model)
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not text.strip():
        raise AutoTPError("--prompt is empty")
    plan = make_plan_of(args)
    options = {name: getattr(args, name) for name in ("model", "dtype", "chat", "bench", "max_new_tokens", "seed", *_DRAWS)}
    if not args.sample and any(options[name] is not None for name in _DRAWS):
        given = next(name for name in _DRAWS if options[name] is not None)
        raise AutoTPError(f"--{given.replace('_', '-')} is for sampling: add --sample, or leave it out")
    screen = _Screen(args.json)
    report = run_ranks(
        generate_rank, args.tp, options | {"prompt": text, "sample": args.sample}, plan.to_json(), on_message=screen.show
    )
    screen.end()
    if args.json:
        print(json.dumps(report))
    else:
        print(describe(report), file=sys.stderr, flush=True)
    return 0


_DRAWS = ("temperature", "top_k", "top_p")


class _Screen:
    """The text as it comes, on stdout; while nothing comes, seconds."""

    def __init__(self, silent: bool) -> None:
        self.silent = silent
        self.waiting: Any = show_progress("loading")
        self.waiting.__enter__()

    def show(self, text: str) -> None:
        """The next piece of text, empty before the first."""
        self.end_waiting()
        if not self.silent:
            print(text, end="", flush=True)

    def end_waiting(self) -> None:
        if self.waiting is not None:
            self.waiting.__exit__(None, None, None)
            self.waiting = None

    def end(self) -> None:
        """All is said."""
        self.end_waiting()
        if not self.silent:
            print(flush=True)


def describe(report: dict[str, Any]) -> str:
    """The report as a table."""
    runs = report["runs"]
    lines = [
        f"\n{report['prompt_tokens']} tokens of prompt, {runs[0]['new_tokens']} new; {report['dtype']}, {report['device']}",
        f"{'':<12}{'first token':>14}{'tokens/s':>12}{'memory a rank':>16}",
    ]
    for run in runs:
        first = f"{run['first_token_ms']:.1f} ms"
        lines.append(f"{run['name']:<12}{first:>14}{run['tokens_per_s']:>12.1f}{run['memory_gib']:>12.2f} GiB")
    if len(runs) > 1:
        ratio = runs[0]["tokens_per_s"] / runs[1]["tokens_per_s"]
        same = report["equal_tokens"]
        said = "the same tokens" if same == runs[0]["new_tokens"] else f"the same first {same} tokens"
        lines.append(paint(f"{ratio:.2f} times the unsharded model's tokens/s; {said}", "green", sys.stderr))
    return "\n".join(lines)


def generate_rank(options: dict[str, Any], plan_json: str) -> dict[str, Any]:
    """One rank's part of `autotp generate`."""
    from ..inject.plan import Plan
    from .speak import speak

    return speak(options, Plan.from_json(plan_json))
