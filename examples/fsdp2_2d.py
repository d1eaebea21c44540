"""Train a causal model over a grid of GPUs: tensor-parallel rows, FSDP2 over the columns; saved states go on over other grids.

    torchrun --nproc-per-node 4 examples/fsdp2_2d.py --tp 2 --data texts.jsonl

Started again, it goes on from the newest state in --states.
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

import autotp


def read_samples(path, tokenizer, length):
    """One tensor of token ids a text, cut to `length`."""
    with open(path, encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    return [tokenizer(text, truncation=True, max_length=length, return_tensors="pt")["input_ids"][0] for text in texts]


def collate(samples):
    """Samples padded on the right; padding has no label."""
    ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=0)
    labels = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--data", default="texts.jsonl", help='one {"text": ...} a line')
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--out", default="fsdp2-2d/final")
    parser.add_argument("--states", type=Path, default=Path("fsdp2-2d/states"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-5)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    data_ranks = int(os.environ["WORLD_SIZE"]) // args.tp
    mesh = dist.init_device_mesh(device, (data_ranks, args.tp), mesh_dim_names=("dp", "tp"))

    # Weights and optimizer states in float32, products in bf16.
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = autotp.from_pretrained(args.model, mesh["tp"], dtype=torch.float32).train()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    samples = read_samples(args.data, tokenizer, args.length)
    sampler = autotp.DataSampler(samples, mesh["dp"], seed=0, drop_last=True)
    state = autotp.TrainingState(model, optimizer, dp=mesh["dp"])
    step, epoch, taken = 0, 0, 0  # `taken` samples of the epoch, over all data ranks
    if any(args.states.glob("checkpoint-*")):
        found = state.load(args.states)
        step, epoch, taken = found.step, found.extra["epoch"], found.extra["taken"]

    while step < args.steps:
        sampler.set_epoch(epoch, start=taken)
        for batch in DataLoader(samples, args.batch_size, sampler=sampler, collate_fn=collate, drop_last=True):
            loss = model(**{name: value.to(model.device) for name, value in batch.items()}).loss
            loss.backward()
            autotp.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step, taken = step + 1, taken + args.batch_size * data_ranks
            if dist.get_rank() == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
            if step % args.save_every == 0:
                state.save(args.states, step, extra={"epoch": epoch, "taken": taken}, keep_last=2)
            if step == args.steps:
                break
        else:
            epoch, taken = epoch + 1, 0

    autotp.save_pretrained(model, args.out)
    if dist.get_rank() == 0:
        tokenizer.save_pretrained(args.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
