"""transformers' Trainer, TRL's and accelerate on a parallelized model: steps, checkpoints and what they say when misused.

All take the whole job for theirs, so tests start jobs of their own: this file is also the script that their ranks run.
"""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from transformers import LlamaConfig, LlamaForCausalLM

from autotp.errors import AutoTPError, CheckpointError, GatherError
from tests.jobs import run_job
from tests.train.tiny import make_texts, make_tokenizer


def build(vocab_size=64):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def make_data(count=16, seed=1):
    """Rows of 4 to 9 tokens, padded to 9."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for length in torch.randint(4, 10, (count,), generator=generator).tolist():
        ids, mask = torch.randint(0, 64, (9,), generator=generator), torch.arange(9) < length
        rows.append({"input_ids": ids * mask, "attention_mask": mask.long(), "labels": ids.where(mask, -100)})
    return rows


def launch(scenarios, directory, size):
    """Run scenarios of this file, one after the other, on `size` ranks; 0 runs them unsharded, without a launcher."""
    directory.mkdir(exist_ok=True)
    return run_job(__file__, scenarios, directory, cwd=directory, size=size)


def assert_same_weights(one, other, tolerance=1e-5):
    mine, theirs = (LlamaForCausalLM.from_pretrained(path).state_dict() for path in (one, other))
    assert list(mine) == list(theirs)
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], atol=tolerance, rtol=0, msg=name)


def refused(error, function, *args, **kwargs):
    with pytest.raises(error) as info:
        function(*args, **kwargs)
    return str(info.value)


# -- Trainer ------------------------------------------------------------------------------------------------------------


def choose_arguments(cls, directory, **more):
    copies = max(int(os.environ.get("WORLD_SIZE", 1)) // 2, 1)
    options = dict(
        output_dir=str(directory),
        max_steps=3,
        per_device_train_batch_size=2 // copies,
        per_device_eval_batch_size=4 // copies,
        gradient_accumulation_steps=2,
        learning_rate=3e-2,
        adam_epsilon=1e-3,  # the first steps are not signs of gradients near 0
        max_grad_norm=0.5,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return cls(**{**options, **more})


def count_right(prediction):
    """Of whole logits, each sample once."""
    right = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
    assert prediction.predictions.shape == (7, 9, 64)
    return {"right": int((right & (prediction.label_ids[:, 1:] >= 0)).sum())}


def make_trainer(model, directory, **more):
    from transformers import Trainer, TrainingArguments

    saving = dict(save_strategy="steps", save_steps=1, load_best_model_at_end=True, metric_for_best_model="loss")
    arguments = choose_arguments(TrainingArguments, directory, **saving, **more)
    data = dict(train_dataset=make_data(), eval_dataset=make_data(7, 2))
    return Trainer(model=model, args=arguments, compute_metrics=count_right, **data)


def can_resume(trainer):
    """transformers 5.17 can't load any optimizer state in a job of several CPU ranks (a location named "cpu:0")."""
    return trainer.args.world_size == 1 or Version(transformers.__version__) >= Version("5.24")


def write_log(trainer, path):
    """What was logged, less times and rates."""
    keep = lambda key: not key.endswith(("runtime", "per_second", "total_flos"))  # noqa: E731
    if trainer.args.should_save:
        rows = [{key: value for key, value in row.items() if keep(key)} for row in trainer.state.log_history]
        path.write_text(json.dumps(rows))


def run_trainer(directory, parallelize):
    """Losses that grow again at a high rate: the best state is not the last, and the one saved at the end."""
    trainer = make_trainer(parallelize(build()), directory)
    trainer.train()
    trainer.save_model(str(directory / "final"))
    trainer.evaluate()
    write_log(trainer, directory / "log.json")
    if not can_resume(trainer):
        return
    again = make_trainer(parallelize(build()), directory / "resumed")
    again.train(resume_from_checkpoint=str(directory / "checkpoint-1"))
    again.save_model(str(directory / "resumed-final"))
    assert again.state.global_step == 3


def compare_logs(one, other, rows, less=()):
    logs = [json.loads((path / "log.json").read_text()) for path in (one, other)]
    assert len(logs[0]) == len(logs[1]) == rows
    for mine, theirs in zip(*logs, strict=True):
        mine, theirs = ({key: row[key] for key in row if key not in less} for row in (mine, theirs))
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    return logs[0]


def test_trainer_equals_the_unsharded_run(tmp_path):
    """Over two ranks, and over two copies of two ranks each."""
    plain = tmp_path / "plain"
    launch("trainer,sft", plain, 0)
    for name, size in (("tp", 2), ("copies", 4)):
        tp = tmp_path / name
        launch("trainer,sft", tp, size)
        # Copies of the model fill up the last batch, in Trainer's eval_loss too: see test_trainer_sizes.py.
        less = {"eval_loss"} if name == "copies" else ()
        log = compare_logs(plain, tp, 8, less)
        assert {"loss", "grad_norm"} <= set(log[0]) and "eval_right" in log[1]
        assert compare_logs(plain / "sft", tp / "sft", 5, less)[0].keys() >= {
            "loss",
            "entropy",
            "mean_token_accuracy",
            "num_tokens",
        }
        for part in ("final", "sft/checkpoint-2"):
            assert_same_weights(plain / part, tp / part)
        if Version(transformers.__version__) >= Version("5.24"):  # see can_resume
            assert_same_weights(plain / "resumed-final", tp / "resumed-final")
            assert_same_weights(tp / "final", tp / "resumed-final")
        for each in ("config.json", "generation_config.json"):
            assert (plain / "final" / each).read_text() == (tp / "final" / each).read_text()


# -- TRL ----------------------------------------------------------------------------------------------------------------


def run_sft(directory, parallelize):
    """Its loss and metrics are made from the head's weight, which it reads itself."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    texts = Dataset.from_list([{"text": text} for text in make_texts(20)])
    arguments = choose_arguments(
        SFTConfig, directory / "sft", max_steps=2, max_length=24, bf16=False, save_strategy="steps", save_steps=2
    )
    data = dict(train_dataset=texts, eval_dataset=texts.select(range(4)), processing_class=make_tokenizer())
    trainer = SFTTrainer(model=parallelize(build(320)), args=arguments, **data)
    trainer.train()
    write_log(trainer, directory / "sft" / "log.json")


# -- misuse -------------------------------------------------------------------------------------------------------------


def run_misuse(directory, parallelize):
    from accelerate import Accelerator

    model = parallelize(build(), timeout_s=2)
    accelerator = Accelerator(cpu=True)
    assert "ParallelismConfig(tp_size=2)" in refused(AutoTPError, accelerator.prepare, model)
    rank = dist.get_rank()
    if rank == 0:  # the usual mistake
        text = refused(GatherError, model.save_pretrained, str(directory / "alone"))
        assert "rank(s) [1] did not come within 2 s" in text and not (directory / "alone" / "config.json").exists()
    dist.barrier()
    forget(accelerator)


def forget(accelerator):
    """The next scenario names its own parallelism."""
    accelerator.free_memory()
    type(accelerator.state)._reset_state(reset_partial_state=True)


# -- accelerate ---------------------------------------------------------------------------------------------------------


def run_accelerate(directory, parallelize):
    from accelerate import Accelerator, ParallelismConfig

    from autotp import full_state_dict, unshard

    full, model = build(), parallelize(build())
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(make_data(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    reference = torch.optim.AdamW(full.parameters(), lr=1e-2)
    expected = list(torch.utils.data.DataLoader(make_data(), batch_size=2))

    def step(batch, theirs):
        assert torch.equal(batch["input_ids"], theirs["input_ids"])  # all TP ranks get one batch
        accelerator.backward(model(**batch).loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        full(**theirs).loss.backward()
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(full.parameters(), 0.5), rtol=1e-4, atol=0)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()

    batches = list(zip(loader, expected, strict=True))
    step(*batches[0])
    if dist.get_rank() == 0:  # which writes
        accelerator.register_save_state_pre_hook(lambda *_: time.sleep(1))
    accelerator.save_state(str(directory / "state"))
    accelerator.load_state(str(directory / "state"))
    step(*batches[1])

    rank = dist.get_rank()
    state = accelerator.get_state_dict(model)
    assert bool(state) == (rank == 0)
    for name, value in state.items():
        torch.testing.assert_close(value, full.state_dict()[name], atol=1e-5, rtol=0)
    accelerator.save_model(model, str(directory / "model"))
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        str(directory / "idiom"),
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    unwrapped.save_pretrained(str(directory / "final"))
    assert "leave state_dict out" in refused(
        CheckpointError, unwrapped.save_pretrained, str(directory / "no"), state_dict=unwrapped.state_dict()
    )

    accelerator.load_state(str(directory / "state"))  # back to after the first step, each rank with its own moments
    accelerator.backward(model(**batches[1][0]).loss)
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    again = full_state_dict(model)
    assert set(again) == set(state)
    for name, value in again.items():
        torch.testing.assert_close(value, state[name], atol=1e-6, rtol=0)

    check_generation(unwrapped, full)
    unshard(model)


def run_saves(directory, parallelize):
    """One or two copies of a model, as accelerate prepares them: each way out gives the unsharded model, or is refused."""
    from accelerate import Accelerator, ParallelismConfig
    from safetensors.torch import load_file

    import autotp

    rank, size = dist.get_rank(), dist.get_world_size()
    full, model = build(), parallelize(build())
    config = ParallelismConfig(tp_size=2, dp_shard_size=size // 2)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", parallelism_config=config)
    prepared, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert isinstance(prepared, torch.nn.parallel.DistributedDataParallel) == (size > 2)
    whole = full.state_dict()

    def compare(state, prefix=""):
        assert {prefix + name for name in whole} - {prefix + "lm_head.weight"} <= set(state) <= {prefix + name for name in whole}
        assert all(torch.equal(value, whole[name.removeprefix(prefix)]) for name, value in state.items())

    unwrapped, main = accelerator.unwrap_model(prepared), accelerator.is_main_process
    assert unwrapped is model
    ways = {
        "own": lambda to: autotp.save_pretrained(prepared, to),
        "model": lambda to: unwrapped.save_pretrained(to),
        "idiom": lambda to: unwrapped.save_pretrained(
            to, is_main_process=main, save_function=accelerator.save, state_dict=accelerator.get_state_dict(prepared)
        ),
        "short": lambda to: unwrapped.save_pretrained(to, is_main_process=main, save_function=accelerator.save),
    }
    for name, save in ways.items():
        save(str(directory / name))
        dist.barrier()
        compare(LlamaForCausalLM.from_pretrained(directory / name).state_dict())
    accelerator.save_model(prepared, str(directory / "weights"))
    dist.barrier()
    compare(load_file(directory / "weights" / "model.safetensors"))

    inside = "module." if size > 2 else ""
    for state, prefix in (
        (accelerator.get_state_dict(prepared), ""),
        (accelerator.get_state_dict(prepared, unwrap=False), inside),
        (autotp.full_state_dict(prepared), ""),
    ):
        assert bool(state) == (rank % 2 == 0)
        if state:
            compare(state, prefix)
    for state in (prepared.state_dict(), {"model": model.model.layers[0].state_dict(), "step": 1}):
        assert "accelerator.get_state_dict(model)" in refused(CheckpointError, accelerator.save, state, directory / "part.pt")
    assert not (directory / "part.pt").exists()
    accelerator.save({"step": 1, "loss": torch.ones(2)}, directory / "other.pt")
    forget(accelerator)


def check_generation(model, full):
    """A static cache has as many heads as this rank holds, whatever transformers would guess."""
    prompt = make_data()[0]["input_ids"][None]
    for options in ({}, {"cache_implementation": "static"}):
        with torch.no_grad():
            mine, theirs = (m.eval().generate(prompt, max_new_tokens=6, do_sample=False, **options) for m in (model, full))
        assert torch.equal(mine, theirs)


def run_copies(directory, parallelize):
    """A script without seeds whose Accelerator is there first: one or two copies of a model, accumulation, metrics."""
    from accelerate import Accelerator, ParallelismConfig

    import autotp

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    config = ParallelismConfig(tp_size=2, dp_shard_size=size // 2)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, parallelism_config=config)
    rows = torch.randint(0, 64, (16, 9), generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(rows, batch_size=8 // size, shuffle=True)
    full, model = build(), parallelize(build())
    optimizer, reference = (torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3) for each in (model, full))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        seen.append(accelerator.gather_for_metrics(batch))
        (full(input_ids=seen[-1], labels=seen[-1]).loss / 2).backward()
        if accelerator.sync_gradients:
            wanted = torch.nn.utils.clip_grad_norm_(full.parameters(), 0.5)
            torch.testing.assert_close(norm, wanted, rtol=1e-4, atol=0)
            reference.step()
            reference.zero_grad()
    assert len(seen) == 4 and sorted(torch.cat(seen).tolist()) == sorted(rows.tolist())
    for name, value in autotp.full_state_dict(accelerator.unwrap_model(model)).items():
        torch.testing.assert_close(value, full.state_dict()[name], atol=1e-5, rtol=0, msg=name)
    numbers, words = [], []
    for batch in accelerator.prepare(torch.utils.data.DataLoader(range(7), batch_size=2)):
        numbers.append(accelerator.gather_for_metrics({"a": batch})["a"])
        words += accelerator.gather_for_metrics([str(number) for number in batch.tolist()])
    assert torch.cat(numbers).tolist() == list(range(7)) and words == list("0123456")
    assert accelerator.gather(torch.tensor(1)).tolist() == [1] * size
    if size > 2:
        stream = torch.utils.data.DataLoader(Stream(), batch_size=2)
        assert "dispatch_batches=False" in refused(AutoTPError, accelerator.prepare, stream)
    forget(accelerator)


def run_schedules(directory, parallelize):
    """Learning rates move once for each copy's batch, as accelerate's do unsharded, and not while gradients accumulate."""
    from accelerate import Accelerator, ParallelismConfig
    from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

    copies, kinds = dist.get_world_size() // 2, {}
    kinds["one cycle"] = lambda optimizer: OneCycleLR(optimizer, 1e-2, total_steps=4 * copies)  # raises behind its end
    kinds["halves"] = lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step)
    for linked in (True, False):
        config = ParallelismConfig(tp_size=2, dp_shard_size=copies)
        options = dict(gradient_accumulation_steps=2, step_scheduler_with_optimizer=linked)
        accelerator = Accelerator(cpu=True, parallelism_config=config, **options)
        model, other = parallelize(build()), torch.nn.Linear(1, 1)
        for make in kinds.values():
            optimizer, reference = (torch.optim.SGD(each.parameters(), lr=1.0) for each in (model, other))
            expected = make(reference)
            scheduler = accelerator.prepare(make(optimizer))  # before the model, as some scripts do
            prepared, optimizer = accelerator.prepare(model, optimizer)
            for turn in range(4):
                with accelerator.accumulate(prepared):
                    accelerator.backward(prepared(**row(0)).loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                for _ in range((copies if turn % 2 else 0) if linked else 1):
                    expected.step()
                assert scheduler.get_last_lr() == expected.get_last_lr()
            accelerator._schedulers[0].load_state_dict(scheduler.state_dict())
            accelerator.free_memory()
        forget(accelerator)


def row(number):
    return {name: value[None] for name, value in make_data()[number].items()}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(8))


def test_accelerate_trains_copies_and_counts_samples_once(tmp_path):
    launch("copies,saves,schedules", tmp_path, 4)


def test_accelerate_names_misuse_and_equals_the_unsharded_run(tmp_path):
    launch("misuse,copies,saves,schedules,accelerate", tmp_path, 2)
    assert_same_weights(tmp_path / "final", tmp_path / "idiom", 0)
    assert "distributed_config" not in (tmp_path / "final" / "config.json").read_text()
    from safetensors.torch import load_file

    whole = LlamaForCausalLM.from_pretrained(tmp_path / "final").state_dict()
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(saved[name], whole[name]) for name in saved) and len(saved) >= len(whole) - 1


SCENARIOS = {
    "trainer": run_trainer,
    "sft": run_sft,
    "misuse": run_misuse,
    "copies": run_copies,
    "accelerate": run_accelerate,
    "saves": run_saves,
    "schedules": run_schedules,
}


def main():
    scenarios, directory = sys.argv[1].split(","), Path(sys.argv[2])
    if "RANK" in os.environ:
        import autotp

        dist.init_process_group()
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))

        def parallelize(model, **options):
            return autotp.parallelize(model, mesh["tp"], **options)
    else:

        def parallelize(model):
            return model

    for scenario in scenarios:
        SCENARIOS[scenario](directory, parallelize)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
