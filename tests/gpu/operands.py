"""Operands of 8 bits on a GPU, bitwise the reference's."""

from __future__ import annotations

import os
from itertools import product

import torch

from autotp.kernels import reference_fp8
from autotp.kernels.fp8 import SCALINGS, quantise, quantise_stacks
from autotp.kernels.fp8_scaled import Stack

PLAIN = torch.float8_e4m3fn, True, True, None, None, None  # how the reference quantises both operands


def check_operands(dtypes: list[torch.dtype], device: str) -> list[str]:
    """Operands of 8 bits that are not bitwise the reference's, by dtype and scaling: values, turned values, scales."""
    os.environ["AUTOTP_BACKEND"] = "quantise=triton,quantise_stacks=triton" if device == "cpu" else ""
    wrong = []
    shapes = [(48, 272)] if device == "cpu" else [(48, 272), (1040, 4096), (33, 17)]
    for dtype, scaling, shape in product(dtypes, (*SCALINGS, "squares"), shapes):
        x = torch.randn(shape[0], 2 * shape[1], dtype=torch.float64, device=device).to(dtype)[:, : shape[1]]
        found = [(f"{scaling} {dtype} {shape}", quantise(x, scaling), reference_fp8.quantise(x, scaling, *PLAIN))]
        if scaling == "tensorwise" and shape[1] % 16 == 0:
            parts = x[:32], x[32:]
            stacks = [Stack(parts, True, None), Stack(parts[1:], True, None), Stack(parts[:1], False, None)]
            pairs = zip(quantise_stacks(stacks), stacks, strict=True)
            for got, stack in pairs:
                want = reference_fp8.quantise(torch.cat(stack.parts), scaling, *PLAIN)
                found.append((f"stack {dtype} {shape}", got, want if stack.columns else (want[0], None)))
        for name, got, want in found:
            for side, mine, true in zip(("values", "turned"), got, want, strict=True):
                if mine is None or true is None:
                    assert mine is true
                    continue
                differ = (mine.values.view(torch.uint8) != true.values.view(torch.uint8)).sum().item()
                if differ or not torch.equal(mine.scale, true.scale):
                    scales = (mine.scale != true.scale).sum().item() if mine.scale.shape == true.scale.shape else mine.scale.shape
                    wrong.append(f"{side} of {name}: {differ} of {mine.values.numel()} differ, and scales: {scales}")
    return wrong


def launch_quantise(device: str) -> int:
    """Operands of 8 bits, both or one."""
    launches = 0
    scalings, wanted = (*SCALINGS, "squares"), ((True, True), (True, False), (False, True))
    for (rows, width), scaling, (straight, turned) in product(((3, 33), (7, 1000), (300, 129)), scalings, wanted):
        bad = torch.zeros((), dtype=torch.int32, device=device)
        quantise(torch.randn(rows, width, device=device).half(), scaling, rows=straight, columns=turned, bad=bad)
        launches += 1
    parts = [torch.randn(*shape, device=device).half() for shape in ((48, 32), (16, 32), (16, 16), (160, 272))]
    counted = torch.zeros(3, dtype=torch.int32, device=device)
    stacks = [Stack(tuple(parts[:2]), True, counted[0]), Stack((parts[2],), False, counted[1]), Stack((parts[3],), True, None)]
    quantise_stacks(stacks)
    return launches + 1
