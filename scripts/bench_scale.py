"""The whole table on a host of 2, 4 or 8 GPUs in one command: steps, prompts and decoding at each number of GPUs.

python scripts/bench_scale.py --out FILE.jsonl [--limit 540]
python scripts/bench_scale.py --out FILE.jsonl --cpu --tiny --gpus 4      (gloo ranks, to see that it runs)

Layers of Llama-3-8B's and 70B's shape, random, bf16. Each case (implementation, shape, TP x DP) is one torchrun with a time limit
of its own; cases run side by side where GPUs are free (`--apart`: one after another). Before it is measured autotp is checked:
a small model in float32, logits to 1e-4 and gradients to 1e-3 of the unsharded one's.

| work | ms of |
|---|---|
| train | forward, loss, backward, AdamW on float32 masters; 2 x 4096 tokens for each copy of the model |
| prefill | a prompt of 4096 tokens |
| decode B | a step of `generate()` for B rows after 1024 tokens |

Lines are added to FILE as they come, and cases of this commit and machine that it holds are not run again: a run that was cut off
goes on with the same command. The table, last, has the speed-up in tokens a second over the fastest result on one GPU, that
divided by the GPUs, and "exposed", the step less the same with communication cut out (scripts/no_communication.py).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from threading import Thread
from typing import Any

from scale_table import MARK, Case, Results, find_failed, name_line, print_table

SHAPES: dict[str, dict[str, Any]] = {
    "8B": dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256),
    "70B": dict(hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8, vocab_size=128256),
    "tiny": dict(hidden_size=64, intermediate_size=128, num_attention_heads=8, num_key_value_heads=8, vocab_size=512),
}
LAYERS = {"8B": 8, "70B": 2, "tiny": 2}
SIZES: dict[str, Any] = dict(tokens=4096, context=1024, new=64, steps=8)
TINY_SIZES: dict[str, Any] = dict(tokens=64, context=16, new=4, steps=1)
STEPS, DECODING = ["prefill", "train"], ["decode 1", "decode 8", "decode 64"]


def list_cases(gpus: int, shapes: list[str]) -> list[Case]:
    """All cases, those that tell most first."""
    sizes = [size for size in (8, 4, 2) if size <= gpus]
    cases = []
    for shape in shapes:
        every = ["prefill", *DECODING, "train"]
        for tp in sizes:
            cases += [Case("autotp", shape, tp, 1, every), Case("autotp, dealt tokens", shape, tp, 1, STEPS)]
            cases += [Case("transformers TP", shape, tp, 1, every)]
        cases += [Case("autotp", shape, 1, 1, every), Case("one GPU", shape, 1, 1, every)]
        if gpus >= 8:
            cases += [Case(name, shape, 4, 2, ["train"]) for name in ("autotp", "autotp, dealt tokens")]
        cases += [Case("autotp, norms apart", shape, sizes[0], 1, DECODING)]
        if importlib.util.find_spec("deepspeed"):
            cases += [Case("DeepSpeed AutoTP", shape, tp, 1, every) for tp in sizes]
    return cases


class Running:
    """A case that runs.

    Attributes:
        gpus: which it has; begun: the work that it is at.
    """

    def __init__(self, case: Case, gpus: list[int], details: dict[str, Any], end: float, results: Results, options: Any) -> None:
        self.case, self.gpus, self.results = case, gpus, results
        self.end, self.begun, self.tail = min(end, time.monotonic() + options.case_limit), "load", deque(maxlen=25)
        asked = dict(implementation=case.implementation, shape=case.shape, tp=case.tp, dp=case.dp, works=case.works, **details)
        visible = {} if options.cpu else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        self.process = start_ranks(asked, case.ranks, visible)
        self.reader = Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            if not text.startswith(MARK):
                self.tail.append(text.rstrip())
                continue
            line = json.loads(text[len(MARK) :])
            if "begin" in line:
                self.begun = line["begin"]
            else:
                self.results.add(self.case.key(line.pop("work")) | line)

    def poll(self) -> bool:
        """Whether it has ended; past its time it is made to."""
        late = time.monotonic() > self.end
        if self.process.poll() is None and not late:
            return False
        failed = late or self.process.returncode
        stop(self.process)
        self.reader.join(10)
        if failed:
            why = "out of time" if late else f"exit code {self.process.returncode}"
            error = dict(error=why, said=[] if late else list(self.tail))
            self.results.add(self.case.key(self.begun) | error)
        return True


def start_ranks(asked: dict[str, Any], ranks: int, env: dict[str, str]) -> subprocess.Popen:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, __file__, "--worker", json.dumps(asked)]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4"), "PYTHONPATH": path, **env}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def stop(process: subprocess.Popen) -> None:
    """End a torchrun, which ends its ranks."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def run_all(cases: list[Case], gpus: int, details: dict[str, Any], results: Results, end: float, options: Any) -> list[Case]:
    """Run the cases, side by side as GPUs are free, until `end`; those that there was no time for."""
    waiting, running, free = list(cases), [], set(range(gpus))
    while waiting or running:
        for one in [one for one in running if one.poll()]:
            running.remove(one)
            free |= set(one.gpus)
            left = [work for work in one.case.works if not results.find(**one.case.key(work)) and work != one.begun]
            if left and one.process.returncode and one.begun != "load":  # what comes after the work that failed
                waiting.insert(0, Case(one.case.implementation, one.case.shape, one.case.tp, one.case.dp, left))
        if time.monotonic() >= end and not running:
            break
        fits = next((case for case in waiting if case.ranks <= len(free) and not (options.apart and running)), None)
        if fits is not None and time.monotonic() < end:
            waiting.remove(fits)
            given = sorted(free)[: fits.ranks]
            free -= set(given)
            running.append(Running(fits, given, details[fits.shape], end, results, options))
        time.sleep(0.2)
    return waiting


def find_machine(options: Any) -> tuple[int, str]:
    """How many GPUs there are, and what they are called."""
    if options.cpu:
        return options.gpus or 2, "CPU process"
    import torch

    found = torch.cuda.device_count()
    if (options.gpus or found) > found or found < 2:
        raise SystemExit(f"bench_scale.py: this host has {found} GPUs: it takes 2 or more, and --gpus at most as many")
    return options.gpus or found, torch.cuda.get_device_name()


def describe(options: Any, machine: str, gpus: int) -> dict[str, Any]:
    import torch
    import transformers

    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--verify", "-q", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return dict(
        hardware=f"{gpus} x {machine}", versions=versions, commit=commit or "unknown", tiny=options.tiny, apart=options.apart
    )


def save_checkpoints(folder: str, shapes: list[str], options: Any) -> dict[str, dict[str, Any]]:
    """A random checkpoint of each shape, and what workers are told of it."""
    sizes, details = TINY_SIZES if options.tiny else SIZES, {}
    for shape in shapes:
        path = os.path.join(folder, shape)
        layers = options.layers or LAYERS[shape]
        process = start_ranks(dict(save=path, fields=SHAPES[shape], layers=layers), 1, {})
        said, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"bench_scale.py: no checkpoint could be written to {path}:\n{said[-3000:]}")
        details[shape] = dict(fields=SHAPES[shape], path=path, layers=layers, **sizes)
    return details


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the file of JSON lines to add to")
    parser.add_argument("--limit", type=float, default=540, help="seconds in all")
    parser.add_argument("--case-limit", type=float, default=150, help="seconds of one case")
    parser.add_argument("--gpus", type=int, help="how many to use; all, if not given")
    parser.add_argument("--shapes", nargs="+", choices=("8B", "70B"), default=["8B", "70B"])
    parser.add_argument("--layers", type=int, help="of each shape; 8 and 2, if not given")
    parser.add_argument("--only", nargs="+", help="implementations")
    parser.add_argument("--apart", action="store_true", help="one case at a time")
    parser.add_argument("--cpu", action="store_true", help="gloo ranks in place of GPUs")
    parser.add_argument("--tiny", action="store_true", help="a small shape")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        import scale_worker

        scale_worker.run(json.loads(options.worker))
        return 0
    if options.out is None:
        parser.error("--out is needed")
    end = time.monotonic() + options.limit
    gpus, machine = find_machine(options)
    shapes = ["tiny"] if options.tiny else options.shapes
    cases = [case for case in list_cases(gpus, shapes) if not options.only or case.implementation in options.only]
    if not cases:
        parser.error(f"--only: there are {', '.join(dict.fromkeys(case.implementation for case in list_cases(gpus, shapes)))}")
    results = Results(options.out, describe(options, machine, gpus))
    begun = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    results.add(dict(work="start", date=begun, command=" ".join(sys.argv), deepspeed=bool(importlib.util.find_spec("deepspeed"))))
    due = [Case(c.implementation, c.shape, c.tp, c.dp, [w for w in c.works if not results.find(**c.key(w))]) for c in cases]
    due = [case for case in due if case.works]
    with tempfile.TemporaryDirectory() as folder:
        details = save_checkpoints(folder, list(dict.fromkeys(case.shape for case in due)), options)
        left = run_all(due, gpus, details, results, end, options)
    print_table(cases, results)
    if not importlib.util.find_spec("deepspeed"):
        print("DeepSpeed is not installed here, so it was not measured")
    for case in left:
        print(f"no time was left for {case}: the same command goes on")
    failed = find_failed(results)
    for line in failed:
        print(f"{name_line(line)}: {line['error']}", *line["said"], sep="\n    ")
    wrong = any(line["work"] == "check" and not line["good"] for line in results.lines)
    return 1 if wrong or failed or left else 0


if __name__ == "__main__":
    sys.exit(main())
