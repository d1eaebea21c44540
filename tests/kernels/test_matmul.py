"""The products of a linear: values, what they accumulate into, and which columns lie side by side."""

import pytest
import torch

from autotp.kernels import matmul


def made(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("m, n, k", [(5, 3, 4), (1, 1, 1), (0, 3, 4), (7, 0, 4), (33, 17, 9)])
def test_products_equal_their_algebra(m, n, k):
    x, w, b, dy = made(0, m, k), made(1, n, k), made(2, n), made(3, m, n)
    torch.testing.assert_close(matmul.linear(x, w, b), x @ w.t() + b)
    torch.testing.assert_close(matmul.dgrad(dy, w), dy @ w)
    torch.testing.assert_close(matmul.wgrad(dy, x), dy.t() @ x)
    into = made(4, m, k)
    before = into.clone()
    assert matmul.dgrad(dy, w, into) is into
    torch.testing.assert_close(into, before + dy @ w)
    wide = torch.cat([dy, dy + 1], 1)  # column slices of a wider buffer
    torch.testing.assert_close(matmul.dgrad(wide[:, n:], w), (dy + 1) @ w)
    torch.testing.assert_close(matmul.wgrad(wide[:, :n], x), dy.t() @ x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_main_gradients_add_up_or_are_overwritten(dtype):
    dy, x = made(0, 6, 3, dtype=dtype), made(1, 6, 4, dtype=dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    exact, product = dy.double().t() @ x.double(), matmul.wgrad(dy, x)
    rounding = (product.double() - exact).abs().max()
    main = made(2, 3, 4, dtype=wide)
    expected = main.double() + exact
    assert matmul.wgrad(dy, x, main) is None
    assert (main.double() - expected).abs().max() <= rounding + 1e-5
    main.fill_(float("nan"))
    assert matmul.wgrad(dy, x, main, overwrite=True) is None
    assert (main.double() - exact).abs().max() <= rounding + 1e-5


def test_columns_side_by_side_are_seen():
    buffer = made(0, 6, 10)
    parts = list(buffer.split([2, 5, 3], 1))
    found = matmul.view_side_by_side(parts)
    assert found.data_ptr() == buffer.data_ptr() and torch.equal(found, buffer)
    assert matmul.join_columns(parts[1:]).data_ptr() == parts[1].data_ptr() and torch.equal(
        matmul.join_columns(parts[1:]), buffer[:, 2:]
    )
    one = [p[:1] for p in parts]
    assert torch.equal(matmul.view_side_by_side(one), buffer[:1])


def test_columns_that_only_look_side_by_side_are_copied():
    buffer = made(0, 6, 10)
    a, b, c = buffer.split([2, 5, 3], 1)
    flat = made(1, 64)
    row = flat[:8].expand(6, 8)
    cases = {
        "in another order": [b, a],
        "with a gap": [a, c],
        "of other memory": [a, b.clone()],
        "one twice": [a, a],
        "transposed": [made(2, 2, 6).t(), made(3, 3, 6).t()],
        "one row for all": [row[:, :3], row[:, 3:]],
        "rows that overlap": [flat.as_strided((6, 3), (4, 1)), flat.as_strided((6, 3), (4, 1), 3)],
        "of other strides": [flat.as_strided((3, 2), (8, 1)), flat.as_strided((3, 2), (9, 1), 2)],
        "of other dtypes": [a, b.float()],
    }
    for name, parts in cases.items():
        assert matmul.view_side_by_side(parts) is None, name
        if name != "of other dtypes":
            assert torch.equal(matmul.join_columns(parts), torch.cat(parts, 1)), name
