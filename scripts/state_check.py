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
import multiprocessing
import random
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
from autotp.train.launch import launch_ranks

WIDTH, LAYERS = 512, 24  # of the model that is killed: 75 MB with its optimizer's state
STEPS = 3  # on each number of ranks
BAR = 2e-3  # of a loss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory with safetensors")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--out", help="a JSON file to write")
    args = parser.parse_args()
    torch.set_num_threads(1)  # processes are forked from this one
    report = {"killed": check_kills(False, args.kills), "killed async": check_kills(True, args.kills)}
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


def save_for_ever(rank: int, meeting: str, out: str, beside: bool) -> None:
    """In a rank: save one step after another."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
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


def check_kills(beside: bool, count: int) -> dict[str, Any]:
    """Kill a rank `count` times, and load after each."""
    draw, steps, halves = random.Random(), [0], 0
    context = multiprocessing.get_context("fork")  # started in no time, as all is imported
    with tempfile.TemporaryDirectory() as place:
        out = f"{place}/out"
        for number in range(count):
            meeting = f"{place}/{number}"
            ranks = [context.Process(target=save_for_ever, args=(rank, meeting, out, beside), daemon=True) for rank in (0, 1)]
            for process in ranks:
                process.start()
            begun = None
            while newest_step(out) == steps[-1] and all(process.is_alive() for process in ranks):
                if begun is None and any(Path(out).glob(".checkpoint-*.partial")):
                    begun = time.monotonic()
                time.sleep(0.005)
            time.sleep(draw.uniform(0, 3 * (time.monotonic() - (begun or time.monotonic()))))  # a save, and what lies between
            draw.choice(ranks).kill()
            time.sleep(draw.choice((0, 0.2)))
            for process in ranks:  # as the one that started them would
                process.kill()
                process.join()
            halves += any(Path(out).glob(".checkpoint-*.partial"))
            found, wanted = make_plain(), make_plain()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                steps.append(TrainingState(*found[:2]).load(out).step)
            fill(wanted[2], steps[-1])
            same = all(torch.equal(a, b) for a, b in zip(find_tensors(*found[:2]), wanted[2], strict=True))
            if not same or steps[-1] <= steps[-2]:
                return {"passed": False, "steps": steps}
    return {"passed": True, "kills": count, "found half written": halves, "steps that loaded": steps[1:]}


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
