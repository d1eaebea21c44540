"""Checkpoints that a run goes on from, over as many ranks as there are then: `OUT/checkpoint-STEP`.

Each is a `TrainingState`, which keeps beside its tensors the options of the run, its files, and its position in them.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoint.plain import decode_plain
from ..checkpoint.state import TrainingState, find_newest, read_about
from ..errors import AutoTPError, CheckpointError
from ..places import Places
from .batches import TrainBatches
from .optimizer import MasterOptimizer
from .options import TrainOptions, flag_of

# What the position in the data and the weights mean nothing without.
FIXED = ("dtype", "master_weights", "seq_length", "packing", "completions_only", "text_field", "seed")


class RunState:
    """The parts of a run that change from step to step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: MasterOptimizer,
        schedule: Any,
        batches: TrainBatches,
        options: TrainOptions,
        places: Places,
    ) -> None:
        self.optimizer, self.batches, self.options, self.places = optimizer, batches, options, places
        self.state = TrainingState(model, optimizer.adamw, schedule, masters=optimizer.masters, dp=places)

    def save(self, step: int) -> Path:
        """Write `checkpoint-STEP` and return it, or begin to, if `--async-save` is given; collective over all ranks.

        Raises:
            AutoTPError, OSError: on all ranks, if some rank could not write; what bears the name is as it was.
        """
        options = self.options
        extra = {"options": options.to_mapping(), "files": _describe_files(options)}
        extra |= {"scale": self.optimizer.scale_state(), "data": self.batches.state()}
        return self.state.save(options.out, step, extra, keep_last=options.keep_last, async_save=options.async_save)

    def wait(self) -> None:
        """Until what `save` began is written; collective, and raises as `save` does."""
        self.state.wait()

    def load(self, directory: Path) -> int:
        """Go on from `directory`; returns the steps that are done. Collective over all ranks.

        Raises:
            AutoTPError: on all ranks: it is no checkpoint, of other options, or does not fit.
        """
        with self.places.together(f"resuming from {directory}"):
            _check_options(directory, read_extra(directory), self.options)
        loaded = self.state.load(directory)
        self.optimizer.load_scale_state(loaded.extra["scale"])
        self.batches.load_state(loaded.extra["data"])
        return loaded.step


def find_checkpoint(options: TrainOptions, warn: bool = False) -> Path | None:
    """The directory to resume from; None to start anew.

    Args:
        options: of the run.
        warn: of newer checkpoints that are not whole and so are passed over.

    Raises:
        AutoTPError: it is missing, or a new run would mix its checkpoints with an older run's or write over a model.
    """
    newest, passed_over = find_newest(Path(options.out))
    if options.resume not in (None, "auto"):
        if not (Path(options.resume) / "state.json").is_file():
            hint = f"the newest in --out is {newest}" if newest else f"there is none in --out {options.out}"
            raise AutoTPError(f"--resume {options.resume} is not the checkpoint of a run: {hint}")
        return Path(options.resume)
    if newest is None and (Path(options.out) / "config.json").exists():
        raise AutoTPError(f"--out {options.out} holds a model, which this run would write over: name another directory")
    if newest is not None and options.resume is None:
        raise AutoTPError(f"--out {options.out} holds {newest.name} of an earlier run: go on with --resume auto, or name another")
    if options.resume is not None and passed_over and warn:
        begin = "starting anew" if newest is None else f"going on from {newest}"
        warnings.warn(f"{begin}; passed over: {'; '.join(passed_over)}", stacklevel=2)
    return newest


def read_extra(directory: Path) -> dict[str, Any]:
    """What a checkpoint keeps beside its tensors: `options`, `files`, `scale` and `data`.

    Raises:
        CheckpointError: it is no whole checkpoint of a run.
    """
    extra = decode_plain(read_about(directory).get("extra"))
    if not isinstance(extra, dict) or not {"options", "files", "scale", "data"} <= extra.keys():
        raise CheckpointError(f"{directory} is a training state, but not of `autotp train`: load it with autotp.TrainingState")
    return extra


def _check_options(directory: Path, extra: dict[str, Any], options: TrainOptions) -> None:
    now, then = options.to_mapping(), extra["options"]
    for field in FIXED:
        if now[field] != then.get(field):
            raise AutoTPError(f"{directory} was written with {flag_of(field)} {then.get(field)}, this run has {now[field]}: "
                              f"resume with {then.get(field)}")  # fmt: skip
    sizes = ("dp", "batch_size", "grad_accum")
    before, after = ([each[field] for field in sizes] for each in (then, now))
    counts = [a * b * c for a, b, c in (before, after)]
    if counts[0] != counts[1]:
        names = " x ".join(map(flag_of, sizes))
        raise AutoTPError(f"{directory} was written with {counts[0]} sequences in a step ({names}: {before}), this run has "
                          f"{counts[1]} ({after}): make them equal, by --grad-accum say")  # fmt: skip
    files = _describe_files(options)
    if files != extra["files"]:
        raise AutoTPError(f"{directory} was written while training on (name, bytes) {extra['files']}, now --data is {files}: "
                          f"the position in the data means nothing there. Give the same files in the same order")  # fmt: skip


def _describe_files(options: TrainOptions) -> list[list[Any]]:
    return [[Path(path).name, Path(path).stat().st_size] for path in options.data]
