"""Runs that end early: interrupted and resumed with the same losses, stopped by a number that is none, refused by name."""

import json
import os
import random
import shutil
import signal
import time

import pytest
import torch
from torch import nn

from autotp.checkpoint.claim import DirectoryClaim
from autotp.comm import TPGroup
from autotp.errors import AutoTPError, CheckpointError
from autotp.places import Places
from autotp.train import optimizer as optimizer_file
from autotp.train import run as run_file
from autotp.train.loop import Stepper
from autotp.train.optimizer import MasterOptimizer
from autotp.train.options import TrainOptions
from autotp.train.run import NonFiniteLossError, TrainInterrupted, train
from autotp.train.stop import StopSignals
from tests.ranks import grid
from tests.train.tiny import make_texts, save_model, write_jsonl

STEPS = 6


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A model that draws random numbers, and little data, so that a run goes over several epochs."""
    directory = tmp_path_factory.mktemp("model")
    save_model(directory, attention_dropout=0.2)
    write_jsonl(directory / "texts.jsonl", [{"text": text} for text in make_texts(9)])
    return directory


def make_options(source, out, **given):
    base = dict(tp=2, dtype="float32", steps=STEPS, lr=1e-2, warmup=2, lr_schedule="cosine", batch_size=2, seq_length=16)
    return TrainOptions(
        **{**base, "grad_accum": 2, "model": str(source), "data": f"{source}/texts.jsonl", "out": str(out), **given}
    )


def run_until(group, options, last=None, number=signal.SIGINT, sender=0, mesh=False):
    """In a rank: train; rank `sender` gets a signal in the step before `last`. The losses, or where it was interrupted."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(1000 + rank)  # what was drawn before is of no matter
    events = []

    def tell(event):
        events.append(event)
        if event["step"] == last - 1:
            os.kill(os.getpid(), number)

    handler = signal.getsignal(signal.SIGINT)
    if last is not None and rank == sender and sender:  # a rank that is told nothing
        from autotp.train import run as run_file

        taken, original = [], run_file.Stepper.take

        def take(self, *args):
            taken.append(1)
            if len(taken) == last:
                os.kill(os.getpid(), number)
            return original(self, *args)

        run_file.Stepper.take = take
    try:
        result = train(options, tell if last is not None else None, grid() if mesh else group)
        return list(result.losses)
    except TrainInterrupted as stopped:
        assert signal.getsignal(signal.SIGINT) is handler
        return stopped.step, stopped.checkpoint, str(stopped)
    finally:
        if last is not None and rank == sender and sender:
            run_file.Stepper.take = original


CASES = {
    "tensor parallel": dict(),
    "masters, padding": dict(dtype="bfloat16", packing=False),
    "two data ranks": dict(dp=2),
}


@pytest.mark.parametrize("case", CASES)
def test_interrupted_anywhere_and_resumed_gives_the_same_losses(ranks, source, tmp_path, case):
    given = CASES[case]
    mesh, size = "dp" in given, 4 if "dp" in given else 2
    whole = ranks.run(run_until, make_options(source, tmp_path / "whole", **given), None, 0, 0, mesh, size=size)
    assert all(losses == whole[0] for losses in whole) and len(set(whole[0])) == STEPS
    last = random.randint(2, STEPS - 2)  # two steps are left at least, so that the schedule shows
    halves = make_options(source, tmp_path / "halves", log=str(tmp_path / "log.jsonl"), **given)
    for step, checkpoint, text in ranks.run(run_until, halves, last, signal.SIGINT, 0, mesh, size=size):
        assert step == last and f"--resume {checkpoint}" in text and checkpoint.endswith(f"checkpoint-{last}")
    resumed = TrainOptions.from_mapping({**halves.to_mapping(), "resume": checkpoint})
    assert all(losses == whole[0][last:] for losses in ranks.run(run_until, resumed, None, 0, 0, mesh, size=size))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == whole[0]
    weights = [read_weights(tmp_path / out) for out in ("whole", "halves")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_run_goes_on_over_other_numbers_of_ranks(ranks, tmp_path):
    """Begun by two copies of two ranks, ended by one rank; the sequences of a step are the same."""
    save_model(tmp_path)
    write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in make_texts(9)])
    kept = dict(save_every=2, async_save=True, keep_last=2)
    options = make_options(tmp_path, tmp_path / "out", dp=2, grad_accum=1, steps=4, dtype="bfloat16", **kept)
    losses = ranks.run(run_until, options, None, 0, 0, True, size=4)[0]
    assert sorted(path.name for path in (tmp_path / "out").glob("*checkpoint*")) == ["checkpoint-2", "checkpoint-4"]
    changed = dict(tp=1, dp=1, grad_accum=2, resume=str(tmp_path / "out" / "checkpoint-2"))
    resumed = train(TrainOptions.from_mapping({**options.to_mapping(), **changed}))
    assert resumed.steps == 4 and resumed.losses == pytest.approx(losses[2:], abs=1e-3)  # in bfloat16


def read_weights(directory):
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def test_a_signal_on_any_rank_stops_all(ranks, source, tmp_path):
    stopped = ranks.run(run_until, make_options(source, tmp_path / "out"), 3, signal.SIGTERM, 1)
    assert [each[0] for each in stopped] == [3, 3]


def test_checkpoints_come_every_so_many_steps_and_auto_takes_the_newest(source, tmp_path):
    options = make_options(source, tmp_path / "out", tp=1, save_every=2)
    losses = train(options).losses
    assert sorted(path.name for path in (tmp_path / "out").glob("*checkpoint*")) == [f"checkpoint-{n}" for n in (2, 4, 6)]
    (tmp_path / "out" / "checkpoint-6").rename(tmp_path / "elsewhere")
    again = TrainOptions.from_mapping({**options.to_mapping(), "resume": "auto"})
    assert train(again).losses == losses[4:]
    new = TrainOptions.from_mapping({**options.to_mapping(), "resume": "auto", "out": str(tmp_path / "new"), "steps": 1})
    assert len(train(new).losses) == 1


def test_a_run_where_another_one_saves_is_refused_before_its_first_step(source, tmp_path, monkeypatch):
    monkeypatch.setattr(run_file, "_CLAIM_WAIT_S", 0.1)
    out, steps = tmp_path / "out", []
    out.mkdir()
    options = make_options(source, out, tp=1, save_every=2)
    ours, theirs = os.pipe()
    if not (other := os.fork()):
        claim = DirectoryClaim()
        claim.hold(out, 0)
        os.write(theirs, b"held")
        time.sleep(60)
        os._exit(0)
    try:
        assert os.read(ours, 4) == b"held"
        with pytest.raises(CheckpointError, match=f"process {other} on .* still runs"):
            train(options, steps.append)
        assert not steps and not [*out.glob("checkpoint*")]
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    assert len(train(options, steps.append).losses) == len(steps) == STEPS


def test_what_cannot_be_resumed_is_named(ranks, source, tmp_path):
    out = tmp_path / "out"
    options = make_options(source, out, tp=1, save_every=2, steps=2)
    train(options)
    checkpoint = str(out / "checkpoint-2")

    def refused(**given):
        with pytest.raises(AutoTPError) as info:
            train(TrainOptions.from_mapping({**options.to_mapping(), **given}))
        return str(info.value)

    assert "holds checkpoint-2 of an earlier run: go on with --resume auto" in refused()
    assert "was written with --seed 0, this run has 7: resume with 0" in refused(resume=checkpoint, seed=7)
    assert "was written with --seq-length 16, this run has 8" in refused(resume=checkpoint, seq_length=8)
    assert "is not the checkpoint of a run: the newest in --out is" in refused(resume=str(out))
    other = write_jsonl(source / "other.jsonl", [{"text": "a"}])
    assert "other.jsonl" in refused(resume=checkpoint, data=[other])
    message = ranks.run(
        run_refused, TrainOptions.from_mapping({**options.to_mapping(), "resume": checkpoint, "tp": 2, "seed": 7})
    )
    assert all("was written with --seed 0, this run has 7" in each for each in message)
    said = "was written with 4 sequences in a step (--dp x --batch-size x --grad-accum: [1, 2, 2]), this run has 8 ([1, 2, 4])"
    assert said in refused(resume=checkpoint, grad_accum=4)
    (tmp_path / "older" / "checkpoint-7").mkdir(parents=True)
    for other in (None, "auto"):
        said = refused(resume=other, out=str(tmp_path / "older"))
        assert "holds no whole checkpoint: " in said and "checkpoint-7 is not a whole training state" in said
        assert "holds a model, which this run would write over" in refused(resume=other, out=str(source))
    (out / "checkpoint-4").mkdir()
    shutil.copytree(checkpoint, out / "checkpoint-3")
    shard = out / "checkpoint-3" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:1000])
    assert f"{shard} has 1000 bytes instead of" in refused(resume=str(shard.parent))
    with pytest.warns(UserWarning, match=r"going on from .*checkpoint-2; passed over: .*checkpoint-4.*checkpoint-3"):
        assert train(TrainOptions.from_mapping({**options.to_mapping(), "resume": "auto"})).steps == 2


def run_refused(group, options):
    with pytest.raises(AutoTPError) as info:
        train(options, None, group)
    return str(info.value)


def test_a_failed_write_leaves_the_older_checkpoint(source, tmp_path, monkeypatch):
    options = make_options(source, tmp_path / "out", tp=1, save_every=1, steps=1)
    losses = train(options).losses
    before = (tmp_path / "out" / "checkpoint-1" / "state.json").read_bytes()
    again = TrainOptions.from_mapping({**options.to_mapping(), "steps": 2, "resume": "auto"})
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            train(again)
    assert (tmp_path / "out" / "checkpoint-1" / "state.json").read_bytes() == before
    assert not (tmp_path / "out" / "checkpoint-2").exists()
    assert train(again).steps == 2 and len(losses) == 1


def test_a_second_interrupt_does_not_wait():
    handler = signal.getsignal(signal.SIGINT)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.seen
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is handler


# -- numbers that are none ------------------------------------------------------------------------------------------------


class Fake(nn.Module):
    """Its loss is nan for a batch with token 7, and its gradient is inf for one with token 8."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=dtype))

    def forward(self, input_ids, labels):
        loss = self.weight.float().sum()
        if (input_ids == 7).any():
            loss = loss * float("nan")
        if (input_ids == 8).any():
            loss = loss + (self.weight - self.weight.detach()).float().sum() * 1e38 * 1e38
        return type("Output", (), {"loss": loss})


def make_batch(token):
    ids = torch.tensor([[1, token, 3]])
    return {"input_ids": ids, "labels": ids}


def take(tokens, number, places=None):
    model = Fake()
    stepper = Stepper(model, MasterOptimizer(model, 0.1), places or Places.alone(torch.device("cpu")), 1.0)
    with pytest.raises(NonFiniteLossError) as info:
        stepper.take([make_batch(token) for token in tokens], number)
    assert (model.weight == 1).all()
    return info.value


def run_nan(group, tokens):
    mesh = grid()
    tp, dp = (TPGroup(mesh[name].get_group(), torch.device("cpu")) for name in ("tp", "dp"))
    error = take(tokens[dp.tp_rank], 2, Places(tp, dp))
    return error.step, error.batch


def test_a_loss_that_is_none_stops_with_its_step_and_batch(ranks):
    error = take([1, 2, 7], 5)
    assert (error.step, error.batch) == (5, 14) and "the loss is nan in batch 14 (data rank 0) of step 5" in str(error)
    assert (error := take([1, 8], 3)).batch == 4 and "norm is inf in batches 4 to 5 of step 3" in str(error)
    # Of step 2's micro-batches, numbered over both data ranks, the second of rank 1.
    assert ranks.run(run_nan, [[1, 2], [3, 7]], size=4) == [(2, 7)] * 4


def run_exploding(group, options):
    with pytest.raises(NonFiniteLossError) as info:
        train(options, None, group)
    return info.value.step, str(info.value)


def test_a_run_that_explodes_stops_on_all_ranks(ranks, source, tmp_path):
    options = make_options(source, tmp_path / "out", lr=1e30, warmup=0, clip=0.0)
    found = ranks.run(run_exploding, options)
    assert found[0] == found[1] and found[0][0] == 2 and "Lower the learning rate" in found[0][1]
    assert not (tmp_path / "out" / "config.json").exists()


def test_an_overflow_of_the_scale_is_skipped(monkeypatch):
    monkeypatch.setattr(optimizer_file, "GROW_AFTER", 2)
    model = Fake(torch.float16)
    optimizer = MasterOptimizer(model, 0.1)
    stepper = Stepper(model, optimizer, Places.alone(torch.device("cpu")), 0.0)
    assert optimizer.scale == 2.0**16
    optimizer.scale = 2.0**18  # float16 ends at 65504
    stepper.take([make_batch(1)], 1)
    assert (model.weight == 1).all() and optimizer.scale == 2.0**17
    while optimizer.scale > 2.0**15:
        stepper.take([make_batch(1)], 1)
    assert (model.weight == 1).all()
    stepper.take([make_batch(1)], 2)
    assert not (model.weight == 1).any() and optimizer.scale == 2.0**15
    stepper.take([make_batch(1)], 3)
    assert optimizer.scale == 2.0**16
