"""Fine-tune an encoder-decoder with Seq2SeqTrainer, which generates to evaluate.

torchrun --nproc-per-node 2 examples/trainer_seq2seq.py
"""

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

import autotp

NAME = "google-t5/t5-small"
PAIRS = {"old birds sing": "birds sing", "the quick brown fox jumps": "the fox jumps", "a lazy dog sleeps": "a dog sleeps"}

tokenizer = AutoTokenizer.from_pretrained(NAME)
model = autotp.parallelize(AutoModelForSeq2SeqLM.from_pretrained(NAME))  # AutoModelForSeq2SeqLM.from_pretrained(NAME)

rows = [tokenizer("summarize: " + text, text_target=short) for text, short in PAIRS.items()] * 4
arguments = Seq2SeqTrainingArguments(
    output_dir="seq2seq",
    per_device_train_batch_size=4,
    max_steps=4,
    learning_rate=1e-3,
    predict_with_generate=True,
    generation_max_length=12,
    eval_strategy="steps",
    eval_steps=2,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)


def count_equal(result):
    pair = (result.predictions, result.label_ids)
    texts, wanted = (tokenizer.batch_decode(ids.clip(0), skip_special_tokens=True) for ids in pair)
    return {"samples": len(texts), "equal": sum(text.strip() == want.strip() for text, want in zip(texts, wanted, strict=True))}


trainer = Seq2SeqTrainer(
    model=model,
    args=arguments,
    train_dataset=rows,
    eval_dataset=rows[:5],
    data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    processing_class=tokenizer,
    compute_metrics=count_equal,
)
trainer.train()
trainer.save_model("seq2seq/final")
