"""Two, four and eight GPUs over NCCL against the unsharded model on one; skipped where there are fewer."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 400


@pytest.mark.parametrize("count", [2, 4, 8])
def test_gpus(count):
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command = [*launcher, "tests/gpu/two_gpus.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "4", "HF_HUB_OFFLINE": "1"}
    # torchrun ends the other ranks when one exits; the limit ends all when they wait for each other.
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"not done within {LIMIT_S} s\n{output}")
    print("\n".join(line for line in output.splitlines() if line.startswith("CHECK")))
    assert process.returncode == 0, output
