"""Training state: save everything that a run goes on from, and go on from it at any TP and DP size.

Nothing is gathered: each rank writes boxes of the whole tensors (`chunks.py`) through `torch.distributed.checkpoint`, copies
once, and reads the boxes that its new part is made of.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..comm import TPGroup
from ..errors import AutoTPError, CheckpointError
from ..groups import local_device, resolve_group
from ..layers.base import check_usable, find_group, unwrap
from ..layers.fully import data_ranks
from ..layers.quantised import list_packed
from ..places import Places
from .claim import DirectoryClaim
from .dcp import TensorWriter, read_metadata
from .parts import StateParts
from .pending import ABOUT, PREFIX, PendingSave, clean_up, find_partial, find_steps, partial_of, sum_json
from .plain import decode_plain, encode_plain
from .random_state import choose_random_state, jump_random_state, random_state, set_random_state

FORMAT = 1
_WAIT_S = 30  # at most, for another job that saves to the same directory


@dataclass(frozen=True)
class LoadedState:
    """What was gone on from.

    Attributes:
        step: the number it was saved under.
        extra: what `save` was given to keep.
        path: its directory.
    """

    step: int
    extra: Any
    path: Path


class TrainingState:
    """The parts of a training run that its state is made of, to be saved and gone on from.

    An object rather than torch's `save` and `load`, since a save beside the training outlives its call: the next one, or
    `wait`, says how it ended. All methods are collective over the ranks of the model and its copies.

    Args:
        model: parallelized, or plain; wrapped in DistributedDataParallel, sharded by FSDP2, or neither.
        optimizer: of the model's parameters.
        scheduler: has `state_dict`, of plain values, and `load_state_dict`.
        masters: tensors that the optimizer updates in place of the parameters of these names, of their shapes.
        dp: the process group, or one-axis DeviceMesh, of the ranks that hold the same shards of the model's other copies;
            False where the model has none, though other ranks run.

    Raises:
        CheckpointError: the optimizer's tensors are not the model's.
        AutoTPError: other ranks run, and `dp` does not say what they are.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        *,
        masters: Mapping[str, Tensor] | None = None,
        dp: Any = None,
    ) -> None:
        self.model = unwrap(model)
        self.optimizer, self.scheduler, self.masters = optimizer, scheduler, dict(masters or {})
        self.places = dp if isinstance(dp, Places) else _find_places(self.model, dp)
        self._pending: PendingSave | None = None
        self._claim = DirectoryClaim()
        self._make_parts()

    def __enter__(self) -> TrainingState:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.wait()
            self._claim.release()

    def _make_parts(self) -> StateParts:
        """Made anew each time: an optimizer may have got parameters since."""
        check_usable(self.model, self.model.state_dict().keys() - list_packed(self.model))
        for name, parameter in self.model.named_parameters():
            if isinstance(parameter, DTensor) and not set(data_ranks(parameter)) <= set(self.places.dp.ranks):
                raise CheckpointError(
                    f"FSDP2 shards '{name}' over ranks {data_ranks(parameter)}, but dp= names {list(self.places.dp.ranks)}: "
                    f"pass the mesh that fully_shard was given, dp=mesh['dp']"
                )
        return StateParts(self.model, self.optimizer, self.scheduler, self.masters)

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(self, directory: Any, step: int, extra: Any = None, *, keep_last: int = 0, async_save: bool = False) -> Path:
        """Write `directory/checkpoint-STEP`, and return it; it has its name when it is whole.

        From its first save on, until it ends or leaves the `with` of this object, a job has the directory to itself.

        Args:
            directory: one that all ranks share; made if it is not there.
            step: number of the state; one of the same number is replaced.
            extra: plain values to keep (None, numbers, texts, bytes, tensors; lists, tuples and dicts of those), rank 0's.
            keep_last: how many states of steps up to this one are left in `directory`; 0: all.
            async_save: return when what this rank writes is copied to the CPU, and write beside the training. What goes wrong
                is raised by the next `save`, `load` or `wait`.

        Raises:
            CheckpointError: the ranks' states do not fit together, or hold what can't be saved; another job that still runs
                saves to `directory`.
            AutoTPError, OSError: on all ranks, if one could not write; what bears the name is as it was.
        """
        self.wait()
        final = Path(directory) / f"{PREFIX}{step}"
        doing, places = f"saving {final}", self.places
        with places.together(doing):
            parts = self._make_parts()
            about = {"format": FORMAT, "step": step, "sizes": [places.tp.tp_size, places.dp.tp_size], **parts.describe()}
            writer = TensorWriter(partial_of(final), parts.tensors_to_save())
            own = encode_plain(random_state(), "the random numbers")
            kept = encode_plain(extra, "extra")
        every = places.gather((hashlib.sha256(json.dumps(about).encode()).hexdigest(), writer.plan, own))
        with places.together(doing):
            other = [rank for rank, each in enumerate(every) if each[0] != every[0][0]]
            if other:
                raise CheckpointError(f"optimizer or schedule of rank(s) {other} are in another state than rank 0's: all ranks "
                                      f"must take the same steps with the same options")  # fmt: skip
            writer.agree([each[1] for each in every], places.rank)
            if places.is_main:
                _refuse_foreign(final)
                final.parent.mkdir(parents=True, exist_ok=True)
                self._claim.hold(final.parent, min(_WAIT_S, places.tp.timeout_s / 2))
                clean_up(final)
                _check_room(final, writer)
                partial_of(final).mkdir()
        about |= {"random": [each[2] for each in every], "extra": kept}
        with places.together(doing):
            if async_save:
                writer.stage()
        self._pending = PendingSave(writer, final, about, places.rank, places.size, keep_last)
        self._pending.start(beside=async_save)
        if not async_save:
            self.wait()
        return final

    def wait(self) -> None:
        """Until the save in progress, if there is one, has its name.

        Raises:
            AutoTPError, OSError: on all ranks, if one could not write.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.written.wait()
        try:
            with self.places.together(f"saving {pending.final}"):
                pending.raise_error()
            with self.places.together(f"saving {pending.final}"):
                if self.places.is_main:
                    pending.complete()
        except BaseException:
            pending.give_up()
            raise

    # -- loading ------------------------------------------------------------------------------------------------------

    def load(self, directory: Any) -> LoadedState:
        """Go on from a state: of `directory` if it is one, else from the newest whole one in it.

        What is newer and not whole is passed over, and a warning says so. All is compared before anything is changed. Random
        numbers go on bit for bit at the same TP and DP size; see `choose_random_state` for others.

        Raises:
            AutoTPError: on all ranks: there is none, it can't be read, or is of another model, optimizer or schedule.
        """
        self.wait()
        places, path = self.places, Path(directory)
        with places.together(f"resuming from {path}"):
            found = _choose(path) if places.is_main else None
        path = Path(places.gather(None if found is None else str(found))[0])
        with places.together(f"resuming from {path}"):
            about = read_about(path)
            try:
                metadata = read_metadata(path, about["files"])
                parts = self._make_parts()
                parts.check(about, metadata)
                rank, jump = choose_random_state(
                    tuple(about["sizes"]), (places.tp.tp_size, places.dp.tp_size), places.tp.tp_rank, places.dp.tp_rank
                )
                numbers, extra = decode_plain(about["random"][rank]), decode_plain(about["extra"])
            except (KeyError, TypeError, IndexError, ValueError) as error:
                raise _explain(path, error) from error
        with places.together(f"resuming from {path}"):
            parts.load(path, about, metadata)
            set_random_state(numbers)
            jump_random_state(jump)
        return LoadedState(about["step"], extra, path)


def _explain(path: Path, error: Exception) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return CheckpointError(f"can't go on from {path}: {error}")
    return CheckpointError(f"{path / ABOUT} is damaged: {type(error).__name__}: {error}")


def _find_places(model: nn.Module, dp: Any) -> Places:
    tp = find_group(model) or TPGroup(None, local_device())
    if dp is None and dist.is_initialized() and dist.get_world_size() > tp.tp_size:
        raise AutoTPError(
            f"{dist.get_world_size()} ranks run and the model is on {tp.tp_size} of them: pass dp=mesh['dp'], the ranks that "
            f"hold the same shards of its copies, or dp=False if it has no copies"
        )
    return Places(tp, TPGroup(None, tp.device) if dp is None or dp is False else resolve_group(dp))


def _refuse_foreign(final: Path) -> None:
    """Only a state is replaced by a state: other programs call theirs `checkpoint-STEP` too."""
    if final.is_dir() and not (final / ABOUT).exists() and (found := sorted(path.name for path in final.iterdir())):
        held = ", ".join(found[:4])
        raise CheckpointError(
            f"{final} is no training state ({held}), which one would replace: name another directory, or move it"
        )


def _check_room(final: Path, writer: TensorWriter) -> None:
    needed, free = writer.total_bytes(), shutil.disk_usage(final.parent).free
    if needed > free:
        raise CheckpointError(f"{final.parent} has {free:,} bytes free, the state needs {needed:,} beside those that are there: "
                              f"make room, or keep fewer")  # fmt: skip


# -- which state ----------------------------------------------------------------------------------------------------------


def read_about(path: Path) -> dict[str, Any]:
    """`state.json` of a state whose files are all there, with the sizes they had.

    Raises:
        CheckpointError: it is no state, or not whole.
    """
    try:
        about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        own = about.pop("own_crc32", None)  # none in states of older versions
        if own is not None and own != sum_json(about):
            raise CheckpointError(f"{path / ABOUT} is not what was saved: its CRC-32 differs, the file is damaged")
        if about["format"] != FORMAT:
            raise CheckpointError(f"{path} is a training state of format {about['format']}, this autotp reads {FORMAT}")
        for name, size in about["files"].items():
            if Path(name).name != name or not isinstance(size, int):
                raise CheckpointError(f"{path / ABOUT} names {name!r} of {size} bytes, which is no file of a training state")
            found = (path / name).stat().st_size
            if found != size:
                raise CheckpointError(f"{path / name} has {found} bytes instead of {size}: the state is not whole")
        for name, crc in about.get("crc32", {}).items():  # of states that were saved with them
            if name in about["files"] and zlib.crc32((path / name).read_bytes()) != crc:
                raise CheckpointError(f"{path / name} is not what was saved: its CRC-32 differs, the file is damaged")
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a whole training state: {error}") from error
    return about


def find_newest(directory: Path) -> tuple[Path | None, list[str]]:
    """The newest whole state in `directory`, or None; and what is newer, or did not come to its end, with what it lacks."""
    passed_over = []
    newest, newest_step = None, -1
    for step, path in find_steps(directory).items():
        try:
            read_about(path)
        except CheckpointError as error:
            passed_over.append(str(error))
            continue
        newest, newest_step = path, step
        break
    halves = [path for step, path in find_partial(directory).items() if step > newest_step]
    return newest, [*(f"{path} (a save that did not come to its end)" for path in halves), *passed_over]


def _choose(directory: Path) -> Path:
    """`directory` if it is a state; else the newest whole one in it, with a warning of what is passed over."""
    if (directory / ABOUT).exists():
        return directory
    found, passed_over = find_newest(directory)
    if found is None:
        raise CheckpointError("; ".join([f"there is no whole training state in {directory}", *passed_over]))
    if passed_over:
        warnings.warn(f"going on from {found}; passed over: {'; '.join(passed_over)}", stacklevel=3)
    return found
