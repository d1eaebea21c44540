"""Plain values through JSON."""

import json
import math
import random
from collections import Counter

import numpy as np
import pytest
import torch

from autotp.checkpoint.plain import decode_plain, encode_plain
from autotp.checkpoint.random_state import choose_random_state, jump_random_state, random_state, set_random_state
from autotp.errors import CheckpointError


def there_and_back(value):
    return decode_plain(json.loads(json.dumps(encode_plain(value, "it"))))


def test_values_come_back_as_they_were():
    value = {
        "a": [1, 2.5, True, None, "text", (1, (2,)), []],
        3: {"tuple": 1, "dict": 2, "tensor": 3},
        (0, 1): 0.1 + 0.2,
        "big": 1 << 200,
        "inf": -math.inf,
        "bytes": b"\x00\xff",
    }
    assert there_and_back(value) == value and type(there_and_back(value)["a"][2]) is bool
    assert math.isnan(there_and_back(math.nan)) and there_and_back(np.float64(0.1)) == 0.1 and there_and_back(np.int32(7)) == 7
    assert there_and_back(Counter({30: 2})) == {30: 2}
    for tensor in (torch.randn(3, 2), torch.tensor(2.0), torch.zeros(0, 4), torch.tensor([True]), torch.randn(4).bfloat16()):
        found = there_and_back({"t": tensor})["t"]
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)


def test_what_is_not_plain_is_named():
    with pytest.raises(CheckpointError, match=r"extra\['a'\]\[1\] is a function, which a training state can't hold"):
        encode_plain({"a": [0, lambda: 0]}, "extra")
    for data in (
        {"list": []},
        {"tensor": ["float32", [3], "AAAA"]},
        {"tensor": ["nn", [0], ""]},
        {"dict": [1]},
        {},
        {"bytes": "a"},
    ):
        with pytest.raises(CheckpointError, match="can't be read"):
            decode_plain(data)


def test_random_numbers_go_on():
    state = there_and_back(random_state())
    drawn = lambda: (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random())  # noqa: E731
    first = drawn()
    set_random_state(state)
    assert drawn() == first
    set_random_state(state)
    jump_random_state(0)
    assert drawn() == first
    jumped = []
    for number in (1, 2):
        set_random_state(state)
        jump_random_state(number)
        jumped.append(drawn())
    assert first != jumped[0] != jumped[1]


def test_whose_random_numbers_a_rank_goes_on_with():
    ranks = [(dp, tp) for dp in range(2) for tp in range(2)]
    assert [choose_random_state((2, 2), (2, 2), tp, dp) for dp, tp in ranks] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert choose_random_state((2, 2), (3, 2), 2, 1) == (2, 0)  # of TP rank 0 of the same data rank
    assert [choose_random_state((2, 1), (2, 2), 1, dp) for dp in range(2)] == [(1, 0), (1, 1)]
