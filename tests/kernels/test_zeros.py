"""Numbers that are made many at a time: each is given once, and made where it is used."""

import torch

from autotp.kernels.zeros import COUNT, Numbers, scales, zeros

from .tensors import DEVICE

PLACE = torch.zeros(1, device=DEVICE).device


def test_each_is_zero_and_nobody_elses():
    pool = Numbers(torch.zeros, torch.int32)
    taken = [pool.take(PLACE).add_(i + 1) for i in range(2 * COUNT + 3)]
    assert torch.stack(taken).tolist() == list(range(1, 2 * COUNT + 4))
    assert all(z.shape == () and z.dtype == torch.int32 and z.data_ptr() % 16 == 0 for z in taken)


def test_what_is_filled_in_inference_mode_can_be_written_outside_of_it():
    pool = Numbers(torch.zeros, torch.int32)
    with torch.inference_mode():
        first = pool.take(PLACE)
    for taken in (first, pool.take(PLACE)):
        assert not taken.is_inference() and taken.add_(1) == 1


def test_what_is_written_as_a_scale_is_nobody_elses():
    taken = [scales.take(PLACE).fill_(i) for i in range(2 * COUNT + 3)]
    assert torch.stack(taken).tolist() == list(range(2 * COUNT + 3))
    assert all(s.shape == () and s.dtype == torch.float32 and s.data_ptr() % 16 == 0 for s in taken)
    assert zeros.take(PLACE) == 0


def test_streams_and_graphs_share_none(monkeypatch):
    capturing, stream, made = False, 0, []

    def make(*shape, dtype, device):
        made.append((stream, capturing, shape))
        return torch.zeros(3, 1, dtype=dtype)

    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: capturing, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream, raising=False)
    pool, device = Numbers(make, torch.int32), torch.device("cuda", 0)
    pool.take(device)
    stream = 7
    pool.take(device)
    pool.take(device)
    assert made == [(0, False, (COUNT, 4)), (7, False, (COUNT, 4))]
    capturing = True
    pool.take(device)
    assert made[2:] == [(7, True, ((),))]
