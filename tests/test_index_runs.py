"""Runs of indices: what was compressed is enumerated, read and written as it was listed."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotp.index_runs import compress_indices, put_runs, run_width, take_runs


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=60))
def test_compressed_indices_enumerate_the_same(indices):
    runs = compress_indices(indices)
    assert run_width(runs) == len(indices)
    assert take_runs(torch.arange(51), 0, runs).tolist() == indices
    target = torch.full((51,), -1)
    put_runs(target, 0, runs, torch.arange(len(indices)))
    assert all(target[value] == indices.index(value) for value in indices)
