"""Every example runs as its first lines say, on tiny models of the same names, and what it saves loads in plain transformers."""

import os
import re
import subprocess
import sys

import pytest
from safetensors import safe_open

from tests.jobs import ROOT, run_job
from tests.shelf import make_shelf

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SHORT = [path for path in EXAMPLES if path.stem != "accelerate_checkpoint"]  # that one is run twice below


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return make_shelf(tmp_path_factory.mktemp("shelf"))


@pytest.mark.parametrize("example", SHORT, ids=lambda path: path.stem)
def test_example_runs(example, shelf):
    text = example.read_text()
    if "pip install bitsandbytes" in text:
        pytest.importorskip("bitsandbytes")
    ranks = int(re.search(r"--(?:nproc-per-node|num_processes) (\d+) examples/" + example.name, text)[1])
    run_job(example, cwd=shelf, size=ranks)
    check_saved(text, shelf)


def test_resume(shelf):
    """The script that saves states goes on from one in the midst of an epoch: the losses that the whole run had."""
    script = ROOT / "examples" / "accelerate_checkpoint.py"
    whole = re.findall(r"step \d: loss \S+", run_job(script, cwd=shelf)[0])
    assert len(whole) == 6 and re.findall(r"step \d: loss \S+", run_job(script, "resumed/step-4", cwd=shelf)[0]) == whole[4:]


def check_saved(text, shelf):
    """What is written under the names that end in `final` is whole: no shard's shape, no rank's file."""
    for name in set(re.findall(r'"([\w-]+/final)"', text)):
        files = sorted(path.name for path in (shelf / name).iterdir() if path.suffix == ".safetensors")
        assert files, name
        with safe_open(shelf / name / files[0], "pt") as file:
            assert file.keys()


def test_accelerate_launch(shelf):
    """One example under accelerate's own launcher, in half precision; elsewhere the ranks are started as torchrun does."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    command += ["--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += [str(ROOT / "examples" / "accelerate_loop.py"), "bf16"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    for _ in range(3):  # accelerate lets go of the free port that it found before rank 0 listens there
        done = subprocess.run(
            command, cwd=shelf, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=240
        )
        if "EADDRINUSE" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(r"epoch 1: loss \d", done.stdout)
