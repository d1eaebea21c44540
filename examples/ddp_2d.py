"""Train a causal model over a grid of GPUs: tensor-parallel rows, data-parallel columns with DistributedDataParallel.

    torchrun --nproc-per-node 4 examples/ddp_2d.py --tp 2 --data texts.jsonl

Without GPUs the ranks are processes on the CPU.
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
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
    parser.add_argument("--out", default="ddp-2d/final")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-5)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = int(os.environ["WORLD_SIZE"])
    mesh = dist.init_device_mesh(device, (ranks // args.tp, args.tp), mesh_dim_names=("dp", "tp"))

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = autotp.from_pretrained(args.model, mesh["tp"]).train()
    ddp = DistributedDataParallel(model, process_group=mesh["dp"].get_group(), gradient_as_bucket_view=True)

    samples = read_samples(args.data, tokenizer, args.length)
    sampler = autotp.DataSampler(samples, mesh["dp"], seed=0, drop_last=True)
    loader = DataLoader(samples, args.batch_size, sampler=sampler, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, batch in enumerate(loader):
            loss = ddp(**{name: value.to(model.device) for name, value in batch.items()}).loss
            loss.backward()
            norm = autotp.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f} norm {norm.item():.3f}", flush=True)

    autotp.save_pretrained(model, args.out, is_main_process=mesh["dp"].get_local_rank() == 0)
    if dist.get_rank() == 0:
        tokenizer.save_pretrained(args.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
