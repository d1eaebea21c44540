"""Ranks that are started here: their results and messages, who failed and how, and signals."""

import ast
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from autotp.errors import AutoTPError
from autotp.groups import init_process_group_from_env
from autotp.train.launch import RankFailed, launch_ranks, send_message

pytestmark = pytest.mark.usefixtures("forked_launch")  # the last test starts its rank as users' are


def add_up(value):
    """Ranks meet, rank 0 sends a message and both print."""
    init_process_group_from_env()
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"rank {os.environ['RANK']} prints\n", end="")  # in one write: the ranks share the log
    send_message(("sum", float(total)))
    dist.destroy_process_group()
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), value


def fail_on_last(value):
    if os.environ["RANK"] == "1":
        raise AutoTPError("the weights\ndiffer")
    time.sleep(60)


def wait_for_signal():
    """Says that it is ready, and returns when SIGINT has come."""
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    send_message("ready")
    while not seen:
        time.sleep(0.01)


def note_signals():
    """Tells of the first signal, and never ends by itself."""
    wait_for_signal()
    send_message("noted")
    time.sleep(60)


def stop_when_asked():
    wait_for_signal()
    return "stopped"


def wait_for_ever():
    send_message("ready")
    time.sleep(60)


class Blocked:
    """Arrives in a rank as the signals that were blocked there when it was unpickled, before any code of the rank ran."""

    def __reduce__(self):
        return read_blocked, ()


def read_blocked():
    return {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())}


def give_back(value):
    return value


def interrupt_self(message):
    os.kill(os.getpid(), signal.SIGINT)


def test_result_messages_and_log(tmp_path):
    messages = []
    assert launch_ranks(add_up, 2, "x", log=tmp_path / "log", on_message=messages.append) == (0, 2, "x")
    assert messages == [("sum", 2.0)] * 2
    assert sorted((tmp_path / "log").read_text().split()) == sorted(["rank", "0", "prints", "rank", "1", "prints"])
    assert not send_message("outside of ranks")


def test_names_who_failed():
    with pytest.raises(RankFailed, match=r"^rank 1 failed: the weights differ$") as failed:
        launch_ranks(fail_on_last, 2, "x")
    assert failed.value.rank == 1 and failed.value.how == "AutoTPError" and "fail_on_last" in failed.value.traces
    assert isinstance(failed.value.cause, AutoTPError)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_is_handed_on_once(number):
    """Rank 0 ends when it is asked to, and its result counts."""
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    asked = []

    def ask(message):
        if not asked:
            asked.append(os.kill(os.getpid(), number))

    assert launch_ranks(stop_when_asked, 1, on_message=ask) == "stopped"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_second_signal_kills():
    with pytest.raises(KeyboardInterrupt):
        launch_ranks(note_signals, 1, on_message=interrupt_self)  # at "ready", and again at "noted"


def test_a_signal_that_nobody_handles_ends_the_ranks():
    with pytest.raises(KeyboardInterrupt):
        launch_ranks(wait_for_ever, 1, on_message=interrupt_self)


def test_the_first_rank_of_a_process_starts_with_signals_blocked():
    """A Ctrl-C in a terminal reaches every process, and one that still imports could only print a traceback and end."""
    code = "from tests.train.test_launch import *; print(launch_ranks(give_back, 1, Blocked()))"  # nothing was spawned before
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) >= {signal.SIGINT, signal.SIGTERM}
