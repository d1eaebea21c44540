"""Times autotp beside transformers' own tensor parallelism and one GPU.

torchrun --nproc-per-node 2 scripts/bench.py --out FILE.json
torchrun --nproc-per-node 2 scripts/bench.py --out FILE.json --work train --skip "one GPU"

The model is a random Llama of Llama-3-8B's shape with 8 layers, bf16, loaded by all three from one checkpoint. Medians of
CUDA-event timings; the peak of allocated memory is of the timed steps, weights included. Rank 0's numbers. `--tiny` is a small
shape, on the CPU where there is no GPU, to see that it runs.

| workload | a step |
|---|---|
| body | forward and backward of the decoder body, 2 x 4096 tokens |
| loss | forward with labels and backward of the whole model, 2 x 4096 tokens |
| prefill | a prompt of 4096 tokens, batch 1: forward and the last token's logits |
| decode | one more token in eager mode after 1024, batch 1 |
| train | the full step: loss and backward as above, and AdamW on float32 master weights; no clipping |
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import autotp

SHAPE: dict[str, Any] = dict(
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256
)
TINY: dict[str, Any] = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, vocab_size=512)
ROWS, TOKENS, CONTEXT = 2, 4096, 1024
WORKS = ("body", "loss", "prefill", "decode", "train")  # in this order: the last one leaves its optimizer states
LOADERS = {
    "one GPU": lambda path, device: AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device),
    "transformers TP": lambda path, device: AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, tp_plan="auto"),
    "autotp": lambda path, device: autotp.from_pretrained(path),
}


class MasterAdamW:
    """AdamW on float32 copies of a model's bf16 parameters, each rank on its own shards; the same for every implementation."""

    def __init__(self, model) -> None:
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.masters = [local(param.detach()).float().clone() for param in self.params]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-5, fused=self.masters[0].is_cuda)

    @torch.no_grad()
    def step(self) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            grad = param.grad
            if isinstance(grad, DTensor):  # it may be whole, or partial sums, where the parameter is split
                grad = grad.redistribute(param.device_mesh, param.placements)
            master.grad = None if grad is None else local(grad).float()
            param.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch._foreach_copy_([local(param.detach()) for param in self.params], self.masters)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def write_checkpoint(shape: dict[str, Any], layers: int, device: torch.device) -> str:
    """A random checkpoint, written by rank 0; every rank gets its path."""
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    if path[0]:
        save_random(path[0], shape, layers, device)
    dist.broadcast_object_list(path, 0)
    return str(path[0])


def save_random(path: str, shape: dict[str, Any], layers: int, device: torch.device) -> None:
    """Write a random Llama in bf16, drawn on `device`."""
    config = LlamaConfig(**shape, num_hidden_layers=layers, max_position_embeddings=8192, dtype=torch.bfloat16)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(path)


def make_steps(model, ids: torch.Tensor) -> dict:
    """One callable for each workload."""

    def body():
        out = model.model(ids, use_cache=False).last_hidden_state
        out.backward(torch.full_like(out, 1e-4))
        model.zero_grad(set_to_none=True)

    def loss():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def prefill():
        model(input_ids=ids[:1], use_cache=False, logits_to_keep=1)

    cache = []

    @torch.no_grad()
    def decode():
        if not cache:
            cache.append(model(input_ids=ids[:1, :CONTEXT], use_cache=True, logits_to_keep=1).past_key_values)
        model(input_ids=ids[:1, :1], past_key_values=cache[0], use_cache=True)

    optimizers, losses = [], []

    def train():
        if not optimizers:
            optimizers.append(MasterAdamW(model))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        losses.append(loss.detach())
        loss.backward()
        optimizers[0].step()

    train.losses = losses
    return {"body": body, "loss": loss, "prefill": prefill, "decode": decode, "train": train}


def time_step(step, warm: int, steps: int, device: torch.device) -> dict:
    """Milliseconds a step, by CUDA events or the clock, and the peak of allocated memory, which only a GPU tells."""
    for _ in range(warm):
        step()
    if device.type == "cpu":
        times = [time_on_cpu(step) for _ in range(steps)]
    else:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        times = [time_on_gpu(step) for _ in range(steps)]
    return {
        "ms": round(statistics.median(times), 2),
        "min": round(min(times), 2),
        "max": round(max(times), 2),
        "peak_gib": None if device.type == "cpu" else round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


def time_on_gpu(step) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def time_on_cpu(step) -> float:
    start = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - start)


def measure(name: str, path: str, ids: torch.Tensor, works: list[str], steps: int) -> dict:
    """Some workloads of one implementation; one that does not fit into memory says so."""
    model = LOADERS[name](path, ids.device)
    found = {}
    every = make_steps(model, ids)
    for work in works:
        model.train(work not in ("prefill", "decode"))
        try:
            found[work] = time_step(every[work], 4, 2 * steps if work in ("prefill", "decode") else steps, ids.device)
        except torch.OutOfMemoryError as error:
            if name != "one GPU":  # the other ranks wait in a collective
                raise
            found[work] = {"out_of_memory": str(error).split(" GPU ")[0]}
            model.zero_grad(set_to_none=True)
        if work == "train" and every[work].losses:
            found[work]["losses"] = [round(float(every[work].losses[at]), 4) for at in (0, -1)]
        if dist.get_rank() == 0:
            print(f"BENCH {name:16s} {work:7s} {found[work]}", flush=True)
    return found


def start() -> torch.device:
    """Join the ranks; this rank's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="the JSON file to write")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--reverse", action="store_true", help="autotp first, to see whether the order matters")
    parser.add_argument("--work", nargs="+", choices=WORKS, default=list(WORKS), help="what to time")
    parser.add_argument("--skip", nargs="+", choices=list(LOADERS), default=[], help="implementations to leave out")
    parser.add_argument("--tiny", action="store_true", help="a small shape")
    args = parser.parse_args()
    device = start()
    shape, tokens = (TINY, 2 * CONTEXT) if args.tiny else (SHAPE, TOKENS)
    rank, path = dist.get_rank(), write_checkpoint(shape, args.layers, device)
    ids = torch.randint(0, shape["vocab_size"], (ROWS, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    commit = subprocess.run(["git", "rev-parse", "--verify", "-q", "HEAD"], capture_output=True, text=True).stdout.strip()
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "hardware": f"{dist.get_world_size()} x {torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU process'}",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "autotp": autotp.__version__},
        "commit": commit or "unknown",
        "command": f"torchrun --nproc-per-node {dist.get_world_size()} {' '.join(sys.argv)}",
        "shape": {**shape, "layers": args.layers, "rows": ROWS, "tokens": tokens},
        "results": {},
    }
    if rank == 0:
        print(f"BENCH {json.dumps(report)}", flush=True)
    for name in reversed(LOADERS) if args.reverse else LOADERS:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if name not in args.skip and (name != "one GPU" or rank == 0):
            report["results"][name] = measure(name, path, ids, args.work, args.steps)
        dist.barrier()
    if rank == 0:
        with open(args.out, "w") as file:
            json.dump(report, file, indent=1)
        shutil.rmtree(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
