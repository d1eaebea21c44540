"""A directory in which the names of public models stand for tiny ones of the same kind: code from the docs runs as written."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from tests.train.tiny import make_chats, make_texts, make_tokenizer, save_model, write_jsonl

CAUSAL, ENCODER, PAIRS = "HuggingFaceTB/SmolLM2-135M-Instruct", "sentence-transformers/all-MiniLM-L6-v2", "google-t5/t5-small"


def make_shelf(directory: Path) -> Path:
    """The models with their tokenizers, `texts.jsonl`, `chats.jsonl` and `book.txt` in `directory`, and the directory again."""
    save_model(directory / CAUSAL)
    save_encoder(directory / ENCODER)
    save_pairs(directory / PAIRS)
    write_jsonl(directory / "texts.jsonl", [{"text": text} for text in make_texts(60)])
    write_jsonl(directory / "chats.jsonl", make_chats())
    (directory / "book.txt").write_text("\n".join(make_texts(60)))
    return directory


def save_encoder(directory: Path) -> None:
    """A tiny BERT with a word tokenizer."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    words = sorted({word for text in make_texts(200) for word in text.split()})
    vocabulary = {token: index for index, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names = dict(unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(directory)
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128)
    BertForMaskedLM(BertConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(directory)


def save_pairs(directory: Path) -> None:
    """A tiny T5 with a tokenizer."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.bos_token
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    sizes = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    tokens = dict(
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, decoder_start_token_id=tokenizer.pad_token_id
    )
    T5ForConditionalGeneration(T5Config(vocab_size=320, **sizes, **tokens)).save_pretrained(directory)
