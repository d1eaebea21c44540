import pytest
import torch
import torch.nn.functional as F

from autotp.kernels.dropout import attend_apart, drop_apart

NUMEL = 200_000


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_masks_of_parts_know_nothing_of_each_other(rate):
    masks = []
    for part in (0, 1, 7):
        torch.manual_seed(0)
        y = drop_apart(part, torch.ones(NUMEL), rate)
        masks.append(y == 0)
        assert torch.equal(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - rate)))
    chance = rate**2 + (1 - rate) ** 2
    pairs = [(masks[0], masks[1]), (masks[1], masks[2]), (masks[0][1:], masks[0][:-1])]
    for found, expected in [(m, rate) for m in masks] + [(a == b, chance) for a, b in pairs]:
        assert abs(found.double().mean() - expected) < 4 * (expected * (1 - expected) / NUMEL) ** 0.5


def test_edges():
    x = torch.randn(4, 3, requires_grad=True)
    assert drop_apart(0, x, 0.0) is x and drop_apart(0, x, 0.5, training=False) is x
    assert not drop_apart(0, x, 1.0).any() and not torch.autograd.grad(drop_apart(0, x, 1.0).sum(), x)[0].any()
    with pytest.raises(ValueError, match="between 0 and 1"):
        drop_apart(0, x, 1.5)
    y = torch.ones(1000)
    assert drop_apart(0, y, 0.5, inplace=True) is y and (y == 0).any()


@pytest.mark.parametrize("kind", ["causal", "none", "added", "shut", "scaled"])
def test_attention_is_torchs(kind):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    shut = (torch.rand(2, 1, 6, 6) > 0.3).index_fill(2, torch.tensor([2]), False)  # one query sees nothing
    given = {"causal": {"is_causal": True}, "none": {}, "scaled": {"scale": 0.3}, "shut": {"attn_mask": shut}}
    given = {"added": {"attn_mask": torch.randn(2, 1, 6, 6)}, **given}[kind]
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **given)
    torch.testing.assert_close(attend_apart(0, q, k, v, dropout_p=1e-9, enable_gqa=True, **given), expected)
