"""Fine-tune a causal language model with transformers' Trainer: torchrun --nproc-per-node 2 examples/trainer_causal_lm.py"""

import torch
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

import autotp

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
TEXTS = ["the quick brown fox jumps over a lazy dog", "old birds sing of rain", "one cat sleeps in warm sun while birds sing"]

tokenizer = AutoTokenizer.from_pretrained(NAME)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = autotp.from_pretrained(NAME)  # AutoModelForCausalLM.from_pretrained(NAME)

rows = [tokenizer(text + tokenizer.eos_token, truncation=True, max_length=64) for text in TEXTS * 8]
arguments = TrainingArguments(
    output_dir="causal-lm",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=4,
    learning_rate=5e-5,
    lr_scheduler_type="cosine",
    eval_strategy="steps",
    eval_steps=2,
    save_strategy="steps",
    save_steps=2,
    load_best_model_at_end=True,
    logging_steps=1,
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=rows[:20],
    eval_dataset=rows[20:],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    processing_class=tokenizer,
)
trainer.train()
print(trainer.evaluate())
trainer.save_model("causal-lm/final")  # whole: plain transformers loads it
