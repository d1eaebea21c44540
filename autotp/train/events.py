"""What is told of each step: speed, memory, and where it is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import AutoTPError
from ..layers.base import sharded_modules

# Dense 16-bit matrix peaks in FLOP/s, by a part of the device's name; the first that fits.
PEAKS = (
    *(("B200", 2250e12), ("H100 PCIe", 756e12), ("H100 NVL", 835e12), ("H100", 989e12), ("H200", 989e12), ("H800", 989e12)),
    *(("A100", 312e12), ("A800", 312e12), ("L40S", 362e12), ("L40", 181e12), ("L4", 121e12), ("A10", 125e12)),
    *(("V100", 125e12), ("RTX 4090", 165e12), ("RTX 3090", 71e12)),
)


class SpeedMeter:
    """Tokens into the share of the peak that was used (MFU), where the GPU is known and works in 16 bits.

    Counted are 6 operations a weight and token, without the embedding table, and those of causal attention; what gradient
    checkpointing does again is not.
    """

    def __init__(self, model: nn.Module, seq_length: int, device: torch.device, ranks: int) -> None:
        config: Any = model.config
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        weights = sum(full_sizes(model).values())
        if not getattr(config, "tie_word_embeddings", False):
            weights -= (getattr(config, "vocab_size", 0) or 0) * (getattr(config, "hidden_size", 0) or 0)
        layers, width = getattr(config, "num_hidden_layers", 0) or 0, getattr(config, "hidden_size", 0) or 0
        self.per_token = 6 * weights + 6 * layers * width * seq_length
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        half = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
        self.peak = next((peak * ranks for part, peak in PEAKS if part in name), None) if half else None

    def mfu(self, tokens_per_s: float) -> float | None:
        """The share of all ranks' peak; None where it is not known."""
        return None if self.peak is None else self.per_token * tokens_per_s / self.peak


def full_sizes(model: nn.Module) -> dict[int, int]:
    """Elements of each whole parameter, by its id here."""
    sizes = {id(param): param.numel() for param in model.parameters()}
    for _, module in sharded_modules(model):
        for name, shard in module.shards.items():
            param = module._parameters.get(name)
            if param is not None:
                sizes[id(param)] = torch.Size(shard.shape).numel()
    return sizes


def memory_gib(device: torch.device) -> float:
    """The peak so far of this process: allocated on its GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource  # not on every system

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


class EventLog:
    """Writes events as JSON lines and for TensorBoard, where asked to.

    Raises:
        AutoTPError: TensorBoard is not installed, or the file can't be written.
    """

    def __init__(self, log: str | None, tensorboard: str | None, resumed: bool) -> None:
        self.file = self.board = None
        try:
            if log is not None:
                Path(log).parent.mkdir(parents=True, exist_ok=True)
                self.file = open(log, "a" if resumed else "w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise AutoTPError(f"--log {log} can't be written: {error}") from error
        if tensorboard is not None:
            try:
                from torch.utils.tensorboard.writer import SummaryWriter
            except ImportError as error:
                raise AutoTPError("--tensorboard needs a package: pip install tensorboard, or use --log") from error
            self.board = SummaryWriter(tensorboard)

    def write(self, event: dict[str, Any]) -> None:
        """One event; at once on disk."""
        if self.file is not None:
            print(json.dumps(event), file=self.file, flush=True)
        if self.board is not None:
            for key, value in event.items():
                if value is not None and key not in ("step", "steps"):
                    self.board.add_scalar(key, value, event["step"])

    def close(self) -> None:
        """Nothing more comes."""
        for each in (self.file, self.board):
            if each is not None:
                each.close()
