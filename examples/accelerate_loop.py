"""A training loop on accelerate, with accumulation, metrics and states that it goes on from.

accelerate launch --multi_gpu --num_processes 2 examples/accelerate_loop.py [bf16|fp16]
"""

import sys

import torch
from accelerate import Accelerator, ParallelismConfig
from transformers import AutoTokenizer, get_scheduler

import autotp

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
TEXTS = ["the quick brown fox jumps over a lazy dog", "old birds sing of rain", "one cat sleeps in warm sun while birds sing"]

accelerator = Accelerator(
    cpu=not torch.cuda.is_available(),
    mixed_precision=sys.argv[1] if len(sys.argv) > 1 else "no",
    gradient_accumulation_steps=2,
    parallelism_config=ParallelismConfig(tp_size=2),  # all ranks of a model get the same batches
)
tokenizer = AutoTokenizer.from_pretrained(NAME)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = autotp.from_pretrained(NAME, dtype=torch.float32)  # AutoModelForCausalLM.from_pretrained(NAME)


def collate(texts):
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    return {**batch, "labels": batch["input_ids"].where(batch["attention_mask"] == 1, -100)}


optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
train = torch.utils.data.DataLoader(TEXTS * 4, batch_size=2, shuffle=True, collate_fn=collate)
test = torch.utils.data.DataLoader(TEXTS, batch_size=2, collate_fn=collate)
schedule = get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=6)
model, optimizer, train, test, schedule = accelerator.prepare(model, optimizer, train, test, schedule)

for epoch in range(2):
    model.train()
    for batch in train:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()
    right = []
    for batch in test:
        with torch.no_grad():
            best = model(**batch).logits.argmax(-1)
        hits = ((best[:, :-1] == batch["labels"][:, 1:]) & (batch["labels"][:, 1:] >= 0)).sum(-1)
        right.append(accelerator.gather_for_metrics(hits))
    right = torch.cat(right)
    accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}, {right.sum()} tokens right in {len(right)} texts")
    accelerator.save_state(f"loop/epoch-{epoch}")

accelerator.load_state("loop/epoch-1")
accelerator.unwrap_model(model).save_pretrained("loop/final", is_main_process=accelerator.is_main_process)
accelerator.end_training()
