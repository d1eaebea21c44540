"""Quantised base weights on two GPUs: outputs, adapters' gradients and tokens beside a model of the values they stand for.

`torchrun --nproc-per-node 2 tests/gpu/quantised.py [nf4 int8 ..]`; DEVICE=cpu runs over gloo. Prints one line a format and fails
if any failed. bitsandbytes and torchao are needed for their own formats.
"""

import copy
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import autotp
from autotp.layers.packed import list_tensors
from tests.gpu.checks import CUDA, run_checks
from tests.layers.test_adapters import add
from tests.layers.test_quantised import SIZES, make_config, packed_of, stand_for
from tests.models import batch, tiny

DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")
BARS = {"int8": 0.2}  # LLM.int8() rounds inputs, too
BITS = {"nf4": 4, "fp4": 4, "int8": 8, "torchao int8": 8, "torchao int4": 8}  # of a value; scales beside it are few more


def relative(got, want):
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


def check_bytes(model, kind):
    """Bytes of this rank's quantised weights with their scales: not more than a fifth beyond the bits that the format says."""
    packed = packed_of(model).values()
    held = sum(tensor.nbytes for module in packed for tensor in list_tensors(module.weight))
    least = sum(module.in_features * module.out_features for module in packed) * BITS[kind] // 8
    assert least <= held <= 1.2 * least, f"{held} bytes of weights, {least} without scales"
    return held


def check_tokens(model, plain, tokens, given):
    """How far the tokens generated behind `given` are from the greatest of the plain logits: not more than the models differ."""
    with torch.no_grad():
        own, want = (each(input_ids=tokens).logits[:, given - 1 : -1].float() for each in (model, plain))
    lacks = (want.amax(-1) - want.gather(-1, tokens[:, given:, None])[..., 0]).max().item()
    # A step with a cache rounds otherwise than one call for all.
    allowed = 2 * (own - want).abs().max().item() + 2**-6 * want.abs().max().item()
    assert lacks <= allowed, f"a token lacks {lacks:.1e} of the greatest logit, more than {allowed:.1e}"
    return f"tokens within {lacks:.1e} of the greatest logit (<= {allowed:.1e})"


def check(kind, path):
    """bf16 outputs and gradients within rounding; tokens of a graph-captured loop equal to those of the plain one."""
    bar = BARS.get(kind, 3e-2)
    model = autotp.from_pretrained(path, dtype=torch.bfloat16, quantization_config=make_config(kind))
    plain = stand_for(model, AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(DEVICE))
    held = check_bytes(model, kind)
    inputs = {name: value.to(DEVICE) for name, value in batch(plain).items()}
    with torch.no_grad():
        error = relative(model(**inputs).logits, plain(**inputs).logits)
    assert error <= bar, f"logits differ by {error:.1e}"
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = [each.generate(inputs["input_ids"][:1, :5], **settings) for each in (model, copy.deepcopy(model))]
    assert torch.equal(tokens[0], tokens[1]), "a copy generates other tokens"
    chosen = check_tokens(model, plain, tokens[0], 5)
    model, plain = add(model), add(plain)
    torch.manual_seed(5)
    state = {name: torch.randn_like(p) * 0.1 for name, p in plain.named_parameters() if "lora_" in name}
    for each in (model, plain):
        each.load_state_dict(state, strict=False)
        each.train()(**inputs).loss.backward()
    shards = {f"{n}.{p}": m.shards[p] for n, m in model.named_modules() for p in getattr(m, "shards", {})}
    own, worst = dict(model.named_parameters()), 0.0
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            want = shards[name].split(parameter.grad, dist.get_rank()) if name in shards else parameter.grad
            worst = max(worst, relative(own[name].grad, want))
    assert worst <= 3 * bar, f"a gradient differs by {worst:.1e}"
    return f"logits {error:.1e}, gradients {worst:.1e}, {chosen}, {held} bytes of weights"


def main():
    with tempfile.TemporaryDirectory() as directory:
        tiny("llama", **SIZES).save_pretrained(directory)  # each rank its own copy of the same

        def check_quantised(kind):
            return check(kind, directory)

        kinds = sys.argv[1:] or ["nf4", "fp4", "int8", "torchao int8", "torchao int4"]
        run_checks([(check_quantised, kind) for kind in kinds])


if __name__ == "__main__":
    main()
