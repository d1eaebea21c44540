"""Times `generate()` of a parallelized model, end to end.

torchrun --nproc-per-node 2 scripts/bench_generate.py
MOE=1 torchrun ...                                                 (8 layers of Mixtral-8x7B's shape)
SMALL=1 torchrun --nproc-per-node 2 scripts/bench_generate.py      (a tiny model, on the CPU where there is no GPU)

A random Llama of Llama-3-8B's shape, bf16, greedy. Every RESULT line is one measure, of rank 0:

| work | what |
|---|---|
| warm_up | seconds, and graphs captured, for one row and all lengths up to those below |
| generate | wall milliseconds a token over 256 new tokens after 1024; "decode_ms" without the prompt's share |
| first_token | milliseconds to the first token of 4096; "replay_ms": its graph alone, "body_ms": its layers, one by one |
| memory | GiB beyond this rank's weights and cache, at the peak |
| many | generations of random lengths and batches on two layers: captures and bytes allocated that were added after warm-up |
| step | one decoding step under the profiler: kernel, calls, microseconds |
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import autotp
from autotp.generation.engine import find_engine
from autotp.generation.prompt import PromptStep
from autotp.groups import init_process_group_from_env, local_device

MOE = os.environ.get("MOE") == "1"
SMALL = os.environ.get("SMALL") == "1"
SHAPE: dict[str, Any] = dict(
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256
)
TINY: dict[str, Any] = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, vocab_size=512)
LAYERS, CONTEXT, NEW, LONG, BATCHES = (2, 16, 8, 64, (1, 2)) if SMALL else (8 if MOE else 32, 1024, 256, 4096, (1, 8, 64))
GENERATIONS = int(os.environ.get("GENERATIONS", 20 if SMALL else 2000))
SECONDS = float(os.environ.get("SECONDS", 75))  # for all of them
GIB = 1 << 30


def main() -> int:
    init_process_group_from_env()
    device = local_device()
    print_result("start", torch=torch.__version__, device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu")
    model = build(LAYERS, device)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    measure_warm_up(model)
    for batch in BATCHES:
        measure_generate(model, batch)
    measure_first_token(model)
    measure_memory(model, weights)
    profile_step(model)
    autotp.release(model)
    del model
    measure_many(build(2, device))
    dist.barrier()
    print_result("done")
    dist.destroy_process_group()
    return 0


def print_result(work: str, **values: Any) -> None:
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(dict(work=work, **values)), flush=True)


def build(layers: int, device: torch.device) -> Any:
    """A random model over all ranks, which never stops by itself."""
    options: dict[str, Any] = dict(TINY if SMALL else SHAPE, num_hidden_layers=layers, max_position_embeddings=8192)
    experts: dict[str, Any] = dict(num_local_experts=8, num_experts_per_tok=2, vocab_size=min(options["vocab_size"], 32000))
    make: Any = MixtralForCausalLM if MOE else LlamaForCausalLM
    config = MixtralConfig(**options | experts) if MOE else LlamaConfig(**options)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = make(config).eval()
    torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    start = time.perf_counter()
    autotp.parallelize(model)
    print_result("parallelize", layers=layers, s=round(time.perf_counter() - start, 1))
    return model


def engine_of(model: Any) -> Any:
    """What the model decodes with."""
    return find_engine(model)


def draw_prompt(rows: int, tokens: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 10_000 + tokens)
    return torch.randint(1, 512, (rows, tokens), generator=generator).to(device)


def generate(model: Any, rows: int, tokens: int, new: int, **options: Any) -> torch.Tensor:
    ids = draw_prompt(rows, tokens, model.device)
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, **options)


def time_ms(call: Callable[[], Any], rounds: int) -> float:
    """Median wall milliseconds of a call, the device's work included."""
    times = []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_warm_up(model: Any) -> None:
    start = time.perf_counter()
    captured = autotp.warm_up(model, BATCHES[:1], max_length=CONTEXT + NEW)
    print_result(
        "warm_up", graphs=captured, s=round(time.perf_counter() - start, 1), without=list(engine_of(model).broken.values())
    )


def measure_generate(model: Any, batch: int) -> None:
    for do_sample in (False, True) if batch == BATCHES[0] else (False,):
        options = dict(rows=batch, tokens=CONTEXT)
        generate(model, **options, new=4)
        whole = time_ms(lambda options=options: generate(model, **options, new=NEW), 3)
        first = time_ms(lambda options=options: generate(model, **options, new=1), 3)
        if do_sample:
            ids = draw_prompt(batch, CONTEXT, model.device)
            whole = time_ms(lambda ids=ids: model.generate(ids, max_new_tokens=NEW, do_sample=True, top_k=50, top_p=0.9), 3)
        print_result(
            "generate", batch=batch, sampling=do_sample, context=CONTEXT, new=NEW, ms_a_token=round(whole / NEW, 3),
            prompt_ms=round(first, 2), decode_ms=round((whole - first) / (NEW - 1), 3),
            tokens_a_second=round(batch * NEW / whole * 1e3),
        )  # fmt: skip


def measure_first_token(model: Any) -> None:
    generate(model, 1, LONG, 1)
    whole, ids = time_ms(lambda: generate(model, 1, LONG, 1), 5), draw_prompt(1, LONG, model.device)
    graphs = [step.graph for step in engine_of(model).steps.values() if isinstance(step, PromptStep) and step.tokens == LONG]
    replay = round(time_ms(graphs[-1].replay, 5), 2) if graphs and graphs[-1] is not None else None
    with torch.no_grad():
        body = time_ms(lambda: model.model(ids, use_cache=False), 5)
    print_result("first_token", context=LONG, ms=round(whole, 2), replay_ms=replay, body_ms=round(body, 2))


def measure_memory(model: Any, weights: int) -> None:
    if not torch.cuda.is_available():
        print_result("memory", weights_gib=round(weights / GIB, 3), cache_gib=round(engine_of(model).arena.nbytes / GIB, 3))
        return
    for batch in (BATCHES[0], BATCHES[-1]):
        autotp.release(model)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        generate(model, batch, CONTEXT, NEW)
        cache, peak = engine_of(model).arena.nbytes, torch.cuda.max_memory_allocated()
        print_result(
            "memory", batch=batch, weights_gib=round(weights / GIB, 2), cache_gib=round(cache / GIB, 3),
            beyond_gib=round((peak - weights - cache) / GIB, 3), reserved_gib=round(torch.cuda.memory_reserved() / GIB, 2),
        )  # fmt: skip


def measure_many(model: Any) -> None:
    """Random lengths and batches, the same on all ranks."""
    sizes = (1, 2, 4, 8)
    for batch in reversed(sizes):
        autotp.warm_up(model, [batch], max_length=512)
    draws = random.Random(0)
    engine, seen, done = engine_of(model), [], 0
    print_result("call", new=1, layers=2, ms=round(time_ms(lambda: generate(model, 1, 64, 1), 9), 2))
    start = time.perf_counter()
    for number in range(GENERATIONS):
        if number % 50 == 0 and not agree_to_go_on(time.perf_counter() - start < SECONDS):
            break
        done = number + 1
        rows, tokens, new = draws.randint(1, 8), draws.randint(1, 300), draws.randint(1, 24)
        options = dict(top_k=20) if draws.random() < 0.3 else {}
        ids = draw_prompt(rows, tokens, model.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=bool(options), **options)
        if out.shape != (rows, tokens + new):
            print_result("many", wrong=[number, rows, tokens, new, list(out.shape)])
        if number == GENERATIONS // 10:
            seen.append(read_state(engine))
    (captures, allocated, reserved, rss), last = (seen or [read_state(engine)])[0], read_state(engine)
    print_result(
        "many", generations=done, s=round(time.perf_counter() - start, 1), captures=last[0], recaptures=last[0] - captures,
        allocated_growth=last[1] - allocated, reserved_growth=last[2] - reserved, host_growth_mib=round(last[3] - rss, 1),
    )  # fmt: skip


def agree_to_go_on(wanted: bool) -> bool:
    """Rank 0's word."""
    box = [wanted]
    dist.broadcast_object_list(box, 0)
    return box[0]


def read_state(engine: Any) -> tuple[int, int, int, float]:
    """Captures, bytes allocated and reserved on the device, and this process's MiB."""
    return engine.captures, torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), read_rss()


def read_rss() -> float:
    """Resident MiB of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def profile_step(model: Any) -> None:
    """Kernels of the decoding steps of a generation, a step's share."""
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return
    new = 17
    generate(model, 1, CONTEXT, new)
    generate(model, 1, CONTEXT, 1)
    with profile(activities=[ProfilerActivity.CUDA]) as one:
        generate(model, 1, CONTEXT, 1)
        synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as many:
        generate(model, 1, CONTEXT, new)
        synchronize()
    table = [row for row in subtract(read_kernels(many), read_kernels(one), new - 1) if row[1] > 0]
    print_result("step", us=round(sum(us for _, _, us in table)), calls=round(sum(calls for _, calls, _ in table)))
    for name, calls, us in table[:28]:
        print_result("kernel", name=name, calls=calls, us=us)


def read_kernels(profiled: Any) -> dict[str, tuple[int, float]]:
    found = {}
    for event in profiled.key_averages():
        if event.self_device_time_total > 0:
            name = re.sub(r"<.*", "", event.key.replace("void ", "")).split("(")[0][-60:]
            calls, us = found.get(name, (0, 0.0))
            found[name] = calls + event.count, us + event.self_device_time_total
    return found


def subtract(many: dict, one: dict, steps: int) -> list[tuple[str, float, float]]:
    """`(kernel, calls, microseconds)` of one of `steps`, the longest first."""
    rows = []
    for name, (calls, us) in many.items():
        before = one.get(name, (0, 0.0))
        rows.append((name, round((calls - before[0]) / steps, 2), round((us - before[1]) / steps, 1)))
    return sorted(rows, key=lambda row: -row[2])


if __name__ == "__main__":
    sys.exit(main())
