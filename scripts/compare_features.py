"""What transformers' own tensor parallelism does on tiny models, feature by feature: each a pair of gloo ranks of its own.

PYTHONPATH=. OMP_NUM_THREADS=1 python scripts/compare_features.py [FEATURE ...]

docs/compare.md holds what it said. Models are random, float32, on the CPU; what is compared is the unsharded model on each rank.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import transformers
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification, LlamaConfig

LIMIT_S = 90
IDS = torch.arange(24).reshape(2, 12) * 7 % 320
SMALL: dict[str, Any] = dict(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
SMALL |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
NO_DROPOUT: dict[str, Any] = dict(hidden_dropout_prob=0, attention_probs_dropout_prob=0)


def llama(**given: Any) -> LlamaConfig:
    """A tiny Llama's config, with weights large enough for attention to matter."""
    return LlamaConfig(**{**SMALL, "num_key_value_heads": 2, "initializer_range": 0.2, **given})


def make(directory: Path, config: Any = None, kind: Any = AutoModelForCausalLM) -> tuple[Any, Any]:
    """A random model, unsharded and through transformers' TP, both in training mode."""
    path = str(directory / "model")
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        kind.from_config(config or llama()).save_pretrained(path)
    dist.barrier()
    plain = kind.from_pretrained(path, dtype=torch.float32).train()
    return plain, kind.from_pretrained(path, dtype=torch.float32, tp_plan="auto").train()


def whole(tensor: Any) -> Any:
    """The whole tensor of a DTensor; others as they are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def step(model: Any) -> Any:
    """Loss after a backward."""
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return whole(loss.detach())


def gradients(plain: Any, tp: Any) -> str:
    """Losses, the worst gradient of all, and how many are split."""
    losses = step(plain), step(tp)
    own = dict(plain.named_parameters())
    worst = max(
        (whole(p.grad) - own[n].grad).norm().item() / own[n].grad.norm().clamp_min(1e-9).item()
        for n, p in tp.named_parameters()
        if p.requires_grad
    )
    split = sum(any(place.is_shard() for place in getattr(p, "placements", ())) for p in tp.parameters())
    return f"loss {losses[0]:.6f} and {losses[1]:.6f}, worst gradient off by {worst:.1e}; {split} of {len(own)} Parameters split"


def clip(directory: Path, **given: Any) -> str:
    plain, tp = make(directory)
    step(plain)
    step(tp)
    norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, **given) for model in (plain, tp)]
    return f"norms {norms[0]:.6f} and {whole(norms[1]):.6f}"


def adamw(directory: Path, fused: bool) -> str:
    losses = []
    for model in make(directory):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, fused=fused)
        for _ in range(3):
            last = step(model)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(last)
    return f"third loss {losses[0]:.6f} and {losses[1]:.6f}"


def save(directory: Path, **given: Any) -> str:
    plain, tp = make(directory, llama(**given))
    tp.save_pretrained(directory / "out")
    dist.barrier()
    again = AutoModelForCausalLM.from_pretrained(directory / "out", dtype=torch.float32).state_dict()
    differ = [name for name, value in plain.state_dict().items() if not torch.equal(again[name], value)]
    return "bitwise" if not differ else f"{len(differ)} tensors differ, {differ[0]} first"


def lora(directory: Path, target: Any = "all-linear") -> str:
    wish: dict[str, Any] = dict(r=4, target_modules=target, task_type="CAUSAL_LM", init_lora_weights=False)
    plain, tp = (peft.get_peft_model(model, peft.LoraConfig(**wish)) for model in make(directory))
    torch.manual_seed(3)
    given = {name: torch.randn(p.shape) * 0.1 for name, p in plain.named_parameters() if p.requires_grad}
    for model in (plain, tp):
        for name, parameter in model.named_parameters():
            if name in given and isinstance(parameter, DTensor):
                parameter.data.copy_(distribute_tensor(given[name], parameter.device_mesh, parameter.placements))
            elif name in given:
                parameter.data.copy_(given[name])
    return gradients(plain, tp)


def generate(directory: Path) -> str:
    plain, tp = (model.eval() for model in make(directory))
    wish: dict[str, Any] = dict(max_new_tokens=12, eos_token_id=None, attention_mask=torch.ones_like(IDS[:, :6]))
    greedy = [model.generate(IDS[:, :6], do_sample=False, **wish) for model in (plain, tp)]
    torch.manual_seed(dist.get_rank())
    drawn = tp.generate(IDS[:, :6], do_sample=True, **wish)
    every = [torch.empty_like(drawn) for _ in range(2)]
    dist.all_gather(every, drawn)
    return f"greedy tokens equal: {torch.equal(*greedy)}; sampling with a seed a rank, ranks agree: {torch.equal(*every)}"


def new_head(directory: Path) -> str:
    make(directory)
    wish: dict[str, Any] = dict(dtype=torch.float32, num_labels=4, tp_plan="auto")
    torch.manual_seed(dist.get_rank())
    model = AutoModelForSequenceClassification.from_pretrained(str(directory / "model"), **wish)
    own = whole(model.score.weight.detach())
    every = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(every, own)
    return f"seeds differ by rank; the new head is alike on both: {torch.equal(*every)}"


def state(directory: Path) -> str:
    """Two steps sharded; or one, its state saved, loaded into the unsharded model, and the second there."""
    plain, tp = make(directory)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3) for model in (plain, tp)]
    step(tp)
    optimizers[1].step()
    weights, moments = get_state_dict(tp, optimizers[1])
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=directory / "dcp")
    weights, moments = get_state_dict(plain, optimizers[0])
    dcp.load({"model": weights, "optim": moments}, checkpoint_id=directory / "dcp")
    set_state_dict(plain, optimizers[0], model_state_dict=weights, optim_state_dict=moments)
    losses = []
    for model, optimizer in zip((plain, tp), optimizers, strict=True):
        optimizer.zero_grad()
        step(model)
        optimizer.step()
        losses.append(step(model))
    return f"loss after two steps, the second unsharded: {losses[0]:.6f}; sharded: {losses[1]:.6f}"


def train(directory: Path) -> str:
    _, tp = make(directory)
    rows: Any = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in IDS] * 4
    wish: dict[str, Any] = dict(
        max_steps=3, use_cpu=True, save_steps=2, logging_steps=1, report_to=[], per_device_train_batch_size=2
    )
    trainer = transformers.Trainer(tp, transformers.TrainingArguments(str(directory / "run"), **wish), train_dataset=rows)
    trainer.train()
    return f"grad norms {[round(log['grad_norm'], 4) for log in trainer.state.log_history if 'grad_norm' in log]}"


FEATURES: dict[str, Callable[[Path], str]] = {
    "llama": lambda d: gradients(*make(d)),
    "tied-head": lambda d: gradients(*make(d, llama(tie_word_embeddings=True))),
    "gpt2": lambda d: gradients(*make(d, transformers.GPT2Config(vocab_size=320, n_embd=64, n_layer=2, n_head=4))),
    "bert": lambda d: gradients(*make(d, transformers.BertConfig(**SMALL, **NO_DROPOUT), AutoModelForMaskedLM)),
    "three-heads": lambda d: gradients(*make(d, llama(num_attention_heads=3, num_key_value_heads=3, hidden_size=48))),
    "clip": clip,
    "clip-foreach-off": lambda d: clip(d, foreach=False),
    "adamw": lambda d: adamw(d, False),
    "adamw-fused": lambda d: adamw(d, True),
    "save": save,
    "save-tied": lambda d: save(d, tie_word_embeddings=True),
    "lora": lora,
    "lora-q-v": lambda d: lora(d, ["q_proj", "v_proj"]),
    "lora-mlp": lambda d: lora(d, ["up_proj", "down_proj"]),
    "generate": generate,
    "new-head": new_head,
    "state": state,
    "trainer": train,
}


def run_rank(feature: str, rank: int, port: int, directory: Path) -> None:
    """One rank of one feature, what it says in a file."""
    log = os.open(directory / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        said = FEATURES[feature](directory)
    except Exception as error:
        said = f"raises {type(error).__name__}: {str(error).splitlines()[0][:240]}"
    (directory / f"rank{rank}.txt").write_text(said)
    os._exit(0)


def run(feature: str) -> str:
    """What rank 0 says of a feature, or rank 1 where that one fell."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        ranks = [mp.get_context("fork").Process(target=run_rank, args=(feature, r, port, Path(name))) for r in range(2)]
        for process in ranks:
            process.start()
        end = time.monotonic() + LIMIT_S
        for process in ranks:
            process.join(max(0.0, end - time.monotonic()))
            if (Path(name) / "rank0.txt").exists():
                end = min(end, time.monotonic() + 5)
            process.kill()
        said = [Path(name) / f"rank{r}.txt" for r in range(2)]
        return next((path.read_text() for path in said if path.exists()), f"no answer in {LIMIT_S} s")


if __name__ == "__main__":
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}", flush=True)
    for feature in sys.argv[1:] or FEATURES:
        print(f"{feature}: {run(feature)}", flush=True)
