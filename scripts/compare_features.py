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
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification, LlamaConfig
from transformers.distributed import DistributedConfig

LIMIT_S = 240
IDS = torch.arange(24).reshape(2, 12) * 7 % 320
SMALL: dict[str, Any] = dict(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
SMALL |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
NO_DROPOUT: dict[str, Any] = dict(hidden_dropout_prob=0, attention_probs_dropout_prob=0)


def llama(**given: Any) -> LlamaConfig:
    """A tiny Llama's config, with weights large enough for attention to matter."""
    return LlamaConfig(**{**SMALL, "num_key_value_heads": 2, "initializer_range": 0.2, **given})


def make_plain(directory: Path, config: Any = None, kind: Any = AutoModelForCausalLM) -> Any:
    """A random model in training mode, the same on every rank; its checkpoint lies in `directory / "model"`."""
    path = str(directory / "model")
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        kind.from_config(config or llama()).save_pretrained(path)
    dist.barrier()
    return kind.from_pretrained(path, dtype=torch.float32).train()


def make(directory: Path, config: Any = None, kind: Any = AutoModelForCausalLM) -> tuple[Any, Any]:
    """A random model, unsharded and through transformers' TP, both in training mode."""
    plain = make_plain(directory, config, kind)
    return plain, kind.from_pretrained(str(directory / "model"), dtype=torch.float32, tp_plan="auto").train()


def whole(tensor: Any) -> Any:
    """The whole tensor of a DTensor; others as they are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def step(model: Any, ids: Tensor = IDS) -> Any:
    """Loss after a backward."""
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return whole(loss.detach())


def tell(plain: Any, losses: Any, grads: dict[str, Tensor], split: int) -> str:
    """Losses, the worst of the whole gradients `grads` beside those of `plain`, and how many Parameters are split."""
    own = {name: p.grad for name, p in plain.named_parameters() if name in grads}
    floor = 1e-3 * max(grad.norm().item() for grad in own.values())  # a key's bias has a gradient of rounding errors alone
    worst = max((grad - own[name]).norm().item() / max(own[name].norm().item(), floor) for name, grad in grads.items())
    return f"loss {losses[0]:.6f} and {losses[1]:.6f}, worst gradient off by {worst:.1e}; {split} Parameters split"


def gradients(plain: Any, tp: Any, ids: Tensor = IDS) -> str:
    """Of a step on `ids` through transformers' TP."""
    losses = step(plain), step(tp, ids)
    split = sum(any(place.is_shard() for place in getattr(p, "placements", ())) for p in tp.parameters())
    return tell(plain, losses, {n: whole(p.grad) for n, p in tp.named_parameters() if p.requires_grad}, split)


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


def add_lora(model: Any, target: Any) -> Any:
    """`model` with LoRA of peft on `target`."""
    wish: dict[str, Any] = dict(r=4, target_modules=target, task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(model, peft.LoraConfig(**wish))


def draw_adapters(model: Any) -> dict[str, Tensor]:
    """Small values for the Parameters of `model` that train."""
    torch.manual_seed(3)
    return {name: torch.randn(p.shape) * 0.1 for name, p in model.named_parameters() if p.requires_grad}


def lora(directory: Path, target: Any = "all-linear") -> str:
    plain, tp = (add_lora(model, target) for model in make(directory))
    given = draw_adapters(plain)
    for model in (plain, tp):
        for name, parameter in model.named_parameters():
            if name in given and isinstance(parameter, DTensor):
                parameter.data.copy_(distribute_tensor(given[name], parameter.device_mesh, parameter.placements))
            elif name in given:
                parameter.data.copy_(given[name])
    return gradients(plain, tp)


def generate(plain: Any, tp: Any) -> str:
    for model in (plain, tp):
        model.eval()
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


def two_axes(directory: Path, **axes: Any) -> str:
    """Two copies of two ranks each, one row of the batch to each, through transformers' own second axis."""
    plain = make_plain(directory)
    wish: dict[str, Any] = dict(dtype=torch.float32, distributed_config=DistributedConfig(tp_size=2, **axes))
    tp = AutoModelForCausalLM.from_pretrained(str(directory / "model"), **wish).train()
    return gradients(plain, tp, IDS.chunk(2)[dist.get_rank() // 2])


def tokens(directory: Path) -> str:
    """What a norm between regions reads, where transformers is asked to deal tokens."""
    make_plain(directory)
    axes = DistributedConfig(tp_size=2, enable_sequence_parallel=True)
    tp = AutoModelForCausalLM.from_pretrained(str(directory / "model"), dtype=torch.float32, distributed_config=axes)
    seen: list[Any] = []
    tp.model.layers[1].input_layernorm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    tp(input_ids=IDS)
    return f"a norm between regions reads {list(getattr(seen[0], '_local_tensor', seen[0]).shape)} of {[*IDS.shape, 64]}"


def train(tp: Any, directory: Path, **more: Any) -> str:
    rows: Any = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in IDS] * 4
    wish: dict[str, Any] = dict(
        max_steps=3, use_cpu=True, save_steps=2, logging_steps=1, report_to=[], per_device_train_batch_size=2
    )
    wish |= more
    trainer = transformers.Trainer(tp, transformers.TrainingArguments(str(directory / "run"), **wish), train_dataset=rows)
    trainer.train()
    logs = [{key: round(log[key], 4) for key in ("loss", "grad_norm") if key in log} for log in trainer.state.log_history]
    return f"logs {[log for log in logs if log]}"


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
    "generate": lambda d: generate(*make(d)),
    "new-head": new_head,
    "state": state,
    "trainer": lambda d: train(make(d)[1], d),
    "copies": lambda d: two_axes(d, dp_replicate_size=2),
    "fully-sharded": lambda d: two_axes(d, fsdp_size=2),
    "tokens": tokens,
}
FOUR_RANKS = ("copies", "fully-sharded", "zero-1")


def run_rank(work: Callable[[Path], str], rank: int, size: int, port: int, directory: Path) -> None:
    """One rank of one feature, what it says in a file."""
    log = os.open(directory / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        said = work(directory)
    except Exception as error:
        said = f"raises {type(error).__name__}: {' '.join(str(error).split())[:240]}"
    (directory / f"rank{rank}.txt").write_text(said)
    os._exit(0)


def run(work: Callable[[Path], str], size: int, folder: str) -> str:
    """What rank 0 says of a feature, or the first that answered where that one fell."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    jobs = [(work, rank, size, port, Path(folder)) for rank in range(size)]
    ranks = [mp.get_context("fork").Process(target=run_rank, args=job) for job in jobs]
    said = [Path(folder) / f"rank{r}.txt" for r in range(size)]
    for path in said:
        path.unlink(missing_ok=True)
    for process in ranks:
        process.start()
    end = time.monotonic() + LIMIT_S
    for process in ranks:
        process.join(max(0.0, end - time.monotonic()))
        if said[0].exists():
            end = min(end, time.monotonic() + 5)
        process.kill()
    return next((path.read_text() for path in said if path.exists()), f"no answer in {LIMIT_S} s")


Features = dict[str, Callable[[Path], str]]


def run_all(features: Features, afterwards: Features | None = None) -> None:
    """A line on each feature that was asked for, or on all; some have a second job, in the folder of the first."""
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}", flush=True)
    for feature in sys.argv[1:] or features:
        jobs = [each[feature] for each in (features, afterwards or {}) if feature in each]
        with tempfile.TemporaryDirectory() as folder:
            said = [run(job, 4 if feature in FOUR_RANKS else 2, folder) for job in jobs]
        print(f"{feature}: {'; '.join(said)}", flush=True)


if __name__ == "__main__":
    run_all(FEATURES)
