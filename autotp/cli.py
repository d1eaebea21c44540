"""`autotp plan | verify | train`: what a plan would do to a model, whether it computes the same, and a small training run."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .errors import AutoTPError
from .train.launch import launch_ranks, under_torchrun
from .train.loop import TrainOptions, train_model

if TYPE_CHECKING:
    from .inject.plan import Plan
    from .train.verify import VerifyReport

DTYPES = ("float32", "bfloat16", "float16", "float64")


def main(argv: Sequence[str] | None = None) -> int:
    """The console command; returns its exit code.

    0: done; 1: the plan splits nothing, or the parallelized model computes something else; 2: an error, in one line.
    """
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except (AutoTPError, OSError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        print(f"autotp: error: {' '.join(lines)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(prog="autotp", description="Make a Hugging Face model tensor-parallel.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    plan = commands.add_parser("plan", help="print what would be split, found and proved from the model's config alone")
    add_plan_arguments(plan, "hub id or directory; no weights are read", "print the plan as JSON")
    plan.set_defaults(run=run_plan)

    check = commands.add_parser("verify", help="load a checkpoint unsharded and parallelized, and compare what both compute")
    add_plan_arguments(check, "hub id or directory", "print the report as one JSON object")
    check.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights of both (%(default)s)")
    check.set_defaults(run=run_verify)

    train = commands.add_parser("train", help="train on a text file and save a plain checkpoint")
    train.add_argument("model", metavar="MODEL", help="hub id or directory")
    train.add_argument("--data", required=True, metavar="FILE", help="UTF-8 text to train on")
    train.add_argument("--tp", type=positive, required=True, metavar="N", help="number of ranks; started here, or by torchrun")
    train.add_argument("--out", required=True, metavar="DIR", help="where the checkpoint goes; plain transformers loads it")
    train.add_argument("--steps", type=positive, default=100, help="optimizer steps (%(default)s)")
    train.add_argument("--lr", type=float, default=1e-5, help="AdamW's learning rate (%(default)s)")
    train.add_argument("--weight-decay", type=float, default=0.0, help="AdamW's weight decay (%(default)s)")
    train.add_argument("--batch-size", type=positive, default=4, help="blocks in a micro-batch (%(default)s)")
    train.add_argument("--seq-length", type=positive, default=512, help="tokens in a block (%(default)s)")
    train.add_argument("--grad-accum", type=positive, default=1, help="micro-batches per step (%(default)s)")
    train.add_argument("--clip", type=float, default=1.0, help="global gradient norm; 0: no clipping (%(default)s)")
    train.add_argument("--seed", type=int, default=0, help="order of the blocks, dropout (%(default)s)")
    train.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (%(default)s)")
    train.set_defaults(run=run_train)
    return parser


def add_plan_arguments(parser: argparse.ArgumentParser, model_help: str, json_help: str) -> None:
    """The arguments of a command that makes a plan."""
    parser.add_argument("model", metavar="MODEL", help=model_help)
    parser.add_argument("--tp", type=positive, required=True, metavar="N", help="number of ranks")
    parser.add_argument(
        "--plan", metavar="FILE.json", help="a plan that `autotp plan --json` printed, edited or not; proved again"
    )
    parser.add_argument(
        "--few-units", choices=("whole", "refuse"), default="whole",
        help="what has fewer units (neurons, heads) than there are ranks stays whole, or is an error (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help=json_help)


def positive(text: str) -> int:
    """A whole number above zero."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above zero")
    return value


def run_plan(args: argparse.Namespace) -> int:
    """Print the plan of `args.model`; 1 if it splits nothing."""
    plan = _make_plan(args)
    print(plan.to_json(indent=1) if args.json else f"{plan}\n\nproof: {plan.proof or 'not needed for one rank'}")
    if args.tp > 1 and not plan.shards:
        print(f"autotp: nothing of {args.model} would be split over {args.tp} ranks", file=sys.stderr)
        return 1
    return 0


def _make_plan(args: argparse.Namespace) -> Plan:
    """The plan in the file `args.plan`, proved; without one the plan found in the model.

    Raises:
        AutoTPError: no config, no such file or no plan in it, or it does not compute what the model does.
    """
    from .inject.plan import Plan
    from .inject.rules import make_plan

    given = "auto"
    if args.plan is not None:
        try:
            given = Plan.from_json(Path(args.plan).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, AutoTPError) as error:
            raise AutoTPError(f"--plan {args.plan}: {error}") from error
    config = _load_config(args.model)
    with show_progress(f"planning {args.model} over {args.tp} ranks"):
        return make_plan(config, args.tp, plan=given, few_units=args.few_units)


@contextmanager
def show_progress(doing: str, after_s: float = 2.0, every_s: float = 1.0) -> Iterator[None]:
    """What takes longer than `after_s` counts its seconds in a line on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()

    def show() -> None:
        start = time.monotonic()
        if done.wait(after_s):
            return
        while True:
            print(f"\r{doing}: {time.monotonic() - start:.0f} s", end="", file=sys.stderr, flush=True)
            if done.wait(every_s):
                break
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    shower = threading.Thread(target=show, daemon=True)
    shower.start()
    try:
        yield
    finally:
        done.set()
        shower.join()


def _load_config(model: str) -> Any:
    """The config of a hub id or a directory.

    Raises:
        AutoTPError: there is none, or this transformers doesn't know it.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise AutoTPError(
            f"can't read the config of {model}, neither a directory nor a hub id that is known here: {error}"
        ) from error


def run_verify(args: argparse.Namespace) -> int:
    """Compare the parallelized model with the unsharded one in ranks started here; 1 if they differ."""
    from .checkpoint.source import SafetensorsSource
    from .inject.load import find_checkpoint

    if under_torchrun():
        raise AutoTPError("verify starts its own ranks: run it without torchrun")
    _load_config(args.model)
    with SafetensorsSource(find_checkpoint(args.model)):  # what is wrong with the files is known before the ranks start
        plan = _make_plan(args)
    if not args.json:
        print(f"{plan.model} over {plan.tp_size} ranks: {plan.split_share:.1%} of the parameters split\n"
              f"proof: {plan.proof or 'not needed for one rank'}", flush=True)  # fmt: skip
    report, inputs = launch_ranks(verify_rank, args.tp, args.model, plan.to_json(), args.dtype)
    print(json.dumps(report_json(args, plan, report, inputs)) if args.json else report_text(args, report, inputs))
    return 0 if report.passed else 1


def verify_rank(model: str, plan_json: str, dtype: str) -> tuple[VerifyReport, str]:
    """One rank's part of `autotp verify`."""
    from .inject.plan import Plan
    from .train.compare import compare_checkpoint

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


def run_train(args: argparse.Namespace) -> int:
    """Train in the ranks that run already, or start them."""
    _check_train(args)
    if under_torchrun():
        if int(os.environ["WORLD_SIZE"]) != args.tp:
            raise AutoTPError(f"torchrun started {os.environ['WORLD_SIZE']} ranks, but --tp is {args.tp}: make them equal")
        train_rank(args)
    else:
        print(f"{args.model} on {args.tp} ranks, {args.steps} steps of "
              f"{args.grad_accum * args.batch_size * args.seq_length:,} tokens", flush=True)  # fmt: skip
        launch_ranks(train_rank, args.tp, argparse.Namespace(**{k: v for k, v in vars(args).items() if k != "run"}))
    return 0


def _check_train(args: argparse.Namespace) -> None:
    """What can be known before the ranks start: half a minute earlier, and once."""
    _options(args)
    _load_config(args.model)
    if not Path(args.data).is_file():
        raise AutoTPError(f"--data {args.data}: there is no such file")
    if Path(args.out).exists() and not Path(args.out).is_dir():
        raise AutoTPError(f"--out {args.out} is a file, not a directory")


def _options(args: argparse.Namespace) -> TrainOptions:
    return TrainOptions(args.steps, args.lr, args.weight_decay, args.grad_accum, args.clip)


def train_rank(args: argparse.Namespace) -> list[float]:
    """One rank's part of `autotp train`: load its slices, train, save together; returns the losses."""
    from tqdm import tqdm
    from transformers import AutoTokenizer

    from .checkpoint.save import save_pretrained
    from .inject.rewrite import from_pretrained
    from .train.data import iterate_batches, read_blocks

    is_main = os.environ["RANK"] == "0"
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    blocks = read_blocks(args.data, tokenizer, args.seq_length)
    torch.manual_seed(args.seed)
    model = from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    with tqdm(total=args.steps, unit="step", disable=not is_main) as bar:

        def show_step(step: int, loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            bar.update()

        losses = train_model(model, iterate_batches(blocks, args.batch_size, args.seed), _options(args), show_step)
    save_pretrained(model, args.out)
    if is_main:
        tokenizer.save_pretrained(args.out)
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; saved to {args.out}", flush=True)
    return losses


if __name__ == "__main__":
    sys.exit(main())
