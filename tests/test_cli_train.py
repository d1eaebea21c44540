"""`autotp train`: its options and its file of options, ranks of its own and a launcher's, Ctrl-C, and what it says."""

import argparse
import dataclasses
import io
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from autotp.checkpoint.gguf import convert_beside
from autotp.checkpoint.state import read_about
from autotp.cli.config import read_config
from autotp.cli.parser import TRAIN_GROUPS, build_parser
from autotp.cli.screen import TrainBar, paint, paint_plan
from autotp.cli.train import read_options, resume_command
from autotp.errors import AutoTPError
from autotp.train.options import TrainOptions
from autotp.train.run import train
from tests.command import finish, run_cli, save_checkpoint, start, train_args
from tests.jobs import run_job

pytestmark = pytest.mark.usefixtures("forked_launch")  # what `start` starts begins as users' runs do
NAMES = [field.name for field in dataclasses.fields(TrainOptions)]
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    # On a machine without GPUs `--multi_gpu` is the way in which accelerate starts several processes without MPI.
    "accelerate": [
        *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
    ],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("llama"))


def parse(*args):
    return read_options(build_parser().parse_args(["train", *map(str, args)]))


# -- options --------------------------------------------------------------------------------------------------------------


def test_every_option_has_a_flag():
    flags = [name for options in TRAIN_GROUPS.values() for name, _, _ in options]
    assert sorted([*flags, "model"]) == sorted(NAMES)


def test_flags_are_the_options():
    options = parse(
        *("m", "--data", "a", "b", "--out", "o", "--tp", 2, "--dp", 3, "--lr", "1e-3", "--betas", 0.8, 0.9, "--warmup", 0.1),
        *("--no-packing", "--completions-only", "--epochs", 2, "--eval-data", "c", "--eval-every", 5, "--resume", "auto"),
    )
    expected = dict(model="m", data=("a", "b"), out="o", tp=2, dp=3, lr=1e-3, betas=(0.8, 0.9), warmup=0.1, packing=False)
    expected |= dict(completions_only=True, epochs=2, eval_data=("c",), eval_every=5, resume="auto")
    assert options == TrainOptions(**expected)


def test_options_from_a_file_and_flags_win(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ndata: [a, b]\nout: o\ntp: 2\nlr: 1e-3\nseq-length: 64\npacking: false\n")
    options = parse("--config", file, "--tp", 4, "--packing")
    assert options == TrainOptions(model="m", data=("a", "b"), out="o", tp=4, lr=1e-3, seq_length=64, packing=True)
    assert parse("other", "--config", file).model == "other"


@pytest.mark.parametrize(
    "text, said",
    [
        ("tp: 2\nseq_lenght: 5\n", "there is no option seq_lenght. Did you mean seq_length?"),
        ("tp: 2\nlr: [1\n", "is not YAML: line 3, column 1"),
        ("tp: 2\n\tlr: 1\n", "is not YAML: line 2, column 1"),
        ("tp: 2\ntp: 4\n", "line 2, column 1: tp is given twice"),
        ("seq_length: 2\nseq-length: 4\n", "seq_length is given twice"),
        ("- tp\n", "must be lines of `option: value`"),
        ("", "must be lines of `option: value`"),
        (b"\xff\xfe\xfa", "is not UTF-8 text"),
        ("tp: many\n", "--tp 'many' is a str, not a whole number"),
    ],
)
def test_file_of_options_that_is_wrong(text, said, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    err = run_cli("train", "m", "--data", "d", "--out", "o", "--config", file, code=2, capsys=capsys).err
    assert err.startswith("autotp: error: ") and said in err and err.count("\n") == 1


def test_file_of_options_that_is_not_there(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("tp: 2")
    err = run_cli("train", "--config", tmp_path / "rum.yaml", code=2, capsys=capsys).err
    assert f"Did you mean {tmp_path / 'run.yaml'}?" in err


def test_plain_numbers_of_a_file_are_numbers(tmp_path):
    (tmp_path / "a.yaml").write_text("lr: 1e-5\neps: 2E-8\nclip: 1.5\nseed: 12\nout: 1e\n")
    assert read_config(str(tmp_path / "a.yaml"), NAMES) == dict(lr=1e-5, eps=2e-8, clip=1.5, seed=12, out="1e")


def test_missing_options_are_named(capsys):
    err = run_cli("train", "m", code=2, capsys=capsys).err
    assert "--data, --out, --tp must be given" in err


# -- runs -----------------------------------------------------------------------------------------------------------------


def test_ranks_started_here_train_like_one(checkpoint, tmp_path, capsys):
    more = ["--grad-accum", "2", "--clip", "0.5", "--log", tmp_path / "log.jsonl", "--json"]
    done = run_cli(*train_args(checkpoint, tmp_path / "out", *more), capsys=capsys)
    said = json.loads(done.out)
    options = parse(*train_args(checkpoint, tmp_path / "one", "--grad-accum", 2, "--clip", 0.5, tp=1)[1:])
    expected = train(options)
    assert said["steps"] == 3 and not said["interrupted"] and said["out"] == str(tmp_path / "out")
    assert said["first_loss"] == pytest.approx(expected.losses[0], abs=1e-5)
    assert said["last_loss"] == pytest.approx(expected.losses[-1], abs=1e-5)
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3
    found, whole = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("out", "one"))
    for name, value in whole.items():
        torch.testing.assert_close(found[name], value, atol=1e-4, rtol=1e-4, msg=name)
    assert done.err.count("step ") >= 3 and "tok/s" in done.err and "\r" not in done.err


def test_ranks_of_accelerate_launch_train(checkpoint, tmp_path, monkeypatch):
    """In the variables that it sets; it starts the ranks itself in the test of an interrupt below."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    script = tmp_path / "join.py"
    script.write_text("import sys\nfrom autotp.cli import main\nassert main(sys.argv[1:]) == 0\n")
    said = "".join(run_job(script, *train_args(checkpoint, tmp_path / "out"), cwd=tmp_path))
    assert said.count("saved to") == 1 and said.count("2 ranks, float32") == 1
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_attention_heads == 4


def test_interrupt_saves_and_the_printed_command_goes_on(checkpoint, tmp_path, capsys):
    process = start([], *train_args(checkpoint, tmp_path, "--steps", 4000))
    while "step 1/" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert (code, out) == (130, ""), err  # nothing that is imported prints there either, in any process
    command = err.split("Go on with:\n")[1].strip()
    step = int(command.rpartition("-")[2])
    assert command.startswith("autotp train ") and f"interrupted after step {step}" in err and "Traceback" not in err
    done = run_cli(*command.split()[1:], "--steps", step + 3, "--json", capsys=capsys)
    assert json.loads(done.out)["steps"] == step + 3 and f"step {step + 1}/{step + 3}" in done.err


@pytest.mark.parametrize("name", LAUNCHERS)
def test_interrupt_under_a_launcher_saves(checkpoint, tmp_path, name):
    """Ctrl-C reaches the launcher, which hands it on to the ranks."""
    process = start(LAUNCHERS[name], *train_args(checkpoint, tmp_path, "--steps", 4000))
    while "step 1/" not in process.stderr.readline():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = finish(process)
    said = [line for line in err.splitlines() if line.startswith("autotp: ")]
    assert code and len(said) == 1 and "and saved. Go on with:" in said[0], err
    command = err.split("Go on with:\n")[1].splitlines()[0].split()
    assert command[:2] == {"torchrun": ["torchrun", "--standalone"], "accelerate": ["accelerate", "launch"]}[name]
    assert read_about(Path(command[-1]))["step"] == int(command[-1].rpartition("-")[2])


def test_resume_command_replaces_an_older_one(monkeypatch):
    args = argparse.Namespace(argv=["train", "my model", "--resume", "a", "--tp", "2", "--resume=b"])
    end = "train 'my model' --tp 2 --resume out/checkpoint-7"
    assert resume_command(args, "out/checkpoint-7") == f"autotp {end}"
    for key, value in dict(RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2").items():
        monkeypatch.setenv(key, value)
    start = "torchrun --standalone --nproc-per-node 2"
    assert resume_command(args, "out/checkpoint-7") == f"{start} -m autotp.cli {end}"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    start = "accelerate launch --multi_gpu --num_processes 2 --mixed_precision bf16"
    assert resume_command(args, "out/checkpoint-7") == f"{start} -m autotp.cli {end}"


# -- what is drawn --------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


EVENT = dict(step=1, steps=40, loss=2.5, lr=1e-5, tokens_per_s=12345.6, mfu=0.414, memory_gib=3.21)


def test_bar_on_a_terminal():
    stream = Terminal()
    bar = TrainBar(stream)
    bar.show(EVENT)
    bar.show({**EVENT, "step": 2, "eval_loss": 2.25})
    bar.close()
    said = stream.getvalue()
    assert "2/40" in said and "loss 2.5000  12,346 tok/s  MFU 41%  3.2 GiB" in said and "evaluation loss 2.2500\n" in said


def test_lines_elsewhere():
    stream = io.StringIO()
    bar = TrainBar(stream)
    for step in range(1, 401):
        bar.show({**EVENT, "step": step, "steps": 400, "mfu": None})
    lines = stream.getvalue().splitlines()
    assert len(lines) in (20, 21, 22) and lines[0].startswith("step 1/400") and lines[-1].startswith("step 400/400")
    assert "MFU" not in stream.getvalue()


def test_colours_are_for_terminals(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert paint("x", "red", Terminal()) == "\x1b[31mx\x1b[0m" and paint("x", "red", io.StringIO()) == "x"
    assert "\x1b[32mproved" in paint_plan("head\n----\nproof: proved", Terminal())
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert paint_plan("head\n----\nproof: proved", Terminal()) == "head\n----\nproof: proved"


def test_gguf_is_converted_once_and_again_when_it_changes(checkpoint, tmp_path, monkeypatch, capsys):
    pytest.importorskip("gguf")
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"not really")
    for kind in (AutoModelForCausalLM, AutoTokenizer):  # transformers reads GGUF, but does not write it
        whole = kind.from_pretrained(checkpoint)
        monkeypatch.setattr(kind, "from_pretrained", lambda path, gguf_file, whole=whole, **more: whole)
    found = [convert_beside(file, tmp_path / "out") for _ in range(2)]
    assert found[0] == found[1] and found[0].parent.parent == tmp_path and capsys.readouterr().err.count("converting") == 1
    assert (found[0] / "model.safetensors").is_file() and (found[0] / "tokenizer.json").is_file()
    file.write_bytes(b"another one")
    assert convert_beside(file, tmp_path / "out") != found[0]


def test_gguf_that_is_none(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"no GGUF")
    with pytest.raises(AutoTPError, match=r"transformers can't read|pip install gguf"):
        convert_beside(tmp_path / "model.gguf", tmp_path / "out")
