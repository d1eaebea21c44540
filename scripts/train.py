"""Train a causal language model over several ranks: what `autotp train` does, in a loop of your own. Copy it and change it.

torchrun --nproc-per-node 2 scripts/train.py --model DIR_OR_HUB_ID --data FILE [FILE ...] --out DIR

FILE is text, .jsonl (plain or chats), .parquet or .arrow. For two models that share the data give --dp 2 and start twice the
ranks.
"""

import argparse

import torch
from accelerate import Accelerator
from transformers import AutoTokenizer, get_cosine_schedule_with_warmup

import autotp
from autotp.places import Places
from autotp.train.batches import TrainBatches
from autotp.train.encode import Encoder
from autotp.train.loop import Stepper
from autotp.train.optimizer import MasterOptimizer
from autotp.train.sequences import SequenceStream, ShuffledSequences

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True, nargs="+")
parser.add_argument("--out", required=True)
parser.add_argument("--tp", type=int, default=2)
parser.add_argument("--dp", type=int, default=1)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--lr", type=float, default=1e-5)
parser.add_argument("--batch-size", type=int, default=2)
parser.add_argument("--seq-length", type=int, default=128)
parser.add_argument("--grad-accum", type=int, default=1)
parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
parser.add_argument("--mixed-precision", default="no", choices=["no", "bf16"])


def main() -> None:
    args = parser.parse_args()
    places = Places.find(args.tp, args.dp)  # this rank's TP group, and the group its data axis is
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=args.mixed_precision)
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    # Every rank reads the same stream in the same order; the ranks of one model take the same micro-batches of it.
    stream = SequenceStream(tuple(args.data), Encoder(tokenizer), args.seq_length, packing=True, seed=0)
    rank, ranks = places.dp.tp_rank, places.dp.tp_size
    sequences = ShuffledSequences(stream, seed=0)
    batches = TrainBatches(sequences, args.batch_size, args.grad_accum, rank, ranks, pad=tokenizer.eos_token_id, padded=False)

    # Each rank reads only its slices. With a model that exists already: autotp.parallelize(model, places.tp).
    model = autotp.from_pretrained(args.model, places.tp, dtype=getattr(torch, args.dtype))
    model.train()
    torch.manual_seed(places.dp.tp_rank)  # dropout: the ranks of one model draw alike

    # AdamW on float32 masters; each rank updates its shards. The loss is the mean over all label tokens of a step.
    optimizer = MasterOptimizer(model, args.lr, weight_decay=0.1)
    schedule = get_cosine_schedule_with_warmup(optimizer.adamw, args.steps // 10, args.steps)
    stepper = Stepper(model, optimizer, places, max_norm=1.0, autocast=accelerator.autocast)
    for number in range(1, args.steps + 1):
        step = stepper.take(batches.next_step(), number)
        schedule.step()
        if places.is_main:
            print(f"step {number}: loss {step.loss:.4f}, gradient norm {step.grad_norm:.3f}", flush=True)

    # Whole weights, for a while: every rank enters; what rank 0 changes inside is split again at the end.
    linear = next(module for module in model.modules() if isinstance(module, autotp.LinearLayer))
    with autotp.GatherReplacedLayerParams(list(linear.parameters(recurse=False)), linear, enabled=True):
        if places.is_main:
            print(f"one whole weight: {list(linear.weight.shape)}", flush=True)

    autotp.save_pretrained(model, args.out, is_main_process=rank == 0)  # plain transformers loads it
    if places.is_main:
        tokenizer.save_pretrained(args.out)
    accelerator.end_training()


if __name__ == "__main__":
    main()
