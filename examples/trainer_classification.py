"""Fine-tune an encoder as a classifier with transformers' Trainer, from weights that have no classifier yet.

torchrun --nproc-per-node 2 examples/trainer_classification.py
"""

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

import autotp

NAME = "sentence-transformers/all-MiniLM-L6-v2"
TEXTS = {
    "the lazy dog sleeps in warm sun": 0,
    "one cat sleeps while rain sing": 0,
    "quick brown fox jumps over a dog": 1,
    "old birds sing": 1,
}

set_seed(0)  # all ranks draw the same new classifier
tokenizer = AutoTokenizer.from_pretrained(NAME)
model = AutoModelForSequenceClassification.from_pretrained(NAME, num_labels=2)
model = autotp.parallelize(model)  # the one line more

rows = [{**tokenizer(text), "labels": label} for text, label in TEXTS.items()] * 6
arguments = TrainingArguments(
    output_dir="classifier",
    per_device_train_batch_size=4,
    num_train_epochs=2,
    learning_rate=3e-4,
    warmup_steps=2,
    eval_strategy="epoch",
    logging_steps=2,
    save_strategy="epoch",
    metric_for_best_model="accuracy",
    load_best_model_at_end=True,
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=rows,
    eval_dataset=rows[:7],
    data_collator=DataCollatorWithPadding(tokenizer),
    processing_class=tokenizer,
    compute_metrics=lambda result: {"accuracy": float((result.predictions.argmax(-1) == result.label_ids).mean())},
)
trainer.train()
print(trainer.evaluate())
trainer.save_model("classifier/final")
