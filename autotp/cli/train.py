"""`autotp train`: its options, its ranks, and what the user sees of them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.gguf import convert_beside, find_gguf
from ..checkpoint.state import find_newest
from ..errors import AutoTPError
from ..groups import init_process_group_from_env
from ..train.launch import send_message, under_torchrun
from ..train.options import TrainOptions
from ..train.run import TrainInterrupted, TrainResult, check_data, train
from ..train.setup import check_model, load_tokenizer, read_plan
from .checks import check_ranks
from .config import read_config
from .ranks import Failure, SpokenFor, explain_memory, is_memory_error, is_other_rank, run_ranks, write_trace
from .screen import TrainBar, show_progress


def run_train(args: argparse.Namespace) -> int:
    """Train in the ranks that run already, or start them."""
    with _one_speaker():
        options = read_options(args)
        launcher, started = find_launcher()
        check_ranks(options.tp, options.dp, torch.cuda.device_count(), started, launcher)
    return start_ranks(args, options) if started is None else join_ranks(args, options)


def read_options(args: argparse.Namespace) -> TrainOptions:
    """The options of `args` over those of its config file.

    Raises:
        AutoTPError: a file that is no config, an unknown key, a missing option or a wrong value.
    """
    names = [field.name for field in dataclasses.fields(TrainOptions)]
    given = {name: value for name, value in vars(args).items() if name in names}
    return TrainOptions.from_mapping({**(read_config(args.config, names) if args.config else {}), **given})


def find_launcher() -> tuple[str, int | None]:
    """Who started this process as one of several ranks, and how many; `None` if nobody did."""
    launcher = "accelerate launch" if "ACCELERATE_MIXED_PRECISION" in os.environ else "torchrun"
    if under_torchrun():
        return launcher, int(os.environ["WORLD_SIZE"])
    return launcher, 1 if launcher == "accelerate launch" else None


def prepare(options: TrainOptions) -> TrainOptions:
    """Look at every file that the run will need; the options with a model that ranks can read slices of.

    Raises:
        AutoTPError: what is missing, with the name most like it.
    """
    check_data(options)
    if options.plan is not None:
        read_plan(options.plan)
    gguf = find_gguf(options.model)
    if gguf is not None:
        options = dataclasses.replace(options, model=str(convert_beside(gguf, options.out)))
    check_model(options.model)
    load_tokenizer(options.model)
    return options


def log_of(options: TrainOptions) -> str:
    """Where the ranks' own output goes; its directory is made."""
    Path(options.out).mkdir(parents=True, exist_ok=True)
    return str(Path(options.out) / "autotp.log")


def start_ranks(args: argparse.Namespace, options: TrainOptions) -> int:
    """Start `tp * dp` ranks and show what rank 0 reports."""
    with show_progress("looking at model and data"):
        options = prepare(options)
    log, bar, size = log_of(options), TrainBar(sys.stderr), options.tp * options.dp
    say_start(args, options)
    bar.wait(f"starting {size} ranks: finding the plan, reading the weights")
    try:
        outcome = run_ranks(train_rank, size, options, log=log, on_message=bar.show)
    except KeyboardInterrupt:
        bar.close()
        print(f"autotp: interrupted{say_newest(args, options)}", file=sys.stderr)
        return 130
    except Failure as error:
        bar.close()
        raise Failure(f"{str(error).rstrip('.')}{say_newest(args, options)}", error.log) from error
    bar.close()
    return say_end(args, outcome)


def join_ranks(args: argparse.Namespace, options: TrainOptions) -> int:
    """This process's part where a launcher started it; ends the process itself if it fails."""
    bar = TrainBar(sys.stderr)
    try:
        options = _prepare_together(options)
        if not is_other_rank():
            say_start(args, options)
            bar.wait("finding the plan, reading the weights")
        outcome = train_rank(options, bar.show)
    except SpokenFor:
        raise
    except BaseException as error:
        bar.close()
        if isinstance(error, KeyboardInterrupt) or not _take_the_word():
            code = 130 if isinstance(error, KeyboardInterrupt) else 2
            _write_rank_trace(options)
        else:
            raise _name_the_rank(error, _write_rank_trace(options)) from error
        sys.stderr.flush()
        os._exit(code)  # at once: what waits for the other ranks at exit would wait for ever
    bar.close()
    return say_end(args, outcome) if not is_other_rank() else 130 * (outcome["checkpoint"] is not None)


def train_rank(options: TrainOptions, on_event: Any = send_message) -> dict[str, Any]:
    """One rank's part of `autotp train`; what the user is told at the end.

    Raises:
        AutoTPError: as `train`; memory ran out.
    """
    try:
        return describe_result(train(options, on_event))
    except TrainInterrupted as error:
        return dict(steps=error.step, checkpoint=error.checkpoint)
    except Exception as error:
        if not is_memory_error(error):
            raise
        raise AutoTPError(explain_memory(error, options)) from error


def describe_result(result: TrainResult) -> dict[str, Any]:
    """A run's result as plain data."""
    ends = dict(first_loss=result.losses[0], last_loss=result.losses[-1]) if result.losses else {}
    return dict(steps=result.steps, **ends, eval_loss=result.eval_loss, out=result.out, checkpoint=None)


# -- what is said ---------------------------------------------------------------------------------------------------------


def say_start(args: argparse.Namespace, options: TrainOptions) -> None:
    """What is about to run, in a line, and what of an earlier run is passed over."""
    newest, passed_over = find_newest(Path(options.out)) if options.resume == "auto" else (None, [])
    for each in passed_over:
        print(f"autotp: passed over {each}; going on from {newest or 'the start'}", file=sys.stderr)
    copies = f" x {options.dp} copies" if options.dp > 1 else ""
    tokens = options.dp * options.grad_accum * options.batch_size * options.seq_length
    print(
        f"{args.model if 'model' in args else options.model}: {options.tp} ranks{copies}, {options.dtype}, "
        f"{'' if options.packing else 'at most '}{tokens:,} tokens in a step",
        file=sys.stderr,
        flush=True,
    )


def say_end(args: argparse.Namespace, outcome: dict[str, Any]) -> int:
    """The result, or how to go on after an interrupt; the exit code."""
    checkpoint = outcome["checkpoint"]
    if checkpoint is not None:
        print(f"autotp: interrupted after step {outcome['steps']}, and saved. Go on with:\n  {resume_command(args, checkpoint)}",
              file=sys.stderr, flush=True)  # fmt: skip
    if args.json:
        print(json.dumps({**outcome, "interrupted": checkpoint is not None}))
    elif checkpoint is None:
        losses = f"all {outcome['steps']} steps were done before; "
        if "first_loss" in outcome:
            losses = f"loss {outcome['first_loss']:.4f} -> {outcome['last_loss']:.4f}; "
        measured = f"evaluation loss {outcome['eval_loss']:.4f}; " if outcome["eval_loss"] is not None else ""
        print(f"{losses}{measured}saved to {outcome['out']}", flush=True)
    return 0 if checkpoint is None else 130


def say_newest(args: argparse.Namespace, options: TrainOptions) -> str:
    """How to go on from the newest checkpoint, if there is one."""
    newest, _ = find_newest(Path(options.out))
    if newest is None:
        return ""
    return f". The newest checkpoint is {newest}; go on with: {resume_command(args, str(newest))}"


def resume_command(args: argparse.Namespace, checkpoint: str) -> str:
    """The command that was given, with `--resume`."""
    words, skip = [], False
    for word in args.argv:
        if not skip and word != "--resume" and not word.startswith("--resume="):
            words.append(word)
        skip = word == "--resume"
    return shlex.join([*_start_command(), *words, "--resume", checkpoint])


def _start_command() -> list[str]:
    """What stands before the options on a command line that starts as many ranks as this process's launcher did."""
    launcher, started = find_launcher()
    if started is None:
        return ["autotp"]
    if launcher == "accelerate launch":
        precision = os.environ["ACCELERATE_MIXED_PRECISION"]
        several = ["--multi_gpu"] if started > 1 else []
        sizes = ["--num_processes", str(started), "--mixed_precision", precision]
        return ["accelerate", "launch", *several, *sizes, "-m", "autotp.cli"]
    here = os.environ.get("LOCAL_WORLD_SIZE", str(started))
    return ["torchrun", "--standalone", "--nproc-per-node", here, "-m", "autotp.cli"]


# -- under a launcher -----------------------------------------------------------------------------------------------------


@contextmanager
def _one_speaker() -> Iterator[None]:
    """Of what every rank finds alike, rank 0 speaks."""
    try:
        yield
    except (AutoTPError, OSError) as error:
        if is_other_rank():
            raise SpokenFor from error
        raise


def _store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()


def _prepare_together(options: TrainOptions) -> TrainOptions:
    """`prepare` on rank 0, whose model is then everyone's.

    Raises:
        AutoTPError: on rank 0, and with a port in use. SpokenFor: elsewhere.
    """
    try:
        init_process_group_from_env()
    except torch.distributed.DistNetworkError as error:
        raise AutoTPError(explain_port(error)) from error
    key = "autotp/prepared"
    if is_other_rank():
        _store().wait([key])
        model = _store().get(key).decode()
        if not model:
            raise SpokenFor
        return dataclasses.replace(options, model=model)
    try:
        options = prepare(options)
    except BaseException:
        _store().set(key, "")
        raise
    _store().set(key, options.model)
    return options


def explain_port(error: BaseException) -> str:
    """Why ranks could not meet, and what to do."""
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if "EADDRINUSE" in str(error) or "in use" in str(error):
        return (
            f"port {os.environ.get('MASTER_PORT')} of this machine is in use by another process, so the ranks can't meet there: "
            f"`torchrun --standalone` takes a free one, `--master-port` (or MASTER_PORT) names another"
        )
    return f"the ranks can't meet at {place} (MASTER_ADDR, MASTER_PORT): {error}"


def _take_the_word() -> bool:
    """Whether this rank is the first to fail, or can't know."""
    try:
        return _store().add("autotp/failed", 1) == 1
    except Exception:  # no process group, or the store's process is gone
        return not is_other_rank()


def _write_rank_trace(options: TrainOptions) -> str:
    text = f"\n=== rank {os.environ['RANK']}\n{traceback.format_exc()}"
    try:
        return write_trace(text, log_of(options))
    except OSError:
        return write_trace(text)


def _name_the_rank(error: BaseException, log: str) -> Failure:
    said = str(error) if isinstance(error, AutoTPError) else f"{type(error).__name__}: {error}"
    return Failure(f"rank {os.environ['RANK']} failed: {said}", log)
