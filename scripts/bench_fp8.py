"""FP8 beside bf16, in one run on one machine: every operation against its floor, a training step, decoding, memory.

torchrun --nproc-per-node 2 scripts/bench_fp8.py
torchrun --nproc-per-node 2 scripts/bench_fp8.py --tiny        (small shapes, to see that it runs)
torchrun --nproc-per-node 2 scripts/bench_fp8.py --work body --compile default
torchrun --nproc-per-node 2 scripts/bench_fp8.py --work body --graph     (the step captured as one CUDA graph)

| work | what is measured, by CUDA events, medians |
|---|---|
| products | `F.scaled_mm` of 8192 rows by recipe, TFLOP/s; error against float32 beside scales and casts written by hand |
| operands | both operands of a tensor, GB/s of what a kernel with no cache would move |
| few | the product of one row, GB/s of the weight |
| body | forward and backward of 8 decoder layers of Llama-3-8B's shape, 2 x 4096 tokens: alone, and ten in a row; memory |
| decode | `generate()`, 32 layers, batch 1, 256 tokens after 1024, wall time; bytes of weights |

Every line is rank 0's. The floors are what the data sheet of an H200 promises: 989 TFLOP/s in bf16, 1979 in FP8, 4.8 TB/s.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from bench_fp8_operations import measure_few, measure_operands, measure_products, say, saying_errors, time_us
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import autotp
from autotp.groups import init_process_group_from_env, local_device
from autotp.kernels import fp8

SHAPE: dict[str, Any] = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
TINY: dict[str, Any] = dict(hidden_size=512, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)
RECIPES = {
    "fp8-tensorwise": fp8.Recipe(),
    "fp8-tensorwise, fast gradients": fp8.Recipe(fast_gradients=True),
    "fp8-tensorwise, fast, own scales": fp8.Recipe(fast_gradients=True, agree=False),
    "fp8-rowwise": fp8.Recipe("rowwise"),
    "fp8-blockwise": fp8.Recipe("blockwise"),
}


def build(shape: dict[str, Any], layers: int, vocabulary: int, device: torch.device) -> Any:
    """A random Llama, alike on all ranks."""
    config = LlamaConfig(
        **shape, num_hidden_layers=layers, vocab_size=vocabulary, max_position_embeddings=8192, dtype=torch.bfloat16
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model


def free(device: torch.device) -> None:
    """Give back what was measured."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Way(NamedTuple):
    """How the body runs: compiled in `mode`; a step as one CUDA graph; with dealt tokens."""

    mode: str = "none"
    graph: bool = False
    sequence_parallel: bool = False


def measure_body(shape: dict[str, Any], device: torch.device, layers: int, tokens: int, recipes: list[str], way: Way) -> None:
    """Forward and backward of the decoder's body."""
    if way != Way():
        say(f"\n{way}")
    widths = (34, 11, 11, 17, 11, 24)
    say("\nbody, forward and backward", "ms", "of bf16", "ms, 10 in a row", "peak GiB", "gradient's difference", widths=widths)
    ids = torch.randint(0, 1024, (2, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    options: dict[str, Any] = dict(plan="auto", sequence_parallel=way.sequence_parallel)
    first, grad = 0.0, torch.empty(0)
    for name in ("bf16", *recipes):
        model = build(shape, layers, 1024, device)
        autotp.parallelize(model, precision=None if name == "bf16" else RECIPES[name], **options)
        options["plan"] = replace(model.autotp_plan, products=())
        with saying_errors(name):
            ms, many, peak, own = time_body(model.train(), ids, device, way)
            first, grad = first or ms, grad if grad.numel() else own
            said = f"{((own - grad).norm() / grad.norm()).item():.3f}"
            say(name, f"{ms:.2f}", f"{ms / first:.3f}", f"{many:.2f}", peak, said, widths=widths)
            if bad := autotp.fp8_report(model):
                say(f"  not finite: {bad}")
        del model
        torch.compiler.reset()
        free(device)


def time_body(model: Any, ids: Tensor, device: torch.device, way: Way) -> tuple[float, float, str, Tensor]:
    """Milliseconds of a step alone and of each of ten in a row, peak memory, and one weight's gradient."""
    compiled = way.mode != "none"
    body = torch.compile(model.model, mode=way.mode) if compiled else model.model

    def step() -> None:
        model.zero_grad(set_to_none=True)
        if compiled:
            torch.compiler.cudagraph_mark_step_begin()
        out = body(ids, use_cache=False).last_hidden_state
        out.backward(torch.full_like(out, 1e-4))

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    run = capture(step, model) if way.graph else step
    ms = time_us(run, device, 10) / 1e3
    start = time.perf_counter()
    for _ in range(10):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    many = 100 * (time.perf_counter() - start)
    peak = f"{torch.cuda.max_memory_allocated() / 2**30:.2f}" if device.type == "cuda" else "-"
    return ms, many, peak, model.model.layers[0].mlp.up_proj.weight.grad.float()


def capture(step: Callable[[], None], model: Any) -> Callable[[], None]:
    """The step as a CUDA graph's replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def measure_decode(shape: dict[str, Any], device: torch.device, layers: int, context: int, new: int) -> None:
    """Tokens of a batch of one."""
    say("\ndecode, batch 1", "ms a token", "of bf16", "GiB of weights")
    ids = torch.randint(0, 1024, (1, context), generator=torch.Generator().manual_seed(0)).to(device)
    plan: Any = "auto"
    first = 0.0
    for name in ("bf16", "fp8-weights"):
        model = build(shape, layers, 128256 if device.type == "cuda" else 1024, device).eval()
        autotp.parallelize(model, plan=plan, precision=None if name == "bf16" else name)
        plan = replace(model.autotp_plan, products=())
        n_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        how: dict[str, Any] = dict(do_sample=False, pad_token_id=0, eos_token_id=None)
        seconds = []
        for count in (new, new, 1, new, 1, new):  # the first captures
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            model.generate(ids, max_new_tokens=count, min_new_tokens=count, **how)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append((count, time.perf_counter() - start))
        whole = min(s for count, s in seconds[1:] if count == new)
        ms = 1e3 * whole / new
        first = first or ms
        say(name, f"{ms:.3f}", f"{ms / first:.3f}", f"{n_bytes / 2**30:.2f}")
        autotp.release(model)
        del model
        free(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    works = ("products", "operands", "few", "body", "decode")
    parser.add_argument("--work", nargs="+", choices=works, default=list(works))
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES), help="of the body")
    parser.add_argument("--tiles", action="store_true", help="one row by every tile, too")
    modes = ("none", "default", "reduce-overhead", "max-autotune")
    parser.add_argument("--compile", choices=modes, default="none", help="torch.compile the body, of bf16 and FP8 alike")
    parser.add_argument("--graph", action="store_true", help="a step of the body captured as one CUDA graph")
    parser.add_argument("--sequence-parallel", action="store_true", help="the body with dealt tokens")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    args = parser.parse_args()
    if args.graph and args.compile != "none":
        parser.error("--graph captures the step as it is: leave --compile out")
    if args.graph and not torch.cuda.is_available():
        parser.error("--graph needs GPUs")
    init_process_group_from_env()
    device = local_device()
    shape, scale = (TINY, 16) if args.tiny else (SHAPE, 1)
    rows, layers = (256, 2) if args.tiny else (8192, 8)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    say(f"torch {torch.__version__}, {dist.get_world_size()} x {name}")
    if "products" in args.work:
        measure_products(device, rows, scale)
    if "operands" in args.work:
        measure_operands(device, rows, scale)
    if "few" in args.work:
        measure_few(device, scale, args.tiles)
    free(device)
    dist.barrier()
    if "body" in args.work:
        way = Way(args.compile, args.graph, args.sequence_parallel)
        measure_body(shape, device, layers, 64 if args.tiny else 4096, args.recipes, way)
    if "decode" in args.work:
        measure_decode(shape, device, 2 if args.tiny else 32, 16 if args.tiny else 1024, 8 if args.tiny else 256)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
