"""`autotp train` over several ranks beside one, and interrupted and resumed: losses, speed and memory, in tables.

PYTHONPATH=. python scripts/train_check.py MODEL --out FILE.json
PYTHONPATH=. python scripts/train_check.py MODEL --out FILE.json --dtype float32 --batch-size 2 --seq-length 64   # on the CPU

MODEL is a directory with weights and tokenizer, or a GGUF file. It is trained on Python's documentation. Exits with 1 if a check
fails.

| check | compared |
|---|---|
| ranks | each step's loss with that of one rank |
| resumed | the same of a run that got a Ctrl-C at a random step and went on with the command it printed, with the whole run |
| dropout | the same for a small random model that draws its masks on every rank, resumed from its 10th step of 20 |
| other masks | that again, with other random numbers put into the checkpoint: it must differ, or the check above sees nothing |
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pydoc_data.topics
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel
from transformers.utils.logging import disable_progress_bar

import autotp
from autotp.checkpoint.gguf import convert_gguf, find_gguf
from autotp.checkpoint.plain import decode_plain, encode_plain

BARS = {"float32": 1e-3, "bfloat16": 3e-2}  # of a loss, for sums in another order over some hundred steps
Events = list[dict[str, Any]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", required=True, help="the JSON file to write: every step of every run")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dtype", choices=BARS, default="bfloat16")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--lr", default="2e-5")
    args = parser.parse_args()
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="autotp-check-") as place:
        gguf = find_gguf(args.model)
        args.model = str(convert_gguf(gguf, Path(place) / "model")) if gguf else args.model
        found, rows = check(args, Path(place))
    report = describe(args) | {"checks": rows, "runs": found}
    Path(args.out).write_text(json.dumps(report, indent=1))
    show(args, report)
    return 0 if all(row["passed"] for row in rows) else 1


def check(args: argparse.Namespace, place: Path) -> tuple[dict[str, Events], list[dict[str, Any]]]:
    """Every run's steps, and what the comparisons gave."""
    text = place / "python.txt"
    text.write_text("\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)))
    common = ["--data", text, "--batch-size", args.batch_size, "--lr", args.lr]
    real = [args.model, *common, "--steps", args.steps, "--dtype", args.dtype, "--seq-length", args.seq_length]
    at = random.SystemRandom().randrange(args.steps // 4, args.steps // 2)
    one, ranks = "tp 1", f"tp {args.tp}"
    runs = {name: run(place, name, *real, "--tp", tp) for name, tp in ((one, 1), (ranks, args.tp))}
    runs["resumed"], stopped = run_interrupted(place, at, *real, "--tp", args.tp)
    bar = BARS[args.dtype]
    rows = [compare("ranks", runs[ranks], runs[one], bar), compare("resumed", runs["resumed"], runs[ranks], bar)]
    rows[1]["check"] += f" (interrupted after step {stopped})"

    make_model_with_dropout(args.model, place / "dropout")
    drawn = [place / "dropout", *common, "--steps", 20, "--dtype", "float32", "--seq-length", 64, "--tp", args.tp]
    runs["dropout"] = run(place, "dropout whole", *drawn, "--save-every", 10)
    checkpoint = place / "dropout whole" / "checkpoint-10"
    runs["dropout resumed"] = run(place, "dropout resumed", *drawn, "--resume", checkpoint)
    change_random_state(checkpoint)
    runs["other masks"] = run(place, "other masks", *drawn, "--resume", checkpoint)
    after = runs["dropout"][10:]
    other = compare("other masks", runs["other masks"], after, 0.0)
    rows.append(compare("dropout", runs["dropout resumed"], after, other["largest"] / 20))
    return runs, [*rows, other | {"passed": other["largest"] > 1e-3, "bar": "above 1e-3"}]


# -- runs -----------------------------------------------------------------------------------------------------------------


def command(place: Path, name: str, *options: Any) -> list[str]:
    told = ["train", *options, "--out", place / name, "--log", place / f"{name}.jsonl"]
    return [sys.executable, "-m", "autotp.cli", *map(str, told)]


def run(place: Path, name: str, *options: Any) -> Events:
    """The steps of a run that must end well."""
    say(name)
    finish(subprocess.Popen(command(place, name, *options), stderr=subprocess.PIPE, text=True), 0)
    return read_log(place / f"{name}.jsonl")


def run_interrupted(place: Path, at: int, *options: Any) -> tuple[Events, int]:
    """The steps of both halves of a run that gets a SIGINT after step `at`, and the step that it stopped after."""
    say(f"to be interrupted in step {at + 1}")
    log = place / "resumed.jsonl"
    process = subprocess.Popen(command(place, "resumed", *options), stderr=subprocess.PIPE, text=True)
    while process.poll() is None and (not log.exists() or len(read_log(log)) < at):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    printed = finish(process, 130).split("Go on with:\n")[1].strip()
    stopped = len(read_log(log))
    say(f"interrupted after step {stopped}; {printed}")
    again = [sys.executable, "-m", "autotp.cli", *shlex.split(printed)[1:]]
    finish(subprocess.Popen(again, stderr=subprocess.PIPE, text=True), 0)
    return read_log(log), stopped


def finish(process: subprocess.Popen, code: int) -> str:
    _, said = process.communicate()
    if process.returncode != code:
        raise RuntimeError(f"exit code {process.returncode}, not {code}:\n{said}")
    return said


def read_log(path: Path) -> Events:
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def say(what: str) -> None:
    print(f"CHECK {datetime.datetime.now():%H:%M:%S} {what}", flush=True)


def make_model_with_dropout(model: str, out: Path) -> None:
    """A GPT-2 of four small layers, dropout after embeddings, attention and MLP, with the tokenizer of `model`."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    torch.manual_seed(0)
    eos = tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=128, n_layer=4, n_head=4, embd_pdrop=0.2, attn_pdrop=0.2, resid_pdrop=0.2,
        bos_token_id=eos, eos_token_id=eos,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(out)
    tokenizer.save_pretrained(out)


def change_random_state(checkpoint: Path) -> None:
    """Other random numbers of every rank."""
    path = checkpoint / "state.json"
    about = json.loads(path.read_text())
    every = [decode_plain(each) for each in about["random"]]
    for state in every:
        state["torch"] = torch.Generator().manual_seed(77).get_state()
        if "cuda" in state:
            state["cuda"] = torch.Generator("cuda").manual_seed(77).get_state()
    path.write_text(json.dumps({**about, "random": [encode_plain(state, "random") for state in every]}))


# -- what is said ---------------------------------------------------------------------------------------------------------


def compare(check: str, events: Events, expected: Events, bar: float) -> dict[str, Any]:
    """The largest and the mean difference of two runs' losses."""
    same = [event["step"] for event in events] == [event["step"] for event in expected]
    off = [abs(a["loss"] - b["loss"]) for a, b in zip(events, expected, strict=True)] if same else [float("inf")]
    return {"check": check, "steps": len(off), "largest": max(off), "mean": statistics.mean(off), "bar": bar,
            "passed": max(off) <= bar}  # fmt: skip


def describe(args: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--verify", "-q", "HEAD"], capture_output=True, text=True).stdout.strip()
    gpus = torch.cuda.device_count()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "hardware": f"{gpus} x {torch.cuda.get_device_name()}" if gpus else f"CPU, {os.cpu_count()} cores",
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "transformers": transformers.__version__,
                     "autotp": autotp.__version__},
        "commit": commit or "unknown",
        "options": {**vars(args), "model": Path(args.model).name},
    }  # fmt: skip


def show(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """The tables, in Markdown."""
    runs = {name: report["runs"][name] for name in ("tp 1", f"tp {args.tp}", "resumed")}
    print(f"\n{report['hardware']}; {report['versions']}; {report['commit']}\n")
    print("| run | tokens/s, median | MFU | peak GiB of a rank |\n|---|---|---|---|")
    for name, events in runs.items():
        timed = events[min(5, len(events) - 1) :]
        mfu = [event["mfu"] for event in timed if event["mfu"] is not None]
        speed = statistics.median(event["tokens_per_s"] for event in timed)
        print(f"| {name} | {speed:,.0f} | {f'{statistics.median(mfu):.1%}' if mfu else 'not known'} "
              f"| {max(event['memory_gib'] for event in events):.2f} |")  # fmt: skip
    print(f"\n| loss at step | {' | '.join(runs)} |\n|{'---|' * (len(runs) + 1)}")
    for step in sorted({1, *(args.steps * part // 8 for part in range(1, 9))}):
        losses = [f"{events[step - 1]['loss']:.6f}" for events in runs.values()]
        print(f"| {step} | {' | '.join(losses)} |")
    print("\n| check | steps | largest difference of a loss | mean | bar | |\n|---|---|---|---|---|---|")
    for row in report["checks"]:
        bar = row["bar"] if isinstance(row["bar"], str) else f"{row['bar']:.0e}"
        print(f"| {row['check']} | {row['steps']} | {row['largest']:.1e} | {row['mean']:.1e} | {bar} "
              f"| {'ok' if row['passed'] else 'FAILED'} |")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
