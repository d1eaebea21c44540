"""A sample of what scripts/coverage.py runs: types whose plans need different rules, as tiny models, over two ranks."""

import copy
import warnings

import pytest
import transformers
from measures import GRADIENTS, OUTPUTS, SHARE, compare, prepare
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import autotp

SAMPLE = {
    "causal": {
        "dbrx": "stacked experts that read a slice of the packed weights",
        "doge": "masks of single heads, from a whole site",
        "gpt_bigcode": "one kv head, packed behind the queries",
        "jamba": "attention, mamba and experts in turn",
        "jetmoe": "experts of the attention's queries",
        "lfm2": "short convolutions that gate",
        "llama4_text": "experts beside a shared one, attention in chunks",
        "minimax": "linear attention with decays by head in buffers",
        "opt": "a bias on every linear, learned positions with an offset",
        "recurrent_gemma": "gates of single heads",
        "rwkv": "no attention: channels that decay",
    },
    "masked": {
        "albert": "one layer that runs several times",
        "deberta-v2": "relative positions projected by the same weights",
        "fnet": "no attention: a Fourier transform",
        "longformer": "attention in windows, whose sizes are written into shapes",
        "modernbert": "packed projections, global and local layers",
        "roformer": "rotary embedding of heads that is an input",
    },
    "seq2seq": {"led": "windows in the encoder, cross-attention", "m2m_100": "two towers, tied to one vocabulary"},
    "vision": {
        "beit": "a relative position bias by head",
        "convnext": "convolutions of single channels between linear maps",
        "detr": "a backbone of convolutions, queries that attend",
        "segformer": "keys of a shortened sequence",
        "siglip": "torch's own multi-head attention",
        "swin": "shifted windows, widths that grow",
    },
    "audio": {"sew-d": "disentangled attention behind convolutions", "wav2vec2": "a weight-normed convolution of positions"},
}


def check_type(group, kind, model_type):
    """What scripts/coverage.py measures of one type."""
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, calls, _ = prepare(kind, model_type)
        sharded = autotp.parallelize(copy.deepcopy(model), group).train(model.training)
        return compare(model, sharded, calls)


@pytest.mark.parametrize("kind, model_type", [(kind, model_type) for kind, types in SAMPLE.items() for model_type in types])
def test_split_and_right(ranks, kind, model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    for row in ranks.run(check_type, kind, model_type):
        assert row["output_error"] <= OUTPUTS and row["gradient_error"] <= GRADIENTS, row
        assert row["verdict"] == "pass" and row["share"] >= SHARE, row
