"""Times LayerNormLinear's step and counts what it keeps, beside the same norm and products with the norm's output kept.

python scripts/bench_norm_linear.py [--out FILE.json]
python scripts/bench_norm_linear.py --cpu              (small sizes, to see that it runs)

Llama-3-8B's sizes on one of two ranks, bf16, forward and backward with all gradients: q, k and v, and gate and up. "us" is the
median over rounds of queued calls; "kept" the bytes that autograd keeps of a forward besides the parameters. Rows of the table:
"separate" has one product a part, "kept" one for all parts, both behind the fused norm; "main_grad" adds weight gradients to
float32 buffers in the product.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotp import LayerNormLinear
from autotp.kernels.norm import norm

CPU = "--cpu" in sys.argv
DEVICE, DTYPE = "cpu" if CPU else "cuda", torch.bfloat16
ROWS, WIDTH = ((8,), 64) if CPU else ((2048, 8192), 4096)
PARTS = {"q k v": (32, 16, 16), "gate up": (96, 96)} if CPU else {"q k v": (2048, 512, 512), "gate up": (7168, 7168)}
CALLS, ROUNDS = (2, 1) if CPU else (10, 7)


def kept_bytes(forward: Callable[[Tensor], Tensor], x: Tensor, parameters: list[Tensor]) -> int:
    """Bytes of distinct storages, parameters aside, that autograd keeps."""
    own, kept = {p.untyped_storage().data_ptr() for p in parameters}, {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = forward(x)  # alive until all are counted, so that no address is used twice
    del y
    return sum(n_bytes for address, n_bytes in kept.items() if address not in own)


def time_step(step: Callable[[], Any]) -> float:
    """Median microseconds of a call, of several queued one behind the other."""
    step()
    times = []
    for _ in range(ROUNDS):
        if not CPU:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            step()
        if not CPU:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(times)


def make_forwards(parts: tuple[int, ...]) -> dict[str, tuple[Callable[[Tensor], Tensor], list[Tensor]]]:
    """Name -> a forward and its parameters."""
    options: dict[str, Any] = dict(normalization="RMSNorm", bias=False, params_dtype=DTYPE, device=DEVICE)
    split = {f"part{i}": size for i, size in enumerate(parts)}
    ours = LayerNormLinear(WIDTH, sum(parts), parameters_split=split, **options)
    main = LayerNormLinear(WIDTH, sum(parts), parameters_split=split, fuse_wgrad_accumulation=True, **options)
    for name in main.weight_names:
        main.get_parameter(name).main_grad = torch.zeros(main.get_parameter(name).shape, device=DEVICE)
    gamma = nn.Parameter(torch.ones(WIDTH, dtype=DTYPE, device=DEVICE))
    whole = nn.Parameter(torch.cat([ours.get_parameter(name).detach() for name in ours.weight_names]))
    weights = [nn.Parameter(part.clone()) for part in whole.detach().split(list(parts))]

    def separate(x: Tensor) -> Tensor:
        h = norm(x, gamma, None, 1e-5, "rms")
        return torch.cat([F.linear(h, weight) for weight in weights], -1)

    return {
        "separate": (separate, [gamma, *weights]),
        "kept": (lambda x: F.linear(norm(x, gamma, None, 1e-5, "rms"), whole), [gamma, whole]),
        "LayerNormLinear": (ours, list(ours.parameters())),
        "main_grad": (main, list(main.parameters())),
    }


def measure(group: str, m: int) -> list[dict[str, Any]]:
    x = torch.randn(m, WIDTH, device=DEVICE).to(DTYPE).requires_grad_()
    dy = torch.randn(m, sum(PARTS[group]), device=DEVICE).to(DTYPE)
    results = []
    for name, (forward, parameters) in make_forwards(PARTS[group]).items():

        def step(forward=forward, parameters=parameters) -> None:
            for tensor in (x, *parameters):
                tensor.grad = None
            forward(x).backward(dy)

        bytes_kept = kept_bytes(forward, x, parameters)
        results.append({"group": group, "rows": m, "name": name, "us": time_step(step), "kept_bytes": bytes_kept})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--cpu", action="store_true", help="small sizes on the CPU, to see that it runs")
    options = parser.parse_args()
    torch.manual_seed(0)
    results = [result for m in ROWS for group in PARTS for result in measure(group, m)]
    device = "CPU" if CPU else torch.cuda.get_device_name()
    if options.out:
        with open(options.out, "w") as file:
            json.dump({"device": device, "torch": torch.__version__, "results": results}, file, indent=1)
    print(f"{device}, torch {torch.__version__}, {DTYPE}")
    print(f"{'group':10}{'M':>7}  {'':18}{'us':>10}{'kept KiB':>10}")
    for r in results:
        print(f"{r['group']:10}{r['rows']:7}  {r['name']:18}{r['us']:10.1f}{r['kept_bytes'] / 2**10:10.1f}")


if __name__ == "__main__":
    main()
