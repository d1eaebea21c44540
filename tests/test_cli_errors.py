"""What a user meets when something is wrong with a training run: one message, from one rank, that says what to do."""

import json
import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
import torch

import autotp.cli.ranks
import autotp.cli.train
from autotp.checkpoint.pending import ABOUT
from autotp.checkpoint.state import FORMAT
from autotp.cli.checks import check_ranks
from autotp.cli.main import main
from autotp.cli.ranks import explain_memory, is_memory_error, run_ranks
from autotp.cli.train import train_rank
from autotp.errors import AutoTPError
from autotp.train.launch import send_message
from autotp.train.options import TrainOptions
from autotp.train.paths import nearest_path
from tests.command import finish, run_cli, save_checkpoint, start, train_args

pytestmark = pytest.mark.usefixtures("forked_launch")
EVENT = dict(step=7, steps=9, loss=2.0, lr=1e-5, tokens_per_s=10.0, mfu=None, memory_gib=1.0)
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.25 GiB is free. "
    "Process 7 has 77.80 GiB in use. Of the allocated memory 70.00 GiB is allocated by PyTorch. If reserved but unallocated "
    "memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True. See documentation (https://pytorch.org/docs)"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def message(capsys, monkeypatch):
    """Runs `autotp train` and gives its one message, which names no file unless there is a log."""

    def run(*args, log=None):
        err = run_cli(*args, code=2, capsys=capsys).err
        lines = [line for line in err.splitlines() if line.startswith("autotp: ")]
        assert len(lines) == 1 + (log is not None) and lines[0].startswith("autotp: error: ") and "Traceback" not in err
        if log is not None:
            assert lines[1] == f"autotp: full traces: {log}"
        return lines[0]

    return run


# -- before ranks start ---------------------------------------------------------------------------------------------------


def test_typo_in_the_data_path(checkpoint, tmp_path, message):
    args = [arg.replace("text.txt", "tekst.txt") for arg in train_args(checkpoint, tmp_path)]
    assert f"--data {checkpoint / 'tekst.txt'}: there is no such file. Did you mean {checkpoint / 'text.txt'}?" in message(*args)


def test_typo_in_the_model_path(checkpoint, tmp_path, message):
    wrong = checkpoint.parent / checkpoint.name.replace("llama", "lama")
    said = message(*train_args(checkpoint, tmp_path)[:1], wrong, *train_args(checkpoint, tmp_path)[2:])
    assert f"MODEL {wrong}: there is no such directory. Did you mean {checkpoint}?" in said


def test_typo_in_a_directory_above(tmp_path):
    (tmp_path / "models" / "a").mkdir(parents=True)
    assert nearest_path(tmp_path / "model" / "a") == f" Did you mean {tmp_path / 'models' / 'a'}?"
    assert nearest_path(tmp_path / "entirely-different") == ""


def test_tokenizer_missing(checkpoint, tmp_path, message):
    bare = tmp_path / "bare"
    shutil.copytree(checkpoint, bare, ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    said = message(*train_args(bare, tmp_path / "out"))
    assert f"{bare} has no tokenizer" in said and "copy tokenizer.json" in said.lower()


@pytest.mark.parametrize("text, said", [(b"", "is empty"), (b"\xff\xfe\xfa" * 99, "text.txt")])
def test_data_that_is_empty_or_no_text(text, said, checkpoint, tmp_path, message):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    (copy / "text.txt").write_bytes(text)
    log = None if not text else tmp_path / "out" / "autotp.log"
    assert said in message(*train_args(copy, tmp_path / "out", tp=1), log=log)


def test_data_that_may_not_be_read(checkpoint, tmp_path, message, monkeypatch):
    def refuse(path, *args, **more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("autotp.train.records.open", refuse, raising=False)
    assert f"--data {checkpoint / 'text.txt'} can't be read: Permission denied" in message(*train_args(checkpoint, tmp_path))


def test_out_that_is_a_file(checkpoint, tmp_path, message):
    (tmp_path / "file").write_text("")
    assert "is a file, not a directory" in message(*train_args(checkpoint, tmp_path / "file"))
    assert "is a file, not a directory" in message(*train_args(checkpoint, tmp_path / "file" / "below"))


def test_more_ranks_than_gpus(checkpoint, tmp_path, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    said = message(*train_args(checkpoint, tmp_path, tp=8))
    assert "--tp 8 needs 8 GPUs on this machine, and it has 2: lower --tp to 2 or less" in said


@pytest.mark.parametrize("started, here, good", [(4, 4, True), (4, 2, True), (3, 3, False), (8, 4, False)])
def test_ranks_that_a_launcher_started_must_agree(started, here, good, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    if good:
        check_ranks(2, 2, here, started, "torchrun")
    else:
        with pytest.raises(AutoTPError, match=rf"torchrun started {started} rank\(s\), but --tp 2 times --dp 2 is 4"):
            check_ranks(2, 2, here, started, "torchrun")


def test_of_ranks_that_disagree_only_rank_0_speaks(checkpoint, tmp_path, message, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    assert "torchrun started 3 rank(s), but --tp 2 is 2" in message(*train_args(checkpoint, tmp_path))
    monkeypatch.setenv("RANK", "1")
    assert main(train_args(checkpoint, tmp_path)) == 2 and capsys.readouterr().err == ""


def test_accelerate_with_one_process(checkpoint, tmp_path, message, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert "accelerate launch started 1 rank(s), but --tp 2 is 2" in message(*train_args(checkpoint, tmp_path))


def test_port_in_use(checkpoint, tmp_path):
    """As a launcher without a store of its own starts rank 0, where torchrun's `--master-port` is taken."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        env = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port)
        code, _, err = finish(start([], *train_args(checkpoint, tmp_path), **env))
    said = [line for line in err.splitlines() if line.startswith("autotp: ")]
    assert code == 2 and len(said) == 2 and "Traceback" not in err
    assert f"port {port} of this machine is in use by another process" in said[0] and "--standalone" in said[0]


# -- while ranks run ------------------------------------------------------------------------------------------------------


def rank_without_memory(options):
    """A rank of which the second runs out of memory; the first waits for it."""

    def train(options, on_event):
        if os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        time.sleep(600)
        (Path(options.out) / "waited").touch()

    autotp.cli.train.train = train
    return train_rank(options)


def rank_that_is_killed(options):
    """Ranks in a collective, of which the second is killed while the first waits in it."""
    torch.distributed.init_process_group("gloo")
    send_message(EVENT)
    if os.environ["RANK"] == "1":
        for step, whole in ((5, True), (7, False)):  # the newest whole one is what can be gone on from
            path = Path(options.out) / f"checkpoint-{step}"
            path.mkdir()
            if whole:
                (path / ABOUT).write_text(json.dumps({"format": FORMAT, "files": {}}))
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.all_reduce(torch.ones(1))


def rank_with_a_bug(options):
    raise KeyError("no such key")


def test_out_of_memory(checkpoint, tmp_path, message, monkeypatch):
    monkeypatch.setattr(autotp.cli.train, "train_rank", rank_without_memory)
    said = message(*train_args(checkpoint, tmp_path, "--batch-size", 8), log=tmp_path / "autotp.log")
    assert not (tmp_path / "waited").exists()
    assert "rank 1 failed: out of memory with --batch-size 8 --seq-length 16 --tp 2 --dtype float32" in said
    assert "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.25 GiB is free." in said
    assert "--batch-size 4 --grad-accum 2" in said and "--gradient-checkpointing" in said and "--dtype bfloat16" in said
    assert "torch.OutOfMemoryError" in (tmp_path / "autotp.log").read_text()


def test_ways_out_of_memory_that_are_taken_are_not_named():
    options = TrainOptions("m", ("d",), "o", 2, batch_size=1, gradient_checkpointing=True, seq_length=64)
    said = explain_memory(torch.OutOfMemoryError(OUT_OF_MEMORY), options)
    assert said.endswith("Ways out: --tp 4 where there are GPUs for it") and "http" not in said
    assert "torch gives no numbers" in explain_memory(MemoryError(), options)


def test_memory_that_torch_does_not_get_on_the_cpu():
    with pytest.raises(RuntimeError) as info:
        torch.empty(1 << 50)
    assert is_memory_error(info.value) and not is_memory_error(RuntimeError("shapes differ"))
    said = explain_memory(info.value, TrainOptions("m", ("d",), "o", 2))
    assert "you tried to allocate 4503599627370496 bytes" in said and "--batch-size 2 --grad-accum 2" in said


def test_a_rank_is_killed(checkpoint, tmp_path, message, monkeypatch):
    monkeypatch.setattr(autotp.cli.train, "train_rank", rank_that_is_killed)
    said = message(*train_args(checkpoint, tmp_path), log=tmp_path / "autotp.log")
    assert re.search(r"rank 1 failed: process \d+ was killed by SIGKILL. The other 1 rank\(s\) were ended.", said)
    assert f"--resume {tmp_path / 'checkpoint-5'}" in said and ". The newest checkpoint is" in said and ".." not in said
    assert "--- rank 0" in (tmp_path / "autotp.log").read_text()  # what the other one saw


def test_an_interrupt_before_the_ranks_wrote_their_log_stays_one(tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(autotp.cli.ranks, "launch_ranks", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(print, 1, log=str(tmp_path / "autotp.log"))


def test_a_bug_is_one_message_too(checkpoint, tmp_path, message, monkeypatch):
    monkeypatch.setattr(autotp.cli.train, "train_rank", rank_with_a_bug)
    said = message(*train_args(checkpoint, tmp_path), log=tmp_path / "autotp.log")
    assert "rank 0 failed: KeyError: 'no such key'" in said or "rank 1 failed: KeyError: 'no such key'" in said
    monkeypatch.setattr(autotp.cli.train, "prepare", rank_with_a_bug)
    assert main(train_args(checkpoint, tmp_path)) == 2


def test_under_torchrun_one_rank_speaks(checkpoint, tmp_path):
    """Both ranks find that the loss is no number."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    code, _, err = finish(start(launcher, *train_args(checkpoint, tmp_path, "--lr", "1e30", "--steps", 50, "--clip", 0)))
    said = [line for line in err.splitlines() if line.startswith("autotp: error: ")]
    assert code and len(said) == 1 and "step" in said[0] and "not taken" in said[0], err
    assert (tmp_path / "autotp.log").read_text().count("=== rank") == 2
