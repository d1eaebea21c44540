"""What is to be run of a model: its kinds of input, each with the ways in which it may have to be shaped.

A recipe names the inputs of a call and how they are made; nothing is made or run here.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import nn

from ..errors import PlanError
from .configs import cross_width, first_of

Recipe = tuple[tuple[str, ...], dict[str, Any]]  # the inputs of a call, and how they are to be read
_IMAGES = ("pixel_values", "pixel_values_videos", "pixel_values_images")
SOUNDS = ("input_features", "input_values", "audio_values", "audio_input_features")
SOUND_MASKS = ("input_features_mask", "feature_attention_mask", "padding_mask")
_PRIMARY = ("input_ids", "inputs", *_IMAGES, *SOUNDS, "past_values", "sample", "inputs_embeds")


def list_scenarios(model: nn.Module, length: int) -> list[list[Recipe]]:
    """What to run, each as a list of alternatives of which the first that runs is enough."""
    parameters = inspect.signature(model.forward).parameters
    config = model.config
    primaries = [name for name in parameters if name in _PRIMARY]
    if not primaries:
        raise PlanError(
            f"{type(model).__name__}.forward takes {list(parameters)}: autotp knows no example for any of them. "
            f"Pass `inputs=`, a dict of keyword arguments (or a list of them) that the model can be called with."
        )
    first = primaries[0]
    kinds = {n: _image_variants for n in _IMAGES} | {n: partial(_sound_variants, raw=n != "input_features") for n in SOUNDS}
    own = kinds[first](config) if first in kinds else _text_variants(config, length)
    if first == "inputs":
        own += [{**v, "as": name} for name in ("pixel_values", "input_values", "input_features") for v in kinds[name](config)]
    scenarios: list[list[Recipe]] = [[((first,), variant) for variant in own]]
    extra: list[tuple[str, ...]] = [("encoder_hidden_states",)] if cross_width(model) else []
    if first == "input_ids" and "decoder_input_ids" not in parameters and cross_width(model):
        extra.append(("encoder_outputs",))
    extra += [("entity_ids", "entity_position_ids", "entity_attention_mask")]
    if first == "input_ids":
        if "token_type_ids" in parameters:
            scenarios[0] = [((first, "token_type_ids"), variant) for variant in own] + scenarios[0]
        if first_of(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
            scenarios.append([((first,), {"length": 4 * length, "for": "experts"})])  # so that each of them gets a token
        for name in primaries[1:]:
            if name in kinds:
                marker = _media_id(config, name)
                scenarios.append([((first, name), {**v, "media_id": marker}) for v in kinds[name](config)])
    if "shared_kv_states" in parameters:  # another model's states: it gives the embeddings too
        scenarios[0] = [(("inputs_embeds", "shared_kv_states"), {}), *scenarios[0]]
    for names in extra:
        if names[0] in parameters:
            scenarios.append([((first, *names), variant) for variant in own])
    return scenarios


def _lengths(config: Any, length: int) -> list[int]:
    """Text lengths to try: the one asked for, then what a block-wise model may need instead."""
    shape = first_of(config, "axial_pos_shape")
    fixed = [shape[0] * shape[1]] if shape else []
    blocks = [first_of(config, name) for name in ("attention_window", "block_size", "chunk_size", "max_position_embeddings")]
    blocks = [max(b) if isinstance(b, list) and b else b for b in blocks]
    most = first_of(config, "max_position_embeddings", "n_positions", "max_seq_len", default=1024)
    return list(dict.fromkeys(n for n in [*fixed, length, 16, 32, 64, *blocks] if type(n) is int and 1 < n <= min(most, 512)))


def _text_variants(config: Any, length: int) -> list[dict[str, Any]]:
    books = first_of(config, "num_codebooks", "num_channels", "n_q", "num_quantizers", "audio_channels")
    variants: list[dict[str, Any]] = [{"length": n} for n in _lengths(config, length)]
    variants += [{"without": ("attention_mask",), "length": length}]
    if isinstance(books, int):
        variants += [{"decoder_codebooks": books, "length": length}]
        variants += [{"codebooks": n, "length": length} for n in (books, books + 1)]
        variants += [{"codebooks": books, "stacked": True, "length": length, "without": ("attention_mask",)}]
    return variants


def _image_variants(config: Any) -> list[dict[str, Any]]:
    frames = first_of(config, "num_frames")
    clips = [None] if frames is None else [int(frames), None]
    shapes = [{"frames": f, "image_size": s} for f in clips for s in (None, 32, 64, 128, 224)]
    tiles = first_of(config, "max_num_tiles")
    shapes += [{"tiles": tiles}] if tiles else []
    shapes += [{"frames": f, "without": ("image_sizes",)} for f in clips]
    return [*shapes, {"packed": True}, {"patches": True}, {"frames": 1}, {"frames": 2}]


def _sound_variants(config: Any, raw: bool) -> list[dict[str, Any]]:
    variants = [{"bins_first": b, "sound_length": n} for n in (None, 64, 200, 1000) for b in (True, False)]
    variants += [{"mono": True, "sound_length": n} for n in ((2000, 16000) if raw else (2000,))]  # samples, or frames
    stacked = dict.fromkeys((first_of(config, "num_stacked_frames"), 2, 4))
    variants += [{"bins_first": False, "sound_length": 64, "stacked_frames": n} for n in stacked if n]
    return [{**v, "without": SOUND_MASKS} for v in variants[:2]] + variants


def _media_id(config: Any, name: str) -> int | None:
    """The id that stands for a picture, clip or sound in the text."""
    kind = "audio" if name in SOUNDS else "video" if "video" in name else "image"
    return first_of(config, *(f"{kind}_token_{end}" for end in ("id", "index")), f"{kind}_context_token_id")
