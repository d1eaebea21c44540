"""One new token and a static cache: attention over what the mask shows, and the write, against plain PyTorch."""

import pytest
import torch
import torch.nn.functional as F

from autotp.kernels import reference_decode, triton_cache
from autotp.kernels.cache import attend_cache, fits, write_cache

from .tensors import DEVICE, assert_close_enough, draw

SIZES = [(1, 4, 2, 130, 16, 16), (2, 3, 1, 70, 24, 20), (2, 4, 4, 96, 8, 32)]  # B, Hq, Hkv, L, D, E


def draw_masks(batch, length):
    """None; each row's own, padded on the left and not filled; one for all, expanded."""
    token, start = torch.arange(length, device=DEVICE), torch.arange(batch, device=DEVICE)[:, None] * 5
    own = ((token >= start) & (token < length // 2 + start)).view(batch, 1, 1, length)
    return None, own, own[:1].expand(batch, -1, -1, -1)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("batch, heads, kv_heads, length, width, out", SIZES)
def test_attention(use, batch, heads, kv_heads, length, width, out, splits):
    torch.manual_seed(0)
    q = draw(batch, 1, heads, width).transpose(1, 2)
    keys, values = draw(batch, kv_heads, length, width), draw(batch, kv_heads, length, out)
    for mask in draw_masks(batch, length):
        group = heads // kv_heads
        shared = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        exact = F.scaled_dot_product_attention(q, *shared, mask, scale=0.3).transpose(1, 2)
        torch.testing.assert_close(reference_decode.attend_cache(q, keys, values, mask, 0.3), exact)
        half = [x.half() for x in (q, keys, values)]
        assert fits(*half, mask)
        y = triton_cache.attend_cache(*half, mask, 0.3, splits)
        plain = reference_decode.attend_cache(*half, mask, 0.3)
        assert_close_enough(y, plain, exact)
    use("attend_cache=triton")
    torch.testing.assert_close(attend_cache(q.float(), keys.float(), values.float(), None, 0.3), exact_of(q, keys, values))


def exact_of(q, keys, values):
    return reference_decode.attend_cache(q, keys, values, None, 0.3).float()


def test_what_no_token_shows_is_nothing(use):
    use("attend_cache=triton")
    q, keys = draw(1, 2, 1, 8).float(), draw(1, 1, 9, 8).float()
    mask = torch.zeros(1, 1, 1, 9, dtype=torch.bool, device=DEVICE)
    assert torch.equal(attend_cache(q, keys, keys, mask, 1.0), torch.zeros(1, 1, 2, 8, device=DEVICE))


def test_other_calls_are_refused():
    q, keys, mask = draw(2, 4, 1, 8), draw(2, 2, 6, 8), torch.ones(2, 1, 1, 6, dtype=torch.bool, device=DEVICE)
    assert fits(q, keys, keys, mask)
    for call in (
        (draw(2, 4, 2, 8), keys, keys, mask),
        (draw(2, 3, 1, 8), keys, keys, mask),
        (q.float(), keys, keys, mask),
        (q, keys, keys, mask.double()),
        (q, keys, keys, mask.expand(2, 4, 1, 6)),
        (q, keys, keys.transpose(2, 3).contiguous().transpose(2, 3), mask),
        (q, keys.clone().requires_grad_(), keys, mask),
    ):
        assert not fits(*call)


def test_a_token_is_written_in_place(use):
    use("write_cache=triton")
    k, v = draw(2, 1, 3, 8).float().transpose(1, 2), draw(2, 3, 1, 6).float()
    keys, values = draw(2, 3, 10, 8).float(), draw(2, 3, 10, 6).float()
    before = keys.clone(), values.clone()
    position = torch.tensor([4], device=DEVICE)
    write_cache(k, v, keys, values, position)
    for cache, old, new in zip((keys, values), before, (k, v), strict=True):
        old[:, :, 4:5] = new
        assert torch.equal(cache, old)
