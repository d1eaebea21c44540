"""Errors of the fused operations on a GPU, and that none of our kernels leaves its tensors; skipped where there is none."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = [sys.executable, "tests/gpu/kernel_errors.py"]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def run(command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    print(found.stdout[-6000:])
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]


def test_errors_are_at_most_twice_those_of_pytorch():
    run(SCRIPT)


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
def test_compute_sanitizer_finds_nothing():
    run(["compute-sanitizer", "--error-exitcode", "9", *SCRIPT, "--launch"])
