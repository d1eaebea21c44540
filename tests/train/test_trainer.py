"""transformers' Trainer and accelerate on a parallelized model: the steps, the checkpoints and what they say when misused.

Both take the whole job for theirs, so tests start jobs of their own: this file is also the script that torchrun runs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from transformers import LlamaConfig, LlamaForCausalLM

from autotp.errors import AutoTPError, CheckpointError, GatherError

ROOT = Path(__file__).parent.parent.parent


def build():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return LlamaForCausalLM(config)


def make_data():
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 64, (7,), generator=generator) for _ in range(16)]
    return [{"input_ids": row, "labels": row} for row in rows]


def launch(scenarios, directory, size):
    """Run scenarios of this file, one after the other, on `size` ranks; 0 runs them unsharded, without a launcher."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command = (command if size else [sys.executable]) + [__file__, scenarios, str(directory)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


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


def make_trainer(model, directory):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        adam_epsilon=1e-3,  # the first steps are not signs of gradients near 0
        max_grad_norm=0.5,
        save_steps=1,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return Trainer(model=model, args=arguments, train_dataset=make_data())


def can_resume(trainer):
    """transformers 5.17 can't load any optimizer state in a job of several CPU ranks (a location named "cpu:0")."""
    return trainer.args.world_size == 1 or Version(transformers.__version__) >= Version("5.24")


def run_trainer(directory, parallelize):
    trainer = make_trainer(parallelize(build()), directory)
    trainer.train()
    trainer.save_model(str(directory / "final"))
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    if trainer.args.should_save:
        (directory / "log.json").write_text(json.dumps({"losses": losses, "norms": norms}))
    if not can_resume(trainer):
        return
    resumed = make_trainer(parallelize(build()), directory / "resumed")
    resumed.train(resume_from_checkpoint=str(directory / "checkpoint-1"))
    resumed.save_model(str(directory / "resumed-final"))
    assert resumed.state.global_step == 2


def test_trainer_equals_the_unsharded_run(tmp_path):
    launch("trainer", tmp_path / "plain", 0)
    launch("trainer", tmp_path / "tp", 2)
    plain, tp = tmp_path / "plain", tmp_path / "tp"
    logs = [json.loads((path / "log.json").read_text()) for path in (plain, tp)]
    for key in ("losses", "norms"):
        assert len(logs[0][key]) == 2 and logs[0][key] == pytest.approx(logs[1][key], rel=1e-3)
    assert_same_weights(plain / "final", tp / "final")
    if Version(transformers.__version__) >= Version("5.24"):  # see can_resume
        assert_same_weights(plain / "resumed-final", tp / "resumed-final")
        assert_same_weights(tp / "final", tp / "resumed-final")
    for name in ("config.json", "generation_config.json"):
        assert (plain / "final" / name).read_text() == (tp / "final" / name).read_text()


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
    accelerator.free_memory()
    type(accelerator.state)._reset_state(reset_partial_state=True)  # the next scenario names its own parallelism


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
    accelerator.save_state(str(directory / "state"))
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


def check_generation(model, full):
    """A static cache has as many heads as this rank holds, whatever transformers would guess."""
    prompt = make_data()[0]["input_ids"][None]
    for options in ({}, {"cache_implementation": "static"}):
        with torch.no_grad():
            mine, theirs = (m.eval().generate(prompt, max_new_tokens=6, do_sample=False, **options) for m in (model, full))
        assert torch.equal(mine, theirs)


def test_accelerate_names_misuse_and_equals_the_unsharded_run(tmp_path):
    launch("misuse,accelerate", tmp_path, 2)
    assert_same_weights(tmp_path / "final", tmp_path / "idiom", 0)
    assert "distributed_config" not in (tmp_path / "final" / "config.json").read_text()
    from safetensors.torch import load_file

    whole = LlamaForCausalLM.from_pretrained(tmp_path / "final").state_dict()
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(saved[name], whole[name]) for name in saved) and len(saved) >= len(whole) - 1


def main():
    scenarios, directory = sys.argv[1].split(","), Path(sys.argv[2])
    if "RANK" in os.environ:
        from autotp import parallelize
    else:

        def parallelize(model):
            return model

    for scenario in scenarios:
        {"trainer": run_trainer, "accelerate": run_accelerate, "misuse": run_misuse}[scenario](directory, parallelize)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
