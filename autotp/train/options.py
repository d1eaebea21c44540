"""How to train: the options of `autotp train`, one field each, and what is wrong with a set of them."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import AutoTPError

DTYPES = ("bfloat16", "float32", "float16")
SCHEDULES = ("constant", "linear", "cosine")
# The words of --sequence-parallel, and what `parallelize` calls them; YAML reads on and off as true and false.
WHEN_DEALT: dict[str, bool | str] = {"never": False, "auto": "auto", "always": True}


@dataclass(frozen=True)
class TrainOptions:
    """One training run. A field `seq_length` is the flag `--seq-length` and the key `seq-length` (or `seq_length`) of a file.

    Attributes:
        model: hub id or directory.
        data: files to train on: text, `.jsonl`, `.parquet` or `.arrow`.
        out: directory of the trained checkpoint, and of the run's own checkpoints `checkpoint-STEP`.
        tp, dp: ranks that share one model, and models that share each step's batches; `tp * dp` processes run.
        dtype: of the weights.
        master_weights: the optimizer updates float32 copies of weights that are not float32.
        steps, epochs: how long, one of them; neither: one epoch.
        lr, lr_schedule, warmup: the peak learning rate, how it falls after the warm-up (to 0 at the last step), and the
            warm-up's steps, or below 1 its share of all steps.
        weight_decay, betas, eps: AdamW's; norms and biases are not decayed.
        batch_size: sequences of a micro-batch, on each data rank.
        seq_length: tokens of a sequence.
        grad_accum: micro-batches of a step.
        clip: norm that the gradients are scaled down to; 0: no clipping.
        packing: texts are joined with the end token between them and cut into whole sequences; without it every text is a
            sequence of its own, cut at `seq_length` and padded.
        completions_only: only what the assistant says in a chat counts in the loss.
        text_field: the key or column with the text in JSONL, parquet and arrow files.
        gradient_checkpointing: activations are computed again in backward instead of kept.
        eval_data, eval_every, eval_batches: files to evaluate on, every how many steps (0: at the end only) and how many
            batches (None: all).
        save_every: a checkpoint to resume from every so many steps; 0: only when the run is interrupted.
        keep_last: how many of these are left; 0: all.
        async_save: they are written beside the training, which goes on as soon as a copy is made in the CPU's memory.
        resume: a directory `checkpoint-STEP`, or "auto": the newest in `out`, if there is one.
        seed: of the data's order and of dropout.
        log: a file to which `train` writes each step's event as a JSON line; a resumed run adds to it.
        tensorboard: a directory to which `train` writes the same for TensorBoard.
        plan: a Plan JSON to use instead of the discovered one.
        sequence_parallel: when tokens are dealt to the tp ranks between regions: "never", "auto" (where there are many) or
            "always" (as soon as there are as many as ranks).

    Raises:
        AutoTPError: a value that can't be, with the flag, the value and a way out.
    """

    model: str
    data: tuple[str, ...]
    out: str
    tp: int
    dp: int = 1
    dtype: str = "bfloat16"
    master_weights: bool = True
    steps: int | None = None
    epochs: int | None = None
    lr: float = 1e-5
    lr_schedule: str = "constant"
    warmup: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, ...] = (0.9, 0.999)
    eps: float = 1e-8
    batch_size: int = 4
    seq_length: int = 512
    grad_accum: int = 1
    clip: float = 1.0
    packing: bool = True
    completions_only: bool = False
    text_field: str = "text"
    gradient_checkpointing: bool = False
    eval_data: tuple[str, ...] | None = None
    eval_every: int = 0
    eval_batches: int | None = None
    save_every: int = 0
    keep_last: int = 0
    async_save: bool = False
    resume: str | None = None
    seed: int = 0
    log: str | None = None
    tensorboard: str | None = None
    plan: str | None = None
    sequence_parallel: str = "never"

    def __post_init__(self) -> None:
        for field, kind in typing.get_type_hints(type(self)).items():
            object.__setattr__(self, field, _as_type(field, getattr(self, field), kind))
        self._check_choices()
        self._check_ranges()

    def _check_choices(self) -> None:
        for field, allowed in (("dtype", DTYPES), ("lr_schedule", SCHEDULES), ("sequence_parallel", tuple(WHEN_DEALT))):
            if getattr(self, field) not in allowed:
                _refuse(
                    field, getattr(self, field), f"is not one of {', '.join(allowed)}{_nearest(getattr(self, field), allowed)}"
                )
        if not self.data:
            _refuse("data", "", "names no file: give at least one")
        if self.steps is not None and self.epochs is not None:
            _refuse("steps", self.steps, f"and --epochs {self.epochs} both say how long to train: give one of them")
        if not self.text_field:
            _refuse("text_field", "''", "is empty: name the key or column that holds the text")
        if self.eval_every and not self.eval_data:
            _refuse("eval_every", self.eval_every, "needs something to evaluate on: give --eval-data too, or leave it out")

    def _check_ranges(self) -> None:
        for field in ("tp", "dp", "steps", "epochs", "batch_size", "grad_accum", "eval_batches"):
            value = getattr(self, field)
            if value is not None and value < 1:
                _refuse(field, value, "is below 1: give a whole number above 0")
        if self.seq_length < 2:
            _refuse("seq_length", self.seq_length, "is below 2: a sequence needs a token to predict the next one from")
        for field in ("lr", "warmup", "weight_decay", "clip", "eval_every", "save_every", "keep_last", "seed"):
            value = getattr(self, field)
            if not 0 <= value < math.inf:
                _refuse(field, value, "is not a finite number from 0 on")
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            _refuse("warmup", self.warmup, "is neither a share below 1 nor a whole number of steps")
        if not self.eps > 0:
            _refuse("eps", self.eps, "is not above 0: AdamW divides by it where a gradient is 0; 1e-8 is usual")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            _refuse("betas", list(self.betas), "are not two numbers from 0 up to below 1, such as 0.9 0.999")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> TrainOptions:
        """The options of a file or a command line; dashes in keys count as underscores.

        Raises:
            AutoTPError: an unknown key, with the nearest known one; a missing one; a value of the wrong type or range.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        given: dict[str, Any] = {}
        for key, value in values.items():
            field = str(key).replace("-", "_")
            if field not in known:
                near = _nearest(field, known).replace("_", "-")
                raise AutoTPError(f"there is no option {key!r} (its value is {value!r}){near or ': see `autotp train --help`'}")
            if field in given:
                raise AutoTPError(f"option {key!r} is given twice, as {given[field]!r} and {value!r}: leave one out")
            given[field] = value
        needed = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING and f.name not in given]
        if needed:
            raise AutoTPError(f"{', '.join(map(flag_of, needed))} must be given")
        return cls(**given)

    def to_mapping(self) -> dict[str, Any]:
        """Plain lists, texts and numbers by field; `from_mapping` gives equal options."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(self).items()}


def flag_of(field: str) -> str:
    """The flag of a field: `--seq-length` of `seq_length`."""
    return "MODEL" if field == "model" else "--" + field.replace("_", "-")


def _refuse(field: str, value: Any, why: str) -> typing.NoReturn:
    raise AutoTPError(f"{flag_of(field)} {value} {why}")


def _nearest(word: str, known: typing.Iterable[str]) -> str:
    """`: did you mean X?`, where there is one."""
    near = difflib.get_close_matches(str(word), list(known), 1, 0.6)
    return f": did you mean {near[0]!r}?" if near else ""


def _as_type(field: str, value: Any, kind: Any) -> Any:
    """`value` as the field's type; only a change that loses nothing is made (2 for 2.0, a list for a tuple, "1e-5")."""
    if isinstance(kind, types.UnionType):
        if value is None:
            return None
        kind = next(each for each in typing.get_args(kind) if each is not type(None))
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(_as_type(field, each, item) for each in values)
    if kind is str and hasattr(value, "__fspath__"):
        value = value.__fspath__()
    if kind is float and not isinstance(value, bool):
        if isinstance(value, int):
            return float(value)
        if isinstance(value, str):  # what YAML makes of 1e-5, which has no dot
            try:
                return float(value)
            except ValueError:
                pass
    if kind is int and isinstance(value, float) and value == int(value):
        return int(value)
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    name = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[kind]
    raise AutoTPError(f"{flag_of(field)} {value!r} is a {type(value).__name__}, not {name}")
