"""Where transformers' generate meets our loop.

`generate` prepares everything (processors, criteria, masks, lengths) and then calls `_sample`; there the calls on parallelized
models that our loop serves turn to it. The others, and other models, run what transformers wrote. The public hook,
`generate(custom_generate=function)`, would not do: it drops the streamer and the tokenizer that stop strings need.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin

from ..comm import TPGroup
from ..errors import AutoTPError
from ..kernels.dispatch import Problem
from ..kernels.grouped import rather_not_grouped
from ..layers.integrations import replace
from .arena import ArenaCache
from .choose import Head
from .engine import Engine, describe, find_engine
from .loop import Loop, Request, refuse_failures
from .prompt import PromptStep, fit_graph, read_prompt, take_inputs
from .serve import CONSTANTS, NOT_RETURNED, UNREAD, find_cache_name, why_not
from .step import Form, Step

_installed = False
FAILED = "failed: "  # begins a rank's note where there is no generation
_OTHERS = {"_beam_search": "beam search", "_assisted_decoding": "assisted decoding"}


def install_generation() -> None:
    """Wrap the decoding methods of transformers' GenerationMixin, once for the process."""
    global _installed
    if _installed:
        return
    _installed = True
    replace(GenerationMixin, "generate", _wrap_generate)
    replace(GenerationMixin, "_sample", _wrap_sample)
    for name, words in _OTHERS.items():
        replace(GenerationMixin, name, lambda original, words=words: _wrap_other(original, words))


def _wrap_generate(original: Callable) -> Callable:
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        engine = find_engine(self)
        if engine is None:
            return original(self, *args, **kwargs)
        outer, engine.met = engine.met, False
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            if not engine.met:  # a streamer that fails on the prompt, say: the other ranks are about to wait for this one
                engine.group.arrive("generate", FAILED + describe(error), wait=False)
            raise
        finally:
            engine.met = outer

    return generate


def _wrap_sample(original: Callable) -> Callable:
    def sample(
        self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus=False, streamer=None, **kwargs: Any
    ) -> Any:
        engine = find_engine(self)
        if engine is not None:
            reason = why_not(self, input_ids, generation_config, synced_gpus, kwargs)
            if reason is None and engine.busy:
                reason = "it was called inside another generation of the same model, whose cache it would overwrite"
            if reason is None:
                request = Request(logits_processor, stopping_criteria, generation_config, streamer)
                with torch.inference_mode(False), torch.no_grad(), engine.occupied():
                    return decode(engine, self, request, input_ids, kwargs)
            _prepare_other(engine, generation_config, reason)
        return original(self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **kwargs)

    return sample


def _wrap_other(original: Callable, words: str) -> Callable:
    def decode_otherwise(self, input_ids, *args: Any, **kwargs: Any) -> Any:
        engine = find_engine(self)
        if engine is not None:
            _prepare_other(engine, kwargs.get("generation_config"), words)
        return original(self, input_ids, *args, **kwargs)

    return decode_otherwise


def _prepare_other(engine: Engine, config: Any, reason: str) -> None:
    """What transformers' own loops need on sharded models: one stream of draws."""
    engine.say(f"generate runs transformers' own decoding, without CUDA graphs: {reason}")
    check_alike(engine, "transformers' own decoding")
    if config is None or config.do_sample:
        align_draws(engine.group)


def align_draws(group: TPGroup) -> None:
    """Give every rank the state of rank 0's default random generator, on the device that the model is on."""
    if group.tp_size == 1:
        return
    cuda = group.device.type == "cuda"
    state = group.broadcast_object(torch.cuda.get_rng_state(group.device) if cuda else torch.get_rng_state())
    torch.cuda.set_rng_state(state, group.device) if cuda else torch.set_rng_state(state)


def decode(engine: Engine, model: Any, request: Request, input_ids: Tensor, model_kwargs: dict[str, Any]) -> Any:
    """`_sample` of a parallelized model, by our loop.

    Raises:
        AutoTPError: the ranks ask for different things, or one of them stopped.
    """
    cache_name = find_cache_name(model_kwargs)
    assert cache_name is not None
    mask = model_kwargs.get("attention_mask")
    mask = None if mask is None else mask.cpu()  # once, before anything runs
    check_alike(engine, request.describe(input_ids, mask))
    request.config.disable_compile = True
    engine.refresh(model)
    text = model.config.get_text_config(decoder=True)
    inputs = take_inputs(input_ids, {name: value for name, value in model_kwargs.items() if name not in (cache_name, *UNREAD)})
    inputs |= {name: value for name, value in NOT_RETURNED.items() if inputs.get(name) or getattr(text, name, False)}
    longest = max(request.limit - 1, input_ids.shape[1], request.config.max_cache_len or 0)
    form = describe_form(*engine.bucket(input_ids.shape[0], longest), request.greedy, inputs)
    cache, head = engine.take_cache(text, form.rows, form.length), Head(model)
    step = engine.take_step(form, lambda: Step(form, cache, cache_name, engine.group, head))
    loop = Loop(engine, model, step, request, input_ids)

    def read() -> Tensor:
        tokens = fit_graph(form, input_ids, request.config, mask) if engine.can_capture(PromptStep) else None
        if tokens is None:
            logits = read_prompt(model, cache, cache_name, input_ids, request.config, inputs, head if request.greedy else None)
        else:
            key = (form._replace(greedy=True), tokens)  # its logits serve both
            first = engine.take_step(key, lambda: PromptStep(form, tokens, cache, cache_name, head))
            first.fill(input_ids)
            engine.launch(first, model)
            logits = first.logits[: input_ids.shape[0]] if request.greedy else head.gather(first.logits[: input_ids.shape[0]])
        step.begin(input_ids, inputs, request.eos if request.greedy else (), request.pad)
        return logits

    sequences = loop.run(read, stepping(model))
    if not request.config.return_dict_in_generate:
        return sequences
    made: Any = GenerateDecoderOnlyOutput
    kept = copy_cache(cache, text, request.config, *sequences.shape)
    return made(sequences=sequences, scores=loop.scores, logits=loop.logits, **{cache_name: kept})


def describe_form(rows: int, length: int, greedy: bool, inputs: dict[str, Any]) -> Form:
    """The form of the steps of a bucket that take `inputs`."""
    positions = inputs.get("position_ids")
    leading = None if positions is None else tuple(positions.shape[:-2])
    extra = tuple((name, inputs[name]) for name in CONSTANTS if inputs.get(name) is not None)
    return Form(rows, length, greedy, leading, "attention_mask" in inputs, inputs.get("token_type_ids") is not None, extra)


def copy_cache(cache: ArenaCache, text: Any, config: Any, rows: int, tokens: int) -> StaticCache | DynamicCache:
    """What the caller keeps of a generation of `rows` sequences of `tokens`: a cache of the kind that it asked for."""
    static = config.cache_implementation == "static"
    kept = StaticCache(config=text, max_cache_len=config.max_length - 1) if static else DynamicCache(config=text)
    cache.copy_to(kept, rows, tokens - 1)
    return kept


def stepping(model: Any) -> AbstractContextManager[Any]:
    """Within it steps run, and no prompt: transformers has experts gather a copy of weights for every token there.

    Our experts' products read each weight once and wait for nothing where PyTorch has a kernel for them: they stay.
    """
    plan = model.__dict__.get("autotp_plan")
    fused = plan is not None and any(fusion.kind == "experts" for fusion in plan.fused)
    ours = Problem("grouped_product", model.device.type, model.dtype)
    if fused and not rather_not_grouped(ours):
        return nullcontext()
    return getattr(model, "_optimize_model_for_decode", nullcontext)()


def check_alike(engine: Engine, asked: str) -> None:
    """Refuse a generation that ranks ask for in different ways, or that failed on one, before any of them waits for another.

    Raises:
        AutoTPError: naming the ranks and what they ask for, or what was raised; GatherError: the ranks that did not come.
    """
    engine.met = True
    notes = engine.group.arrive("generate", asked)
    refuse_failures([note.removeprefix(FAILED) if note.startswith(FAILED) else "" for note in notes], "generate failed")
    odd = [rank for rank, note in enumerate(notes) if note != notes[0]]
    if odd:
        raise AutoTPError(
            f"generate was called in different ways: TP rank {odd[0]} asks for {notes[odd[0]]}; rank 0 for {notes[0]}. "
            f"Every rank must call it alike (only the streamer may be one rank's own)."
        )
