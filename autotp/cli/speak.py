"""One rank's part of `autotp generate`: the checkpoint over all ranks, and unsharded on the first one to compare with."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import TextStreamer
from transformers.generation.streamers import BaseStreamer

from ..errors import AutoTPError
from ..inject.load import find_checkpoint
from ..inject.plan import Plan
from ..inject.rewrite import from_pretrained
from ..layers.base import find_group
from ..train.compare import load_whole
from ..train.launch import send_message
from ..train.setup import load_tokenizer
from .ranks import is_memory_error

WARM_TOKENS = 3  # the second and third compile, capture and replay what the others need


def speak(options: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Generate as `options` (of the command) say; returns the report.

    Raises:
        AutoTPError: no weights, no tokenizer, no chat template, or memory ran out.
    """
    try:
        return _speak(options, plan)
    except Exception as error:
        if not is_memory_error(error):
            raise
        raise AutoTPError(
            f"out of memory with --max-new-tokens {options['max_new_tokens']}{' --bench' * options['bench']}: lower it, "
            f"{'leave --bench out, ' * options['bench']}or use more ranks (--tp)"
        ) from error


def _speak(options: dict[str, Any], plan: Plan) -> dict[str, Any]:
    dtype = options["dtype"]
    model: Any = from_pretrained(options["model"], plan=plan, dtype=dtype if dtype == "auto" else getattr(torch, dtype))
    group = find_group(model)
    assert group is not None
    with group.together("reading the prompt"):
        tokenizer = load_tokenizer(options["model"])
        ids = encode(tokenizer, options).to(group.device)
    said = "" if group.tp_rank == 0 else None
    runs, tokens = [], []
    speaker = _Speaker(tokenizer) if said is not None else None
    run, out = measure(model, ids, options, speaker, group.device)
    run["memory_gib"] = max(group.gather_objects(run["memory_gib"]))
    runs.append({"name": f"{group.tp_size} rank{'s' * (group.tp_size > 1)}", **run})
    tokens.append(out)
    if options["bench"]:
        with group.together("the unsharded model"):
            if group.tp_rank == 0:
                whole = load_whole(type(model), find_checkpoint(options["model"]), model.dtype).to(group.device)
                run, out = measure(whole, ids, options, None, group.device)
                runs.append({"name": "unsharded", **run})
                tokens.append(out)
    equal = count_equal(*tokens) if len(tokens) == 2 else None
    device = torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else "CPU"
    return {
        **{"text": tokenizer.decode(tokens[0], skip_special_tokens=True), "prompt_tokens": ids.shape[1], "runs": runs},
        **{"equal_tokens": equal, "dtype": str(model.dtype).removeprefix("torch."), "device": device},
    }


def encode(tokenizer: Any, options: dict[str, Any]) -> Tensor:
    """The prompt as ids `[1, S]`, by the chat template where that is asked for.

    Raises:
        AutoTPError: the tokenizer has no chat template, or makes no tokens of it.
    """
    text = options["prompt"]
    if options["chat"]:
        if not getattr(tokenizer, "chat_template", None):
            raise AutoTPError(f"the tokenizer of {options['model']} has no chat template: leave --chat out")
        text = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=not options["chat"])["input_ids"]
    if not ids.numel():
        raise AutoTPError("the tokenizer makes no tokens of --prompt")
    return ids


def measure(
    model: Any, ids: Tensor, options: dict[str, Any], speaker: _Speaker | None, device: torch.device
) -> tuple[dict[str, Any], list[int]]:
    """Generate, once briefly to have everything compiled and once to be timed; numbers, and the new tokens."""
    clock = _Clock(speaker)
    call = make_call(model, ids, options)
    call(WARM_TOKENS, None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    out = call(options["max_new_tokens"], clock)
    end = time.perf_counter()
    new = out.shape[1] - ids.shape[1]
    decoding_s = end - clock.first if new > 1 else end - start
    return {
        "new_tokens": new,
        "first_token_ms": (clock.first - start) * 1e3,
        "tokens_per_s": max(new - 1, 1) / decoding_s,
        "memory_gib": read_memory_gib(device),
    }, out[0, ids.shape[1] :].tolist()


def make_call(model: Any, ids: Tensor, options: dict[str, Any]) -> Callable[[int, BaseStreamer | None], Tensor]:
    """`call(max_new_tokens, streamer)`: generate as the options say, with the same draws every time."""
    given = {name: options[name] for name in ("temperature", "top_k", "top_p") if options[name] is not None}
    settings = model.generation_config
    pad = settings.pad_token_id if settings.pad_token_id is not None else settings.eos_token_id
    pad = pad[0] if isinstance(pad, list) else pad
    room = ids.shape[1] + options["max_new_tokens"] - 1

    def call(new: int, streamer: BaseStreamer | None) -> Tensor:
        torch.manual_seed(options["seed"])
        short = dict(cache_implementation="static", max_cache_len=room) if find_group(model) and new < WARM_TOKENS + 1 else {}
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=options["sample"], streamer=streamer,
            pad_token_id=0 if pad is None else pad, **given, **short,
        )  # fmt: skip

    return call


def count_equal(first: list[int], second: list[int]) -> int:
    """Tokens at the beginning that are the same."""
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))


def read_memory_gib(device: torch.device) -> float:
    """The peak of allocated memory on a GPU; this process's resident peak on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class _Speaker(TextStreamer):
    """Hands the text to the process that started the ranks, a word at a time."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        send_message(text)


class _Clock(BaseStreamer):
    """Notes when the first token came, and passes all on."""

    def __init__(self, speaker: _Speaker | None) -> None:
        self.speaker, self.seen, self.first = speaker, 0, 0.0

    def put(self, value: Tensor) -> None:
        self.seen += 1
        if self.seen == 2:  # the prompt comes first
            self.first = time.perf_counter()
        if self.speaker is not None:
            self.speaker.put(value)

    def end(self) -> None:
        if self.speaker is not None:
            self.speaker.end()
