"""Plain values as JSON and back, exactly: what a training state holds beside its large tensors, without a pickle.

| value | JSON |
|---|---|
| None, bool, int, float, str, list | themselves (floats to the last bit) |
| tuple | `{"tuple": [...]}` |
| dict | `{"dict": [[key, value], ...]}`, keys of any plain type |
| tensor | `{"tensor": [dtype, shape, base64 of the bytes]}` |
| bytes | `{"bytes": base64}` |
"""

from __future__ import annotations

import base64
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError


def encode_plain(value: Any, where: str) -> Any:
    """`value` for `json.dumps`.

    Raises:
        CheckpointError: naming the place in `where` that is not plain.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):  # numpy's float64 is a float too
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, np.generic):
        return encode_plain(value.item(), where)
    if isinstance(value, list):
        return [encode_plain(each, f"{where}[{i}]") for i, each in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [encode_plain(each, f"{where}[{i}]") for i, each in enumerate(value)]}
    if isinstance(value, dict):
        pairs = [[encode_plain(key, f"a key of {where}"), encode_plain(each, f"{where}[{key!r}]")] for key, each in value.items()]
        return {"dict": pairs}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), base64.b64encode(data).decode()]}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a training state can't hold: only None, numbers, texts, bytes, tensors, and "
        f"lists, tuples and dicts of those. Leave it out, or convert it"
    )


def decode_plain(value: Any) -> Any:
    """The inverse of `encode_plain`; tensors on the CPU.

    Raises:
        CheckpointError: it is not what `encode_plain` gives.
    """
    try:
        return _decode(value)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"a value of the training state can't be read: {error}") from error


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind == "tuple":
        return tuple(_decode(each) for each in inside)
    if kind == "dict":
        return {_decode(key): _decode(each) for key, each in inside}
    if kind == "bytes":
        return base64.b64decode(inside, validate=True)
    if kind != "tensor":
        raise ValueError(f"there is no kind of value {kind!r}")
    name, shape, text = inside
    dtype, data = getattr(torch, name), base64.b64decode(text)
    if not isinstance(dtype, torch.dtype) or len(data) != prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no {name} tensor of shape {shape}")
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
