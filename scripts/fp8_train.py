"""Trains one model twice on the same text, seed and order, in bf16 and in FP8, and compares the losses.

torchrun --nproc-per-node 1 scripts/fp8_train.py
torchrun --nproc-per-node 2 scripts/fp8_train.py --precision fp8 fp8-rowwise
torchrun --nproc-per-node 1 scripts/fp8_train.py --precision bf16 fp8     (bf16 twice: how far runs differ by themselves)
torchrun --nproc-per-node 1 scripts/fp8_train.py --tiny        (a small model, 20 steps, to see that it runs)

The model is a random Llama of SmolLM2-135M's shape (30 layers, 576 wide) over bytes; the text is what `help()` knows of Python
(`pydoc_data.topics`), of which the last tenth is held out. bf16 weights, AdamW on float32 masters. Exits with 1 if a final
loss is more than 1% off bf16's, or if anything was not finite.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from bench import MasterAdamW
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import autotp
from autotp.groups import init_process_group_from_env, local_device

SMOL: dict[str, Any] = dict(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3
)
TINY: dict[str, Any] = dict(
    hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
)
LAST = 25  # steps whose mean is the final loss
MOST = 0.01  # of a difference to bf16


def draw_batches(text: Tensor, steps: int, rows: int, tokens: int) -> Tensor:
    """`[steps, rows, tokens]` of random places, the same in every run."""
    starts = torch.randint(0, len(text) - tokens, (steps, rows), generator=torch.Generator().manual_seed(1))
    return torch.stack([torch.stack([text[s : s + tokens] for s in row]) for row in starts.tolist()])


def run(precision: str, args: argparse.Namespace, device: torch.device) -> tuple[float, float, float, list[float]]:
    """Final loss in training and held out, milliseconds a step, and all losses."""
    data = torch.tensor(list("\n\n".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.long)
    cut = len(data) * 9 // 10
    batches = draw_batches(data[:cut], args.steps, args.rows, args.tokens)
    held = draw_batches(data[cut:], 4, args.rows, args.tokens).to(device)
    torch.manual_seed(args.seed)
    config = LlamaConfig(**(TINY if args.tiny else SMOL), vocab_size=256, tie_word_embeddings=True, dtype=torch.bfloat16)
    model: Any = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).train()
    autotp.parallelize(model, precision=None if precision == "bf16" else precision)
    if dist.get_rank() == 0 and model.autotp_plan.products:
        print(str(model.autotp_plan).split("linear  ", 1)[-1].split("left whole")[0], flush=True)
    optimizer, losses = MasterAdamW(model), []
    start = time.perf_counter()
    for step, ids in enumerate(batches.to(device)):
        for group in optimizer.optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 50) * max(0.1, 1 - step / args.steps)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    found = torch.stack(losses).float().cpu().tolist()
    ms = 1e3 * (time.perf_counter() - start) / args.steps
    with torch.no_grad():
        model.eval()
        out = torch.stack([model(input_ids=ids, labels=ids, use_cache=False).loss.float() for ids in held]).mean().item()
    if bad := autotp.fp8_report(model):
        raise SystemExit(f"{precision}: scales that were not finite: {bad}")
    last = found[-LAST:]
    return sum(last) / len(last), out, ms, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", default=["fp8"], help="beside bf16")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    usual = (20, 2, 64) if args.tiny else (500, 8, 512)
    args.steps, args.rows, args.tokens = (a or b for a, b in zip((args.steps, args.rows, args.tokens), usual, strict=True))
    init_process_group_from_env()
    device, base, worst = local_device(), None, 0.0
    for precision in ("bf16", *args.precision):
        final, out, ms, losses = run(precision, args, device)
        base = base or final
        worst = max(worst, abs(final / base - 1))
        if dist.get_rank() == 0:
            marks = [f"{losses[at]:.4f}" for at in range(0, args.steps, max(1, args.steps // 5))]
            print(
                f"{precision:16s} final loss {final:.4f} ({final / base - 1:+.2%}), held out {out:.4f}, {ms:.1f} ms a step; "
                f"on the way {' '.join(marks)}",
                flush=True,
            )
    dist.destroy_process_group()
    return int(worst > MOST)


if __name__ == "__main__":
    sys.exit(main())
