"""What to pass as one argument of a model's forward: a random value by the argument's name, of sizes that the config holds.

There is no table of models. Shapes of parameters are read, their values never, so a model on meta will do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .configs import as_pair, config_part, cross_width, first_of, special_ids, text_rows

_BINS = ("num_mel_bins", "n_mels", "input_feat_per_channel", "input_dim", "feature_projection_input_dim", "input_size")


class ArgumentMaker:
    """Builds the arguments of one call; `variant` says how, where the config leaves several readings."""

    def __init__(self, model: nn.Module, batch: int, length: int, seed: int, variant: dict[str, Any]) -> None:
        self.model, self.batch, self.variant = model, batch, variant
        self.config: Any = model.config
        self.length = variant.get("length", length)
        self.generator = torch.Generator().manual_seed(seed)
        encoder = config_part(self.config, "vision_config", "vision", "vision_encoder", "encoder", "backbone_config")
        self.vision = encoder or self.config
        self.audio = config_part(self.config, "audio_config", "audio_encoder", "speech_config", "encoder_config") or self.config

    # -- parts -------------------------------------------------------------------------------------------------------

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def tokens(self, *shape: int, high: int | None = None) -> Tensor:
        """Random ids below `high` (the vocabulary), none of them special where there is a choice."""
        high = max(2, high or self.vocabulary())
        special = special_ids(self.config)
        usable = [i for i in range(min(3, high - 1), high) if i not in special] or list(range(high))
        return torch.tensor(usable)[torch.randint(len(usable), shape, generator=self.generator)]

    def vocabulary(self) -> int:
        """Number of ids that every table of tokens holds."""
        sizes = [v for v in (first_of(self.config, "vocab_size"), text_rows(self.model)) if isinstance(v, int) and v > 0]
        return min(sizes, default=100)

    def image_size(self) -> tuple[int, int]:
        size = self.variant.get("image_size") or first_of(self.vision, "image_size", "img_size", "input_size")
        return as_pair(size if size is not None else first_of(self.config, "image_size", default=64))

    def channels(self) -> int:
        return int(first_of(self.vision, "num_channels", "in_channels", "in_chans", default=3))

    def image_tokens(self) -> int:
        """Ids that stand for one image in the text."""
        known = self.variant.get("media_tokens")
        if known is not None:
            return known
        tokens = first_of(self.config, "image_seq_length", "mm_tokens_per_image", "image_seq_len", "num_image_tokens")
        if isinstance(tokens, int):
            return tokens
        high, wide = self.image_size()
        patch = as_pair(first_of(self.vision, "patch_size", default=16))
        merge = first_of(self.vision, "spatial_merge_size", default=1)
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
        high = first_of(config_part(self.config, "decoder_config", "decoder", "text_config") or self.config, "vocab_size")
        return self.tokens(self.batch, max(2, self.length - 2), *([books] if books else []), high=high)

    def pixel_values(self) -> Tensor:
        high, wide = self.image_size()
        if self.variant.get("patches"):
            return self.normal(int(self.grid()[0].prod()) * self.batch, self.patch_width())
        if self.variant.get("packed"):
            side = int(first_of(self.vision, "num_patches", default=16))
            return self.normal(
                self.batch, side, self.channels() * as_pair(first_of(self.vision, "patch_size", default=16))[0] ** 2
            )
        if self.variant.get("tiles"):
            return self.normal(self.batch, 1, self.variant["tiles"], self.channels(), high, wide)
        frames = self.variant.get("frames")
        return self.normal(self.batch, *([frames] if frames else []), self.channels(), high, wide)

    def grid(self) -> Tensor:
        merge = int(first_of(self.vision, "spatial_merge_size", default=2))
        return torch.tensor([[1, 2 * merge, merge]])

    def patch_width(self) -> int:
        time = int(first_of(self.vision, "temporal_patch_size", default=1))
        return self.channels() * time * as_pair(first_of(self.vision, "patch_size", default=16))[0] ** 2

    def input_features(self) -> Tensor:
        bins = int(first_of(self.audio, *_BINS) or first_of(self.config, "num_mel_bins", "feature_size", default=80))
        bins *= self.variant.get("stacked_frames", 1)
        frames = self.variant.get("sound_length") or 2 * int(first_of(self.audio, "max_source_positions", default=32))
        return self.normal(self.batch, *((bins, frames) if self.variant.get("bins_first", True) else (frames, bins)))

    def input_values(self) -> Tensor:
        frames = self.variant.get("sound_length") or 2000
        if isinstance(first_of(self.audio, "max_length"), int) and isinstance(first_of(self.audio, "num_mel_bins"), int):
            return self.normal(self.batch, first_of(self.audio, "max_length"), first_of(self.audio, "num_mel_bins"))
        return self.normal(self.batch, *([1] if self.variant.get("mono") else []), frames)

    def encoder_hidden_states(self) -> Tensor:
        return self.normal(self.batch, self.length + 2, cross_width(self.model) or self.width())

    def width(self) -> int:
        if backbone := first_of(self.config, "backbone_hidden_size"):  # embeddings beside hidden states of another model
            return 2 * int(backbone)
        return int(first_of(self.config.get_text_config(), "hidden_size", "d_model", "n_embd", "dim", default=64))

    def shared_kv_states(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Keys and values of another model, for each kind of layer."""
        text = self.config.get_text_config()
        own = getattr(text, "per_layer_config", None) or {}
        states = {}
        for number, kind in enumerate(getattr(text, "layer_types", None) or ["full_attention"]):
            layer = own.get(number, text) if isinstance(own, dict) else own[number]
            heads, wide = first_of(layer, "num_key_value_heads", "num_attention_heads"), first_of(layer, "head_dim", default=8)
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


_BUILDERS: dict[str, Callable[[ArgumentMaker], Any]] = {
    "shared_kv_states": ArgumentMaker.shared_kv_states,
    "global_attention_mask": lambda m: (torch.arange(m.length) == 0).long().expand(m.batch, -1),
    "encoder_outputs": lambda m: (m.encoder_hidden_states(),),
    "entity_ids": lambda m: m.tokens(m.batch, 2, high=first_of(m.config, "entity_vocab_size", default=2)),
    "entity_position_ids": lambda m: torch.arange(4).view(1, 2, 2).expand(m.batch, -1, -1),
    "entity_attention_mask": lambda m: m.ones(m.batch, 2),
    "input_ids": ArgumentMaker.input_ids,
    "decoder_input_ids": ArgumentMaker.decoder_input_ids,
    "attention_mask": lambda m: m.ones(m.batch, m.length),
    "token_type_ids": lambda m: m.ones(m.batch, m.length) * 0,
    "langs": lambda m: m.ones(m.batch, m.length) * 0,
    "position_ids": lambda m: torch.arange(m.length).expand(m.batch, -1),
    "use_cache": lambda m: False,
    "bbox": ArgumentMaker.bbox,
    "pixel_values": ArgumentMaker.pixel_values,
    "pixel_values_images": ArgumentMaker.pixel_values,
    "pixel_values_videos": ArgumentMaker.pixel_values,
    "pixel_attention_mask": lambda m: m.ones(m.batch, int(first_of(m.vision, "num_patches", default=16))),
    "spatial_shapes": lambda m: torch.tensor([[int(first_of(m.vision, "num_patches", default=16) ** 0.5)] * 2] * m.batch),
    "image_grid_thw": lambda m: m.grid().expand(m.batch, -1),
    "video_grid_thw": lambda m: m.grid().expand(m.batch, -1),
    "image_sizes": lambda m: torch.tensor([m.image_size()] * m.batch),
    "aspect_ratio_ids": lambda m: m.ones(m.batch, 1),
    "aspect_ratio_mask": lambda m: m.ones(m.batch, 1, int(first_of(m.config, "max_num_tiles", default=1))),
    "inputs": lambda m: _BUILDERS[m.variant.get("as", "input_ids")](m),
    "input_features": ArgumentMaker.input_features,
    "audio_input_features": ArgumentMaker.input_features,
    "input_values": ArgumentMaker.input_values,
    "audio_values": ArgumentMaker.input_values,
    "inputs_embeds": lambda m: m.normal(m.batch, m.length, m.width()),
    "encoder_hidden_states": ArgumentMaker.encoder_hidden_states,
}
