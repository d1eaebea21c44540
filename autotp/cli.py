"""`autotp plan | train`: what a plan would do to a model, and a small training run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .errors import AutoTPError
from .train.launch import launch_ranks, under_torchrun
from .train.loop import TrainOptions, train_model

DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    """The console command; returns its exit code: 0 done, 1 the plan splits nothing, 2 an error, in one line."""
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

    plan = commands.add_parser("plan", help="print what would be split, from the model's config alone")
    plan.add_argument("model", metavar="MODEL", help="hub id or directory; no weights are read")
    plan.add_argument("--tp", type=positive, required=True, metavar="N", help="number of ranks")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.set_defaults(run=run_plan)

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


def positive(text: str) -> int:
    """A whole number above zero."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above zero")
    return value


def run_plan(args: argparse.Namespace) -> int:
    """Print the plan of `args.model`; 1 if it splits nothing."""
    from .inject.rules import make_plan

    plan = make_plan(_load_config(args.model), args.tp)
    print(plan.to_json(indent=1) if args.json else plan)
    if args.tp > 1 and not plan.shards:
        print(f"autotp: nothing of {args.model} would be split over {args.tp} ranks", file=sys.stderr)
        return 1
    return 0


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
