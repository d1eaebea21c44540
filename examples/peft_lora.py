"""LoRA on every linear of a causal model with peft: train, save the adapter, load it again, generate.

torchrun --nproc-per-node 2 examples/peft_lora.py
"""

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import AutoTokenizer, get_linear_schedule_with_warmup

import autotp

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
TEXTS = ["the quick brown fox jumps over a lazy dog", "old birds sing of rain", "one cat sleeps in warm sun while birds sing"]

tokenizer = AutoTokenizer.from_pretrained(NAME)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = autotp.from_pretrained(NAME, dtype=torch.float32)  # AutoModelForCausalLM.from_pretrained(NAME)

config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=16, lora_dropout=0.1, target_modules="all-linear")
model = get_peft_model(model, config)

batch = tokenizer(TEXTS, return_tensors="pt", padding=True).to(model.device)
labels = batch["input_ids"].where(batch["attention_mask"] == 1, -100)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=8)

model.train()
for _ in range(8):
    loss = model(**batch, labels=labels).loss
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
model.save_pretrained("lora/final")

model = PeftModel.from_pretrained(autotp.from_pretrained(NAME, dtype=torch.float32), "lora/final").eval()
prompt = tokenizer("the quick brown", return_tensors="pt").to(model.device)
tokens = model.generate(**prompt, max_new_tokens=5, do_sample=False)
print(f"loss {loss.item():.3f}: {tokenizer.decode(tokens[0])}")
