"""`train` over ranks beside a plain loop on the unsharded model, for each option that changes numbers."""

import dataclasses
import json
import math
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

import autotp
from autotp.comm import TPGroup
from autotp.errors import AutoTPError
from autotp.train.batches import TrainBatches
from autotp.train.encode import Encoder
from autotp.train.run import train
from autotp.train.sequences import SequenceStream, ShuffledSequences
from tests.ranks import grid
from tests.train.test_data import FORMATS, write
from tests.train.tiny import make_options, make_texts, make_tokenizer, run_ranks

UNEQUAL = dict(packing=False, grad_accum=2, clip=0.0)
CASES = {
    "packing": dict(clip=0.0, betas=(0.8, 0.9)),
    "cosine, warm-up, clipping": dict(lr_schedule="cosine", warmup=2, clip=0.3),
    "linear, share of warm-up, weight decay": dict(lr_schedule="linear", warmup=0.25, weight_decay=0.5, steps=5),
    "constant, warm-up": dict(warmup=3),
    "padding, accumulation with unequal tokens": UNEQUAL,
    "completions only": dict(**UNEQUAL, completions_only=True, data="chats"),
    "gradient checkpointing": dict(gradient_checkpointing=True, clip=0.0, seq_length=24),
}


# -- the plain loop -------------------------------------------------------------------------------------------------------


def draw_batches(options, micros):
    """Each step's micro-batches, in the order that tests of the data have shown."""
    encoder = Encoder(make_tokenizer(), options.completions_only)
    stream = SequenceStream(options.data, encoder, options.seq_length, options.packing, options.seed)
    sequences = ShuffledSequences(stream, options.seed)
    return TrainBatches(sequences, options.batch_size, micros, 0, 1, encoder.pad, not options.packing)


def rate(options, step):
    """The learning rate of a step, from 0."""
    warmup = math.ceil(options.warmup * options.steps) if options.warmup < 1 else options.warmup
    if step < warmup:
        return options.lr * step / warmup
    done = (step - warmup) / max(1, options.steps - warmup)
    return options.lr * {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[options.lr_schedule]


def sum_of_losses(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits.float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")


def train_plainly(options, micros):
    """The unsharded model in float32: losses, norms, rates, and the trained model."""
    model = LlamaForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    named = dict(model.named_parameters())
    plain = {name for name in named if "norm" in name}
    groups = [
        {"params": [named[name] for name in named if name not in plain], "weight_decay": options.weight_decay},
        {"params": [named[name] for name in plain], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps)
    batches, seen = draw_batches(options, micros), []
    for step in range(options.steps):
        taken = batches.next_step()
        labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in taken)
        loss = sum(sum_of_losses(model, batch) for batch in taken) / labels
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip or math.inf)
        for group in adamw.param_groups:
            group["lr"] = rate(options, step)
        adamw.step()
        adamw.zero_grad()
        seen.append((loss.item(), norm.item(), rate(options, step)))
    return seen, model


def compare(options, results, micros):
    """What the ranks did and saved is what the plain loop does."""
    seen, model = train_plainly(options, micros)
    events = results[0][1]
    assert [event["step"] for event in events] == list(range(1, options.steps + 1))
    for event, (loss, norm, lr) in zip(events, seen, strict=True):
        assert event["loss"] == pytest.approx(loss, rel=2e-5)
        assert event["grad_norm"] == pytest.approx(norm, rel=2e-4)
        assert event["lr"] == pytest.approx(lr)
    assert all(result.losses == results[0][0].losses for result, _ in results)
    assert not any(others for _, others in results[1:])  # told by the main rank only
    saved = LlamaForCausalLM.from_pretrained(options.out, dtype=torch.float32)
    for (name, mine), theirs in zip(saved.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=0, msg=name)
    assert saved.config.use_cache is True


@pytest.mark.parametrize("case", CASES)
def test_equals_the_plain_loop(ranks, source, tmp_path, case):
    options = make_options(source, tmp_path / "out", **CASES[case])
    compare(options, ranks.run(run_ranks, options), options.grad_accum)


def test_two_data_ranks_equal_the_plain_loop(ranks, source, tmp_path):
    """Each has as many micro-batches as half of the plain loop's, with other numbers of tokens."""
    options = make_options(source, tmp_path / "out", dp=2, **{**UNEQUAL, "clip": 0.3})
    compare(options, ranks.run(run_ranks, options, True, size=4), 2 * options.grad_accum)


def run_seeds(group, options):
    train(options, None, grid())
    return torch.initial_seed()


def test_the_ranks_of_a_model_draw_alike_and_those_of_other_data_differently(ranks, source, tmp_path):
    options = make_options(source, tmp_path / "out", dp=2, steps=1, seed=5)
    assert ranks.run(run_seeds, options, size=4) == [5, 5, 6, 6]


def test_gradient_checkpointing_computes_again(source, tmp_path, monkeypatch):
    calls, attend = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *args, **kwargs: calls.append(1) or attend(*args, **kwargs)
    )

    def count(name, **given):
        calls.clear()
        train(make_options(source, tmp_path / name, tp=1, steps=2, **given))
        return len(calls)

    assert count("again", gradient_checkpointing=True) - count("kept") == 2 * 2


def test_evaluation_is_the_mean_over_all_tokens(ranks, source, tmp_path):
    given = dict(eval_data=f"{source}/other.jsonl", packing=False, eval_every=2, batch_size=3, steps=3, lr=0.0)
    options = make_options(source, tmp_path / "out", dp=2, **given)
    events = ranks.run(run_ranks, options, True, size=4)[0][1]
    model = LlamaForCausalLM.from_pretrained(source)
    stream = SequenceStream(options.eval_data, Encoder(make_tokenizer()), options.seq_length, packing=False)
    total, count = 0.0, 0
    for ids, labels in stream.one_pass():
        ids, labels = (torch.from_numpy(each).long()[None] for each in (ids, labels))
        total += sum_of_losses(model, {"input_ids": ids, "labels": labels}).item()
        count += labels.numel() - 1
    assert [event.get("eval_loss") for event in events] == [None, *[pytest.approx(total / count, rel=1e-5)] * 2]


def test_epochs_see_everything(source, tmp_path):
    stream = SequenceStream((f"{source}/texts.jsonl",), Encoder(make_tokenizer()), 16)
    result = train(make_options(source, tmp_path / "out", tp=1, steps=None, epochs=2, batch_size=3))
    assert result.steps == math.ceil(2 * stream.count() / 3)


# -- 16 bits ------------------------------------------------------------------------------------------------------------


def train_in_bfloat16(options):
    """A bfloat16 model, gradients summed up and applied in float32, or in bfloat16 without masters: losses and model."""
    model = LlamaForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    autotp.parallelize(model, TPGroup(None, torch.device("cpu")))  # whose fused forwards round less often
    wide = torch.float32 if options.master_weights else torch.bfloat16
    masters = [torch.nn.Parameter(param.detach().clone().to(wide)) for param in model.parameters()]
    adamw = torch.optim.AdamW(masters, lr=options.lr, eps=options.eps, weight_decay=0.0)
    batches, losses = draw_batches(options, options.grad_accum), []
    for _ in range(options.steps):
        taken = batches.next_step()
        labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in taken)
        losses.append(0.0)
        for batch in taken:
            loss = sum_of_losses(model, batch) / labels
            loss.backward()
            losses[-1] += loss.item()
            for param, master in zip(model.parameters(), masters, strict=True):
                master.grad = param.grad.to(wide) + (0 if master.grad is None else master.grad)
                param.grad = None
        adamw.step()
        adamw.zero_grad()
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.copy_(master)
    return losses, model


def test_bfloat16_with_float32_masters(ranks, source, tmp_path):
    given = dict(dtype="bfloat16", lr=4e-4, eps=1e-8, steps=8, grad_accum=2, clip=0.0)
    whole = make_options(source, tmp_path / "whole", tp=1, **given)
    losses, model = train_in_bfloat16(whole)
    norms = []
    result = train(whole, lambda event: norms.append(event["grad_norm"]))
    assert result.losses == pytest.approx(losses, rel=1e-4)
    saved = LlamaForCausalLM.from_pretrained(whole.out)
    assert saved.dtype == torch.bfloat16
    start = LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    pairs = list(zip(saved.parameters(), model.parameters(), start.parameters(), strict=True))
    differing = sum(int((mine != theirs).sum()) for mine, theirs, _ in pairs)
    moved = sum(int((mine != first).sum()) for mine, _, first in pairs)
    assert differing < 0.02 * moved
    split = make_options(source, tmp_path / "split", **given)
    halves, events = ranks.run(run_ranks, split)[0]
    assert halves.losses == pytest.approx(losses, rel=3e-3)
    assert [event["grad_norm"] for event in events] == pytest.approx(norms, rel=2e-2)
    assert not (saved.model.norm.weight == 1).all()
    without = make_options(source, tmp_path / "without", **{**given, "master_weights": False})
    expected, _ = train_in_bfloat16(without)
    halves, _ = ranks.run(run_ranks, without)[0]
    assert halves.losses == pytest.approx(expected, rel=3e-3)
    # Norms, which are 1, can't move by 4e-4 in bfloat16.
    assert (LlamaForCausalLM.from_pretrained(without.out).model.norm.weight == 1).all()


def test_float16_scales_its_loss(ranks, source, tmp_path):
    given = dict(lr=1e-3, eps=1e-8, steps=5, clip=0.5)
    half = ranks.run(run_ranks, make_options(source, tmp_path / "half", dtype="float16", **given))[0][0]
    seen, _ = train_plainly(make_options(source, tmp_path / "full", **given), 1)
    assert half.losses == pytest.approx([loss for loss, _, _ in seen], rel=5e-3)


# -- data ---------------------------------------------------------------------------------------------------------------


def test_every_format_trains_alike(ranks, source, tmp_path):
    rows = [{"text": text} for text in make_texts(60)]
    losses = []
    for number, kind in enumerate(FORMATS):
        (tmp_path / kind).mkdir()
        options = make_options(source, tmp_path / f"out{number}", steps=2)
        options = dataclasses.replace(options, data=(write(tmp_path / kind, kind, rows),))
        losses.append(ranks.run(run_ranks, options)[0][0].losses)
    assert len(losses) == 4 and losses == losses[:1] * 4
    (tmp_path / "text.txt").write_text("\n".join(make_texts(60)))
    options = dataclasses.replace(make_options(source, tmp_path / "text"), data=(str(tmp_path / "text.txt"),))
    compare(options, ranks.run(run_ranks, options), 1)


# -- what else --------------------------------------------------------------------------------------------------------------


def test_events_are_logged(source, tmp_path):
    options = make_options(source, tmp_path / "out", tp=1, steps=2, log=str(tmp_path / "logs" / "log.jsonl"))
    events = []
    train(options, events.append)
    assert [json.loads(line) for line in (tmp_path / "logs" / "log.jsonl").read_text().splitlines()] == events
    wanted = {"step", "steps", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "mfu", "memory_gib"}
    assert set(events[0]) == wanted and events[0]["tokens"] == 32 and events[0]["mfu"] is None and events[0]["memory_gib"] > 0


def test_events_are_written_for_tensorboard(source, tmp_path, monkeypatch):
    options = make_options(source, tmp_path / "out", tp=1, steps=2, tensorboard=str(tmp_path / "board"))
    name = "torch.utils.tensorboard.writer"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(AutoTPError, match="--tensorboard needs a package: pip install tensorboard"):
        train(options)
    scalars = []

    class Writer:
        def __init__(self, directory):
            scalars.append(directory)

        def add_scalar(self, key, value, step):
            scalars.append((key, value, step))

        def close(self):
            scalars.append("closed")

    for each in ("torch.utils.tensorboard", name):
        monkeypatch.setitem(sys.modules, each, types.SimpleNamespace(SummaryWriter=Writer))
    losses = train(options).losses
    assert scalars[0] == options.tensorboard and scalars[-1] == "closed"
    assert [(value, step) for key, value, step in scalars[1:-1] if key == "loss"] == [(losses[0], 1), (losses[1], 2)]
    assert all(isinstance(value, int | float) for _, value, _ in scalars[1:-1])


def test_a_given_plan_is_used(ranks, source, tmp_path):
    from transformers import AutoConfig

    import autotp

    (tmp_path / "plan.json").write_text(autotp.make_plan(AutoConfig.from_pretrained(source), 2).to_json())
    options = make_options(source, tmp_path / "out", steps=2, plan=str(tmp_path / "plan.json"))
    compare(options, ranks.run(run_ranks, options), 1)
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(AutoTPError, match=r"--plan .*plan\.json"):
        train(make_options(source, tmp_path / "out2", tp=1, plan=str(tmp_path / "plan.json")))


@pytest.mark.parametrize(
    "given, said",
    [
        (dict(tp=2), "there is no process group"),
        (dict(tp=1, data="typo"), "--data .*typo.jsonl: there is no such file"),
        (dict(tp=1, model="nowhere"), "can't read the config of nowhere, neither a directory with one nor a hub id"),
        (dict(tp=1, seq_length=100000), "no whole sequence of 100000 tokens.*smaller --seq-length"),
    ],
)
def test_mistakes_are_named(source, tmp_path, given, said):
    with pytest.raises(AutoTPError, match=said):
        train(make_options(source, tmp_path / "out", **given))
