"""One decoding step's buffers."""

from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autotp.comm import TPGroup
from autotp.generation.step import Form, Step

BATCH, TOKENS = 2, 5


class OneDevice(TorchDispatchMode):
    """Refuses what would make the host wait for a device: copies from one to another. Values can't be read on meta."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        devices = {each.device.type for each in tree_leaves((args, kwargs, found)) if isinstance(each, torch.Tensor)}
        assert devices <= {"meta"}, func
        return found


def make_step(device, rows=4, length=16):
    cache: Any = SimpleNamespace(position=torch.zeros(1, dtype=torch.int64, device=device), start_decoding=lambda tokens: None)
    head: Any = SimpleNamespace(range=None)
    form = Form(rows, length, greedy=True, positions=(), masked=True, token_types=True, extra=())
    return Step(form, cache, "past_key_values", TPGroup(None, torch.device(device)), head)


def make_prompt(device) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    ids = torch.arange(BATCH * TOKENS, device=device).view(BATCH, TOKENS)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return ids, dict(
        attention_mask=mask, position_ids=torch.arange(TOKENS, device=device)[None], token_type_ids=torch.ones_like(ids)
    )


def test_a_prompt_is_taken_over():
    step, (ids, inputs) = make_step("cpu"), make_prompt("cpu")
    for eos in ([7, 9, 11], [3]):  # what an earlier prompt left is gone
        step.begin(ids, inputs, eos, pad=1)
    assert step.unfinished.tolist() == [1, 1, 0, 0]
    assert step.eos.tolist() == [3, *[-1] * 15] and step.pad.tolist() == [1]
    assert torch.equal(step.ids[:BATCH, :TOKENS], ids) and (step.ids[BATCH:] == 1).all() and (step.ids[:, TOKENS:] == 1).all()
    assert step.positions is not None and step.positions.flatten().tolist() == [5, 5, 0, 0]
    assert step.mask is not None and step.mask[0].tolist() == [0, 0, *[1] * 14]


def test_nothing_waits_for_the_device_while_the_prompt_is_read():
    step, (ids, inputs) = make_step("meta"), make_prompt("meta")
    with OneDevice():
        step.begin(ids, inputs, [7, 9], pad=1)
        step.choose_best(torch.zeros(4, 131, device="meta"))
