"""What processes do that a test starts: nothing here imports more than it needs."""

import os
import time


def give_rank(value):
    """This process's rank, the number of ranks, and what was given."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), value


def fail_on_last(value):
    """Rank 1 raises; the others would go on for a minute."""
    if os.environ["RANK"] == "1":
        raise ValueError("the weights differ")
    time.sleep(60)
