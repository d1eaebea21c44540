"""Times a layer of stacked experts, forward and backward: transformers' grouped forward against ours, each operation, errors.

python scripts/bench_experts.py --out FILE.json [--sweep]      Mixtral at TP=2: H 4096, F 7168, 8 experts, top 2, 8192 tokens
python scripts/bench_experts.py --hidden 2048 --inside 768 --experts 128 --top-k 8
python scripts/bench_experts.py --cpu                          (small sizes in Triton's interpreter, to see that it runs)

bf16, routing weights in float32, as Mixtral's router gives them; one expert gets no token. Times as in bench_kernels.py. An
operation's floor is its bytes at the bandwidth of a large copy, or its arithmetic at the rate of a large bf16 product, whichever
is longer. Errors are of the whole layer against float32, beside transformers' own in bf16, of which they may be twice.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bench_kernels import CPU, DEVICE, DTYPE, Call, copy_bandwidth, draw, time_calls
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from autotp.inject.experts import experts_forward, find_experts
from autotp.inject.forwards import replace_forward
from autotp.kernels import experts as ops
from autotp.kernels import triton_experts
from autotp.kernels.dispatch import BACKENDS, select

Sizes = argparse.Namespace
NAMES = ("out", "dx", "dup", "ddown", "dweights")


def build(s: Sizes) -> tuple[Any, Any]:
    """(transformers' module with its grouped forward, the same with ours); they share weights."""
    config = MixtralConfig(hidden_size=s.hidden, intermediate_size=s.inside, num_local_experts=s.experts)
    config._experts_implementation = "grouped_mm"
    with torch.device(DEVICE):
        plain = MixtralExperts(config).to(DTYPE)
    for parameter in plain.parameters():
        parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    ours, found = copy.copy(plain), find_experts("experts", plain)
    assert found is not None
    replace_forward(ours, "experts", experts_forward(type(plain).forward, found.variant, *found.parts))
    return plain, ours


def draw_inputs(s: Sizes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, their choices, of which the last expert is none, and float32 weights."""
    scores = torch.randn(s.tokens, s.experts, device=DEVICE).softmax(-1)
    scores[:, -1] = 0
    weights, index = scores.topk(s.top_k)
    return draw(s.tokens, s.hidden).requires_grad_(), index, (weights / weights.sum(-1, keepdim=True)).requires_grad_()


def run(module: Any, inputs: tuple[torch.Tensor, ...], dout: torch.Tensor) -> list[torch.Tensor]:
    out = module(*inputs)
    leaves = inputs[0], module.gate_up_proj, module.down_proj, inputs[2]
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def measure_layer(module: Any, s: Sizes) -> dict[str, float]:
    """Device us forward and forward + backward, host us of both, and bytes beyond weights and inputs: at most, and in between."""

    def forward() -> Call:
        inputs = draw_inputs(s)
        return torch.no_grad()(lambda: module(*inputs))

    def both() -> Call:
        inputs, dout = draw_inputs(s), draw(s.tokens, s.hidden)
        return lambda: run(module, inputs, dout)

    n_bytes = s.tokens * s.top_k * s.inside * 2 * DTYPE.itemsize
    forward_us, _ = time_calls(forward, n_bytes)
    both_us, host_us = time_calls(both, n_bytes)
    found = {"forward_us": forward_us, "us": both_us, "host_us": host_us}
    if not CPU:
        inputs, dout = draw_inputs(s), draw(s.tokens, s.hidden)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = module(*inputs)
        found["saved_gib"] = (torch.cuda.memory_allocated() - before) / 2**30
        torch.autograd.grad(out, (inputs[0], module.gate_up_proj, module.down_proj, inputs[2]), dout)
        found["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return found


def product_rate() -> float:
    """Operations a second of a large product."""
    n = 256 if CPU else 8192
    us, _ = time_calls(lambda: partial(torch.mm, draw(n, n), draw(n, n)), 3 * n * n * DTYPE.itemsize)
    return 2 * n**3 / us * 1e6


Operation = tuple[str, Any, float, float, Callable[[Callable[..., Any]], Call]]  # name, problem, bytes, arithmetic, a call of it


def list_operations(plain: Any, s: Sizes) -> list[Operation]:
    """What a forward and a backward run, with fresh inputs for each set of calls."""
    x, index, weights = draw_inputs(s)
    x, weights, rows, wide = x.detach(), weights.detach(), s.tokens * s.top_k, s.inside * 2
    order, inverse, offsets = ops.route_tokens(index, s.experts)
    up, down, size, k = plain.gate_up_proj.detach(), plain.down_proj.detach(), DTYPE.itemsize, s.top_k
    row, token, inner = rows * s.hidden * size, s.tokens * s.hidden * size, rows * s.inside * size
    up_bytes, down_bytes = up.numel() * size, down.numel() * size
    up_flops, down_flops = 2.0 * rows * s.hidden * wide, 2.0 * rows * s.hidden * s.inside

    def problem(op: str, like: torch.Tensor, kind: str = "") -> Any:
        return ops._problem(op, like, kind)

    def product(op: str, width: int) -> Any:
        return problem(op, torch.empty(rows, width, dtype=DTYPE, device=DEVICE))

    def moved(run):
        return partial(run, draw(s.tokens, s.hidden), inverse, k)

    def summed(run, weights: torch.Tensor | None = weights):
        return partial(run, draw(rows, s.hidden), inverse, offsets, weights, k)

    def gate_backward(run):
        h, da = draw(rows, wide), draw(rows, s.inside)
        return lambda: run(da, h, weights, order, offsets, "silu", "gate_up", (True, True, True))

    def times(width, weight):
        return lambda run: partial(run, draw(rows, width), weight, offsets)

    def outer(m, n):
        return lambda run: partial(run, draw(rows, m), draw(rows, n), offsets)

    route = problem("route_tokens", index)._replace(rows=rows, width=0)
    gate, combine = product("gate_rows", wide)._replace(kind="silu"), product("combine_rows", s.hidden)
    return [
        ("route", route, 16.0 * rows, 0, lambda run: partial(run, index, s.experts)),
        *((f"spread {what}", problem("spread_rows", x), token + row, 0, moved) for what in ("x", "dout", "x again")),
        ("h = x up", product("grouped_product", s.hidden), row + up_bytes + 2 * inner, up_flops, times(s.hidden, up.mT)),
        ("gate", gate, 3 * inner, 0, lambda run: partial(run, draw(rows, wide), "silu", "gate_up")),
        ("y = a down", product("grouped_product", s.inside), inner + down_bytes + row, down_flops, times(s.inside, down.mT)),
        ("combine", combine, row + token, 0, summed),
        ("da = dout down", product("grouped_product", s.hidden), row + down_bytes + inner, down_flops, times(s.hidden, down)),
        ("gate backward", gate._replace(op="gate_rows_backward"), 6 * inner, 0, gate_backward),
        ("ddown", product("grouped_outer", s.hidden), row + down_bytes + inner, down_flops, outer(s.hidden, s.inside)),
        ("dup", product("grouped_outer", wide), row + up_bytes + 2 * inner, up_flops, outer(wide, s.hidden)),
        ("dx = dh up", product("grouped_product", wide), row + up_bytes + 2 * inner, up_flops, times(wide, up)),
        ("combine dx", combine, row + token, 0, lambda run: summed(run, None)),
    ]


def measure_operations(operations: list[Operation], bandwidth: float, rate: float) -> list[dict[str, Any]]:
    results = []
    for name, problem, n_bytes, flops, make in operations:
        us = {}
        for backend in BACKENDS[problem.op]:
            if not backend.why_not(problem):
                run = select(problem, backend.name)
                us[backend.name], _ = time_calls(lambda run=run, make=make: make(run), int(n_bytes))
        floor = max(n_bytes / bandwidth, flops / rate) * 1e6
        results.append(
            {
                "operation": name,
                "floor_us": floor,
                "us": us,
                "by": "arithmetic" if flops / rate > n_bytes / bandwidth else "bytes",
            }
        )
    return results


def sweep_columns(operations: list[Operation]) -> list[dict[str, Any]]:
    """Columns that a Triton program holds, for what moves rows."""
    kept, results = triton_experts.COLUMNS, []
    for columns in (512, 1024, 2048, 4096, 8192):
        triton_experts.COLUMNS = columns
        for name, problem, n_bytes, flops, make in operations:
            if not flops and name != "route":
                us, _ = time_calls(lambda problem=problem, make=make: make(select(problem, "triton")), int(n_bytes))
                results.append({"operation": name, "columns": columns, "us": us})
    triton_experts.COLUMNS = kept
    return results


def measure_errors(plain: Any, ours: Any, s: Sizes) -> list[dict[str, Any]]:
    """Errors of ours and of transformers' in bf16, relative to the norm of the exact value, by transformers' loop in float32."""
    inputs, dout = draw_inputs(s), draw(s.tokens, s.hidden)
    exact_module = copy.deepcopy(plain).float()
    exact_module.config._experts_implementation = "eager"
    exact = run(exact_module, (inputs[0].detach().float().requires_grad_(), *inputs[1:]), dout.float())
    results = []
    for name, true, mine, theirs in zip(NAMES, exact, run(ours, inputs, dout), run(plain, inputs, dout), strict=True):
        error, other = ((each.float() - true).norm().item() / true.norm().item() for each in (mine, theirs))
        results.append({"tensor": name, "error": error, "transformers": other, "ok": error <= 2 * other})
    return results


def check_graph(ours: Any, s: Sizes) -> bool:
    """Whether a forward runs in a CUDA graph, and a replay with other tokens and choices gives what a plain call gives."""
    inputs, others = draw_inputs(s), draw_inputs(s)
    with torch.no_grad():
        ours(*inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ours(*inputs)
        for mine, other in zip(inputs, others, strict=True):
            mine.copy_(other)
        graph.replay()
        return torch.equal(out, ours(*others))


def show(report: dict[str, Any]) -> None:
    for name, found in report["layer"].items():
        print(
            f"{name:14}"
            + ", ".join(f"{key} {value:.2f}" if "gib" in key else f"{key} {value:.0f}" for key, value in found.items())
        )
    print(f"{'operation':18}{'floor':>9}  by        " + "".join(f"{name:>11}" for name in ("reference", "torch", "triton")))
    for r in report["operations"]:
        row = "".join(f"{r['us'][name]:11.1f}" if name in r["us"] else f"{'-':>11}" for name in ("reference", "torch", "triton"))
        print(f"{r['operation']:18}{r['floor_us']:9.1f}  {r['by']:10}{row}")
    print(f"floors together {sum(r['floor_us'] for r in report['operations']):.0f} us")
    for r in report["errors"]:
        print(f"{r['tensor']:10} error {r['error']:.2e}, transformers {r['transformers']:.2e}{'' if r['ok'] else '  WRONG'}")
    for r in report["sweep"]:
        print(f"{r['operation']:18} {r['columns']:5} columns {r['us']:8.1f} us")
    if report["graph"] is not None:
        print(f"CUDA graph: {'a replay equals a call' if report['graph'] else 'WRONG'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, small, large in (
        ("hidden", 64, 4096),
        ("inside", 32, 7168),
        ("experts", 4, 8),
        ("top-k", 2, 2),
        ("tokens", 6, 8192),
    ):
        parser.add_argument(f"--{name}", type=int, default=small if CPU else large)
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--cpu", action="store_true", help="small sizes on the CPU, to see that it runs")
    parser.add_argument("--sweep", action="store_true", help="also the columns that a Triton program holds")
    s = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    plain, ours = build(s)
    bandwidth, rate = copy_bandwidth(), product_rate()
    report: dict[str, Any] = {
        "device": "CPU" if CPU else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "sizes": {key: getattr(s, key) for key in ("hidden", "inside", "experts", "top_k", "tokens")},
        "bandwidth": bandwidth,
        "rate": rate,
        "layer": {"transformers": measure_layer(plain, s), "ours": measure_layer(ours, s)},
        "errors": measure_errors(plain, ours, s),
        "graph": None if CPU else check_graph(ours, s),
    }
    operations = list_operations(plain, s)
    report["operations"] = measure_operations(operations, bandwidth, rate)
    report["sweep"] = sweep_columns(operations) if s.sweep else []
    if s.out:
        with open(s.out, "w") as file:
            json.dump(report, file, indent=1)
    print(f"{report['device']}, torch {torch.__version__}, {bandwidth / 1e12:.2f} TB/s, {rate / 1e12:.0f} TFLOP/s")
    print(report["sizes"])
    show(report)
    return 0 if all(r["ok"] for r in report["errors"]) and report["graph"] is not False else 1


if __name__ == "__main__":
    sys.exit(main())
