"""What the tests of the command line share: a tiny checkpoint with a tokenizer and text, and ways to run a command."""

import os
import subprocess
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from autotp.cli import main

TEXT = "the quick brown fox jumps over the lazy dog and the cat sleeps in the warm sun. " * 40


def make_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def llama_config():
    return LlamaConfig(
        vocab_size=301, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )


def save_checkpoint(directory):
    """A tiny llama with its tokenizer, and a text file."""
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config()).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    (directory / "text.txt").write_text(TEXT)
    return directory


def run_cli(*args, code=0, capsys=None):
    assert main([str(arg) for arg in args]) == code
    return capsys.readouterr() if capsys else None


def train_args(checkpoint, out, *more, tp=2):
    """A command that trains for three short steps."""
    args = ["train", checkpoint, "--data", checkpoint / "text.txt", "--tp", tp, "--out", out, "--steps", 3, "--batch-size", 2]
    return [str(arg) for arg in [*args, "--seq-length", 16, "--dtype", "float32", "--lr", "1e-3", *more]]


def start(launcher, *args, **env):
    """The command in a process of its own, which leads its own group; `launcher` stands between python and `autotp.cli`."""
    command = [sys.executable, *launcher, "-m", "autotp.cli", *map(str, args)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, env={**os.environ, **env}, start_new_session=True, **pipes)  # type: ignore[call-overload]


def finish(process, timeout_s=240):
    """Its exit code, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return process.returncode, out, err
