"""The tensors of a GGUF file by the names of a transformers model, one at a time.

transformers' own tables and processors say what a tensor is called and how it is permuted; it would make all of them whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import AutoTPError, CheckpointError
from ..shard import Shard
from .source import digest_lines, take_part


class GGUFSource:
    """A GGUF file, which one rank reads: what is in it depends on the model that it is for.

    Raises:
        AutoTPError: the package gguf is missing.
    """

    one_reader = True

    def __init__(self, file: Path) -> None:
        self.directory = file
        try:
            import gguf  # noqa: F401
        except ImportError as error:
            raise AutoTPError(f"{file} is GGUF, which needs a package more: pip install gguf") from error

    def __enter__(self) -> GGUFSource:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is open."""

    def for_model(self, model: nn.Module) -> GGUFTensors:
        """Its tensors by the names of `model`.

        Raises:
            CheckpointError: it is no GGUF file, or not of such a model.
        """
        try:
            return GGUFTensors(self.directory, model)
        except Exception as error:  # a reader of foreign files raises anything
            raise CheckpointError(f"{self.directory} can't be read as a {type(model).__name__}: {error}") from error


class GGUFTensors:
    """The tensors of a GGUF file that `model` has: dequantized to float32 when they are read, one at a time."""

    one_reader = True

    def __init__(self, file: Path, model: nn.Module) -> None:
        import gguf
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
            load_gguf_checkpoint,
            read_field,
        )

        self.directory = file
        self._config = load_gguf_checkpoint(str(file))["config"]
        self._reader = gguf.GGUFReader(str(file))
        architecture = str(read_field(self._reader, "general.architecture")[0])
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=self._config)
        with mock.patch("gguf.get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)):  # else made for every module
            self._mapping = get_gguf_hf_weights_map(model, self._processor)
        self._dequantize: Callable[..., np.ndarray] = gguf.dequantize
        self._state = {name: tuple(t.shape) for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
        self._made_of: dict[str, list[Any]] = {}
        for tensor in self._reader.tensors:  # zeros that take no memory go the way that the values will go
            shape = tuple(int(n) for n in reversed(tensor.shape))
            for name in self._process(tensor.name, np.broadcast_to(np.float32(0), shape), {}, _make_nothing):
                self._made_of.setdefault(name, []).append(tensor)

    def _process(
        self, name: str, weights: np.ndarray, made: dict[str, Tensor], convert: Callable[[np.ndarray], Tensor]
    ) -> dict[str, Tensor]:
        """Add to `made` what transformers makes of one tensor of the file."""
        with np.errstate(all="ignore"):
            result = self._processor.process(
                weights=weights, name=name, tensor_key_mapping=self._mapping,
                parsed_parameters={"tensors": made, "config": self._config},
            )  # fmt: skip
        if result.name in self._mapping:
            made[self._mapping[result.name]] = convert(result.weights)
        return made

    def names(self) -> set[str]:
        """Names of all tensors, as the model spells them."""
        return set(self._made_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the full tensor; of one that is not the model's, as the file has it."""
        return self._state.get(name) or tuple(int(n) for n in reversed(self._made_of[name][0].shape))

    def dtype(self, name: str) -> torch.dtype:
        """float32: what dequantizing gives."""
        return torch.float32

    def read(self, name: str, shard: Shard | None, rank: int, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        """What `rank` holds of it.

        Raises:
            CheckpointError: it has another shape than the model's.
        """
        return take_part(self.view(name), shard, rank, dtype, device)

    def view(self, name: str) -> Tensor:
        """All of it, dequantized."""
        made: dict[str, Tensor] = {}
        for tensor in self._made_of[name]:
            self._process(tensor.name, self._dequantize(tensor.data, tensor.tensor_type), made, _make_tensor)
        full = made[name]
        if tuple(full.shape) != self.shape(name):
            raise CheckpointError(
                f"'{name}' has shape {list(full.shape)} in {self.directory}, the model's {list(self.shape(name))}"
            )
        return full

    def nbytes(self, name: str) -> int:
        """Bytes of what it is made of."""
        return sum(int(tensor.n_bytes) for tensor in self._made_of[name])

    def check(self, name: str) -> None:
        """There is nothing to compare it with."""

    def digest(self) -> str:
        """A short hash of names and shapes."""
        return digest_lines(f"{name} {self.shape(name)}" for name in self._made_of)


def _make_tensor(weights: np.ndarray) -> Tensor:
    return torch.from_numpy(np.require(weights, requirements=["C", "W"]))


def _make_nothing(weights: np.ndarray) -> Tensor:
    return torch.empty(0)
