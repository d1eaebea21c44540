"""Checkpoints to resume a run from, at the same sizes: `OUT/checkpoint-STEP`, each rank its own files.

| file | of | holds |
|---|---|---|
| `shard-T-of-N.pt` | TP rank T, written by data rank 0 | weights, AdamW's state and masters, the schedule |
| `rank-R-of-N.pt` | rank R | random numbers and the position in the data |
| `state.json` | the run | the step and the options; read first |

They are written to a directory beside and renamed, so what bears the name is whole.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import AutoTPError, CheckpointError
from ..places import Places
from .batches import TrainBatches
from .optimizer import MasterOptimizer
from .options import TrainOptions, flag_of

# What the position in the data and the shards mean nothing without.
FIXED = (
    *("tp", "dp", "dtype", "master_weights", "batch_size", "seq_length", "grad_accum"),
    *("packing", "completions_only", "text_field", "seed"),
)


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
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self.batches, self.options, self.places = batches, options, places

    def _names(self) -> tuple[str, str]:
        places = self.places
        return f"shard-{places.tp.tp_rank}-of-{places.tp.tp_size}.pt", f"rank-{places.rank}-of-{places.size}.pt"

    def save(self, step: int) -> Path:
        """Write `checkpoint-STEP` and return it; collective over all ranks.

        Raises:
            AutoTPError: on all ranks, if some rank could not write; what bears the name is as it was.
        """
        final = Path(self.options.out) / f"checkpoint-{step}"
        partial, old = final.with_name(f".{final.name}.partial"), final.with_name(f".{final.name}.old")
        with self.places.together(f"saving {final}"):
            if self.places.is_main:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        with self.places.together(f"saving {final}"):
            partial.mkdir(parents=True, exist_ok=True)
            shard, own = self._names()
            if self.places.dp.tp_rank == 0:
                saved = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
                torch.save({**saved, "schedule": self.schedule.state_dict()}, partial / shard)
            torch.save({"random": random_state(), "data": self.batches.state()}, partial / own)
        with self.places.together(f"saving {final}"):
            if self.places.is_main:
                self._finish(step, partial, final, old)
        return final

    def _finish(self, step: int, partial: Path, final: Path, old: Path) -> None:
        tp, size = self.places.tp.tp_size, self.places.size
        wanted = [f"shard-{t}-of-{tp}.pt" for t in range(tp)] + [f"rank-{r}-of-{size}.pt" for r in range(size)]
        missing = [name for name in wanted if not (partial / name).exists()]
        if missing:
            raise CheckpointError(
                f"{missing} of other ranks are not in {partial}: --out must be a directory that all ranks share"
            )
        about = {"step": step, "options": self.options.to_mapping(), "files": _describe_files(self.options)}
        (partial / "state.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        partial.rename(final)
        shutil.rmtree(old, ignore_errors=True)

    def load(self, directory: Path) -> int:
        """Go on from `directory`; returns the steps that are done. Collective over all ranks.

        Raises:
            AutoTPError: on all ranks: it is no checkpoint, of other sizes or options, or does not fit.
        """
        with self.places.together(f"resuming from {directory}"):
            about = read_about(directory)
            _check_options(directory, about, self.options)
            shard, own = self._names()
            saved, mine = (_read(directory / name) for name in (shard, own))
            try:
                self.model.load_state_dict(saved["model"])
                self.optimizer.load_state_dict(saved["optimizer"])
            except (RuntimeError, ValueError) as error:
                raise CheckpointError(f"{directory} does not fit this model: {error}") from error
            self.schedule.load_state_dict(saved["schedule"])
            self.batches.load_state(mine["data"])
            set_random_state(mine["random"])
        return about["step"]


def find_checkpoint(options: TrainOptions) -> Path | None:
    """The directory to resume from; None to start anew.

    Raises:
        AutoTPError: it is missing, or a new run would mix its checkpoints with an older run's or write over a model.
    """
    found = {int(path.name[11:]): path for path in Path(options.out).glob("checkpoint-*") if path.name[11:].isdigit()}
    newest = found[max(found)] if found else None
    if options.resume not in (None, "auto"):
        if not (Path(options.resume) / "state.json").is_file():
            hint = f"the newest in --out is {newest}" if newest else f"there is none in --out {options.out}"
            raise AutoTPError(f"--resume {options.resume} is not the checkpoint of a run: {hint}")
        return Path(options.resume)
    if newest is None and (Path(options.out) / "config.json").exists():
        raise AutoTPError(f"--out {options.out} holds a model, which this run would write over: name another directory")
    if newest is not None and options.resume is None:
        raise AutoTPError(f"--out {options.out} holds {newest.name} of an earlier run: go on with --resume auto, or name another")
    return newest


def read_about(directory: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint.

    Raises:
        CheckpointError: it can't be read.
    """
    try:
        return json.loads((directory / "state.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{directory} is not the checkpoint of a run: {error}") from error


def _check_options(directory: Path, about: dict[str, Any], options: TrainOptions) -> None:
    now, then = options.to_mapping(), about["options"]
    for field in FIXED:
        if now[field] != then.get(field):
            raise AutoTPError(f"{directory} was written with {flag_of(field)} {then.get(field)}, this run has {now[field]}: "
                              f"resume with {then.get(field)}")  # fmt: skip
    files = _describe_files(options)
    if files != about["files"]:
        raise AutoTPError(f"{directory} was written while training on (name, bytes) {about['files']}, now --data is {files}: "
                          f"the position in the data means nothing there. Give the same files in the same order")  # fmt: skip


def _describe_files(options: TrainOptions) -> list[list[Any]]:
    return [[Path(path).name, Path(path).stat().st_size] for path in options.data]


def _read(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file may be broken in any way
        raise CheckpointError(f"can't read {path}: {error}") from error


# -- random numbers -----------------------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """The state of every generator that a model may draw from, in plain values."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    state = {"torch": torch.get_rng_state(), "python": (version, numbers, gauss)}
    state["numpy"] = (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest)
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """The inverse of `random_state`."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
