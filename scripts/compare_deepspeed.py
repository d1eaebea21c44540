"""What DeepSpeed's AutoTP does on the models of compare_features.py, each a pair of gloo ranks of its own.

DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python scripts/compare_deepspeed.py [FEATURE ...]

DeepSpeed is no requirement of autotp: `pip install deepspeed` first. It compiles a small library for CPU ranks when it first
runs, with ninja and a C++ compiler. docs/compare.md holds what this said.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
import transformers
from compare_features import (
    IDS,
    NO_DROPOUT,
    SMALL,
    add_lora,
    draw_adapters,
    generate,
    llama,
    make_plain,
    run_all,
    step,
    tell,
    train,
)
from deepspeed.module_inject.layers import GatherReplacedLayerParams  # type: ignore[import-not-found]
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification

CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": 2}}
CONFIG["gradient_clipping"] = 0.0  # which clips at 1 where it is left out


def gpt2() -> transformers.GPT2Config:
    """A tiny GPT-2's, without dropout."""
    rates: dict[str, Any] = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2Config(vocab_size=320, n_embd=64, n_layer=2, n_head=4, **rates)


def start(model: Any, fused: bool | None = None, **config: Any) -> Any:
    """DeepSpeed's engine of `model`, with AdamW."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, eps=1e-3, fused=fused)
    return deepspeed.initialize(model=model, optimizer=optimizer, config={**copy.deepcopy(CONFIG), **config})[0]


def make(directory: Path, config: Any = None, kind: Any = AutoModelForCausalLM, **engine: Any) -> tuple[Any, Any]:
    """A random model, unsharded and through DeepSpeed, both in training mode."""
    plain = make_plain(directory, config, kind)
    return plain, start(copy.deepcopy(plain), **engine)


def run_backward(engine: Any, ids: Tensor = IDS) -> Tensor:
    """Loss after a backward."""
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    return loss.detach()


def gather(engine: Any, read: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    """Whole tensors out of each rank's `read(parameter)`, by DeepSpeed's own gathering of Parameters."""
    found = {}
    for prefix, module in engine.module.named_modules():
        own = dict(module.named_parameters(prefix, recurse=False))
        shards = [p.data for p in own.values()]
        for parameter in own.values():
            parameter.data = read(parameter)
        GatherReplacedLayerParams(list(own.values()), module).__enter__()
        found |= {name: p.data.clone() for name, p in own.items()}
        for parameter, shard in zip(own.values(), shards, strict=True):
            parameter.data = shard
    return found


def gradients(plain: Any, engine: Any, ids: Tensor = IDS) -> str:
    """Of a step on `ids`."""
    losses = step(plain), run_backward(engine, ids)
    trained = {name for name, p in engine.module.named_parameters() if p.requires_grad}
    grads = gather(engine, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)
    own = dict(plain.named_parameters())
    split = sum(p.shape != own[name].shape for name, p in engine.module.named_parameters())
    return tell(plain, losses, {name: grad for name, grad in grads.items() if name in trained}, split)


def clip(directory: Path) -> str:
    plain, engine = make(directory)
    step(plain)
    run_backward(engine)
    norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) for model in (plain, engine.module)]
    every: list[Any] = [None] * 2
    dist.all_gather_object(every, round(norms[1].item(), 6))
    return f"norms {norms[0]:.6f}, and on the ranks {every}"


def adamw(directory: Path, fused: bool | None = None, limit: float = 0.0) -> str:
    """Three steps; clipped by the engine where there is a limit."""
    plain, engine = make(directory, fused=fused, gradient_clipping=limit)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-3)
    for _ in range(3):
        losses = step(plain), run_backward(engine)
        if limit:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
    return f"third loss {losses[0]:.6f} and {losses[1]:.6f}"


def compare_weights(plain: Any, found: dict[str, Tensor]) -> str:
    """What of a state dict is not that of `plain`."""
    want = plain.state_dict()
    other = [name for name in want if name not in found or found[name].shape != want[name].shape]
    differ = [name for name in want if name not in other and not torch.equal(found[name], want[name])]
    return f"{len(other)} tensors lack or are of another shape, {len(differ)} differ" if other or differ else "bitwise"


def save(directory: Path, way: str, **given: Any) -> str:
    """By the model's `save_pretrained`, the engine's `save_16bit_model`, or the state dict that accelerate asks it for."""
    plain, engine = make(directory, llama(**given))
    if way == "pretrained":
        engine.module.save_pretrained(directory / "out")
        dist.barrier()
        return compare_weights(plain, load_file(directory / "out" / "model.safetensors"))
    if way == "16bit":
        engine.save_16bit_model(str(directory / "out"))
        dist.barrier()
        return compare_weights(plain, torch.load(directory / "out" / "pytorch_model.bin"))
    found = engine._consolidated_16bit_state_dict()
    return compare_weights(plain, found) if dist.get_rank() == 0 else "rank 0 says"


def lora(directory: Path, target: Any, afterwards: bool) -> str:
    plain = make_plain(directory)
    if afterwards:
        engine = start(copy.deepcopy(plain))
        add_lora(engine.module, target)
        return "added"
    plain = add_lora(plain, target)
    plain.load_state_dict(draw_adapters(plain), strict=False)
    return gradients(plain, start(copy.deepcopy(plain)))


def new_head(directory: Path) -> str:
    make_plain(directory)
    torch.manual_seed(dist.get_rank())
    wish: dict[str, Any] = dict(dtype=torch.float32, num_labels=4)
    model = AutoModelForSequenceClassification.from_pretrained(str(directory / "model"), **wish)
    own = gather(start(model), lambda p: p.data)["score.weight"]
    every = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(every, own)
    return f"seeds differ by rank; the new head is alike on both: {torch.equal(*every)}"


def save_state(directory: Path, universal: bool) -> str:
    """A step sharded, its state saved, and the loss after a second one."""
    zero: dict[str, Any] = {"zero_optimization": {"stage": 1}} if universal else {}
    engine = make(directory, **zero)[1]
    run_backward(engine)
    engine.step()
    engine.save_checkpoint(str(directory / "state"), tag="one")
    if universal and dist.get_rank() == 0:
        folders = ["--input_folder", str(directory / "state" / "one"), "--output_folder", str(directory / "state" / "all")]
        module = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        subprocess.run([*module, *folders, "--num_extract_workers", "1", "--num_merge_workers", "1"], check=True)
    run_backward(engine)
    engine.step()
    return f"loss after two steps: {run_backward(engine):.6f}"


def load_state(directory: Path, universal: bool) -> str:
    """In a new job: the second step over ranks that each hold the whole model."""
    zero: dict[str, Any] = {"zero_optimization": {"stage": 1}, "checkpoint": {"load_universal": True}} if universal else {}
    model = AutoModelForCausalLM.from_pretrained(str(directory / "model"), dtype=torch.float32).train()
    engine = start(model, tensor_parallel={"autotp_size": 1}, **zero)
    if engine.load_checkpoint(str(directory / "state"), tag="all" if universal else "one")[0] is None:
        return "load_checkpoint finds nothing"
    run_backward(engine)
    engine.step()
    return f"the second of them unsharded: {run_backward(engine):.6f}"


def trainer(directory: Path) -> str:
    config = {**CONFIG, "zero_optimization": {"stage": 0}, "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}
    return train(make_plain(directory), directory, deepspeed=config)


def copies(directory: Path, stage: int) -> str:
    """Three steps of two copies of two ranks each, one row of the batch to each."""
    plain, engine = make(directory, train_micro_batch_size_per_gpu=1, zero_optimization={"stage": stage})
    optimizer, ids = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-3), IDS.chunk(2)[dist.get_rank() // 2]
    for _ in range(3):
        losses = step(plain), run_backward(engine, ids)
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
    dist.all_reduce(losses[1])
    return f"third loss {losses[0]:.6f} and {losses[1] / 4:.6f}"


def tokens(directory: Path) -> str:
    return str(start(make_plain(directory), tensor_parallel={"autotp_size": 2, "sequence_parallel": True}))


def generate_whole(directory: Path) -> str:
    plain, engine = make(directory)
    return generate(plain, engine.module)


FEATURES: dict[str, Callable[[Path], str]] = {
    "llama": lambda d: gradients(*make(d)),
    "tied-head": lambda d: gradients(*make(d, llama(tie_word_embeddings=True))),
    "gpt2": lambda d: gradients(*make(d, gpt2())),
    "bert": lambda d: gradients(*make(d, transformers.BertConfig(**SMALL, **NO_DROPOUT), AutoModelForMaskedLM)),
    "three-heads": lambda d: gradients(*make(d, llama(num_attention_heads=3, num_key_value_heads=3, hidden_size=48))),
    "clip": clip,
    "clip-own": lambda d: adamw(d, limit=0.1),
    "adamw": adamw,
    "adamw-fused": lambda d: adamw(d, fused=True),
    "save": lambda d: save(d, "pretrained"),
    "save-tied": lambda d: save(d, "pretrained", tie_word_embeddings=True),
    "save-16bit": lambda d: save(d, "16bit"),
    "save-gathered": lambda d: save(d, "gathered"),
    "save-gathered-tied": lambda d: save(d, "gathered", tie_word_embeddings=True),
    "lora": lambda d: lora(d, "all-linear", True),
    "lora-q-v": lambda d: lora(d, ["q_proj", "v_proj"], True),
    "lora-before": lambda d: lora(d, "all-linear", False),
    "lora-before-q-v": lambda d: lora(d, ["q_proj", "v_proj"], False),
    "generate": generate_whole,
    "new-head": new_head,
    "state": lambda d: save_state(d, False),
    "state-universal": lambda d: save_state(d, True),
    "trainer": trainer,
    "copies": lambda d: copies(d, 0),
    "zero-1": lambda d: copies(d, 1),
    "fully-sharded": lambda d: copies(d, 3),
    "tokens": tokens,
}
AFTERWARDS: dict[str, Callable[[Path], str]] = {
    "state": lambda d: load_state(d, False),
    "state-universal": lambda d: load_state(d, True),
}


if __name__ == "__main__":
    print(f"DeepSpeed {deepspeed.__version__}", flush=True)
    run_all(FEATURES, AFTERWARDS)
