"""A run on accelerate that saves a state after every second step, and goes on from one in the midst of an epoch.

accelerate launch --multi_gpu --num_processes 2 examples/accelerate_checkpoint.py [resumed/step-4]
"""

import sys

import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import DataLoaderConfiguration, set_seed
from transformers import AutoTokenizer, get_scheduler

import autotp

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
TEXTS = ["the quick brown fox jumps over a lazy dog", "old birds sing of rain", "one cat sleeps in warm sun while birds sing"]

set_seed(0)
accelerator = Accelerator(
    cpu=not torch.cuda.is_available(),
    parallelism_config=ParallelismConfig(tp_size=2),  # all ranks of a model get the same batches
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),  # an epoch's order is that of its number
)
tokenizer = AutoTokenizer.from_pretrained(NAME)
model = autotp.from_pretrained(NAME, dtype=torch.float32)  # AutoModelForCausalLM.from_pretrained(NAME)


def collate(texts):
    batch = tokenizer(texts, return_tensors="pt")
    return {**batch, "labels": batch["input_ids"]}


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(TEXTS, shuffle=True, collate_fn=collate)
schedule = get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=2 * len(TEXTS))
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

step = 0
if len(sys.argv) > 1:
    accelerator.load_state(sys.argv[1])
    step = int(sys.argv[1].rsplit("-", 1)[1])

model.train()
for epoch in range(step // len(loader), 2):
    done = step % len(loader)
    rest = accelerator.skip_first_batches(loader, done) if done else loader
    rest.set_epoch(epoch)
    for batch in rest:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        accelerator.print(f"step {step}: loss {loss.item():.6f}")
        if step % 2 == 0:
            accelerator.save_state(f"resumed/step-{step}")

accelerator.unwrap_model(model).save_pretrained("resumed/final", is_main_process=accelerator.is_main_process)
