"""Zeros that are filled many at a time: each is zero, given once, and filled where it is used."""

import torch

from autotp.kernels import zeros as module
from autotp.kernels.zeros import COUNT, Zeros

from .tensors import DEVICE

PLACE = torch.zeros(1, device=DEVICE).device


def test_each_is_zero_and_nobody_elses():
    pool = Zeros()
    taken = [pool.take(PLACE).add_(i + 1) for i in range(2 * COUNT + 3)]
    assert torch.stack(taken).tolist() == list(range(1, 2 * COUNT + 4))
    assert all(z.shape == () and z.dtype == torch.int32 and z.data_ptr() % 16 == 0 for z in taken)


def test_what_is_filled_in_inference_mode_can_be_written_outside_of_it():
    pool = Zeros()
    with torch.inference_mode():
        first = pool.take(PLACE)
    for taken in (first, pool.take(PLACE)):
        assert not taken.is_inference() and taken.add_(1) == 1


def test_streams_and_graphs_share_none(monkeypatch):
    capturing, stream = False, 0
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream, raising=False)
    made = []
    monkeypatch.setattr(module, "_fill", lambda device: made.append(stream) or ("a", "b"))
    pool, device = Zeros(), torch.device("cuda", 0)
    pool.take(device)
    stream = 7
    pool.take(device)
    pool.take(device)
    assert made == [0, 7]
    capturing = True
    monkeypatch.setattr(torch, "zeros", lambda *shape, **how: ("filled", shape, how["device"]))
    assert pool.take(device) == ("filled", ((),), device) and made == [0, 7]
