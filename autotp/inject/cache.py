"""Discovered plans kept on disk, by everything that a plan follows from; whoever reads one proves it again.

`AUTOTP_CACHE` names the directory (`~/.cache/autotp` if it is not set); `off`, or nothing, keeps none.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import PlanError
from .plan import Plan

_ROOT = Path(__file__).parent.parent
# What discovers, proves and carries out a plan.
_SOURCES = ("*.py", "inject/*.py", "layers/*.py")
_PLACES = ("_name_or_path", "transformers_version")  # in a config: where it was read, not what it says


def find_directory() -> Path | None:
    """Where plans are kept; None if none are."""
    named = os.environ.get("AUTOTP_CACHE")
    if named is not None and named.strip().lower() in ("", "off"):
        return None
    try:
        return Path(named).expanduser() if named is not None else Path.home() / ".cache" / "autotp"
    except RuntimeError:  # a user without a home
        return None


def make_key(
    model: nn.Module, tp_size: int, head: str, versions: Mapping[str, str], sequence_parallel: bool | str = False
) -> str:
    """A hash of all that discovery reads: the live module tree, the config, the request, the libraries and autotp's source."""
    asked = [tp_size, head, sequence_parallel]
    return _digest(repr([_read_tree(model), _read_config(model), asked, dict(versions), _read_sources()]))


def read_plan(key: str) -> Plan | None:
    """The plan kept under `key`, not proved again yet; None if there is none, or its file is damaged."""
    directory = find_directory()
    if directory is None:
        return None
    try:
        digest, _, text = _path(directory, key).read_text(encoding="utf-8").partition("\n")
        return Plan.from_json(text) if digest == _digest(text) else None
    except (OSError, UnicodeDecodeError, PlanError):
        return None


def write_plan(key: str, plan: Plan) -> None:
    """Keep `plan` under `key`; a reader sees the old file or the new one. A directory that can't be written gives a warning."""
    directory = find_directory()
    if directory is None:
        return
    text = plan.to_json()
    temporary = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=directory, suffix=".tmp", delete=False) as file:
            temporary = file.name
            file.write(f"{_digest(text)}\n{text}")
        os.replace(temporary, _path(directory, key))
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        warnings.warn(f"the plan can't be kept in {directory} ({error}): name another AUTOTP_CACHE, or 'off'", stacklevel=2)


def drop_plan(key: str) -> None:
    """Forget what is kept under `key`."""
    directory = find_directory()
    if directory is not None:
        try:
            _path(directory, key).unlink(missing_ok=True)
        except OSError:
            return  # it will be written over, or proved in vain again


def _path(directory: Path, key: str) -> Path:
    return directory / f"{key[:40]}.plan"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read_tree(model: nn.Module) -> list[Any]:
    """Modules by name: class, and the numbers that their forward may read; tensors: shape, dtype, and which are one."""
    modules, tensors, first = [], [], {}
    for name, module in model.named_modules(remove_duplicate=False):
        cls = type(module)
        numbers = {k: v for k, v in vars(module).items() if isinstance(v, int | float) and k != "training"}
        modules.append([name, cls.__module__, cls.__qualname__, numbers])
    held: list[tuple[str, Tensor]] = [*model.named_parameters(remove_duplicate=False)]
    for name, tensor in [*held, *model.named_buffers(remove_duplicate=False)]:
        same, is_parameter = first.setdefault(id(tensor), name), isinstance(tensor, nn.Parameter)
        tensors.append([name, tuple(tensor.shape), str(tensor.dtype), is_parameter, tensor.requires_grad, same])
    return [modules, tensors]


def _read_config(model: nn.Module) -> Any:
    """The config as data, with the implementations chosen, which its JSON leaves out; None for a model without one."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return None
    said = {key: value for key, value in config.to_dict().items() if key not in _PLACES}
    return [said, *(getattr(config, f"_{kind}_implementation", None) for kind in ("attn", "experts"))]


@cache
def _read_sources() -> str:
    """A hash of the source text of autotp that plans depend on; read once, as the modules were."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _SOURCES for path in _ROOT.glob(pattern)):
        digest.update(f"{path.relative_to(_ROOT).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
