"""What no rule can know of a model type when its config is made small: fields by the type's name."""

from __future__ import annotations

from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 131  # ids of every vocabulary
_RESNET: dict[str, Any] = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 32, 64],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage2", "stage3", "stage4"],
}
_BACKBONE = {"use_timm_backbone": False, "backbone_config": CONFIG_MAPPING["resnet"](**_RESNET)}
_INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4}
# What no rule can know, by model type: it goes over everything else, in the configs inside too.
GIVEN: dict[str, dict[str, Any]] = {
    "blt": {"hidden_size_global": 128, "global_config": {"hidden_size": 128, "num_attention_heads": 16}},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
            "full_attention": None,
        },
    },
    "conditional_detr": _BACKBONE,
    "dab-detr": _BACKBONE,
    "deformable_detr": _BACKBONE,
    "detr": _BACKBONE,
    "table-transformer": _BACKBONE,
    "donut-swin": {"image_size": 64, "window_size": 2},
    "swin": {"image_size": 64, "window_size": 2},
    "efficientnet": {
        "width_coefficient": 0.25,
        "in_channels": [32, 16, 24, 40, 80, 112, 192],
        "out_channels": [16, 24, 40, 80, 112, 192, 320],
        "hidden_dim": 320,
    },
    "focalnet": {"embed_dim": 16},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "hgnet_v2": {
        "stem_channels": [3, 8, 8],
        "stage_in_channels": [8, 16, 32, 64],
        "stage_mid_channels": [8, 8, 16, 16],
        "stage_out_channels": [16, 32, 64, 64],
    },
    "llama4": {"vision_config": {"intermediate_size": 256}},
    "mllama": {"vision_config": {"intermediate_layers_indices": [0, 1]}},
    "depth_pro": {"patch_size": 32, "image_size": 32, "intermediate_hook_ids": [1, 0]},
    "textnet": {"stem_out_channels": 8},
    "cvt": {"embed_dim": [8, 24, 48], "depth": [1, 2, 3]},
    "voxtral": {"audio_config": {"intermediate_size": 256}},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "moonshine": {"encoder_num_key_value_heads": 8, "decoder_num_key_value_heads": 8},
    "shieldgemma2": {"yes_token_index": 5, "no_token_index": 6},
    "dbrx": {"attn_config": {"kv_n_heads": 4, "clip_qkv": 8.0, "rope_theta": 1e4}},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "dory": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "dots3_note": {"adapter_input_size": 64, "adapter_merge_size": 2},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_d_head": 16},
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_hidden_layers": 2,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "output_hidden_states": True,
            "vocab_size": VOCAB,
            "use_double_wide_mlp": False,
        }
    },
    "gemma4_unified_assistant": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "granite_speech5_ctc": {"num_key_value_heads": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "phi4_multimodal": {
        "audio_config": {"ext_pw_out_channel": 64, "depthwise_separable_out_channel": 64, "nemo_conv_channels": 64}
    },
    "pegasus_x": {"block_size": 8, "num_global_tokens": 4},
    "qwen4_exp": _INDEXER,
    "qwen4_exp_text": _INDEXER,
    "reformer": {
        "axial_pos_embds_dim": [16, 48],
        "axial_pos_shape": [4, 8],
        "attn_layers": ["local", "lsh"],
        "hash_seed": 0,
        "num_buckets": 2,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 16,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
}
# Of `GIVEN`, what the type's config takes without declaring it.
NOT_FIELDS = ("num_key_value_heads", "yes_token_index", "no_token_index", "use_timm_backbone")
# Arguments that a config takes without declaring them, by the start of its type.
HIDDEN: dict[str, dict[str, Any]] = {
    "gemma4": {"global_head_dim": 8},
    "dots3_note": {
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 8,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 24,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
}
