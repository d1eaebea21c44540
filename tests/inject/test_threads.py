"""Ranks that are threads of one process, and what planning changes in the process."""

import gc

import torch

from autotp.inject import proofs, rules
from autotp.inject.threads import young_garbage
from tests.models import tiny


def test_plans_are_made_in_one_thread_a_rank_and_leave_the_number_as_it_was(monkeypatch):
    seen = []
    prove = proofs.prove
    monkeypatch.setattr(proofs, "prove", lambda *args: seen.append(torch.get_num_threads()) or prove(*args))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        rules.make_plan(tiny("llama"), 2)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}


def test_what_was_there_is_not_searched_for_garbage_inside_and_is_again_afterwards():
    assert gc.get_freeze_count() == 0
    with young_garbage():
        assert gc.get_freeze_count() > 0
        with young_garbage():
            pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
