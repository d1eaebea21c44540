"""Tiny random models of every type that transformers registers, made from the type's own config class.

`tiny_config` shrinks a config by the names and values of its fields, sub-configs too, and mends what the config or the
model then complains of; `tiny_model` builds the model and makes every parameter random.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
import transformers
from special_types import GIVEN, HIDDEN, NOT_FIELDS, VOCAB
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

KINDS = {
    "causal": ["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"],
    "masked": ["MODEL_FOR_MASKED_LM_MAPPING_NAMES"],
    "seq2seq": ["MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"],
    "vision": [
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        "MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES",
        "MODEL_FOR_IMAGE_MAPPING_NAMES",
    ],
    "audio": [
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
        "MODEL_FOR_CTC_MAPPING_NAMES",
        "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    ],
}

# Field name (whole) -> small value, for fields that hold an int. The first pattern that fits counts.
_INTS: list[tuple[str, int]] = [
    (r"mamba_(d_head|head_dim)|qk_head_dim", 16),
    (r"(mamba_)?n_groups|num_groups|rotary_dim", 4),
    (r"upsample_groups", 64),
    (r"(.*_)?num_filters|n_filters", 4),
    (r"mm_tokens_per_image", 4),
    (r"first_k_dense_replace|num_kv_shared_layers|num_mtp_layers", 1),
    (r"(qk_)?nope_head_dim|qk_rope_head_dim|v_head_dim|.*head_dim|d_kv|kv_channels|.*head_size|d_head|.*head_width", 8),
    (r"q_lora_rank|.*_lora_rank|.*lora_r", 24),
    (r".*(moe|expert).*(intermediate|ffn).*|.*expert_dim|moe_.*_size", 32),
    (r".*intermediate_(size|dim)|.*ffn_(dim|hidden_size)|ffn_.*size|.*feed_?forward_(dim|size)", 96),
    (r"d_ff|d_inner|n_inner|.*mlp_dim|.*(dim_?ff|dff)|intermediate_size_mlp", 96),
    (r".*(kv|key_value)_heads|num_query_groups", 4),
    (r".*heads?|n_head|num_attn.*heads", 8),
    (r"(.*_)?vocab_size_per_layer_input|.*ngram_vocab.*|.*group_vocab", VOCAB),
    (r"hidden_size_per_layer_input", 8),
    (r".*_?offset", 1),
    (r"attention_chunk_size|(local|lsh)_attn_chunk_length|mem_len", 4),
    (r".*latents|output_shape", 64),
    (r"(num|n)_(hidden_)?layers?|.*_layers|.*_num_layers|.*_depth|depth|num_.*_layers", 2),
    (r".*vocab_size|vocabulary_size", VOCAB),
    (r".*hidden_size|hidden_dim|d_model|.*model_dim|n_embd|embedding_size|.*_width|width|dim", 64),
    (r".*max.*position.*|n_positions|n_ctx|max_seq_len.*|seq_len.*|max_source_positions|max_target_positions", 128),
    (r".*(num|n)_(local_|routed_)?experts|.*num_experts|n_routed_experts", 8),
    (r".*experts_per_tok.*|.*top_?k.*|moe_topk", 2),
    (r"n_group|num_expert_groups?", 2),
    (r"topk_group", 1),
    (r".*shared_experts?", 1),
    (r".*(sliding|attention|local)_window.*|window|window_size", 16),
    (r".*(period|interval|freq|step|pattern|every_n.*)", 2),
    (r".*(image|img)_size", 32),
    (r".*patch_size", 8),
    (r"num_frames", 2),
    (r"num_labels", 5),
    (r".*projection_dim|.*proj_dim|.*_dim", 64),
]


# Fields whose default leaves them to be derived, or to the checkpoint.
_UNSET = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "vocab_size": VOCAB,
}
# Tried one after another where a config or a model refuses the plain small fields.
_RETRIES: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 8},
    {"head_dim": None},
]


def registered(kind: str) -> dict[str, str]:
    """Model type -> class name, of the types that transformers registers for `kind`."""
    found: dict[str, str] = {}
    for mapping in KINDS[kind]:
        for model_type, name in getattr(auto, mapping).items():
            found.setdefault(model_type, name if isinstance(name, str) else name[0])
    return found


def _small(name: str, value: Any) -> Any:
    """What an int field becomes: never larger, but for heads, of which there are 8 where there are several."""
    for pattern, small in _INTS:
        if re.fullmatch(pattern, name):
            return small if value > small or (small == 8 and value > 2 and "head" in name) else value
    return value


class _Shrinker:
    """Makes the small fields of one config, and of those inside it; token ids keep one meaning throughout."""

    def __init__(self, overrides: dict[str, Any]) -> None:
        self.overrides = overrides
        self.ids: dict[str, int] = {}

    def token(self, name: str, value: int) -> int:
        """A special id inside the small vocabulary, the same wherever the name occurs."""
        if value < 100:
            return value
        return self.ids.setdefault(name, VOCAB - 1 - len(self.ids))

    def shrink(self, config: PreTrainedConfig, extra: dict[str, Any] | None = None) -> PreTrainedConfig:
        """A new config of the same class with small fields."""
        fields = own_fields(config)
        small: dict[str, Any] = {name: self.field(name, value, fields) for name, value in fields.items()}
        small |= self.depth(fields)
        nested = {k for k, v in self.overrides.items() if isinstance(v, dict) and isinstance(fields.get(k), PreTrainedConfig)}
        small |= {k: v for k, v in self.overrides.items() if k in fields and k not in nested}
        small |= next((v for k, v in HIDDEN.items() if config.model_type.startswith(k)), {}) | (extra or {})
        kept: dict[str, Any] = {k: v for k, v in small.items() if v is not None or fields.get(k) is None}
        return type(config)(**kept)

    def field(self, name: str, value: Any, fields: dict[str, Any]) -> Any:
        if isinstance(value, PreTrainedConfig):
            inner = self.overrides.get(name)
            inner = inner if isinstance(inner, dict) else {}
            nested = _Shrinker(self.overrides | inner)
            nested.ids = self.ids
            known = own_fields(value)
            return nested.shrink(value, {k: v for k, v in inner.items() if k not in known})
        if value is None and name in ("image_token_id", "audio_token_id"):
            return self.token(name, 1000)
        if value is None and name in _UNSET:
            return _UNSET[name]
        if "key_value_heads" in name and "kv_lora_rank" in fields:  # one key a head, rebuilt from the low rank
            return 8
        if name == "head_dim" and "expand" in fields:
            return 16
        if re.search(r"token(_id|_index|_ids)$", name) and "num" not in name:
            if type(value) is int:
                return self.token(name, value)
            return [self.token(name, v) for v in value[:1]] if isinstance(value, list | tuple) and value else value
        if type(value) is int:
            heads = fields.get("num_heads")
            if name == "embed_dim" and isinstance(heads, list | tuple):
                return 8 * heads[0]
            return _small(name, value)
        if isinstance(value, list | tuple) and value and all(type(v) is int for v in value):
            return self.ints(name, list(value), fields)
        if isinstance(value, dict) and name.startswith("rope"):
            return _small_rope(value)
        if name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop") or ("drop" in name and type(value) is float):
            return 0.0
        return value

    def ints(self, name: str, value: list[int], fields: dict[str, Any]) -> list[int]:
        """A list of ints: depths, widths of the stages, a size, or something to be left alone."""
        if re.fullmatch(r"depths?|.*_depths|num_blocks|layers|stage_num(b|_)?.*", name):
            return [min(v, 2) for v in value]
        if re.search(r"image_size|input_size|img_size", name):
            return [min(v, 32) for v in value]
        heads = next((v for k, v in fields.items() if "heads" in k and isinstance(v, list | tuple)), None)
        if re.search(r"hidden_sizes|embed_dims?|dims?$|channels|widths", name) and max(value) > 64:
            if heads and len(heads) == len(value):
                return [8 * h for h in heads]
            return [max(8, -(-v * 64 // max(value) // 8) * 8) for v in value]
        return value

    def depth(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Layers enough for every kind of layer that the lists of one entry a layer name."""
        name = next((n for n in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if type(fields.get(n)) is int), None)
        if name is None or fields[name] < 2:
            return {}
        lists = {
            k: list(v)
            for k, v in fields.items()
            if isinstance(v, list | tuple) and len(v) == fields[name] and not isinstance(v[0], list | tuple)
        }
        lists = {k: [_small(k, x) if type(x) is int else x for x in v] for k, v in lists.items()}
        kinds = dict.fromkeys(zip(*({k: v for k, v in lists.items() if v != list(range(len(v)))}).values(), strict=True))
        rows = list(kinds) if lists else []
        names = [k for k, v in lists.items() if v != list(range(len(v)))]
        count = max(2, len(rows))
        rows = (rows * count)[:count]
        out: dict[str, Any] = {name: count}
        out |= {k: [row[i] for row in rows] for i, k in enumerate(names)}
        out |= {k: list(range(count)) for k in lists if k not in names}
        return out


def own_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields that the config's class adds, with the labels left out."""
    base = {f.name for f in dataclasses.fields(PreTrainedConfig)}
    held = config.__dict__
    names = [f.name for f in dataclasses.fields(config) if f.name not in base and f.init]
    return {name: held.get(name, held.get(config.attribute_map.get(name, name))) for name in names}


def _small_rope(value: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings for heads of 8."""
    out: dict[str, Any] = {}
    for key, entry in value.items():
        if isinstance(entry, dict):
            out[key] = _small_rope(entry)
        elif key == "mrope_section":
            out[key] = [2, 1, 1][: len(entry)]
        elif key in ("short_factor", "long_factor"):
            out[key] = [1.0] * 4
        elif key == "original_max_position_embeddings":
            out[key] = 64
        else:
            out[key] = entry
    return out


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """The small config of `model_type`."""
    cls = CONFIG_MAPPING[model_type]
    given = GIVEN.get(model_type, {}) | overrides
    try:
        default = cls()
    except Exception:
        default = cls(**given)
    fields = own_fields(default)
    return _Shrinker(given).shrink(default, {k: v for k, v in given.items() if k in NOT_FIELDS and k not in fields})


def tiny_model(model_type: str, kind: str, seed: int = 0) -> nn.Module:
    """A tiny random float32 model, every parameter random, in evaluation.

    Raises:
        the first error of building it, if no way of shrinking its config helps.
    """
    cls = getattr(transformers, registered(kind)[model_type])
    errors: list[Exception] = []
    for retry in _RETRIES:
        try:
            config = tiny_config(model_type, **retry)
            if kind == "causal" and not config.is_encoder_decoder and "is_decoder" in own_fields(config):
                config.is_decoder = True
            config = matching(config, cls)
            torch.manual_seed(seed)
            model = cls._from_config(config, dtype=torch.float32)
        except Exception as error:  # whatever the config or the model says: another way of shrinking may help
            errors.append(error)
            continue
        return randomize(model, seed).eval()
    raise errors[0]


def matching(config: PreTrainedConfig, cls: type) -> PreTrainedConfig:
    """The config that `cls` takes: `config` itself or the one inside it, as `AutoModel` finds it."""
    wanted = getattr(cls, "config_class", None)
    if wanted is None or isinstance(config, wanted):
        return config
    inside = [v for v in vars(config).values() if isinstance(v, wanted)]
    return inside[0] if inside else config


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter random values: 1-D ones a little beside their own, others N(0, 0.1)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.add_(noise) if parameter.ndim <= 1 else parameter.copy_(noise)
    return model
