"""Train a causal language model over several ranks with accelerate: load, train, clip, gather, save. Copy it and change it.

torchrun --nproc-per-node 2 scripts/train.py --model DIR_OR_HUB_ID --data FILE.txt --out DIR
"""

import argparse
import os

import torch
from accelerate import Accelerator, ParallelismConfig
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, get_cosine_schedule_with_warmup

import autotp
from autotp.train.data import read_blocks

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True, help="UTF-8 text")
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--lr", type=float, default=1e-5)
parser.add_argument("--batch-size", type=int, default=2)
parser.add_argument("--seq-length", type=int, default=128)
parser.add_argument("--grad-accum", type=int, default=1)


def main() -> None:
    args = parser.parse_args()
    # tp_size tells accelerate that these ranks share one model: they get the same batches, and nothing is wrapped in DDP.
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=args.grad_accum,
        parallelism_config=ParallelismConfig(tp_size=int(os.environ["WORLD_SIZE"])),
    )
    torch.manual_seed(0)  # every rank shuffles alike
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    blocks = read_blocks(args.data, tokenizer, args.seq_length)
    data = DataLoader(blocks, batch_size=args.batch_size, shuffle=True)  # type: ignore[arg-type]

    # Each rank reads only its slices. With a model that exists already: autotp.parallelize(model).
    model = autotp.from_pretrained(args.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = get_cosine_schedule_with_warmup(optimizer, args.steps // 10, args.steps)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    model.train()
    step = 0
    while step < args.steps:
        for ids in data:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)  # the norm of the whole gradient
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            schedule.step()
            step += 1
            accelerator.print(f"step {step}: loss {loss.item():.4f}")
            if step == args.steps:
                break

    # Whole weights, for a while: every rank enters; what rank 0 changes inside is split again at the end.
    linear = model.get_submodule(next(name for name, module in model.named_modules() if isinstance(module, autotp.LinearLayer)))
    with autotp.GatherReplacedLayerParams(list(linear.parameters(recurse=False)), linear, enabled=True):
        accelerator.print(f"one whole weight: {list(linear.weight.shape)}")

    autotp.save_pretrained(model, args.out)  # plain transformers loads it
    if accelerator.is_main_process:
        tokenizer.save_pretrained(args.out)
    accelerator.end_training()


if __name__ == "__main__":
    main()
