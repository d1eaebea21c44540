"""Which way rows move: what is asked for, else their size; and why."""

import pytest

from autotp.kernels.moves import LARGEST_BYTES, decide

SMALLEST = 16 << 20


@pytest.mark.parametrize(
    "n_bytes, way, why_not, copies, reason",
    [
        (SMALLEST, None, "", True, "16 MiB, at least 16 MiB"),
        (SMALLEST - 1, None, "", False, "16 MiB, fewer than 16 MiB"),
        (1000, True, "", True, "asked for: True"),
        (SMALLEST, False, "", False, "asked for: False"),
        (LARGEST_BYTES + 1, None, "", False, "more than the 1024 MiB"),
        (LARGEST_BYTES + 1, True, "", True, "asked for"),
        (0, True, "", False, "there are no rows"),
        (SMALLEST, True, "the ranks are on 2 hosts", False, "the ranks are on 2 hosts"),
    ],
)
def test_how_rows_move(n_bytes, way, why_not, copies, reason):
    found = decide(n_bytes, way, why_not, SMALLEST)
    assert found.copies is copies and reason in found.reason
