"""A tiny Llama and its tokenizer, with a chat template, and short runs, for the tests of training."""

import json
import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from autotp.train.options import TrainOptions
from autotp.train.run import train
from tests.ranks import grid

TEXT = "the quick brown fox jumps over a lazy dog and one cat sleeps in warm sun while old birds sing of rain"
WORDS = TEXT.split()
# eps: the first steps are not signs of gradients near 0, which any rounding turns.
BASE = dict(dtype="float32", steps=4, lr=1e-2, eps=1e-3, batch_size=2, seq_length=16, seed=5)
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def make_texts(count=40, seed=0, longest=30):
    """Texts of 3 to `longest` words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(3, longest))) for _ in range(count)]


def make_chats(count=24, seed=1):
    """Chats of one or two questions and answers."""
    texts = iter(make_texts(4 * count, seed, 9))
    turns = lambda: [{"role": "user", "content": next(texts)}, {"role": "assistant", "content": next(texts)}]  # noqa: E731
    return [{"messages": turns() + (turns() if number % 2 else [])} for number in range(count)]


def make_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(make_texts(), trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made.chat_template = TEMPLATE
    return made


def make_config(**given):
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    return LlamaConfig(vocab_size=320, **{**sizes, **given})


def save_model(directory, **config):
    """A checkpoint directory with the model, float32, and the tokenizer."""
    torch.manual_seed(0)
    LlamaForCausalLM(make_config(**config)).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return str(directory)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def make_options(source, out, data="texts", **given):
    return TrainOptions(
        **{**BASE, "tp": 2, "model": str(source), "data": str(source / f"{data}.jsonl"), "out": str(out), **given}
    )


def run_ranks(group, options, mesh=False):
    """In a rank: the losses, and on the main rank what was told."""
    events = []
    result = train(options, events.append, grid() if mesh else group)
    return result, events
