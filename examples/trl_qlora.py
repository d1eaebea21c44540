"""QLoRA with TRL: the base in 4 bits, each rank its parts, adapters on top: torchrun --nproc-per-node 2 examples/trl_qlora.py

pip install bitsandbytes; the script is TRL's own but for the line that makes the model.
"""

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

import autotp

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
TURNS = {"the quick brown fox": "jumps over a lazy dog", "old birds": "sing of rain", "one cat": "sleeps in warm sun"}

four_bits = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)
model = autotp.from_pretrained(NAME, dtype=torch.bfloat16, quantization_config=four_bits)  # AutoModelForCausalLM.from_pretrained

chats = [[{"role": "user", "content": said}, {"role": "assistant", "content": answer}] for said, answer in TURNS.items()]
arguments = SFTConfig(
    output_dir="qlora",
    max_length=64,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    gradient_checkpointing=True,
    max_steps=6,
    learning_rate=2e-3,
    bf16=torch.cuda.is_available(),
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
trainer = SFTTrainer(
    model=model,
    args=arguments,
    train_dataset=Dataset.from_list([{"prompt": chat[:1], "completion": chat[1:]} for chat in chats * 6]),
    processing_class=AutoTokenizer.from_pretrained(NAME),
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model("qlora/final")

# Merged into the weights that it was trained beside; plain transformers loads what is saved.
base = autotp.dequantize(autotp.from_pretrained(NAME, dtype=torch.bfloat16, quantization_config=four_bits))
merged = PeftModel.from_pretrained(base, "qlora/final").merge_and_unload()
autotp.save_pretrained(merged, "qlora-merged/final")
