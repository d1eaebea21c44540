"""Times autotp beside transformers' own tensor parallelism and one GPU.

torchrun --nproc-per-node 2 scripts/bench.py --out FILE.json

The model is a random Llama of Llama-3-8B's shape with 8 layers, bf16, loaded by all three from one checkpoint. Medians of
CUDA-event timings; the peak of allocated memory is of the timed steps, weights included. Rank 0's numbers.

| workload | a step |
|---|---|
| body | forward and backward of the decoder body, 2 x 4096 tokens |
| loss | forward with labels and backward of the whole model, 2 x 4096 tokens |
| decode | one more token in eager mode after 1024, batch 1 |
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
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import autotp

SHAPE: dict[str, Any] = dict(
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256
)
LOADERS = {
    "one GPU": lambda path, device: AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device),
    "transformers TP": lambda path, device: AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, tp_plan="auto"),
    "autotp": lambda path, device: autotp.from_pretrained(path),
}


def write_checkpoint(layers: int, device: torch.device) -> str:
    """A random checkpoint, written by rank 0; every rank gets its path."""
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    if path[0]:
        config = LlamaConfig(**SHAPE, num_hidden_layers=layers, max_position_embeddings=8192, dtype=torch.bfloat16)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        with device:
            model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
        model.save_pretrained(path[0])
    dist.broadcast_object_list(path, 0)
    return str(path[0])


def make_steps(model, ids: torch.Tensor) -> dict:
    """One callable for each workload."""

    def body():
        out = model.model(ids, use_cache=False).last_hidden_state
        out.backward(torch.full_like(out, 1e-4))
        model.zero_grad(set_to_none=True)

    def loss():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    cache = []

    @torch.no_grad()
    def decode():
        if not cache:
            cache.append(model(input_ids=ids[:1, :1024], use_cache=True, logits_to_keep=1).past_key_values)
        model(input_ids=ids[:1, :1], past_key_values=cache[0], use_cache=True)

    return {"body": body, "loss": loss, "decode": decode}


def time_step(step, warm: int, steps: int) -> dict:
    """Milliseconds a step by CUDA events, and the peak of allocated memory."""
    for _ in range(warm):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return {
        "ms": round(statistics.median(times), 2),
        "min": round(min(times), 2),
        "max": round(max(times), 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


def measure(name: str, path: str, ids: torch.Tensor, steps: int) -> dict:
    """Every workload of one implementation."""
    model = LOADERS[name](path, ids.device)
    found = {}
    for work, step in make_steps(model, ids).items():
        model.train(work != "decode")
        found[work] = time_step(step, 4, 2 * steps if work == "decode" else steps)
        if dist.get_rank() == 0:
            print(f"BENCH {name:16s} {work:7s} {found[work]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="the JSON file to write")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--reverse", action="store_true", help="autotp first, to see whether the order matters")
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    rank, path = dist.get_rank(), write_checkpoint(args.layers, device)
    ids = torch.randint(0, SHAPE["vocab_size"], (2, 4096), generator=torch.Generator().manual_seed(0)).to(device)
    commit = subprocess.run(["git", "rev-parse", "--verify", "-q", "HEAD"], capture_output=True, text=True).stdout.strip()
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "hardware": f"{dist.get_world_size()} x {torch.cuda.get_device_name()}",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "autotp": autotp.__version__},
        "commit": commit or "unknown",
        "command": f"torchrun --nproc-per-node {dist.get_world_size()} {' '.join(sys.argv)}",
        "results": {},
    }
    if rank == 0:
        print(f"BENCH {json.dumps(report)}", flush=True)
    for name in reversed(LOADERS) if args.reverse else LOADERS:
        gc.collect()
        torch.cuda.empty_cache()
        if name != "one GPU" or rank == 0:
            report["results"][name] = measure(name, path, ids, args.steps)
        dist.barrier()
    if rank == 0:
        with open(args.out, "w") as file:
            json.dump(report, file, indent=1)
        shutil.rmtree(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
