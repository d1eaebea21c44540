"""Memory of caches."""

import torch

from autotp.generation.arena import Arena


def test_what_an_earlier_generation_left_is_cleared():
    arena = Arena()
    arena.clear(4)  # nothing is there yet
    arena.grow(8)
    shape = (1, 2, 8, 3)
    first = arena.view(0, "keys", shape, torch.zeros(1)).fill_(torch.nan)
    arena.clear(4)
    assert (first.flatten()[: 4 * 6] == 0).all() and first.flatten()[4 * 6 :].isnan().all()
    arena.clear(8)
    later = arena.view(1, "keys", shape, torch.zeros(1)).fill_(torch.nan)  # a block that was not there when 8 were cleared
    other = arena.view(0, "keys", shape, torch.zeros(1).half()).fill_(torch.nan)  # and one in the place of another
    arena.clear(8)
    assert (later == 0).all() and (other == 0).all()
    arena.grow(2)
    small = arena.view(0, "keys", (1, 2, 2, 3), torch.zeros(1)).fill_(torch.nan)
    arena.clear(2)
    assert (small == 0).all()
