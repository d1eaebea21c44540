"""transformers' Trainer on other numbers of ranks: checkpoints go on, and what evaluation says of copies of a model.

This file is also the script that its jobs run, as test_trainer.py is.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
import transformers
from packaging.version import Version

from tests.jobs import JobError, run_job
from tests.train.test_trainer import assert_same_weights, build, choose_arguments, make_data

NEW = Version(transformers.__version__) >= Version("5.24")  # older ones load no optimizer state on several CPU ranks


def launch(scenario, directory, size, tp, start=""):
    """Run a scenario of this file on `size` ranks with models over `tp` of them; 0: unsharded, as many ranks as there are."""
    directory.mkdir(exist_ok=True)
    return run_job(__file__, scenario, directory, tp, start, cwd=directory, size=size)


def make_trainer(model, directory, **more):
    arguments = choose_arguments(transformers.TrainingArguments, directory, **more)
    return transformers.Trainer(model=model, args=arguments, train_dataset=make_data(), eval_dataset=make_data(7, 2))


def train(model, directory, start):
    """Three steps, saved after each; or those behind the checkpoint `start`."""
    saving = dict(eval_strategy="no", save_strategy="steps", save_steps=1)
    trainer = make_trainer(model, directory, per_device_train_batch_size=2, **saving)
    trainer.train(resume_from_checkpoint=start or None)
    assert trainer.state.global_step == 3
    trainer.save_model(str(directory / "final"))


@pytest.mark.skipif(not NEW, reason="needs transformers 5.24 on CPU ranks")
def test_a_checkpoint_goes_on_at_another_tp_size(tmp_path):
    """Of two ranks on four, where key heads have copies, and on one; of an unsharded run on two."""
    two, plain = tmp_path / "two", tmp_path / "plain"
    launch("train", two, 2, 2)
    launch("train", plain, 0, 0)
    runs = [("four", two, 4, 4), ("one", two, 1, 1), ("cut", plain, 2, 2)]
    for name, origin, size, tp in runs:
        launch("train", tmp_path / name, size, tp, origin / "checkpoint-1")
        assert_same_weights(origin / "final", tmp_path / name / "final")
    with pytest.raises(JobError, match="different number of parameter groups"):  # a script that never imports autotp
        launch("train", tmp_path / "unaware", 0, 0, two / "checkpoint-1")


def keep_best(model, directory, start):
    """Steps at a high rate, each saved and evaluated, two checkpoints kept; with `start`, two more steps behind it, one kept.

    Paths are relative, so that a copy of the directory is a run of its own.
    """
    best = dict(load_best_model_at_end=True, metric_for_best_model="loss", save_strategy="steps", save_steps=1)
    limit = dict(max_steps=5, save_total_limit=1) if start else dict(max_steps=3, save_total_limit=2)
    trainer = make_trainer(model, Path("run"), per_device_train_batch_size=2, **best, **limit)
    trainer.train(resume_from_checkpoint=start or None)
    trainer.save_model("final")
    if trainer.args.should_save:
        kept = sorted(path.name for path in Path("run").glob("checkpoint-*"))
        losses = [row[key] for row in trainer.state.log_history for key in ("loss", "eval_loss") if key in row]
        found = dict(kept=kept, best=trainer.state.best_model_checkpoint, step=trainer.state.global_step, losses=losses)
        Path("found.json").write_text(json.dumps(found))


def compare_kept(one, other):
    mine, theirs = (json.loads((path / "found.json").read_text()) for path in (one, other))
    assert mine.pop("losses") == pytest.approx(theirs.pop("losses"), rel=1e-3)
    assert mine == theirs
    assert_same_weights(one / "final", other / "final")
    return mine


def test_the_best_checkpoint_is_kept_and_loaded_at_any_size(tmp_path):
    """The checkpoints that an unsharded run keeps and deletes, and its weights; then from the last of them at another size."""
    plain, two = tmp_path / "plain", tmp_path / "two"
    launch("keep_best", plain, 0, 0)
    launch("keep_best", two, 2, 2)
    found = compare_kept(two, plain)
    assert found["kept"] == ["checkpoint-1", "checkpoint-3"] and found["best"].endswith("checkpoint-1")  # not the last
    if not NEW:
        return
    runs = {"plain on": (plain, 0, 0), "four": (two, 4, 4), "one": (two, 1, 1), "plain on two": (plain, 2, 2)}
    for name, (origin, size, tp) in runs.items():
        shutil.copytree(origin, tmp_path / name)
        launch("keep_best", tmp_path / name, size, tp, "run/checkpoint-3")
        found = compare_kept(tmp_path / name, tmp_path / "plain on")
        assert found["step"] == 5 and found["kept"] == [Path(found["best"]).name]


def evaluate(model, directory, rows):
    """The losses of 8 and of 7 samples of different lengths, `rows` to a batch of each copy."""
    trainer = make_trainer(model, directory, per_device_eval_batch_size=int(rows))
    losses = [trainer.evaluate(make_data(count, 2))["eval_loss"] for count in (8, 7)]
    if trainer.args.should_save:
        (directory / "losses.json").write_text(json.dumps(losses))


def test_copies_are_evaluated_as_transformers_evaluates_unsharded_copies(tmp_path):
    """Where the batches come out even that is an unsharded run's loss, with batches as large as all copies' together."""
    found = {}
    for name, size, tp, rows in (("plain", 0, 0, 4), ("tp", 2, 2, 4), ("copies", 4, 2, 2), ("unsharded copies", 2, 0, 2)):
        launch("evaluate", tmp_path / name, size, tp, rows)
        found[name] = json.loads((tmp_path / name / "losses.json").read_text())
    assert found["tp"] == pytest.approx(found["plain"], rel=1e-5)
    assert found["copies"] == pytest.approx(found["unsharded copies"], rel=1e-5)
    if NEW:  # older ones weigh the copies alike, however many tokens they have
        assert found["copies"][0] == pytest.approx(found["plain"][0], rel=1e-5)
    assert found["copies"][1] != pytest.approx(found["plain"][1], rel=1e-5)  # a sample twice in the last batch


def main():
    scenario, directory, tp, start = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    model = build()
    if "RANK" in os.environ:
        dist.init_process_group()
    if tp:
        import autotp

        mesh = dist.init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
        model = autotp.parallelize(model, mesh["tp"])
    {"train": train, "keep_best": keep_best, "evaluate": evaluate}[scenario](model, directory, start)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
