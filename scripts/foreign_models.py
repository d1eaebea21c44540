"""Small random models of timm, diffusers and x-transformers, for `foreign.py`."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Call = dict[str, Any]
Built = tuple[nn.Module, list[Call]]
MODELS: dict[str, dict[str, Callable[[], Built]]] = {"timm": {}, "diffusers": {}, "x_transformers": {}}


def listed(build: Callable[[], Built]) -> Callable[[], Built]:
    """Lists a function named `library__model`."""
    library, _, name = build.__name__.partition("__")
    MODELS[library][name] = build
    return build


def images(name: str = "x", channels: int = 3, side: int = 32, **others: Callable[[int], Any]) -> list[Call]:
    """Two calls of two and three images; `others` make arguments for a batch."""
    calls = []
    for batch in (2, 3):
        call: Call = {name: torch.randn(batch, channels, side, side)}
        calls.append(call | {key: make(batch) for key, make in others.items()})
    return calls


def steps(batch: int) -> torch.Tensor:
    return torch.randint(0, 1000, (batch,))


def states(length: int, width: int) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.randn(batch, length, width)


# -- timm ----------------------------------------------------------------------------------------------------------------


def timm_model(name: str, side: int = 32, **options: Any) -> Built:
    import timm

    return timm.create_model(name, pretrained=False, num_classes=10, img_size=side, **options), images(side=side)


VIT: dict[str, Any] = {"patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}


@listed
def timm__vit() -> Built:
    return timm_model("vit_tiny_patch16_224", **VIT)


@listed
def timm__vit_layer_scale_qk_norm() -> Built:
    return timm_model("vit_tiny_patch16_224", **VIT, init_values=0.1, qk_norm=True, reg_tokens=2, global_pool="avg", fc_norm=True)


@listed
def timm__vit_swiglu() -> Built:
    from timm.layers import SwiGLUPacked

    return timm_model("vit_tiny_patch16_224", **VIT, mlp_layer=SwiGLUPacked)


@listed
def timm__vit_unfused_attention() -> Built:
    built = timm__vit()
    for module in built[0].modules():
        if hasattr(module, "fused_attn"):
            vars(module)["fused_attn"] = False
    return built


@listed
def timm__vit_parallel_blocks() -> Built:
    return timm_model("vit_small_patch16_18x2_224", **VIT)


@listed
def timm__deit_distilled() -> Built:
    return timm_model("deit_tiny_distilled_patch16_224", **VIT)


@listed
def timm__beit() -> Built:
    return timm_model("beit_base_patch16_224", **VIT, init_values=0.1)


@listed
def timm__eva02_rope() -> Built:
    return timm_model("eva02_tiny_patch14_224", **VIT)


@listed
def timm__swin() -> Built:
    return timm_model("swin_tiny_patch4_window7_224", window_size=4, embed_dim=32, depths=(2, 2), num_heads=(4, 4))


@listed
def timm__swin_v2() -> Built:
    return timm_model("swinv2_tiny_window8_256", window_size=4, embed_dim=32, depths=(2, 2), num_heads=(4, 4))


@listed
def timm__mlp_mixer() -> Built:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(num_classes=10, img_size=32, patch_size=8, embed_dim=64, num_blocks=2), images()


@listed
def timm__convnext() -> Built:
    import timm

    model = timm.create_model("convnext_tiny", pretrained=False, num_classes=10, depths=(1, 1, 1, 1), dims=(32, 64, 64, 64))
    return model, images(side=64)


# -- diffusers -----------------------------------------------------------------------------------------------------------


@listed
def diffusers__dit() -> Built:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=8)
    labels = lambda batch: torch.randint(0, 10, (batch,))  # noqa: E731
    return model, images("hidden_states", 4, 8, timestep=steps, class_labels=labels)


@listed
def diffusers__transformer_2d() -> Built:
    from diffusers import Transformer2DModel

    model = Transformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=32, num_layers=2, norm_num_groups=8, cross_attention_dim=48
    )
    return model, images("hidden_states", 32, 6, encoder_hidden_states=states(5, 48))


@listed
def diffusers__pixart() -> Built:
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, num_layers=3, cross_attention_dim=64, caption_channels=48, sample_size=8,
        use_additional_conditions=False,
    )  # fmt: skip
    added = lambda batch: {"resolution": None, "aspect_ratio": None}  # noqa: E731
    return model, images("hidden_states", 4, 8, timestep=steps, encoder_hidden_states=states(5, 48), added_cond_kwargs=added)


@listed
def diffusers__sd3() -> Built:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8, in_channels=4, out_channels=4, num_layers=3, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=48, caption_projection_dim=64, pooled_projection_dim=40, pos_embed_max_size=8,
        qk_norm="rms_norm", dual_attention_layers=(0,),
    )  # fmt: skip
    pooled = lambda batch: torch.randn(batch, 40)  # noqa: E731
    return model, images("hidden_states", 4, 8, timestep=steps, encoder_hidden_states=states(5, 48), pooled_projections=pooled)


@listed
def diffusers__flux() -> Built:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=48,
        pooled_projection_dim=40, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    calls = []
    for batch, tokens, text in ((2, 9, 5), (3, 16, 4)):
        calls.append(
            {
                "hidden_states": torch.randn(batch, tokens, 16),
                "encoder_hidden_states": torch.randn(batch, text, 48),
                "pooled_projections": torch.randn(batch, 40),
                "timestep": torch.rand(batch),
                "guidance": torch.rand(batch),
                "img_ids": torch.randint(0, 4, (tokens, 3)).float(),
                "txt_ids": torch.zeros(text, 3),
            }
        )
    return model, calls


@listed
def diffusers__unet() -> Built:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, cross_attention_dim=48,
        attention_head_dim=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return model, images("sample", 4, 16, timestep=steps, encoder_hidden_states=states(5, 48))


# -- x-transformers --------------------------------------------------------------------------------------------------------

LAYERS: dict[str, Any] = {"dim": 64, "depth": 2, "heads": 8, "attn_dim_head": 8}


def tokens(layers: nn.Module, **options: Any) -> Built:
    from x_transformers import TransformerWrapper

    model = TransformerWrapper(num_tokens=130, max_seq_len=32, attn_layers=layers, **options)
    return model, [{"x": torch.randint(0, 130, shape)} for shape in ((2, 9), (3, 7))]


@listed
def x_transformers__decoder() -> Built:
    from x_transformers import Decoder

    return tokens(Decoder(**LAYERS))


@listed
def x_transformers__decoder_rotary_glu_gqa() -> Built:
    from x_transformers import Decoder

    return tokens(
        Decoder(**LAYERS, rotary_pos_emb=True, ff_glu=True, ff_swish=True, ff_no_bias=True, attn_kv_heads=4, use_rmsnorm=True)
    )


@listed
def x_transformers__decoder_flash_qk_norm() -> Built:
    from x_transformers import Decoder

    return tokens(Decoder(**LAYERS, attn_flash=True, attn_qk_norm=True, attn_qk_norm_dim_scale=True, rotary_xpos=True))


@listed
def x_transformers__decoder_talking_heads() -> Built:
    from x_transformers import Decoder

    return tokens(Decoder(**LAYERS, attn_pre_talking_heads=True, attn_gate_values=True, rel_pos_bias=True))


@listed
def x_transformers__encoder() -> Built:
    from x_transformers import Encoder

    return tokens(Encoder(**LAYERS, sandwich_norm=True))


@listed
def x_transformers__encoder_alibi() -> Built:
    from x_transformers import Encoder

    return tokens(Encoder(**LAYERS, alibi_pos_bias=True, ff_relu_squared=True), tie_embedding=True)


@listed
def x_transformers__encoder_decoder() -> Built:
    from x_transformers import XTransformer

    model = XTransformer(
        dim=64, enc_num_tokens=96, enc_depth=2, enc_heads=8, enc_attn_dim_head=8, enc_max_seq_len=32,
        dec_num_tokens=96, dec_depth=2, dec_heads=8, dec_attn_dim_head=8, dec_max_seq_len=32,
    )  # fmt: skip
    draw = lambda *shape: torch.randint(0, 96, shape)  # noqa: E731
    return model, [{"src": draw(b, s), "tgt": draw(b, t)} for b, s, t in ((2, 9, 6), (3, 7, 8))]


@listed
def x_transformers__vit() -> Built:
    from x_transformers import Encoder, ViTransformerWrapper

    model = ViTransformerWrapper(image_size=32, patch_size=8, num_classes=10, attn_layers=Encoder(**LAYERS))
    return model, images("img")
