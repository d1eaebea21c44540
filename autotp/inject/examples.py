"""Example calls: keyword arguments made from a model's forward signature and its config, that together run its parameters.

A call is built argument by argument: `_BUILDERS` says for an argument's name what to pass, from sizes that the config
holds. There is no table of models. Shapes of parameters are read, their values never, so a model on meta will do.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PlanError

Call = dict[str, Any]
Recipe = tuple[tuple[str, ...], dict[str, Any]]  # the inputs of a call, and how they are to be read
_IMAGES = ("pixel_values", "pixel_values_videos", "pixel_values_images")
_SOUNDS = ("input_features", "input_values", "audio_values", "audio_input_features")
_BINS = ("num_mel_bins", "n_mels", "input_feat_per_channel", "input_dim", "feature_projection_input_dim", "input_size")
_SOUND_MASKS = ("input_features_mask", "feature_attention_mask", "padding_mask")
_PRIMARY = ("input_ids", "inputs", *_IMAGES, *_SOUNDS, "past_values", "sample", "inputs_embeds")
_CROSS = re.compile(r"(cross_?att|encoder_attn|EncDecAttention)[^.]*\.(.*\.)?(k(ey|v)?(_proj)?|c_attn)$", re.IGNORECASE)
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
    "past_values": ("past_time_features", "past_observed_mask", "future_values", "future_time_features"),
}


def _configs(config: Any) -> Iterator[Any]:
    """`config` and every config inside it, outermost first."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _configs(value)


def _read(config: Any, name: str) -> Any:
    """The field `name` of this config alone, its alias allowed; None if it is not set."""
    held = vars(config)
    return held.get(name, held.get(config.attribute_map.get(name, name)))


def _first(config: Any, *names: str, default: Any = None) -> Any:
    """The first field of `names` that `config` or a config inside it sets."""
    found = (_read(part, name) for name in names for part in _configs(config))
    return next((value for value in found if value is not None), default)


def _pair(value: Any) -> tuple[int, int]:
    """Height and width of a config's size: an int, a pair or a dict."""
    if isinstance(value, dict | list | tuple):
        sizes: list[Any] = list(value.values() if isinstance(value, dict) else value)
        return (int(sizes[-2]), int(sizes[-1])) if len(sizes) > 1 else (int(sizes[0]), int(sizes[0]))
    return int(value), int(value)


def _special_ids(config: Any) -> set[int]:
    """Token ids that mean something to the model, so that random text must not hold them."""
    ids: set[int] = set()
    for part in _configs(config):
        for name, value in vars(part).items():
            if re.search(r"token(_id|_index|_ids)?$", name) and "num" not in name:
                ids.update(v for v in (value if isinstance(value, list | tuple) else [value]) if type(v) is int)
    return ids


class _Maker:
    """Builds the arguments of one call; `variant` says how, where the config leaves several readings."""

    def __init__(self, model: nn.Module, batch: int, length: int, seed: int, variant: dict[str, Any]) -> None:
        self.model, self.batch, self.variant = model, batch, variant
        self.config: Any = model.config
        self.length = variant.get("length", length)
        self.generator = torch.Generator().manual_seed(seed)
        self.parameters = inspect.signature(model.forward).parameters
        encoder = _part(self.config, "vision_config", "vision", "vision_encoder", "encoder", "backbone_config")
        self.vision = encoder or self.config
        self.audio = _part(self.config, "audio_config", "audio_encoder", "speech_config", "encoder_config") or self.config

    # -- parts -------------------------------------------------------------------------------------------------------

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def tokens(self, *shape: int, high: int | None = None) -> Tensor:
        """Random ids below `high` (the vocabulary), none of them special where there is a choice."""
        high = max(2, high or self.vocabulary())
        special = _special_ids(self.config)
        usable = [i for i in range(min(3, high - 1), high) if i not in special] or list(range(high))
        return torch.tensor(usable)[torch.randint(len(usable), shape, generator=self.generator)]

    def vocabulary(self) -> int:
        """Number of ids that every table of tokens holds."""
        sizes = [v for v in (_first(self.config, "vocab_size"), _text_rows(self.model)) if isinstance(v, int) and v > 0]
        return min(sizes, default=100)

    def image_size(self) -> tuple[int, int]:
        size = self.variant.get("image_size") or _first(self.vision, "image_size", "img_size", "input_size")
        return _pair(size if size is not None else _first(self.config, "image_size", default=64))

    def channels(self) -> int:
        return int(_first(self.vision, "num_channels", "in_channels", "in_chans", default=3))

    def image_tokens(self) -> int:
        """Ids that stand for one image in the text."""
        known = self.variant.get("media_tokens")
        if known is not None:
            return known
        tokens = _first(self.config, "image_seq_length", "mm_tokens_per_image", "image_seq_len", "num_image_tokens")
        if isinstance(tokens, int):
            return tokens
        high, wide = self.image_size()
        patch = _pair(_first(self.vision, "patch_size", default=16))
        merge = _first(self.vision, "spatial_merge_size", default=1)
        return max(1, (high // patch[0]) * (wide // patch[1]) // merge**2)

    # -- arguments ---------------------------------------------------------------------------------------------------

    def input_ids(self) -> Tensor:
        books = self.variant.get("codebooks")
        if books and self.variant.get("stacked"):
            return self.tokens(self.batch * books, self.length)
        if books:
            return self.tokens(self.batch, self.length, books)
        ids = self.tokens(self.batch, self.length)
        marker = self.variant.get("media_id")
        if marker is not None:
            ids = torch.cat([ids[:, :2], torch.full((self.batch, self.image_tokens()), marker), ids[:, 2:]], 1)
        return ids

    def decoder_input_ids(self) -> Tensor:
        books = self.variant.get("decoder_codebooks")
        high = _first(_part(self.config, "decoder_config", "decoder", "text_config") or self.config, "vocab_size")
        return self.tokens(self.batch, max(2, self.length - 2), *([books] if books else []), high=high)

    def pixel_values(self) -> Tensor:
        high, wide = self.image_size()
        if self.variant.get("patches"):
            return self.normal(int(self.grid()[0].prod()) * self.batch, self.patch_width())
        if self.variant.get("packed"):
            side = int(_first(self.vision, "num_patches", default=16))
            return self.normal(self.batch, side, self.channels() * _pair(_first(self.vision, "patch_size", default=16))[0] ** 2)
        if self.variant.get("tiles"):
            return self.normal(self.batch, 1, self.variant["tiles"], self.channels(), high, wide)
        frames = self.variant.get("frames")
        return self.normal(self.batch, *([frames] if frames else []), self.channels(), high, wide)

    def grid(self) -> Tensor:
        merge = int(_first(self.vision, "spatial_merge_size", default=2))
        return torch.tensor([[1, 2 * merge, merge]])

    def patch_width(self) -> int:
        time = int(_first(self.vision, "temporal_patch_size", default=1))
        return self.channels() * time * _pair(_first(self.vision, "patch_size", default=16))[0] ** 2

    def input_features(self) -> Tensor:
        bins = int(_first(self.audio, *_BINS) or _first(self.config, "num_mel_bins", "feature_size", default=80))
        bins *= self.variant.get("stacked_frames", 1)
        frames = self.variant.get("sound_length") or 2 * int(_first(self.audio, "max_source_positions", default=32))
        return self.normal(self.batch, *((bins, frames) if self.variant.get("bins_first", True) else (frames, bins)))

    def input_values(self) -> Tensor:
        frames = self.variant.get("sound_length") or 2000
        if isinstance(_first(self.audio, "max_length"), int) and isinstance(_first(self.audio, "num_mel_bins"), int):
            return self.normal(self.batch, _first(self.audio, "max_length"), _first(self.audio, "num_mel_bins"))
        return self.normal(self.batch, *([1] if self.variant.get("mono") else []), frames)

    def encoder_hidden_states(self) -> Tensor:
        return self.normal(self.batch, self.length + 2, _cross_width(self.model) or self.width())

    def width(self) -> int:
        if backbone := _first(self.config, "backbone_hidden_size"):  # embeddings beside hidden states of another model
            return 2 * int(backbone)
        return int(_first(self.config.get_text_config(), "hidden_size", "d_model", "n_embd", "dim", default=64))

    def shared_kv_states(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Keys and values of another model, for each kind of layer."""
        text = self.config.get_text_config()
        own = getattr(text, "per_layer_config", None) or {}
        states = {}
        for number, kind in enumerate(getattr(text, "layer_types", None) or ["full_attention"]):
            layer = own.get(number, text) if isinstance(own, dict) else own[number]
            heads, wide = _first(layer, "num_key_value_heads", "num_attention_heads"), _first(layer, "head_dim", default=8)
            states[kind] = tuple(self.normal(self.batch, heads, self.length, wide) for _ in range(2))
        return states

    def bbox(self) -> Tensor:
        corner = torch.randint(0, 8, (self.batch, self.length, 2), generator=self.generator)
        return torch.cat([corner, corner + 5], -1)

    def ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.int64)

    def value(self, name: str) -> Any:
        """What to pass as `name`; None if nothing is known about it."""
        builder = _BUILDERS.get(name)
        return builder(self) if builder else None

    # -- calls -------------------------------------------------------------------------------------------------------

    def call(self, *inputs: str) -> Call:
        """A call with `inputs`, what belongs to them and what the signature requires."""
        names = list(inputs)
        for name in names:  # grows as it goes: what belongs to a companion comes too
            names += [n for n in _COMPANIONS.get(name, ()) if n in self.parameters]
        names += _required(self.model)
        call: Call = {}
        for name in dict.fromkeys(names):
            value = self.value(name)
            if value is not None:
                call[name] = value
        if "attention_mask" in call and "input_ids" in call:
            call["attention_mask"] = self.ones(*call["input_ids"].shape[:2])
        if "mm_token_type_ids" in self.parameters and self.variant.get("media_id") is not None:
            kind = 2 if "pixel_values_videos" in inputs else 1
            call["mm_token_type_ids"] = (call["input_ids"] == self.variant["media_id"]).long() * kind
        sound = next((call[name] for name in _SOUNDS if name in call), None)
        for name in _SOUND_MASKS:
            if sound is not None and name in self.parameters:
                call[name] = self.ones(self.batch, sound.shape[-1 if self.variant.get("bins_first", True) else 1])
        for name in self.variant.get("without", ()):
            call.pop(name, None)
        return call


_BUILDERS: dict[str, Callable[[_Maker], Any]] = {
    "shared_kv_states": _Maker.shared_kv_states,
    "global_attention_mask": lambda m: (torch.arange(m.length) == 0).long().expand(m.batch, -1),
    "encoder_outputs": lambda m: (m.encoder_hidden_states(),),
    "entity_ids": lambda m: m.tokens(m.batch, 2, high=_first(m.config, "entity_vocab_size", default=2)),
    "entity_position_ids": lambda m: torch.arange(4).view(1, 2, 2).expand(m.batch, -1, -1),
    "entity_attention_mask": lambda m: m.ones(m.batch, 2),
    "input_ids": _Maker.input_ids,
    "decoder_input_ids": _Maker.decoder_input_ids,
    "attention_mask": lambda m: m.ones(m.batch, m.length),
    "token_type_ids": lambda m: m.ones(m.batch, m.length) * 0,
    "langs": lambda m: m.ones(m.batch, m.length) * 0,
    "position_ids": lambda m: torch.arange(m.length).expand(m.batch, -1),
    "use_cache": lambda m: False,
    "bbox": _Maker.bbox,
    "pixel_values": _Maker.pixel_values,
    "pixel_values_images": _Maker.pixel_values,
    "pixel_values_videos": _Maker.pixel_values,
    "pixel_attention_mask": lambda m: m.ones(m.batch, int(_first(m.vision, "num_patches", default=16))),
    "spatial_shapes": lambda m: torch.tensor([[int(_first(m.vision, "num_patches", default=16) ** 0.5)] * 2] * m.batch),
    "image_grid_thw": lambda m: m.grid().expand(m.batch, -1),
    "video_grid_thw": lambda m: m.grid().expand(m.batch, -1),
    "image_sizes": lambda m: torch.tensor([m.image_size()] * m.batch),
    "aspect_ratio_ids": lambda m: m.ones(m.batch, 1),
    "aspect_ratio_mask": lambda m: m.ones(m.batch, 1, int(_first(m.config, "max_num_tiles", default=1))),
    "inputs": lambda m: _BUILDERS[m.variant.get("as", "input_ids")](m),
    "input_features": _Maker.input_features,
    "audio_input_features": _Maker.input_features,
    "input_values": _Maker.input_values,
    "audio_values": _Maker.input_values,
    "inputs_embeds": lambda m: m.normal(m.batch, m.length, m.width()),
    "encoder_hidden_states": _Maker.encoder_hidden_states,
}


def _part(config: Any, *names: str) -> Any:
    """The config inside `config` under the first of `names` that holds one."""
    return next((v for n in names if hasattr(v := getattr(config, n, None), "to_dict")), None)


def _required(model: nn.Module) -> list[str]:
    """Arguments of the forward that have no default."""
    parameters = inspect.signature(model.forward).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _text_rows(model: Any) -> int | None:
    """Rows of the model's own table of tokens."""
    try:
        table = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    return getattr(table, "num_embeddings", None)


def _cross_width(model: nn.Module) -> int | None:
    """Width of what the cross-attention reads; None without cross-attention."""
    for name, module in model.named_modules():
        if _CROSS.search(name):
            width = getattr(module, "in_features", None)
            if isinstance(width, int):
                return width
    return None


# -- the set of calls -----------------------------------------------------------------------------------------------------


def _lengths(config: Any, length: int) -> list[int]:
    """Text lengths to try: the one asked for, then what a block-wise model may need instead."""
    shape = _first(config, "axial_pos_shape")
    fixed = [shape[0] * shape[1]] if shape else []
    blocks = [_first(config, name) for name in ("attention_window", "block_size", "chunk_size", "max_position_embeddings")]
    blocks = [max(b) if isinstance(b, list) and b else b for b in blocks]
    most = _first(config, "max_position_embeddings", "n_positions", "max_seq_len", default=1024)
    return list(dict.fromkeys(n for n in [*fixed, length, 16, 32, 64, *blocks] if type(n) is int and 1 < n <= min(most, 512)))


def _text_variants(config: Any, length: int) -> list[dict[str, Any]]:
    books = _first(config, "num_codebooks", "num_channels", "n_q", "num_quantizers", "audio_channels")
    variants: list[dict[str, Any]] = [{"length": n} for n in _lengths(config, length)]
    variants += [{"without": ("attention_mask",), "length": length}]
    if isinstance(books, int):
        variants += [{"decoder_codebooks": books, "length": length}]
        variants += [{"codebooks": n, "length": length} for n in (books, books + 1)]
        variants += [{"codebooks": books, "stacked": True, "length": length, "without": ("attention_mask",)}]
    return variants


def _image_variants(config: Any) -> list[dict[str, Any]]:
    frames = _first(config, "num_frames")
    clips = [None] if frames is None else [int(frames), None]
    shapes = [{"frames": f, "image_size": s} for f in clips for s in (None, 32, 64, 128, 224)]
    tiles = _first(config, "max_num_tiles")
    shapes += [{"tiles": tiles}] if tiles else []
    shapes += [{"frames": f, "without": ("image_sizes",)} for f in clips]
    return [*shapes, {"packed": True}, {"patches": True}, {"frames": 1}, {"frames": 2}]


def _sound_variants(config: Any) -> list[dict[str, Any]]:
    variants = [{"bins_first": b, "sound_length": n} for n in (None, 64, 200, 1000) for b in (True, False)]
    variants += [{"mono": True, "sound_length": n} for n in (2000, 16000)]
    stacked = dict.fromkeys((_first(config, "num_stacked_frames"), 2, 4))
    variants += [{"bins_first": False, "sound_length": 64, "stacked_frames": n} for n in stacked if n]
    return [{**v, "without": _SOUND_MASKS} for v in variants[:2]] + variants


def _scenarios(model: nn.Module, length: int) -> list[list[Recipe]]:
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
    kinds = {n: _image_variants for n in _IMAGES} | {n: _sound_variants for n in _SOUNDS}
    own = kinds[first](config) if first in kinds else _text_variants(config, length)
    if first == "inputs":
        own += [{**v, "as": name} for name in ("pixel_values", "input_values", "input_features") for v in kinds[name](config)]
    scenarios: list[list[Recipe]] = [[((first,), variant) for variant in own]]
    extra: list[tuple[str, ...]] = [("encoder_hidden_states",)] if _cross_width(model) else []
    if first == "input_ids" and "decoder_input_ids" not in parameters and _cross_width(model):
        extra.append(("encoder_outputs",))
    extra += [("entity_ids", "entity_position_ids", "entity_attention_mask")]
    if first == "input_ids":
        if "token_type_ids" in parameters:
            scenarios[0] = [((first, "token_type_ids"), variant) for variant in own] + scenarios[0]
        if _first(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
            scenarios.append([((first,), {"length": 4 * length})])  # so that every expert gets a token
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


def _build(model: nn.Module, batch: int, length: int, seed: int, recipe: Recipe) -> Call:
    inputs, variant = recipe
    return _Maker(model, batch, length, seed, variant).call(*inputs)


def _media_id(config: Any, name: str) -> int | None:
    """The id that stands for a picture, clip or sound in the text."""
    kind = "audio" if name in _SOUNDS else "video" if "video" in name else "image"
    return _first(config, *(f"{kind}_token_{end}" for end in ("id", "index")), f"{kind}_context_token_id")


def _checked(model: nn.Module) -> None:
    if not hasattr(getattr(model, "config", None), "to_dict"):
        raise PlanError(
            f"{type(model).__name__} has no transformers config, so no example call can be made of it. "
            f"Pass `inputs=`, a dict of keyword arguments (or a list of them) that the model can be called with."
        )


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
    recipes = [recipe for scenario in _scenarios(model, length) for recipe in scenario]
    return [_build(model, batch_size, length, seed, recipe) for recipe in recipes]


def make_examples(
    model: nn.Module, batch_size: int = 2, length: int = 9, seed: int = 0, run: Callable[[Call], Any] | None = None
) -> list[Call]:
    """Calls that together run every parameter of `model` that its kinds of input reach: text, pictures, sound, an encoder's.

    Args:
        model: a transformers model; its weights may be on meta.
        batch_size, length, seed: as for `candidate_calls`.
        run: calls the model (or its copy) and raises where a call does not fit; without it no call is tried and all
            candidates are returned.

    Raises:
        PlanError: no call ran.
    """
    if run is None:
        return candidate_calls(model, batch_size, length, seed)
    _checked(model)
    kept: list[Call] = []
    errors: list[Exception] = []
    scenarios = _scenarios(model, length)
    for scenario in scenarios:
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
                others = _told(str(error), sizes, _Maker(model, *sizes, variant).width())
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
