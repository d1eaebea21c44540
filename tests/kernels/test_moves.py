"""Which way rows move: what is asked for, else their size; and why."""

import pytest

from autotp.kernels.moves import LARGEST_BYTES, SMALLEST_BYTES, decide


@pytest.mark.parametrize(
    "n_bytes, way, why_not, copies, reason",
    [
        (SMALLEST_BYTES, None, "", True, "16 MiB, at least 16 MiB"),
        (SMALLEST_BYTES - 1, None, "", False, "16 MiB, fewer than 16 MiB"),
        (1000, True, "", True, "asked for: True"),
        (SMALLEST_BYTES, False, "", False, "asked for: False"),
        (LARGEST_BYTES + 1, None, "", False, "more than the 1024 MiB"),
        (LARGEST_BYTES + 1, True, "", True, "asked for"),
        (0, True, "", False, "there are no rows"),
        (SMALLEST_BYTES, True, "the ranks are on 2 hosts", False, "the ranks are on 2 hosts"),
    ],
)
def test_how_rows_move(n_bytes, way, why_not, copies, reason):
    found = decide(n_bytes, way, why_not)
    assert found.copies is copies and reason in found.reason
