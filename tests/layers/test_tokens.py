"""When tokens are dealt."""

import pytest
import torch

from autotp.errors import PlanError
from autotp.inject.threads import SoloGroup
from autotp.layers.layouts import Layout
from autotp.layers.tokens import LEAST_BYTES, LEAST_BYTES_WITHOUT_GRADIENT, TokenStream, map_first

# Columns of float32 of which 8 rows are what "auto" wants on a rank: in training, and where no gradient is wanted.
WIDE, WIDER = LEAST_BYTES // 4 // 8, LEAST_BYTES_WITHOUT_GRADIENT // 4 // 8


@pytest.mark.parametrize(
    "mode, shape, trains, expected",
    [
        (True, (3, 7, 4), True, Layout((3, 7), 21, 11)),
        (True, (21, 4), True, Layout((21,), 21, 11)),
        (True, (1, 1, 4), True, None),  # fewer tokens than ranks
        (True, (4, 1, 4), True, Layout((4, 1), 4, 2)),
        (True, (4, 1, 4), False, None),  # a decoding step
        (False, (3, 7, 4), True, None),
        ("auto", (3, 7, 4), True, None),
        ("auto", (2, 8, WIDE), True, Layout((2, 8), 16, 8)),
        ("auto", (1, 15, WIDE), True, None),
        ("auto", (2, 8, WIDER), False, Layout((2, 8), 16, 8)),
        ("auto", (1, 15, WIDER), False, None),
    ],
)
def test_when_tokens_are_dealt(mode, shape, trains, expected):
    stream = TokenStream(SoloGroup(0, 2), mode)
    x = torch.empty(1).expand(shape)
    with torch.set_grad_enabled(trains):
        assert stream.choose(x) == expected
    stream.suspended = True
    assert stream.choose(x) is None
    stream.suspended, stream.owners = False, 0  # counted, and none runs
    assert stream.choose(x) is None


def test_a_checkpoints_forward_without_a_graph_is_training():
    x = torch.empty(2, 8, WIDE, requires_grad=True)
    with torch.no_grad():
        assert TokenStream(SoloGroup(0, 2), "auto").choose(x) == Layout((2, 8), 16, 8)


def test_the_first_tensor_of_an_output_is_changed():
    x, y = torch.ones(2), torch.zeros(2)

    def double(t):
        return t * 2

    assert torch.equal(map_first(x, double, "m"), x * 2)
    changed = map_first(((x, y), y), double, "m")
    assert torch.equal(changed[0][0], x * 2) and changed[0][1] is y and changed[1] is y
    assert torch.equal(map_first({"a": x, "b": y}, double, "m")["a"], x * 2)
    with pytest.raises(PlanError, match="m returned a NoneType with no tensor first"):
        map_first(None, double, "m")
