"""Optimizer state beside a library's own checkpoint: a file a rank, which says of what parts it is, so that any number goes on.

Trainer and accelerate write one optimizer file, rank 0's, and load it on every rank. An unsharded run that knows nothing of
autotp would take that part for the whole, and fused optimizers write behind its end; so it is replaced by one that no optimizer
takes. Beside it each rank writes
`optimizer_{number}.tp{rank}-of-{size}.pt`: its `state_dict`, and under `autotp_shards` the Shard of each parameter as JSON, None
for a whole one. On as many ranks each reads its own. On others, or in an unsharded run, the parts are joined and cut anew; a
checkpoint without such files was written by an unsharded run.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from ..comm import TPGroup
from ..errors import CheckpointError
from ..shard import Shard
from .base import holder_of

SHARDS = "autotp_shards"
NOTE = "the state lies in the files of ranks beside this one: go on with a model of autotp.parallelize, on any number of ranks"
NAME = re.compile(r"optimizer_(\d+)\.tp(\d+)-of-(\d+)\.pt")  # number, rank, ranks


def save_rank_state(group: TPGroup | None, optimizers: list[Optimizer], directory: Any, rank: int) -> None:
    """Write this rank's files; of copies of the model the first, on the job's first ranks, writes.

    Files that another number of ranks wrote to the same directory before are no part of what is written now, and removed.
    """
    size = None if group is None else group.tp_size
    for path in Path(directory).glob("optimizer_*.tp*-of-*.pt") if rank == 0 else ():
        if (match := NAME.fullmatch(path.name)) and int(match[3]) != size:
            path.unlink()
    for number, optimizer in enumerate(optimizers if group is not None and rank < group.tp_size else ()):
        shards = [None if shard is None else shard.to_json() for shard in find_shards(optimizer)]
        state = {**optimizer.state_dict(), SHARDS: shards}
        torch.save(state, _rank_file(Path(directory), number, group.tp_rank, group.tp_size))  # type: ignore[union-attr]
        if rank == 0 and any(shards):
            for path in _library_files(Path(directory), number):
                torch.save({"state": {}, "param_groups": [], "autotp": NOTE}, path)


def check_rank_state(group: TPGroup | None, directory: Any, optimizers: int = 1) -> None:
    """Raise if there is no state in `directory` that the ranks of `group` (None: of an unsharded model) can go on from.

    Raises:
        CheckpointError: files of ranks are missing, or were written on another number of ranks by an autotp that kept no Shards.
    """
    size = 1 if group is None else group.tp_size
    for number in range(optimizers):
        saved = find_size(Path(directory), number, size)
        if saved in (None, size):
            continue
        path = _rank_file(Path(directory), number, 0, saved)
        if SHARDS not in torch.load(path, map_location="cpu", mmap=True, weights_only=True):
            raise CheckpointError(
                f"{path} was written on {saved} ranks by an autotp that did not note what its parts are, and this model is on "
                f"{size}: resume it on {saved} ranks, save there, and go on from that on any number"
            )


@contextmanager
def own_loading(optimizers: list[Optimizer], directory: Any) -> Iterator[None]:
    """Inside it a library's loading leaves alone the optimizers of which there are files of ranks."""
    held = [each for number, each in enumerate(optimizers) if any(Path(directory).glob(f"optimizer_{number}.tp*-of-*.pt"))]
    for optimizer in held:
        optimizer.load_state_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        for optimizer in held:
            del optimizer.load_state_dict


def load_rank_state(group: TPGroup | None, optimizers: list[Optimizer], directory: Any) -> None:
    """Replace the optimizer state that the library loaded on every rank by this rank's own.

    Raises:
        CheckpointError: as `check_rank_state`; or the state is of other parameters, or not of their elements.
    """
    size, own = (1, 0) if group is None else (group.tp_size, group.tp_rank)
    for number, optimizer in enumerate(optimizers):
        saved = find_size(Path(directory), number, size)
        if saved is None and group is None:
            continue  # an unsharded run's, as the library loaded it
        if saved == size and group is not None:
            state = _read(_rank_file(Path(directory), number, own, size))
        elif saved is None:
            state = cut_state([optimizer.state_dict()], [None] * len(find_shards(optimizer)), optimizer, own, directory)
        else:
            parts = [_read(_rank_file(Path(directory), number, rank, saved)) for rank in range(saved)]
            state = cut_state(parts, parts[0][SHARDS], optimizer, own, directory)
        optimizer.load_state_dict({key: value for key, value in state.items() if key != SHARDS})


def find_size(directory: Path, number: int, size: int) -> int | None:
    """On how many ranks the state was written: `size` where that is there; None where no rank wrote any.

    Raises:
        CheckpointError: files of ranks are there, but not of all.
    """
    found: dict[int, set[int]] = {}
    for path in directory.glob(f"optimizer_{number}.tp*-of-*.pt"):
        if match := NAME.fullmatch(path.name):
            found.setdefault(int(match[3]), set()).add(int(match[2]))
    whole = [saved for saved, ranks in sorted(found.items()) if ranks == set(range(saved))]
    if found and not whole:
        saved, ranks = max(found.items())
        missing = _rank_file(directory, number, min(set(range(saved)) - ranks), saved)
        raise CheckpointError(
            f"{missing} is missing: the optimizer state in {directory} was written on {saved} ranks, and {len(ranks)} of the "
            f"files are there. Copy the others to them, or resume from another checkpoint"
        )
    return size if size in whole else whole[0] if whole else None


def find_shards(optimizer: Optimizer) -> list[Shard | None]:
    """What this rank holds of each parameter, in the order of the optimizer's state dict; None for whole ones."""
    shards = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            holder = holder_of(parameter)
            shards.append(None if holder is None else getattr(holder[0], "shards", {}).get(holder[1]))
    return shards


def cut_state(parts: list[dict], saved: list[Any], optimizer: Optimizer, rank: int, directory: Any) -> dict[str, Any]:
    """The state dict of rank `rank` out of those of all ranks that wrote.

    Args:
        parts: their state dicts, in rank order; saved: each parameter's Shard then, as JSON, None for a whole one.

    Raises:
        CheckpointError: another number of parameters, of other shapes, or a state that does not lie beside their elements.
    """
    now = find_shards(optimizer)
    if len(saved) != len(now):
        raise CheckpointError(f"the optimizer state in {directory} is of {len(saved)} parameters, the optimizer has {len(now)}")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {}
    for number, values in parts[0]["state"].items():
        before = None if saved[number] is None else Shard.from_json(saved[number])
        shape = tuple(parameters[number].shape) if now[number] is None else now[number].shape
        state[number] = {}
        for key, value in values.items():
            if isinstance(value, dict) and (before is not None or now[number] is not None):
                kind = type(getattr(optimizer, "optimizer", optimizer)).__name__  # accelerate's holds the real one
                raise CheckpointError(
                    f"state '{key}' of parameter {number} in {directory} is in {kind}'s own format, which can't be cut anew: "
                    f"resume on the {len(parts)} rank(s) it was saved on, or train with an optimizer that keeps plain tensors"
                )
            if isinstance(value, Tensor) and value.ndim:
                pieces = [part["state"][number][key] for part in parts]
                whole = pieces[0] if before is None else _join(before, pieces)
                if whole is None or tuple(whole.shape) != shape:
                    raise CheckpointError(
                        f"state '{key}' of parameter {number} in {directory} has shape {tuple(value.shape)} on rank 0, which is "
                        f"no part of the parameter's {shape}: resume on the {len(parts)} rank(s) it was saved on"
                    )
                value = whole if now[number] is None else now[number].split(whole, rank).clone()
            state[number][key] = value
    return {"state": state, "param_groups": parts[0]["param_groups"]}


def share_random_state(group: TPGroup, directory: Any) -> None:
    """Where a checkpoint is of another number of ranks, let all ranks of a model draw what its first one draws.

    Each rank then read the numbers of another, or none.
    """
    if find_size(Path(directory), 0, group.tp_size) == group.tp_size:
        return
    on_gpu = group.device.type == "cuda"
    own = (random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.cuda.get_rng_state() if on_gpu else None)
    python, numpy, cpu, cuda = group.broadcast_object(own)
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)


def _join(shard: Shard, pieces: list[Tensor]) -> Tensor | None:
    fits = all(tuple(piece.shape) == shard.local_shape(rank) for rank, piece in enumerate(pieces))
    return shard.join(pieces) if fits else None


def _read(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def _library_files(directory: Path, number: int) -> list[Path]:
    """What Trainer, and accelerate, wrote of the optimizer `number`."""
    names = ("optimizer.pt", "optimizer.bin") if number == 0 else (f"optimizer_{number}.bin",)
    return [path for name in names if (path := directory / name).is_file()]


def _rank_file(directory: Path, number: int, rank: int, size: int) -> Path:
    return directory / f"optimizer_{number}.tp{rank}-of-{size}.pt"
