"""Training states: killed while they are written, and of a real model gone on from over other numbers of ranks.

    PYTHONPATH=. python scripts/state_check.py MODEL [--kills 20] [--out FILE.json]

| check | what must hold |
|---|---|
| killed, killed async | after one of two ranks that save step after step was killed at a random moment, all loads, bit for bit |
| sizes | losses of a run on 2 ranks, then 3, then 1 are those of an unbroken run on 1 rank, up to float32's noise |

and how long training waits for a save and for one beside it, and how long a load takes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autotp
from autotp import TrainingState
from autotp.checkpoint.state import find_newest
from autotp.comm import init_process_group_from_env
from autotp.train.launch import launch_ranks

WIDTH, LAYERS = 512, 24  # of the model that is killed: 75 MB with its optimizer's state
STEPS = 3  # on each number of ranks
BAR = 2e-3  # of a loss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory with safetensors")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--out", help="a JSON file to write")
    parser.add_argument("--saver", help=argparse.SUPPRESS)  # in a process of its own, whose ranks are killed
    args = parser.parse_args()
    if args.saver:
        launch_ranks(save_for_ever, 2, args.saver, args.model == "async")
        return 0
    report = {"killed": check_kills("sync", args.kills), "killed async": check_kills("async", args.kills)}
    report["sizes"] = check_sizes(args.model)
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        Path(args.out).write_text(text)
    return 0 if all(each["passed"] for each in report.values()) else 1


# -- killed ---------------------------------------------------------------------------------------------------------------


def make_plain() -> tuple[nn.Module, torch.optim.Optimizer, list[Tensor]]:
    """A model, its optimizer with state, and the tensors of both."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    return model, optimizer, find_tensors(model, optimizer)


def find_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [value for param in model.parameters() for value in optimizer.state[param].values()]
    return [*(param.detach() for param in model.parameters()), *state]


def fill(tensors: list[Tensor], step: int) -> None:
    """Values that this step alone has, on every rank."""
    generator = torch.Generator().manual_seed(step)
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))


def save_for_ever(out: str, beside: bool) -> None:
    """In a rank: save one step after another."""
    init_process_group_from_env()
    model, optimizer, tensors = make_plain()
    state = TrainingState(model, optimizer, dp=torch.distributed.group.WORLD)
    step = newest_step(out)
    torch.distributed.barrier()
    while True:
        step += 1
        fill(tensors, step)
        state.save(out, step, keep_last=2, async_save=beside)


def newest_step(out: str) -> int:
    newest, _ = find_newest(Path(out))
    return 0 if newest is None else int(newest.name.removeprefix("checkpoint-").removeprefix(".checkpoint-").removesuffix(".old"))


def check_kills(kind: str, count: int) -> dict[str, Any]:
    """Kill a rank of a saver `count` times, and load after each."""
    draw, steps, halves = random.Random(), [0], 0
    with tempfile.TemporaryDirectory() as out:
        for _ in range(count):
            command = [sys.executable, __file__, kind, "--saver", out]
            process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
            while newest_step(out) == steps[-1]:
                if process.poll() is not None:
                    raise RuntimeError(f"the saver ended by itself with {process.returncode}")
                time.sleep(0.02)
            time.sleep(draw.uniform(0, 1))
            os.kill(draw.choice(find_ranks(process.pid)), signal.SIGKILL)
            process.wait()
            halves += any(Path(out).glob(".checkpoint-*.partial"))
            found, wanted = make_plain(), make_plain()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                steps.append(TrainingState(*found[:2]).load(out).step)
            fill(wanted[2], steps[-1])
            if not all(torch.equal(a, b) for a, b in zip(find_tensors(*found[:2]), wanted[2], strict=True)):
                return {"passed": False, "steps": steps}
    return {"passed": True, "kills": count, "found half written": halves, "steps that loaded": steps[1:]}


def find_ranks(parent: int) -> list[int]:
    """The processes that `launch_ranks` started in `parent`."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(each) for each in children if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]


# -- sizes ----------------------------------------------------------------------------------------------------------------


def train_part(model_path: str, out: str, first: int, last: int) -> dict[str, Any]:
    """In a rank: go on from what `out` holds, steps `first` to `last`, and save."""
    model: Any = autotp.from_pretrained(model_path, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-4)
    state = TrainingState(model, optimizer)
    report: dict[str, Any] = {}
    if first:
        start = time.perf_counter()
        state.load(out)
        report["load_s"] = round(time.perf_counter() - start, 2)
    losses = []
    for step in range(first, last):
        ids = torch.randint(0, model.config.vocab_size, (2, 32), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids.to(model.device), labels=ids.to(model.device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for name, beside in (("async_save_s", True), ("save_s", False)):
        state.wait()
        start = time.perf_counter()
        state.save(out, last, keep_last=1, async_save=beside)
        report[name] = round(time.perf_counter() - start, 2)
    return report | {"losses": losses}


def check_sizes(model_path: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as out, tempfile.TemporaryDirectory() as other:
        whole = launch_ranks(train_part, 1, model_path, other, 0, 3 * STEPS)["losses"]
        parts = [launch_ranks(train_part, size, model_path, out, n * STEPS, (n + 1) * STEPS) for n, size in enumerate((2, 3, 1))]
        mb = sum(path.stat().st_size for path in Path(out).rglob("*") if path.is_file()) / 1e6
    losses = [loss for part in parts for loss in part.pop("losses")]
    off = max(abs(a - b) for a, b in zip(losses, whole, strict=True))
    times = {
        f"{size} rank(s)": {key: round(value, 2) for key, value in part.items()}
        for size, part in zip((2, 3, 1), parts, strict=True)
    }
    return {"passed": off <= BAR, "largest difference": off, "losses": losses, "unbroken": whole, "MB": round(mb), "times": times}


if __name__ == "__main__":
    sys.exit(main())
