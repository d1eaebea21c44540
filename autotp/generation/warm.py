"""CUDA graphs ahead of time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..errors import AutoTPError
from .buckets import list_prompts, round_length
from .engine import find_engine
from .prompt import PromptStep

NEW_TOKENS = 3  # the first is the prompt's, the second captures, the third replays


def warm_up(model: nn.Module, batch_sizes: Iterable[int] | int = (1,), max_length: int = 2048) -> int:
    """Take memory for, and capture, every step that `generate` could need; collective.

    Args:
        model: a parallelized model in evaluation mode.
        batch_sizes: number or numbers of sequences to be ready for (beams and returned sequences counted).
        max_length: tokens of the longest sequence, prompt included; every shorter cache length is captured too.

    Returns:
        the number of graphs that this captured: 0 on the CPU, where there are none.

    Raises:
        AutoTPError: the model is not parallelized or in training mode, generate can't use graphs for it, or a size is below 1.
    """
    engine = find_engine(model)
    if engine is None:
        raise AutoTPError(f"this {type(model).__name__} is not parallelized: call autotp.parallelize first")
    if model.training:
        raise AutoTPError(
            "the model is in training mode, where generate runs transformers' own decoding: call model.eval() first"
        )
    sizes = [batch_sizes] if isinstance(batch_sizes, int) else list(batch_sizes)
    if not sizes or min(*sizes, max_length) < 1:
        raise AutoTPError(f"batch_sizes={sizes} and max_length={max_length} must name sizes of 1 at least")
    before, pad = engine.captures, getattr(model.generation_config, "pad_token_id", None)
    for rows, length in sorted(_buckets(engine, sizes, max_length), key=lambda b: -b[0] * b[1]):
        prompts = list_prompts(rows, length) if engine.can_capture(PromptStep) else []
        for tokens, new, do_sample in [
            *((tokens, 1, False) for tokens in prompts),
            (1, NEW_TOKENS, False),
            (1, NEW_TOKENS, True),
        ]:
            ids = torch.full((rows, tokens), 1, device=engine.group.device)
            _generate(model, ids, length, new, do_sample, pad)
    if not engine.steps:
        raise AutoTPError("there is nothing to warm up: generate runs transformers' own decoding on this model (see the log)")
    return engine.captures - before


def _buckets(engine: Any, batch_sizes: Iterable[int], max_length: int) -> set[tuple[int, int]]:
    longest = round_length(max_length - 1)
    lengths, tokens = set(), 1
    while tokens <= longest:
        lengths.add(round_length(tokens))
        tokens = round_length(tokens) + 1
    return {engine.bucket(size, length) for size in batch_sizes for length in lengths}


def _generate(model: Any, ids: torch.Tensor, length: int, new: int, do_sample: bool, pad: int | None) -> None:
    """`new` tokens in a cache of `length`, without a trace in the random generator."""
    device = ids.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=do_sample, eos_token_id=None,
            pad_token_id=0 if pad is None else pad, cache_implementation="static", max_cache_len=length,
        )  # fmt: skip
    model.__dict__.pop("_previous_max_cache_length", None)  # transformers' note for caches of its own
