"""Saving and loading while things break, at random moments: what was there must stay whole, and the reason must be said.

PYTHONPATH=. python scripts/faults.py [--times 20] [--seed 0] [--out FILE.json]

Two ranks on the CPU, a random llama of some 80 MB. Exits with 1 if a fault did anything but what the table says.

| fault | must |
|---|---|
| killed | SIGKILL of one rank while all save: the directory holds the old checkpoint or, once done, the new one, bit for bit |
| disk full | a rank's file may not grow beyond a random size: all ranks raise, the old checkpoint is whole |
| read-only | all ranks raise and name the directory |
| raises | a rank raises in the midst of saving: all ranks raise with its error within the timeout, the old checkpoint is whole |
| raises, loading | the same while loading |
| alone | rank 0 saves alone: it names rank 1 |
| truncated, flipped, missing | a file that lost its end, one bit or itself: all ranks name it before there is a model |
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

import autotp
from autotp.checkpoint import load
from autotp.checkpoint.writer import SafetensorsWriter
from autotp.comm import TPGroup

SIZE = "6MB"  # of a file of the checkpoint
TIMEOUT_S = 20
NOBODY = 65534


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="how often each fault happens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="a JSON file for the results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="autotp-faults-") as place:
        root = Path(place)
        os.chmod(root, 0o755)
        sizes: Any = dict(hidden_size=384, intermediate_size=1024, num_hidden_layers=8, vocab_size=8000)
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=2))
        model.save_pretrained(root / "plain")
        (root / "plan.json").write_text(autotp.make_plan(model, 2).to_json())
        results = run_pair(faults_in_ranks, root, args.times, args.seed)
        results["killed"] = [kill_once(root, random.Random(f"{args.seed} {number}")) for number in range(args.times)]
    return report(results, args)


def report(results: dict[str, list[dict[str, Any]]], args: argparse.Namespace) -> int:
    bad = 0
    for fault, trials in results.items():
        good = [trial for trial in trials if trial["good"]]
        bad += len(trials) - len(good)
        slowest = max(trial["seconds"] for trial in trials)
        kinds = {kind: sum(t["what"] == kind for t in trials) for kind in sorted({t["what"] for t in trials})}
        print(f"{fault:>18}: {len(good)} of {len(trials)} as it must be; {kinds}; the slowest took {slowest:.1f} s")
        for trial in trials:
            if not trial["good"]:
                print(f"{'':>20}{trial}")
    if args.out:
        Path(args.out).write_text(json.dumps({"date": time.strftime("%Y-%m-%d %H:%M"), "results": results}, indent=1))
    return int(bad > 0)


# -- two ranks ----------------------------------------------------------------------------------------------------------


def start_pair(work: Callable[..., Any], root: Path, *args: Any) -> tuple[list[Any], list[Any]]:
    """Two processes that run `work(group, root, *args)`, and the pipes that its words come through."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["autotp", "transformers.models.llama.modeling_llama"])
    store = root / f"store-{time.monotonic_ns()}"
    processes, pipes = [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=serve_rank, args=(rank, store, theirs, work, root, *args)))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    return processes, pipes


def serve_rank(rank: int, store: Path, pipe: Any, work: Callable[..., Any], *args: Any) -> None:
    torch.set_num_threads(1)
    disable_progress_bar()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    os.chmod(store, 0o666)  # for whom a read-only directory is tried as
    try:
        pipe.send(work(TPGroup(dist.group.WORLD, torch.device("cpu"), TIMEOUT_S), pipe, *args))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    os._exit(0)  # what waits for the other rank at exit would wait for ever


def run_pair(work: Callable[..., Any], root: Path, *args: Any) -> Any:
    """What rank 0 returns."""
    processes, pipes = start_pair(work, root, *args)
    result, _ = (pipe.recv() for pipe in pipes)
    for process in processes:
        process.join()
    if isinstance(result, str):
        raise SystemExit(result)
    return result


def load_model(group: TPGroup, root: Path, path: Path | None = None) -> Any:
    plan = autotp.Plan.from_json((root / "plan.json").read_text())
    return autotp.from_pretrained(str(path or root / "plain"), group, plan=plan)


def digest(directory: Path) -> str:
    """Of every tensor of the checkpoint, through transformers' reader alone."""
    model = LlamaForCausalLM.from_pretrained(directory)
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        total.update(name.encode() + tensor.numpy().tobytes())
    return total.hexdigest()


# -- a rank that is killed ----------------------------------------------------------------------------------------------


def save_new(group: TPGroup, pipe: Any, root: Path, target: Path, factor: float) -> str:
    model = load_model(group, root)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    dist.barrier()
    pipe.send("saving")
    autotp.save_pretrained(model, target, max_shard_size=SIZE)
    return "saved"


def kill_once(root: Path, draw: random.Random) -> dict[str, Any]:
    """Save the model times 1, then times 2 and kill a rank meanwhile."""
    target = root / "killed"
    if not target.exists():
        processes, pipes = start_pair(save_new, root, target, 1.0)
        for pipe in pipes:
            pipe.recv()
        begun = time.monotonic()
        assert [pipe.recv() for pipe in pipes] == ["saved", "saved"]
        (root / "seconds").write_text(str(time.monotonic() - begun))
        for process in processes:
            process.join()
        (root / "digests").write_text(digest(target))
        shutil.copytree(target, root / "old")
    shutil.rmtree(target)
    shutil.copytree(root / "old", target)
    processes, pipes = start_pair(save_new, root, target, 2.0)
    for pipe in pipes:
        pipe.recv()
    time.sleep(draw.uniform(0, float((root / "seconds").read_text())))
    victim = draw.randrange(2)
    with suppress(ProcessLookupError):  # it may be done already, and its save with it
        os.kill(processes[victim].pid, signal.SIGKILL)
    begun = time.monotonic()
    try:
        word = pipes[1 - victim].recv()
    except EOFError:
        word = "ended without a word"
    seconds = time.monotonic() - begun
    for process in processes:
        process.join()
    old = (root / "digests").read_text()
    found = digest(target)
    twice = LlamaForCausalLM.from_pretrained(target).lm_head.weight / 2
    is_new = torch.equal(twice, LlamaForCausalLM.from_pretrained(root / "old").lm_head.weight)
    what = "old" if found == old else "new" if is_new else "neither"
    return {
        "good": what != "neither" and seconds < TIMEOUT_S + 5,
        "what": what,
        "seconds": seconds,
        "said": word,
        "victim": victim,
    }


# -- faults that ranks survive ------------------------------------------------------------------------------------------


def faults_in_ranks(group: TPGroup, pipe: Any, root: Path, times: int, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Every fault but the kill, `times` times, in the same two processes: a fault must leave nothing behind."""
    model = load_model(group, root)
    target = root / "target"
    autotp.save_pretrained(model, target, max_shard_size=SIZE)
    whole = digest(target) if group.tp_rank == 0 else ""
    results: dict[str, list[dict[str, Any]]] = {}
    for name, fault in FAULTS.items():
        results[name] = []
        for number in range(times):
            draw = random.Random(f"{seed} {name} {number}")  # alike on both ranks
            dist.barrier()
            begun = time.monotonic()
            said, wanted = fault(group, root, model, target, draw)
            seconds = time.monotonic() - begun
            words = group.gather_objects(said)
            if group.tp_rank == 0:
                good = all(any(text in word for text in wanted) for word in words) and digest(target) == whole
                first = {"good": good and seconds < TIMEOUT_S, "what": words[0][:40] if not good else "named"}
                results[name].append({**first, "seconds": seconds, "said": words})
    return results


def say(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def fill_disk(group: TPGroup, root: Path, model: Any, target: Path, draw: random.Random) -> tuple[str, list[str]]:
    victim, limit = draw.randrange(2), draw.randrange(5_000_000)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if group.tp_rank == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        return say(lambda: autotp.save_pretrained(model, target, max_shard_size=SIZE)), ["File too large"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_read_only(group: TPGroup, root: Path, model: Any, target: Path, draw: random.Random) -> tuple[str, list[str]]:
    closed = root / "closed"
    if group.tp_rank == 0 and not closed.exists():
        shutil.copytree(target, closed)
        os.chmod(closed, 0o555)
    dist.barrier()
    below = closed / "below" if draw.random() < 0.5 else closed
    root_user = os.geteuid() == 0
    if root_user:  # whom permissions do not bind
        os.seteuid(NOBODY)
    try:
        return say(lambda: autotp.save_pretrained(model, below, max_shard_size=SIZE)), [f"{below} can't be written to"]
    finally:
        if root_user:
            os.seteuid(0)


def raise_once(owner: Any, name: str, at: int) -> Callable[[], None]:
    """Make the `at`-th call of a function raise; returns what undoes it."""
    original, count = getattr(owner, name), 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == at:
            raise RuntimeError("injected by the test")
        return original(*args, **kwargs)

    setattr(owner, name, fail)
    return lambda: setattr(owner, name, original)


def raise_saving(group: TPGroup, root: Path, model: Any, target: Path, draw: random.Random) -> tuple[str, list[str]]:
    victim, at = draw.randrange(2), draw.randrange(1, 30)  # of some 37 tensors that it writes and 58 that it helps to gather
    owner, name = (SafetensorsWriter, "write") if draw.random() < 0.5 else (TPGroup, "gather_to_host")
    undo = raise_once(owner, name, at) if group.tp_rank == victim else lambda: None
    try:
        return say(lambda: autotp.save_pretrained(model, target, max_shard_size=SIZE)), ["injected by the test"]
    finally:
        undo()


def raise_loading(group: TPGroup, root: Path, model: Any, target: Path, draw: random.Random) -> tuple[str, list[str]]:
    victim = draw.randrange(2)
    undo = raise_once(load, "_place", draw.randrange(1, 70)) if group.tp_rank == victim else lambda: None
    try:
        return say(lambda: load_model(group, root, target)), ["injected by the test"]
    finally:
        undo()


def save_alone(group: TPGroup, root: Path, model: Any, target: Path, draw: random.Random) -> tuple[str, list[str]]:
    before, group_of = model.autotp_group.timeout_s, model.autotp_group
    group_of.timeout_s = draw.uniform(0.2, 1.0)
    said = "TP rank(s) [1] did not come"
    if group.tp_rank == 0:
        said = say(lambda: autotp.save_pretrained(model, target, max_shard_size=SIZE))
    else:
        next(group_of._arrivals)  # it did not come to this one; both go on from the next
    group_of.timeout_s = before
    return said, ["TP rank(s) [1] did not come"]


def damage(kind: str) -> Callable[..., tuple[str, list[str]]]:
    def load_damaged(group: TPGroup, root: Path, model: Any, target: Path, draw: random.Random) -> tuple[str, list[str]]:
        copy = root / "damaged"
        file = copy / draw.choice(sorted(path.name for path in target.glob("*.safetensors")))
        place = draw.random()
        if group.tp_rank == 0:
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(target, copy)
            size = file.stat().st_size
            if kind == "truncated":
                os.truncate(file, int(place * size))
            elif kind == "missing":
                file.unlink()
            else:
                with file.open("r+b") as stream:
                    stream.seek(int(place * size))
                    byte = stream.read(1)[0]
                    stream.seek(int(place * size))
                    stream.write(bytes([byte ^ 1 << draw.randrange(8)]))
        dist.barrier()
        return say(lambda: load_model(group, root, copy)), [file.name]

    return load_damaged


FAULTS = {
    "disk full": fill_disk,
    "read-only": save_read_only,
    "raises": raise_saving,
    "raises, loading": raise_loading,
    "alone": save_alone,
    "truncated": damage("truncated"),
    "flipped": damage("flipped"),
    "missing": damage("missing"),
}

if __name__ == "__main__":
    sys.exit(main())
