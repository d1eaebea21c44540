"""Supervised fine-tuning on chats with TRL: torchrun --nproc-per-node 2 examples/trl_sft.py"""

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

import autotp

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
TURNS = {"the quick brown fox": "jumps over a lazy dog", "old birds": "sing of rain", "one cat": "sleeps in warm sun"}

chats = [[{"role": "user", "content": said}, {"role": "assistant", "content": answer}] for said, answer in TURNS.items()]
dataset = Dataset.from_list([{"prompt": chat[:1], "completion": chat[1:]} for chat in chats * 6])
arguments = SFTConfig(
    output_dir="sft",
    max_length=64,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=4,
    learning_rate=5e-5,
    bf16=False,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
trainer = SFTTrainer(
    model=autotp.from_pretrained(NAME),  # NAME
    args=arguments,
    train_dataset=dataset,
    processing_class=AutoTokenizer.from_pretrained(NAME),
)
trainer.train()
trainer.save_model("sft/final")
