"""Jobs as the tests start them: their port is theirs from before the first rank begins."""

import pytest

from tests.jobs import JobError, run_job

SCRIPT = """
import os, socket, sys
import torch.distributed as dist

with socket.socket() as other:
    try:
        other.bind((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        sys.exit("another process could take the port")
    except OSError:
        pass
dist.init_process_group("gloo")
found = [None] * dist.get_world_size()
dist.all_gather_object(found, dist.get_rank())
dist.destroy_process_group()
print(found, flush=True)
"""
FAILS = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('rank one says no')\ntime.sleep(100)"


def test_no_other_process_can_take_the_port(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    assert run_job(tmp_path / "script.py", cwd=tmp_path, size=2) == ["[0, 1]\n"] * 2


def test_says_what_a_rank_said(tmp_path):
    (tmp_path / "script.py").write_text(FAILS)
    with pytest.raises(JobError, match="rank one says no"):
        run_job(tmp_path / "script.py", cwd=tmp_path, size=2)
