"""The command line: plans from a config alone, one-line errors, and a training run that plain transformers can load."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from autotp.cli import main
from autotp.errors import AutoTPError
from autotp.inject.plan import Plan
from autotp.train.data import cut_blocks, iterate_batches, read_blocks
from autotp.train.launch import launch_ranks
from autotp.train.loop import TrainOptions, train_model

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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny llama with its tokenizer, and a text file."""
    directory = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config()).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    (directory / "text.txt").write_text(TEXT)
    return directory


def run_cli(*args, code=0, capsys=None):
    assert main([str(arg) for arg in args]) == code
    return capsys.readouterr() if capsys else None


# -- plan -----------------------------------------------------------------------------------------------------------------


def test_plan_needs_only_the_config(tmp_path, capsys):
    llama_config().save_pretrained(tmp_path)
    out = run_cli("plan", tmp_path, "--tp", 2, capsys=capsys).out
    assert "q_proj" in out and "colwise" in out and "rowwise" in out and "2 ranks" in out


def test_plan_as_json_is_a_plan(tmp_path, capsys):
    llama_config().save_pretrained(tmp_path)
    plan = Plan.from_json(run_cli("plan", tmp_path, "--tp", 2, "--json", capsys=capsys).out)
    assert plan.tp_size == 2 and plan.shards


def test_plan_exits_nonzero_if_nothing_is_split(tmp_path, capsys):
    # gpt2 has no HF plan; 7 ranks divide none of its sizes either, whatever finds the plan
    GPT2Config(vocab_size=301, n_embd=32, n_layer=1, n_head=1, n_inner=1).save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--tp", "7"]) != 0
    assert "autotp:" in capsys.readouterr().err


def test_errors_are_one_line_and_exit_code_2(tmp_path, capsys):
    err = run_cli("plan", tmp_path / "nowhere", "--tp", 2, code=2, capsys=capsys).err
    assert err.startswith("autotp: error:") and err.count("\n") == 1


@pytest.mark.parametrize("args", [["plan"], ["plan", "x"], ["plan", "x", "--tp", "0"], ["nothing"], []])
def test_wrong_arguments(args, capsys):
    with pytest.raises(SystemExit) as exit:
        main(args)
    assert exit.value.code == 2 and "usage:" in capsys.readouterr().err


# -- train ----------------------------------------------------------------------------------------------------------------


def test_train_checks_before_it_starts_ranks(checkpoint, tmp_path, capsys):
    text = checkpoint / "text.txt"
    err = run_cli("train", checkpoint, "--data", tmp_path / "no", "--tp", 2, "--out", tmp_path, code=2, capsys=capsys).err
    assert "no such file" in err
    err = run_cli("train", checkpoint, "--data", text, "--tp", 2, "--out", text, code=2, capsys=capsys).err
    assert "not a directory" in err
    args = ("train", checkpoint, "--data", text, "--tp", 2, "--out", tmp_path, "--lr", -1)
    assert "lr must not be negative" in run_cli(*args, code=2, capsys=capsys).err


def test_train_saves_what_plain_training_gives(checkpoint, tmp_path):
    """`autotp train` at TP=2, in processes of its own, against the same loop on the unsharded model."""
    options = ["--steps", "3", "--batch-size", "2", "--seq-length", "16", "--grad-accum", "2", "--lr", "1e-3", "--clip", "0.5"]
    command = [sys.executable, "-m", "autotp.cli", "train", str(checkpoint), "--data", str(checkpoint / "text.txt"), "--tp", "2"]
    done = subprocess.run([*command, "--out", str(tmp_path / "out"), *options], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "saved to" in done.stdout

    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    blocks = read_blocks(checkpoint / "text.txt", make_tokenizer(), 16)
    losses = train_model(model, iterate_batches(blocks, 2, 0), TrainOptions(steps=3, lr=1e-3, grad_accum=2, max_norm=0.5))
    assert f"loss {losses[0]:.3f}" in done.stdout or abs(float(done.stdout.split("loss ")[1].split()[0]) - losses[0]) < 1e-3
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved[name], value, atol=1e-4, rtol=1e-4, msg=name)
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())


def test_train_names_the_rank_that_failed(checkpoint, tmp_path, capsys):
    args = ("train", checkpoint, "--data", checkpoint / "text.txt", "--tp", 2, "--out", tmp_path, "--seq-length", 9999)
    err = run_cli(*args, code=2, capsys=capsys).err
    assert err.count("\n") == 1 and "rank" in err and "fewer than one block of 9999" in err


def test_train_under_torchrun_wants_as_many_ranks(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    args = ("train", checkpoint, "--data", checkpoint / "text.txt", "--tp", 2, "--out", tmp_path)
    assert "torchrun started 3 ranks, but --tp is 2" in run_cli(*args, code=2, capsys=capsys).err


def test_script_trains_under_torchrun(checkpoint, tmp_path):
    """scripts/train.py, the page people copy, as its docstring says to run it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "scripts/train.py"]
    command += ["--model", str(checkpoint), "--data", str(checkpoint / "text.txt"), "--out", str(tmp_path), "--steps", "4"]
    done = subprocess.run([*command, "--seq-length", "16", "--grad-accum", "2"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss") == 4 and "one whole weight: [32, 32]" in done.stdout
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.num_attention_heads == 4


# -- parts ----------------------------------------------------------------------------------------------------------------


def test_batches_cover_every_block_once_a_pass_and_repeat_from_the_seed():
    blocks = torch.arange(6).view(6, 1)
    first, second = (iterate_batches(blocks, 4, seed) for seed in (3, 3))
    drawn = [next(first) for _ in range(6)]
    assert sorted(torch.cat(drawn[:3]).flatten().tolist()) == sorted([*range(6), *range(6)])
    assert all(torch.equal(a, next(second)) for a in drawn)


def test_blocks_need_text(tmp_path):
    with pytest.raises(AutoTPError, match="fewer than one block of 64"):
        cut_blocks("short", make_tokenizer(), 64)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(AutoTPError, match="can't read the training text"):
        read_blocks(tmp_path / "bytes", make_tokenizer(), 4)


def give_rank(value):
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), value


def fail_on_last(value):
    if os.environ["RANK"] == "1":
        raise AutoTPError("the weights differ")
    import time

    time.sleep(60)


def test_launch_returns_rank_0_and_names_who_failed():
    assert launch_ranks(give_rank, 2, "x") == (0, 2, "x")
    with pytest.raises(AutoTPError, match=r"rank 1 failed: .*the weights differ"):
        launch_ranks(fail_on_last, 2, "x")
