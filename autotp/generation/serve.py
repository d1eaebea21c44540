"""Which calls of `generate` our own loop serves; every other one runs transformers' own code, for a reason in words."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.generation.utils import ALL_CACHE_NAMES

from .arena import why_not_static

ATTENTION = ("sdpa", "eager")  # what works on a cache that is longer than what is in it
INPUTS = ("attention_mask", "position_ids", "token_type_ids")  # what grows with the sequence, and how is known
NOT_RETURNED = {"output_router_logits": False}  # generate returns none, and their loss fails on a static cache's mask
CONSTANTS = ("logits_to_keep", "use_cache", *NOT_RETURNED)
UNREAD = ("tokenizer",)  # criteria have it


def find_cache_name(model_kwargs: dict[str, Any]) -> str | None:
    """The argument that a model takes its cache by: transformers renamed it once."""
    return next((name for name in ALL_CACHE_NAMES if model_kwargs.get(name) is not None), None)


def why_not(model: Any, input_ids: Tensor, config: Any, synced: bool, model_kwargs: dict[str, Any]) -> str | None:
    """Why our loop can't serve this call of `_sample`; None if it can.

    Args:
        config: the GenerationConfig; synced: `synced_gpus`; model_kwargs: what transformers prepared for the forward.
    """
    return _why_not_model(model) or _why_not_call(model, input_ids, config, synced, model_kwargs)


def _why_not_model(model: Any) -> str | None:
    if model.config.is_encoder_decoder:
        return "the model is an encoder-decoder"
    if not getattr(model, "_can_compile_fullgraph", False):
        return f"{type(model).__name__} does not say that it works on static caches"
    if model.training:
        return "the model is in training mode"
    text = model.config.get_text_config(decoder=True)
    if text._attn_implementation not in ATTENTION:
        return f"its attention is {text._attn_implementation}, none of {', '.join(ATTENTION)}"
    if getattr(text, "alibi", False):
        return "its alibi is made of the two-dimensional mask, which a static cache replaces"
    return why_not_static(text)


def _why_not_call(model: Any, input_ids: Tensor, config: Any, synced: bool, model_kwargs: dict[str, Any]) -> str | None:
    name = find_cache_name(model_kwargs)
    if name is None or not config.use_cache:
        return "it uses no cache"
    if getattr(model_kwargs[name], "_is_user_defined", False):
        return "it continues a cache that the caller holds"
    if config.cache_implementation not in (None, "dynamic", "static"):
        return f"cache_implementation={config.cache_implementation!r}"
    if synced:
        return "synced_gpus"
    if config.is_assistant:
        return "the model drafts for another one"
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        return "attentions or hidden states are returned"
    if input_ids.device != model.device:
        return f"the prompt lies on {input_ids.device} and the model on {model.device}"
    if not input_ids.numel():
        return "there are no input_ids"
    known = (*INPUTS, *CONSTANTS, *UNREAD, *ALL_CACHE_NAMES)
    other = sorted(key for key, value in model_kwargs.items() if key not in known and value is not None)
    return f"the model is also given {', '.join(other)}" if other else None
