"""Fused operations on a GPU: errors against float64 beside those of plain PyTorch in the same dtype, of which they may be twice.

python tests/gpu/kernel_errors.py [--out FILE.json]            all errors, and that the gradients are the same in every run
compute-sanitizer python tests/gpu/kernel_errors.py --launch   each Triton kernel once, at odd sizes, on allocations of their own
python tests/gpu/kernel_errors.py --cpu                        small sizes in Triton's interpreter, to see that it runs
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

if "--cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before transformers imports triton
if "--launch" in sys.argv:
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # so that what lies behind a tensor is nobody's

import torch
import torch.nn.functional as F

from autotp.kernels.gated import gated
from autotp.kernels.norm import KINDS, add_norm, norm, norm_backward, norm_forward
from autotp.kernels.reference import ACTIVATIONS
from autotp.kernels.rotary import rotary
from autotp.layers.cross_entropy import vocab_parallel_cross_entropy
from tests.gpu.decoding import compare_decoding, launch_decoding
from tests.gpu.experts import LARGE, ODD, SMALL, expert_forms
from tests.gpu.operands import check_operands, launch_quantise

CPU = "--cpu" in sys.argv
DEVICE = "cpu" if CPU else "cuda"
# The interpreter cuts bfloat16 off instead of rounding.
DTYPES = [torch.float16, torch.float32] if CPU else [torch.bfloat16, torch.float16, torch.float32]
EPS = 1e-5


@dataclass
class Case:
    """A fused operation and its plain meaning on the same float64 inputs, of which names gives the ones with a gradient."""

    name: str
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    names: str
    backends: tuple[str, ...] = ("triton",)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, device=DEVICE)


def plain_norm(x, weight, bias, kind):
    if kind == "layernorm":
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
    scale = None if weight is None else weight + 1 if kind == "rms1p" else weight
    y = F.rms_norm(x, x.shape[-1:], scale, EPS)
    return y if bias is None else y + bias


def heads_in_slice(x):
    """Three heads, of columns that begin at the fourth."""
    return x[..., 3:].unflatten(-1, (3, -1))


def norm_cases() -> list[Case]:
    cases = []
    shapes = [(5, 33), (2, 3, 2, 8)] if CPU else [(1031, 4096), (37, 4099), (7, 5, 3, 128), (3, 16384), (513, 1), (4097, 2048)]
    for kind in KINDS:
        backends = ("triton",) if CPU or kind == "rms1p" else ("triton", "torch")

        def ours(x, residual, weight, bias=None, kind=kind):
            return add_norm(x, residual, weight, bias, EPS, kind)

        def plain(x, residual, weight, bias=None, kind=kind):
            total = x + residual
            return plain_norm(total, weight, bias, kind), total

        for shape in shapes:
            width = shape[-1]
            inputs = [draw(*shape), draw(*shape), draw(width)]
            if kind == "layernorm":  # PyTorch's rms_norm has no bias
                inputs.append(draw(width))
            taken = ("auto",) if width == 1 else backends  # which leaves such rows, all rounding, to PyTorch
            cases.append(Case(f"{kind} add {shape}", ours, plain, tuple(inputs), "x residual weight bias", taken))
        x = draw(9, 11, 3 + 3 * shapes[0][-1])
        cases.append(
            Case(
                f"{kind} heads in a slice {tuple(x.shape)}",
                lambda x, kind=kind: norm(heads_in_slice(x), None, None, EPS, kind),
                lambda x, kind=kind: plain_norm(heads_in_slice(x), None, None, kind),
                (x,),
                "x",
            )
        )
    return cases


def gated_cases() -> list[Case]:
    cases = []
    for activation in ACTIVATIONS:

        def ours(x, activation=activation):
            return gated(*x.chunk(2, -1), activation)

        def plain(x, activation=activation):
            gate, up = x.chunk(2, -1)
            return ACTIVATIONS[activation](gate) * up

        for shape in [(3, 26)] if CPU else [(513, 2054)] + [(1000, 14336), (2049, 26)] * (activation == "silu"):
            cases.append(Case(f"{activation} gate {shape}", ours, plain, (draw(*shape) * 2,), "x"))
    return cases


def plain_rotary(q, k, cos, sin, interleaved):
    """As transformers computes it, in q's dtype throughout."""
    turned = []
    for x in (q, k):
        first = x[..., : cos.shape[-1]]
        a, b = (first[..., ::2], first[..., 1::2]) if interleaved else first.chunk(2, -1)
        swapped = torch.stack([-b, a], -1).flatten(-2) if interleaved else torch.cat([-b, a], -1)
        turned.append(torch.cat([first * cos.unsqueeze(1) + swapped * sin.unsqueeze(1), x[..., cos.shape[-1] :]], -1))
    return tuple(turned)


def rotary_cases() -> list[Case]:
    cases = []
    shapes = [(2, 3, 4, 2, 8, 6)] if CPU else [(2, 37, 16, 4, 128, 128), (1, 129, 7, 1, 80, 32), (3, 5, 33, 3, 96, 96)]
    for batch, tokens, heads, kv_heads, width, turned in shapes:
        for interleaved in (False, True):
            angles = draw(batch, tokens, turned) * 3

            def split(qkv, heads=heads, kv_heads=kv_heads, width=width):
                parts = qkv.split([heads * width, kv_heads * width, kv_heads * width], -1)
                return [x.unflatten(-1, (-1, width)).transpose(1, 2) for x in parts[:2]]

            def ours(qkv, cos, sin, split=split, interleaved=interleaved):
                return rotary(*split(qkv), cos.detach(), sin.detach(), interleaved)

            def plain(qkv, cos, sin, split=split, interleaved=interleaved):
                return plain_rotary(*split(qkv), cos.detach(), sin.detach(), interleaved)

            inputs = (draw(batch, tokens, (heads + 2 * kv_heads) * width), angles.cos(), angles.sin())
            name = f"rotary {'interleaved' if interleaved else 'halves'} {(batch, tokens, heads, kv_heads, width, turned)}"
            cases.append(Case(name, ours, plain, inputs, "qkv"))
    return cases


class OneRank:
    """As much of a TPGroup as the loss asks for."""

    tp_rank, tp_size = 0, 1

    @staticmethod
    def all_reduce_owned(x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return x


def cross_entropy(x: torch.Tensor, plain: bool = False, smoothing: float = 0.1) -> torch.Tensor:
    """Losses of `[M, V]` in x's dtype, of targets that depend on the shape alone; some do not count."""
    target = torch.arange(len(x), device=x.device) * 7919 % x.shape[1]
    target[::5] = -100
    if plain:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.cross_entropy(wide, target, reduction="none", label_smoothing=smoothing).to(x.dtype)
    how = dict(label_smoothing=smoothing, reduction="none")
    return vocab_parallel_cross_entropy(x, target, (0, x.shape[1]), OneRank(), **how).to(x.dtype)  # type: ignore[arg-type]


def loss_cases() -> list[Case]:
    shapes = [(64, 50)] if CPU else [(513, 64128), (1000, 4099), (4097, 33)]
    return [
        Case(f"loss {shape}", cross_entropy, lambda x: cross_entropy(x, plain=True), (draw(*shape) * 4,), "x") for shape in shapes
    ]


def expert_cases() -> list[Case]:
    return [Case(*form, "x up down weights") for form in expert_forms(SMALL if CPU else LARGE, DEVICE)]


def evaluate(compute: Callable[..., Any], inputs: list[torch.Tensor], count: int) -> list[torch.Tensor]:
    """Outputs, then gradients of the first `count` inputs, for incoming gradients drawn from one seed."""
    inputs = [x.detach().requires_grad_(i < count) for i, x in enumerate(inputs)]
    outputs = compute(*inputs)
    outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    generator = torch.Generator(DEVICE).manual_seed(1)
    # in sixteenths, which every dtype holds exactly
    incoming = [(torch.randn(y.shape, generator=generator, device=DEVICE) * 16).round().div(16).to(y.dtype) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs[:count], incoming)]


def compare(case: Case, dtype: torch.dtype) -> list[dict[str, Any]]:
    """One row for each output and gradient: both errors relative to the exact value's norm, and their ratio."""
    rounded = [x.to(dtype) for x in case.inputs]
    count = min(len(case.names.split()), len(rounded))
    exact = evaluate(case.plain, [x.double() for x in rounded], count)
    theirs = evaluate(case.plain, rounded, count)
    names = [f"output {i}" for i in range(len(exact) - count)] + [f"d{name}" for name in case.names.split()[:count]]
    rows = []
    for backend in case.backends:
        os.environ["AUTOTP_BACKEND"] = backend
        ours = evaluate(case.ours, rounded, count)
        for name, mine, other, true in zip(names, ours, theirs, exact, strict=True):
            size = true.norm().item() or 1.0
            error, plain = ((x.double() - true).norm().item() / size for x in (mine, other))
            # far below half a unit in the last place, where both are as good as exact
            ratio = error / max(plain, torch.finfo(dtype).eps / 32)
            rows.append(
                dict(case=case.name, dtype=str(dtype), backend=backend, tensor=name, error=error, torch=plain, ratio=ratio)
            )
            rows[-1]["ok"] = ratio <= 2 and mine.dtype == dtype
    return rows


CASES = {"norm": norm_cases, "gated": gated_cases, "rotary": rotary_cases, "loss": loss_cases, "experts": expert_cases}


def compare_all(part: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    if part == "decoding":
        return compare_decoding(dtype, DEVICE, CPU)
    return [row for case in CASES[part]() for row in compare(case, dtype)]


def check_repeatable() -> bool:
    """The weight's and bias's gradients of many rows are bitwise the same in every run."""
    os.environ["AUTOTP_BACKEND"] = "triton"
    x, dy, weight, bias = (draw(*shape).float() for shape in ((777, 96), (777, 96), (96,), (96,)))
    _, rstd, mean = norm_forward(x, weight, bias, EPS, "layernorm")
    runs = [norm_backward(dy, x, weight, rstd, mean, "layernorm") for _ in range(3)]
    return all(
        torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True) if a is not None and b is not None
    )


def launch_all() -> int:
    """Each Triton kernel at sizes that fill no tile, and at one that does; inputs end where their allocation does."""
    os.environ["AUTOTP_BACKEND"] = "triton"
    launches = 0

    def run(compute, *inputs):
        nonlocal launches
        inputs = [x.to(torch.float16).requires_grad_() for x in inputs]
        outputs = compute(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.grad(outputs, inputs, [torch.empty_like(y) for y in outputs])
        launches += 1

    for kind in KINDS:
        for rows, width in ((3, 33), (5, 1), (7, 1000), (2, 2048), (300, 129)):
            inputs = draw(rows, width), draw(rows, width), draw(width), draw(width)
            run(lambda x, residual, weight, bias, kind=kind: add_norm(x, residual, weight, bias, EPS, kind), *inputs)
        run(lambda x, kind=kind: norm(heads_in_slice(x), None, None, EPS, kind), draw(2, 5, 3 + 3 * 37))
    for rows, width in ((3, 33), (5, 1), (3, 1030), (2, 2048), (301, 17)):
        run(lambda x: gated(*x[..., 1:].chunk(2, -1), "silu"), draw(rows, 1 + 2 * width))
        run(lambda gate, up: gated(gate, up, "gelu"), draw(rows, width), draw(rows, width))
    for rows, width in ((3, 33), (5, 1), (3, 4099), (2, 8192)):
        run(lambda x: cross_entropy(x[:, 1:]), draw(rows, 1 + width))
    for heads, kv_heads, width, turned in ((3, 1, 10, 6), (33, 5, 160, 160), (16, 4, 128, 128)):
        angles = draw(1, 5, turned).half()
        for interleaved in (False, True):

            def turn(q, k, angles=angles, interleaved=interleaved):
                return rotary(q.transpose(1, 2), k.transpose(1, 2), angles, angles, interleaved)

            run(turn, draw(2, 5, heads, width), draw(2, 5, kv_heads, width))
    for _, compute, _, inputs in expert_forms(ODD, DEVICE):
        run(compute, *inputs)
    return launches + launch_quantise(DEVICE) + launch_decoding(DEVICE)


def show(rows: list[dict[str, Any]]) -> None:
    """The worst tensor of each operation, dtype and backend."""
    worst: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        key = row["case"].split()[0], row["dtype"], row["backend"]
        if key not in worst or row["ratio"] > worst[key]["ratio"]:
            worst[key] = row
    print(f"{'operation':14}{'dtype':16}{'backend':9}{'ratio':>6}{'error':>10}{'PyTorch':>10}  worst tensor")
    for (operation, dtype, backend), row in sorted(worst.items()):
        numbers = f"{row['ratio']:6.2f}{row['error']:10.1e}{row['torch']:10.1e}"
        print(f"{operation:14}{dtype:16}{backend:9}{numbers}  {row['tensor']} of {row['case']}{'' if row['ok'] else '  WRONG'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--cpu", action="store_true", help="small sizes on the CPU, to see that it runs")
    parser.add_argument("--launch", action="store_true", help="start each Triton kernel, compare nothing")
    options = parser.parse_args()
    if options.launch:
        torch.manual_seed(0)
        print(f"LAUNCHED {launch_all()} forwards and backwards")
        if not CPU:
            torch.cuda.synchronize()
        return 0
    jobs = [(part, dtype) for part in (*CASES, "decoding") for dtype in DTYPES]
    if CPU:
        rows = [row for job in jobs for row in compare_all(*job)]
    else:  # compiling is what takes the time
        with ProcessPoolExecutor(len(jobs), get_context("spawn")) as pool:
            rows = [row for found in pool.map(compare_all, *zip(*jobs, strict=True)) for row in found]
    repeatable, operands = check_repeatable(), check_operands(DTYPES, DEVICE)
    if options.out:
        with open(options.out, "w") as file:
            json.dump({"rows": rows, "repeatable": repeatable}, file, indent=1)
    show(rows)
    wrong = [row for row in rows if not row["ok"]]
    print(*(f"WRONG {line}" for line in operands), sep="\n")
    print(f"{len(rows)} tensors, {len(wrong)} beyond twice PyTorch's error; gradients {'' if repeatable else 'NOT '}repeatable")
    return 0 if not wrong and not operands and repeatable else 1


if __name__ == "__main__":
    sys.exit(main())
