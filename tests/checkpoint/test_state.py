"""Training states: bit for bit at the same sizes, gone on from at others, never half, and refused by name."""

import json
import os
import pickle
import re
import shutil
import signal
import time
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import autotp
from autotp import CheckpointError, TrainingState
from autotp.checkpoint import pending as pending_file
from autotp.checkpoint import state as state_file
from autotp.checkpoint.claim import LOCK
from autotp.checkpoint.dcp import TensorWriter
from autotp.checkpoint.state import find_newest
from tests.models import batch, tiny
from tests.ranks import grid


class Net(nn.Module):
    """A frozen, an unused and a tied parameter, and a buffer."""

    def __init__(self, width=6):
        super().__init__()
        self.inner = nn.Linear(4, width)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.out = nn.Linear(width, 4)
        self.again = self.out
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        return self.again(torch.dropout(self.inner(x), 0.3, True)).square().mean()


def make(seed=0, width=6, **options):
    torch.manual_seed(seed)
    net = Net(width)
    groups = [{"params": [p for n, p in net.named_parameters() if "bias" in n], "lr": 0.05}]
    groups.append({"params": [p for n, p in net.named_parameters() if "bias" not in n and p.requires_grad]})
    optimizer = torch.optim.AdamW(groups, lr=0.1, **options)
    return net, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])


def step(net, optimizer, schedule):
    loss = net(torch.rand(5, 4))
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return loss.item()


def steps(parts, count):
    return [step(*parts) for _ in range(count)]


def bits(net, optimizer):
    """Everything, to be compared bit for bit."""
    names = {param: name for name, param in net.named_parameters()}
    state = {f"{names[p]}.{k}": v.clone() for p, each in optimizer.state.items() for k, v in each.items()}
    return {**{name: value.clone() for name, value in net.state_dict().items()}, **state}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def listed(directory):
    return sorted({*os.listdir(directory)} - {LOCK})


@pytest.fixture
def saved(tmp_path):
    """A directory with the states of steps 1 and 3, the parts, and what they were after step 3."""
    parts = make()
    with TrainingState(*parts) as state:
        steps(parts, 1)
        state.save(tmp_path, 1)
        steps(parts, 2)
        state.save(tmp_path, 3, {"place": (7, torch.arange(3))})
    return tmp_path, parts, bits(*parts[:2])


# -- one rank -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_a_run_goes_on_bit_for_bit(saved, fused):
    directory, parts, after = saved
    expected = steps(parts, 3)
    others = make(seed=1, fused=fused)
    loaded = TrainingState(*others).load(directory)
    assert loaded.step == 3 and loaded.extra["place"][1].tolist() == [0, 1, 2] and loaded.path.name == "checkpoint-3"
    assert equal(bits(*others[:2]), after) and others[1].param_groups[0]["fused"] is fused
    found = steps(others, 3)
    assert found == expected if not fused else found == pytest.approx(expected, rel=1e-5)
    assert [group["lr"] for group in others[1].param_groups] == [group["lr"] for group in parts[1].param_groups]
    assert TrainingState(*make()).load(directory / "checkpoint-1").step == 1


def test_a_save_beside_the_training_is_the_state_of_its_step(saved, monkeypatch):
    directory, parts, after = saved
    write = TensorWriter.write
    monkeypatch.setattr(TensorWriter, "write", lambda self: changed.wait(20) and write(self))
    changed = pending_file.threading.Event()
    state = TrainingState(*parts)
    path = state.save(directory / "async", 3, async_save=True)
    steps(parts, 1)
    assert not path.exists() and not equal(bits(*parts[:2]), after)
    changed.set()
    state.wait()
    others = make(seed=1)
    TrainingState(*others).load(path)
    assert equal(bits(*others[:2]), after)


def test_what_fails_beside_the_training_is_raised_by_the_next_call(saved, monkeypatch):
    directory, parts, _ = saved
    state = TrainingState(*parts)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        state.save(directory, 4, async_save=True)
        with pytest.raises(OSError, match="disk full"):
            state.save(directory, 5)
    assert listed(directory) == ["checkpoint-1", "checkpoint-3"]
    state.save(directory, 5)
    assert TrainingState(*make()).load(directory).step == 5


def test_a_directory_that_the_ranks_do_not_share_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(pending_file, "STRAY_S", 0.1)
    final = tmp_path / "checkpoint-1"
    writer = TensorWriter(pending_file.partial_of(final), {"w": torch.ones(2)})
    writer.agree([writer.plan], 0)
    writer.directory.mkdir()
    pending = pending_file.PendingSave(writer, final, {}, 0, 2, 0)
    pending.start(beside=True)
    with pytest.raises(CheckpointError, match=r"\['note-1.json'\] of other ranks are not in .*must be one that all ranks share"):
        pending.complete()


def test_plain_torch_reads_it(saved):
    directory, parts, after = saved
    whole = {f"model.{name}": torch.zeros_like(value) for name, value in parts[0].state_dict().items() if "again" not in name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(whole, checkpoint_id=directory / "checkpoint-3")
    assert all(torch.equal(value, after[key.removeprefix("model.")]) for key, value in whole.items())


def test_only_the_last_are_kept(saved):
    directory, parts, _ = saved
    state = TrainingState(*parts)
    for number in (4, 5, 9):
        state.save(directory, number)
    state.save(directory, 6, keep_last=2)
    assert listed(directory) == ["checkpoint-5", "checkpoint-6", "checkpoint-9"]  # what comes later is not ours


def test_what_is_no_state_is_not_replaced(saved):
    """Other programs call theirs so too, the transformers Trainer for one."""
    directory, parts, _ = saved
    foreign = directory / "checkpoint-4" / "model.safetensors"
    foreign.parent.mkdir()
    foreign.write_text("theirs")
    with pytest.raises(CheckpointError, match=r"checkpoint-4 is no training state \(model\.safetensors\)"):
        TrainingState(*parts).save(directory, 4)
    TrainingState(*parts).save(directory, 5, keep_last=1)
    assert foreign.read_text() == "theirs" and listed(directory) == ["checkpoint-4", "checkpoint-5"]


def test_masters_are_saved_beside_their_weights(tmp_path):
    net = nn.Linear(3, 2).bfloat16()
    masters = {name: param.detach().float().requires_grad_() for name, param in net.named_parameters()}
    optimizer = torch.optim.SGD(masters.values(), lr=0.1, momentum=0.9)
    for master in masters.values():
        master.grad = torch.randn_like(master)
    optimizer.step()
    TrainingState(net, optimizer, masters=masters).save(tmp_path, 1)
    others = {name: torch.zeros_like(master, requires_grad=True) for name, master in masters.items()}
    again = torch.optim.SGD(others.values(), lr=0.1, momentum=0.9)
    TrainingState(nn.Linear(3, 2).bfloat16(), again, masters=others).load(tmp_path)
    assert all(torch.equal(masters[name], others[name]) for name in masters)
    with pytest.raises(CheckpointError, match=r"SGD updates a tensor of shape \(2, 3\) \(group 0\) that is none of the model's"):
        TrainingState(net, optimizer)


# -- never half -----------------------------------------------------------------------------------------------------------


def test_a_crash_at_any_point_leaves_a_whole_state(saved):
    """A process that ends at its nth change of a name, or bringing of a file to the disk, for every n of two saves."""
    directory, parts, after = saved
    steps(parts, 1)
    states, numbers = {3: after, 4: bits(*parts[:2])}, []
    code = 9
    while code:
        shutil.rmtree(directory / "w", ignore_errors=True)
        shutil.copytree(directory / "checkpoint-3", directory / "w" / "checkpoint-3")
        child = os.fork()
        if not child:
            die_at(len(numbers), directory / "w", TrainingState(*parts))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9)
        others = make()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            numbers.append(TrainingState(*others).load(directory / "w").step)
        assert equal(bits(*others[:2]), states[numbers[-1]])
        left = [name for name in os.listdir(directory / "w") if name.endswith(".partial")]
        assert not left or numbers[-1] == 4 or left[0] in str(said[-1].message)
    assert len(numbers) > 20 and numbers == sorted(numbers) and {*numbers} == {3, 4}


def die_at(last, directory, state):
    """In a process of its own: save step 4 and replace it, keeping one state; end at the call number `last`."""
    calls = iter(range(1 << 30))

    def watch(original):
        def watched(*args, **kwargs):
            if next(calls) == last:
                os._exit(9)
            return original(*args, **kwargs)

        return watched

    for owner, name in ((os, "fsync"), (os, "replace"), (os, "rename"), (os, "unlink"), (shutil, "rmtree")):
        setattr(owner, name, watch(getattr(owner, name)))
    try:
        for _ in range(2):
            state.save(directory, 4, keep_last=1)
        os._exit(0)
    finally:
        os._exit(77)


def test_what_is_not_whole_is_passed_over_and_said(saved):
    directory, parts, _ = saved
    for number in (5, 6):
        shutil.copytree(directory / "checkpoint-3", directory / f"checkpoint-{number}")
    (directory / "checkpoint-5" / "__0_0.distcp").unlink()
    with open(directory / "checkpoint-6" / "__0_0.distcp", "ab") as file:
        file.truncate(100)
    (directory / ".checkpoint-7.partial").mkdir()
    (directory / "checkpoint-8").mkdir()
    found, passed_over = find_newest(directory)
    assert found.name == "checkpoint-3" and [re.search(r"checkpoint-\d", each)[0][-1] for each in passed_over] == list("7865")
    with pytest.warns(UserWarning, match=r"going on from .*checkpoint-3; passed over: .*7.partial.*100 bytes instead of"):
        assert TrainingState(*parts).load(directory).step == 3
    with pytest.raises(CheckpointError, match="100 bytes instead of"):
        TrainingState(*parts).load(directory / "checkpoint-6")
    with pytest.raises(CheckpointError, match="there is no whole training state in"):
        TrainingState(*parts).load(directory / "nothing")


# -- two jobs in one directory --------------------------------------------------------------------------------------------


def in_a_job(work):
    """Start a process that does `work(tell)`; gives its number, and the end of a pipe that says what it told."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child:
        os.close(theirs)
        return child, os.fdopen(ours)
    try:
        work(lambda text: os.write(theirs, f"{text}\n".encode()))
    except BaseException as error:
        os.write(theirs, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(0)


def save_elsewhere(directory, step):
    """What a job of its own says that saves there, keeping its last state alone."""

    def work(tell):
        tell(TrainingState(*make(step)).save(directory, step, keep_last=1).name)

    child, told = in_a_job(work)
    os.waitpid(child, 0)
    return told.readline().strip()


def test_another_job_is_refused_while_the_first_one_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(state_file, "_WAIT_S", 0.1)
    directory, parts = tmp_path / "run", make()
    with TrainingState(*parts) as state:
        state.save(directory, 1)
        state.save(directory, 3, async_save=True)
        for step in (3, 9):
            said = save_elsewhere(directory, step)
            assert f"process {os.getpid()} on " in said and "CheckpointError" in said and "still runs" in said
        assert save_elsewhere(tmp_path / "other", 3) == "checkpoint-3"
        assert TrainingState(*parts).save(directory, 5).name == "checkpoint-5"  # of the same job
        state.save(directory, 6)
        assert "still runs" in save_elsewhere(directory, 9)
        shutil.rmtree(directory)
        state.save(directory, 7)
        assert "still runs" in save_elsewhere(directory, 9)
        state.save(tmp_path / "moved", 8)
        assert "still runs" in save_elsewhere(tmp_path / "moved", 9)
    assert save_elsewhere(tmp_path / "moved", 9) == "checkpoint-9"
    assert [path.name for path in directory.glob("checkpoint*")] == ["checkpoint-7"]


def test_a_directory_is_let_go_with_the_last_state_that_saves_there(tmp_path, monkeypatch):
    """Not with another one of the same job, nor by reading the files in it."""
    monkeypatch.setattr(state_file, "_WAIT_S", 0.1)
    directory, parts = tmp_path / "run", make()
    first, second = TrainingState(*parts), TrainingState(*parts)
    with second:
        first.save(directory, 1)
        second.save(directory, 2)
        del first
        assert "still runs" in save_elsewhere(directory, 9)
        with TrainingState(*parts) as third:
            third.save(directory, 3)
        assert "still runs" in save_elsewhere(directory, 9)
        shutil.copytree(directory, tmp_path / "copy")
        assert "still runs" in save_elsewhere(directory, 9)
        assert save_elsewhere(tmp_path / "copy", 9) == "checkpoint-9"
    assert save_elsewhere(directory, 9) == "checkpoint-9"


def test_a_job_that_was_killed_is_followed_at_once(tmp_path, monkeypatch):
    """Though a process that it had forked still runs."""
    monkeypatch.setattr(state_file, "_WAIT_S", 0.1)

    def work(tell):
        state = TrainingState(*make())
        state.save(tmp_path, 1)
        if not (worker := os.fork()):
            time.sleep(60)
            os._exit(0)
        tell(worker)
        time.sleep(60)

    job, told = in_a_job(work)
    worker = int(told.readline())
    try:
        assert "still runs" in save_elsewhere(tmp_path, 2)
        os.kill(job, signal.SIGKILL)
        os.waitpid(job, 0)
        assert save_elsewhere(tmp_path, 2) == "checkpoint-2"
    finally:
        os.kill(worker, signal.SIGKILL)


# -- refused, and nothing changed -----------------------------------------------------------------------------------------


def make_other(kind):
    net = make()[0]
    return net, getattr(torch.optim, kind)(net.parameters(), lr=0.1), None


OTHERS = {
    "sizes": (lambda: make(width=5), r"model.inner.weight has shape \(6, 4\) in the state and \(5, 4\) here"),
    "model": (lambda: (nn.Linear(3, 2), None, None), "the state lacks model.weight; the state lacks model.bias; .* more"),
    "dtype": (lambda: (make()[0].double(), None, None), r"model.frozen is torch.float32 in the state and torch.float64 here"),
    "no optimizer": (lambda: (make()[0], None, None), "the state has AdamW, and no optimizer was given"),
    "optimizer": (lambda: make_other("SGD"), "the state is of AdamW, and the optimizer is SGD"),
    "groups": (lambda: make_other("AdamW"), "the state has 2 groups of parameters, AdamW has 1"),
    "schedule": (lambda: (*make()[:2], None), "the state has MultiStepLR, this run no schedule"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_state_of_something_else_is_named_and_nothing_changes(saved, kind):
    make_others, said = OTHERS[kind]
    others = make_others()
    before = {name: value.clone() for name, value in others[0].state_dict().items()}
    random = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=rf"can't go on from .*checkpoint-3: it does not fit \w+: .*{said}"):
        TrainingState(*others).load(saved[0])
    assert equal(before, others[0].state_dict()) and torch.equal(random, torch.get_rng_state())


def test_groups_of_other_parameters_are_named(saved):
    net, optimizer, schedule = make()
    groups = optimizer.param_groups
    groups[0]["params"].append(groups[1]["params"].pop())
    with pytest.raises(CheckpointError, match=r"group 0 of AdamW lacks \[\] and has \['out.weight'\] beside the state's"):
        TrainingState(net, optimizer, schedule).load(saved[0])


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


def damage_list(path, change):
    """Change the list of tensors, and make its size right."""
    with open(path / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    metadata = change(metadata) or metadata
    data = pickle.dumps(metadata)
    (path / ".metadata").write_bytes(data)
    about = json.loads((path / "state.json").read_text())
    about["files"][".metadata"] = len(data)
    del about["crc32"], about["own_crc32"]  # who deceives would make them right
    (path / "state.json").write_text(json.dumps(about))


def first_place(metadata):
    return next(iter(metadata.storage_data.values()))


DAMAGES = {
    "code": (lambda m: Evil(), "it holds a posix.system"),
    "code inside": (lambda m: setattr(m, "planner_data", Evil()), "it holds a posix.system"),
    "another file": (lambda m: setattr(first_place(m), "relative_path", "../../x"), "lies outside the files, in '../../x'"),
    "beyond the file": (lambda m: setattr(first_place(m), "length", 1 << 40), "lies outside the files"),
    "a pickle": (
        lambda m: m.state_dict_metadata.update({"model.out.bias": dcp.metadata.BytesStorageMetadata()}),
        "holds a torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    ),
    "huge": (
        lambda m: setattr(m.state_dict_metadata["optimizer.out.bias.exp_avg"], "size", torch.Size([1 << 50])),
        "more than the",
    ),
    "a part": (lambda m: m.state_dict_metadata["model.out.bias"].chunks.clear(), "does not say where all of"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_list_that_deceives_is_refused(saved, kind):
    change, said = DAMAGES[kind]
    path = saved[0] / "checkpoint-3"
    damage_list(path, change)
    net = make()
    with pytest.raises(CheckpointError, match=re.escape(said)):
        TrainingState(*net).load(path)


def test_a_flipped_bit_anywhere_is_noticed(saved):
    """In a weight, the list and the plain values; checksums are there even where torch.save was told to leave them out."""
    directory, parts, _ = saved
    torch.serialization.set_crc32_options(False)
    try:
        TrainingState(*parts).save(directory, 9)
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    path = directory / "checkpoint-9"
    tensors = (path / "__0_0.distcp").read_bytes()
    weight = tensors.index(parts[0].inner.weight.detach().numpy().tobytes()[:16])
    for name, place in [("__0_0.distcp", weight + 6), (".metadata", None), ("state.json", None)]:
        good = (path / name).read_bytes()
        bad = bytearray(good)
        bad[len(good) // 2 if place is None else place] ^= 1
        (path / name).write_bytes(bad)
        net = make()
        with pytest.raises(CheckpointError, match=r"damaged|not a whole"):
            TrainingState(*net).load(path)
        (path / name).write_bytes(good)
    assert TrainingState(*make()).load(path).step == 9


def test_values_that_are_damaged_break_the_model(saved):
    path = saved[0] / "checkpoint-3" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[: len(data)] = bytes(len(data))
    path.write_bytes(data)
    net = make()
    with pytest.raises(CheckpointError, match="can't read"):
        TrainingState(*net).load(saved[0])
    with pytest.raises(autotp.AutoTPError, match=r"can't be used any more: only a part of .*checkpoint-3 could be read"):
        net[0](torch.rand(1, 4))


def test_what_can_not_be_saved_is_named_before_anything_is_written(saved):
    directory, parts, _ = saved
    state = TrainingState(*parts)
    with pytest.raises(CheckpointError, match=r"extra\['a'\] is a type"):
        state.save(directory, 7, {"a": int})
    parts[0].inner.register_module("odd", Odd())
    with pytest.raises(CheckpointError, match=r"'inner.odd._extra_state' of Net is a dict, not a tensor"):
        state.save(directory, 7)
    assert listed(directory) == ["checkpoint-1", "checkpoint-3"]


class Odd(nn.Module):
    def get_extra_state(self):
        return {}


# -- several ranks --------------------------------------------------------------------------------------------------------

MODELS = {
    "experts": dict(family="mixtral", num_local_experts=4, num_experts_per_tok=2),
    "copied kv, tied, odd vocabulary": dict(family="llama", num_key_value_heads=1, tie_word_embeddings=True),
    "packed": dict(family="phi3"),
}


def train_on(group, case, start, out, first, last, dp=False):
    """Steps `first` to `last` on all or this data rank's half of each batch, from a state and to one; the losses."""
    given = dict(MODELS[case])
    model = tiny(given.pop("family"), **given)
    if group is not None:
        model = autotp.parallelize(model, group)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    state = TrainingState(model, optimizer, schedule, dp=dp)
    if start is not None:
        assert state.load(start).step == first
    losses = []
    for number in range(first, last):
        loss = model(**batch(model, number)).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if out is not None:
        state.save(out, last, keep_last=1, async_save=True)
        state.wait()
    return losses


def train_in_grid(group, case, start, out, first, last):
    """On two copies of two ranks, which see the same data."""
    return train_on(grid()["tp"], case, start, out, first, last, grid()["dp"])


@pytest.mark.parametrize("case", MODELS)
def test_a_run_goes_on_at_other_sizes(ranks, tmp_path, case):
    whole = train_on(None, case, None, None, 0, 8)
    out = str(tmp_path)
    found = ranks.run(train_on, case, None, out, 0, 2, size=2)[0]
    found += ranks.run(train_on, case, out, out, 2, 4, size=3)[1]
    found += ranks.run(train_in_grid, case, out, out, 4, 6, size=4)[3]
    files = [path.stat().st_size for path in (tmp_path / "checkpoint-6").glob("*.distcp")]
    assert len(files) == 4 and max(files) < 2 * min(files)  # the copies share the writing
    found += train_on(None, case, out, None, 6, 8)
    assert found == pytest.approx(whole, abs=3e-6)
    assert listed(tmp_path) == ["checkpoint-6"]


def refuse(group, out):
    with pytest.raises(autotp.AutoTPError, match="4 ranks run and the model is on 2 of them: pass dp="):
        TrainingState(nn.Linear(2, 2) if group is None else autotp.parallelize(tiny("llama"), group))
    model = autotp.parallelize(tiny("llama"), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainingState(model, optimizer, dp=False)
    rank = torch.distributed.get_rank()
    optimizer.param_groups[0]["lr"] = 0.1 + rank
    with pytest.raises(autotp.AutoTPError, match=r"optimizer or schedule of rank\(s\) \[1\] are in another state"):
        state.save(out, 1)
    optimizer.param_groups[0]["lr"] = 0.1
    if rank == 1:
        torch.save, kept = (lambda *_: (_ for _ in ()).throw(OSError("disk full"))), torch.save
    with pytest.raises((autotp.AutoTPError, OSError), match="disk full"):
        state.save(out, 1, async_save=True)
        state.wait()
    if rank == 1:
        torch.save = kept
    return listed(out)


def test_ranks_that_differ_or_fail_are_named_on_all(ranks, tmp_path):
    assert ranks.run(refuse, str(tmp_path))[0] == []  # rank 0 removes what was written
