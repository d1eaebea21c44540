"""Loading one checkpoint over two ranks on the CPU, beside others: seconds, and host memory beyond what the shard itself needs.

PYTHONPATH=. python scripts/bench_load.py --dir DIR [--ways autotp cut transformers deepspeed] [--rounds 3] [--out FILE.json]

DIR/plain is a random bfloat16 llama of 1.9 GB, made if it is not there; DIR/cut what `autotp shard` makes of it. Each way runs in
processes of its own, by turns. Memory is what is anonymous in /proc/self/smaps_rollup: heap, not pages of mapped files. Its peak
is sampled while the model loads, over what the process has when its libraries are imported; `held` are the parameters.
`used` counts until every page of the weights was read once: what is only mapped has not been loaded before. `core` are the
seconds that the busiest rank had of a core until then, less the sampling; other jobs change them less. AUTOTP_CACHE is heeded:
from the second round on the plan comes from there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils.logging import disable_progress_bar

WAYS = ("autotp", "cut", "transformers", "deepspeed")
RANKS = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:3])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        return run_rank(args.dir, args.ways[0], int(args.rank))
    make_checkpoints(Path(args.dir))
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in args.ways}
    for _ in range(args.rounds):
        for way in args.ways:
            found[way].append({**start_ranks(args.dir, way), "load": os.getloadavg()[0]})
    for way, runs in found.items():
        seconds = [run["seconds"] for run in runs]
        beyond, loads = max(run["beyond"] for run in runs), " ".join(f"{run['load']:.1f}" for run in runs)
        print(
            f"{way:>13}: {statistics.median(seconds):5.1f} s ({min(seconds):.1f} to {max(seconds):.1f}), "
            f"used after {statistics.median(run['used'] for run in runs):.1f} s, "
            f"core {statistics.median(run['core'] for run in runs):.1f} s, "
            f"peak beyond the shard {beyond / 1e6:6.0f} MB, shard {runs[0]['held'] / 1e6:.0f} MB, load of the machine {loads}"
        )
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1))
    return 0


def make_checkpoints(root: Path) -> None:
    if not (root / "plain").exists():
        sizes: Any = dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, vocab_size=32000)
        config = LlamaConfig(**sizes, num_attention_heads=16, num_key_value_heads=8, dtype="bfloat16")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(root / "plain", max_shard_size="500MB")
    if not (root / "cut").exists():
        from autotp.cli import main as autotp_main

        assert autotp_main(["shard", str(root / "plain"), str(root / "cut"), "--tp", str(RANKS)]) == 0


def start_ranks(root: str, way: str) -> dict[str, Any]:
    """The slowest rank's seconds, and the most memory of any."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a free port, held while the ranks run
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(RANKS)}
    env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    command = [sys.executable, __file__, "--dir", root, "--ways", way, "--rank"]
    ranks = [
        subprocess.Popen([*command, str(r)], env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE, text=True)
        for r in range(RANKS)
    ]
    told = [json.loads(process.communicate()[0].splitlines()[-1]) for process in ranks]
    return {key: max(each[key] for each in told) for key in told[0]}


# -- one rank -----------------------------------------------------------------------------------------------------------


def run_rank(root: str, way: str, rank: int) -> int:
    torch.set_num_threads(1)
    disable_progress_bar()
    load = {"autotp": load_autotp, "cut": load_autotp, "transformers": load_transformers, "deepspeed": load_deepspeed}[way]
    work = load(str(Path(root) / ("cut" if way == "cut" else "plain")))
    dist.barrier()
    before = read_anonymous_bytes()
    peak, watched, done = [before], list[float](), threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak.append(read_anonymous_bytes())
        watched.append(time.thread_time())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    begun, core = time.monotonic(), time.process_time()
    model = work()
    dist.barrier()
    seconds = time.monotonic() - begun
    for parameter in model.parameters():
        local = parameter.detach()
        (local.to_local() if hasattr(local, "to_local") else local).reshape(-1)[::1024].sum().item()
    dist.barrier()
    used = time.monotonic() - begun
    done.set()
    watcher.join()
    core = time.process_time() - core - watched[0]
    held = sum(count_bytes(parameter) for parameter in model.parameters())
    print(
        json.dumps(
            {
                "seconds": seconds,
                "used": used,
                "core": core,
                "held": held,
                "beyond": max(*peak, read_anonymous_bytes()) - before - held,
            }
        ),
        flush=True,
    )
    os._exit(0)


def read_anonymous_bytes() -> int:
    found = re.search(r"Anonymous:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    return int(found[1]) * 1024 if found else 0


def count_bytes(parameter: Any) -> int:
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).nbytes


def load_autotp(path: str) -> Callable[[], Any]:
    import autotp

    dist.init_process_group("gloo")
    return lambda: autotp.from_pretrained(path)


def load_transformers(path: str) -> Callable[[], Any]:
    dist.init_process_group("gloo")
    return lambda: AutoModelForCausalLM.from_pretrained(path, tp_plan="auto", dtype=torch.bfloat16)


def load_deepspeed(path: str) -> Callable[[], Any]:
    """As its documentation says: the whole model on every rank, which it then splits."""
    import deepspeed  # type: ignore[import-not-found]

    deepspeed.init_distributed("gloo")

    def work() -> Any:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        return deepspeed.init_inference(model, tensor_parallel={"tp_size": RANKS}, dtype=torch.bfloat16).module

    return work


if __name__ == "__main__":
    sys.exit(main())
