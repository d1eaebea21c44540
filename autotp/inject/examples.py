"""Example calls: keyword arguments made from a model's forward signature and its config, that together run its parameters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import PlanError
from .scenarios import SOUND_MASKS, SOUNDS, Recipe, list_scenarios
from .values import ArgumentMaker

Call = dict[str, Any]
# Passed with their input whenever the signature has them; all others only if they have no default.
_COMPANIONS = {
    "input_ids": (
        *("attention_mask", "decoder_input_ids", "use_cache"),
        *("bbox", "langs", "global_attention_mask", "shared_kv_states"),
    ),
    "pixel_values": (
        *("decoder_input_ids", "spatial_shapes", "image_grid_thw", "image_sizes"),
        *("aspect_ratio_ids", "aspect_ratio_mask"),
    ),
    "spatial_shapes": ("pixel_attention_mask",),
    "pixel_values_videos": ("video_grid_thw",),
    "input_features": ("decoder_input_ids", "use_cache"),
    "input_values": ("decoder_input_ids", "use_cache"),
    "inputs": ("decoder_input_ids",),
}


def candidate_calls(model: nn.Module, batch_size: int = 2, length: int = 9, seed: int = 0) -> list[Call]:
    """Calls of `model` that may run, best first; nothing is run.

    Args:
        model: a transformers model; its weights may be on meta.
        batch_size: rows of every input.
        length: tokens of a text, where the model leaves it free.
        seed: of the random inputs.

    Raises:
        PlanError: the model has no config, or its forward takes nothing that is known here.
    """
    _checked(model)
    recipes = [recipe for scenario in list_scenarios(model, length) for recipe in scenario]
    return [_build(model, batch_size, length, seed, recipe) for recipe in recipes]


def make_examples(
    model: nn.Module,
    batch_size: int = 2,
    length: int = 9,
    seed: int = 0,
    run: Callable[[Call], Any] | None = None,
    is_complete: Callable[[], bool] | None = None,
) -> list[Call]:
    """Calls that together run every parameter of `model` that its kinds of input reach: text, pictures, sound, an encoder's.

    Args:
        model: a transformers model; its weights may be on meta.
        batch_size, length, seed: as for `candidate_calls`.
        run: calls the model (or its copy) and raises where a call does not fit; without it no call is tried and all
            candidates are returned.
        is_complete: whether the calls that ran have reached every expert; then no longer one is made for them.

    Raises:
        PlanError: no call ran.
    """
    if run is None:
        return candidate_calls(model, batch_size, length, seed)
    _checked(model)
    kept: list[Call] = []
    errors: list[Exception] = []
    scenarios = list_scenarios(model, length)
    for scenario in scenarios:
        if kept and is_complete is not None and scenario[0][1].get("for") == "experts" and is_complete():
            continue
        for recipe in scenario:
            call = _try(model, recipe, (batch_size, length, seed), run, errors)
            if call is not None:
                kept.append(call)
                break
    if not kept:
        raise PlanError(
            f"no example call of {type(model).__name__} runs (required arguments: {_required(model) or 'none'}). The first, "
            f"with {list(scenarios[0][0][0])}, failed with {type(errors[0]).__name__}: {errors[0]}. "
            f"Pass `inputs=`, a dict of keyword arguments (or a list of them) that the model can be called with."
        )
    return kept


def _checked(model: nn.Module) -> None:
    if not hasattr(getattr(model, "config", None), "to_dict"):
        raise PlanError(
            f"{type(model).__name__} has no transformers config, so no example call can be made of it. "
            f"Pass `inputs=`, a dict of keyword arguments (or a list of them) that the model can be called with."
        )


def _build(model: nn.Module, batch: int, length: int, seed: int, recipe: Recipe) -> Call:
    """The recipe's call: its inputs, what belongs to them and what the signature requires."""
    inputs, variant = recipe
    parameters = inspect.signature(model.forward).parameters
    maker = ArgumentMaker(model, batch, length, seed, variant)
    names = list(inputs)
    for name in names:  # grows as it goes: what belongs to a companion comes too
        names += [n for n in _COMPANIONS.get(name, ()) if n in parameters]
    names += _required(model)
    call: Call = {}
    for name in dict.fromkeys(names):
        value = maker.value(name)
        if value is not None:
            call[name] = value
    if "attention_mask" in call and "input_ids" in call:
        call["attention_mask"] = maker.ones(*call["input_ids"].shape[:2])
    if "mm_token_type_ids" in parameters and variant.get("media_id") is not None:
        kind = 2 if "pixel_values_videos" in inputs else 1
        call["mm_token_type_ids"] = (call["input_ids"] == variant["media_id"]).long() * kind
    sound = next((call[name] for name in SOUNDS if name in call), None)
    for name in SOUND_MASKS:
        if sound is not None and name in parameters:
            call[name] = maker.ones(batch, sound.shape[-1 if variant.get("bins_first", True) else 1])
    for name in variant.get("without", ()):
        call.pop(name, None)
    return call


def _required(model: nn.Module) -> list[str]:
    """Arguments of the forward that have no default."""
    parameters = inspect.signature(model.forward).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _try(model: nn.Module, recipe: Recipe, sizes: tuple[int, int, int], run: Callable, errors: list[Exception]) -> Call | None:
    """The recipe's call if it runs; where the model says how many ids a picture or sound needs, with that many."""
    inputs, variant = recipe
    waiting = [variant]
    while waiting:
        variant = waiting.pop(0)
        try:
            call = _build(model, *sizes, (inputs, variant))
            run(call)
            return call
        except Exception as error:  # any failure means: not this call
            errors.append(error)
            if "media_id" in variant and "told" not in variant:
                others = _told(str(error), sizes, ArgumentMaker(model, *sizes, variant).width())
                waiting += [{**variant, **other, "told": True} for other in others]
    return None


def _told(error: str, sizes: tuple[int, int, int], width: int) -> list[dict[str, Any]]:
    """What a model's complaint says about the ids that a text must hold for the picture or sound beside it."""
    batch, length, _ = sizes
    if counts := re.search(r"tokens?:? *\d+.*?features:? *(\d+)", error, re.DOTALL):
        each = max(1, int(counts[1]) // batch)
        # Some count rows of features, some their numbers.
        return [{"media_tokens": n} for n in dict.fromkeys((each, max(1, each // width), *(each * n for n in range(2, 33))))]
    if counts := re.search(rf"tensor a \({length}\) must match the size of tensor b \((\d+)\)", error):
        return [{"length": int(counts[1])}]
    return []
