"""The decoding kernels' cases for kernels.py: products of few rows and attention over a cache, which have no gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from autotp.kernels import reference, reference_decode, triton_cache, triton_few_rows

# rows, outputs, terms
PRODUCTS = [(1, 3072, 4096), (2, 515, 4096), (3, 77, 1000), (8, 4096, 7168), (16, 300, 2048)]
ODD_PRODUCTS = [(1, 3, 33), (2, 17, 2048), (4, 5, 1000), (5, 33, 100), (16, 130, 264)]
SMALL_PRODUCTS = [(1, 5, 33), (8, 17, 40)]
# sequences, query and kv heads, tokens, columns of keys and of values
CACHES = [(1, 16, 4, 2048, 128, 128), (8, 12, 4, 515, 96, 64), (3, 7, 1, 1000, 256, 256), (2, 71, 1, 130, 64, 64)]
ODD_CACHES = [(1, 3, 1, 33, 80, 40), (2, 8, 2, 300, 128, 128), (3, 5, 5, 65, 16, 24)]
SMALL_CACHES = [(2, 4, 2, 70, 16, 24)]


def decoding_forms(
    products: list[tuple[int, ...]], caches: list[tuple[int, ...]], device: str
) -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any], tuple[torch.Tensor, ...]]]:
    """`(name, ours, plain, inputs)`, inputs in float64."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, device=device)

    for m, n, k in products:
        for activation in ("", "silu"):

            def ours(x, w, b, activation=activation):
                return triton_few_rows.linear_few(x, w, b, activation)

            def plain(x, w, b, activation=activation):
                return reference.linear_few(x, w, b, activation)

            rows = n * (2 if activation else 1)
            yield f"few_rows {activation} {(m, n, k)}", ours, plain, (draw(m, k), draw(rows, k) * k**-0.5, draw(rows))
    for batch, heads, kv_heads, length, width, out in caches:
        token = torch.arange(length, device=device)
        first = torch.arange(batch, device=device)[:, None] * 3
        mask = ((token >= first) & (token < 2 * length // 3 + first)).view(batch, 1, 1, length)

        def attend(q, k, v, mask=mask):
            return triton_cache.attend_cache(q, k, v, mask, q.shape[-1] ** -0.5)

        def plain_attend(q, k, v, mask=mask):
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)

        tensors = draw(batch, heads, 1, width), draw(batch, kv_heads, length, width), draw(batch, kv_heads, length, out)
        yield f"attend {(batch, heads, kv_heads, length, width, out)}", attend, plain_attend, tensors


def compare_decoding(dtype: torch.dtype, device: str, small: bool) -> list[dict[str, Any]]:
    """One row for each case: both errors relative to the exact value's norm, and their ratio, as kernels.py's `compare`."""
    rows = []
    for name, ours, plain, inputs in decoding_forms(*((SMALL_PRODUCTS, SMALL_CACHES) if small else (PRODUCTS, CACHES)), device):
        rounded = [x.to(dtype) for x in inputs]
        if name.startswith("few_rows") and dtype is torch.float32 and rounded[0].shape[0] > 4:
            continue  # left to cuBLAS
        exact = plain(*(x.double() for x in rounded))
        mine, theirs = ours(*rounded), plain(*rounded)
        error, other = ((x.double() - exact).norm().item() / exact.norm().item() for x in (mine, theirs))
        ratio = error / max(other, torch.finfo(dtype).eps / 32)
        row = dict(case=name, dtype=str(dtype), backend="triton", tensor="output", error=error, torch=other, ratio=ratio)
        rows.append(row | dict(ok=ratio <= 2 and mine.dtype is dtype and mine.shape == theirs.shape))
    return rows


def launch_decoding(device: str) -> int:
    """Each kernel at sizes that fill no tile, on allocations of their own."""
    launches = 0
    for _, ours, _, inputs in decoding_forms(ODD_PRODUCTS, ODD_CACHES, device):
        ours(*(x.half() for x in inputs))
        launches += 1
    k, v, keys, values = (torch.randn(2, 3, n, 40, device=device) for n in (1, 1, 17, 17))
    position = torch.tensor([16], device=device)
    triton_cache.write_cache(k, v, keys, values, position)
    plain = keys.clone(), values.clone()
    reference_decode.write_cache(k, v, *plain, position)
    assert torch.equal(keys, plain[0]) and torch.equal(values, plain[1])
    return launches + 1
