import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["AUTOTP_CACHE"] = "off"  # every test discovers its own plans, in the ranks too, and none writes to the user's home

import pytest
import torch

from tests.ranks import RankPool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks():
    """Pool of gloo ranks: `ranks.run(fn, *args, size=2)`."""
    pool = RankPool()
    yield pool
    pool.stop()
