import os
import sys
from multiprocessing import forkserver
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # not a pool of processes for the few kernels of each rank
os.environ["AUTOTP_CACHE"] = "off"  # every test discovers its own plans, in the ranks too, and none writes to the user's home

# For the small models and measures of the coverage table; last, so that no name there hides a package.
sys.path.append(str(Path(__file__).parent.parent / "scripts"))

import pytest
import torch
import torch.multiprocessing as mp

# Triton reads it when it is imported, which transformers does: without a GPU its kernels run in its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from tests.ranks import PRELOAD, RankPool

torch.set_num_threads(1)

# Workers take whole files: those that take longest begin first, so that none is left to one worker at the end.
LONGEST = """
    test_smollm2 layers/test_quantised test_cli_train inject/test_sample inject/test_families layers/test_adapters
    inject/test_architectures inject/test_tokens kernels/test_peers layers/test_data_parallel inject/test_rewrite layers/test_fp8
    test_many_ranks test_docs inject/test_prove inject/test_shaperule test_examples train/test_trainer train/test_train
    train/test_trainer_sizes inject/test_compile train/test_launch train/test_two_axes
"""


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    place = {here / f"{name}.py": number for number, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.fixture(autouse=True)
def fresh_compiler(request):
    """torch.compile gives a function up that was compiled for too many kinds of arguments, in other tests too."""
    if "compile" in request.node.name:
        torch.compiler.reset()


@pytest.fixture(scope="session")
def ranks():
    """Pool of gloo ranks: `ranks.run(fn, *args, size=2)`."""
    pool = RankPool()
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def eight_ranks():
    """The same with 8 ranks, for what no fewer show."""
    pool = RankPool(8)
    yield pool
    pool.stop()


@pytest.fixture
def forked_launch(monkeypatch):
    """`launch_ranks` forks its ranks from a process that has imported the libraries, which takes each rank seconds otherwise."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()  # now: launch_ranks blocks signals where it starts ranks, and all it forks would inherit that
    monkeypatch.setattr("autotp.train.launch.START", "forkserver")
