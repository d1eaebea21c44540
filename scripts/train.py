"""Train a causal language model over several ranks with accelerate: load, train, clip, gather, save. Copy it and change it.

torchrun --nproc-per-node 2 scripts/train.py --model DIR_OR_HUB_ID --data FILE.txt --out DIR
"""

import argparse

import torch
from accelerate import Accelerator
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
parser.add_argument("--mixed-precision", default="no", choices=["no", "bf16"])


def main() -> None:
    args = parser.parse_args()
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), gradient_accumulation_steps=args.grad_accum, mixed_precision=args.mixed_precision
    )
    torch.manual_seed(0)  # every rank shuffles alike: the ranks of one model must see the same batches
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    blocks = read_blocks(args.data, tokenizer, args.seq_length)
    data = DataLoader(blocks, batch_size=args.batch_size, shuffle=True)  # type: ignore[arg-type]

    # Each rank reads only its slices. With a model that exists already: autotp.parallelize(model).
    model = autotp.from_pretrained(args.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = get_cosine_schedule_with_warmup(optimizer, args.steps // 10, args.steps)
    # The data stays as it is, since accelerate would deal the batches out; evaluation_mode gives the model mixed precision
    # and leaves out DDP, which has no place over ranks that hold different shards.
    model = accelerator.prepare_model(model, evaluation_mode=True)
    optimizer = accelerator.prepare(optimizer)

    model.train()
    step = 0
    while step < args.steps:
        for ids in data:
            with accelerator.accumulate(model):
                ids = ids.to(accelerator.device)
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
    linear = next(module for module in model.modules() if isinstance(module, autotp.LinearLayer))
    with autotp.GatherReplacedLayerParams(list(linear.parameters(recurse=False)), linear, enabled=True):
        accelerator.print(f"one whole weight: {list(linear.weight.shape)}")

    autotp.save_pretrained(model, args.out)  # plain transformers loads it
    if accelerator.is_main_process:
        tokenizer.save_pretrained(args.out)
    accelerator.end_training()


if __name__ == "__main__":
    main()
