"""The table of scripts/bench_scale.py: what is run again, and its numbers; what is left where communication is cut out."""

import json
import time
from types import SimpleNamespace

import bench_scale
import pytest
import torch
import torch.distributed as dist
from no_communication import no_communication
from scale_table import Case, Results, find_failed, print_table

import autotp
from autotp.comm import REDUCE_SCATTER
from autotp.groups import resolve_group
from tests.models import batch, tiny

ABOUT = {"commit": "a", "hardware": "2 x GPU"}


def test_results_of_another_commit_are_not_counted(tmp_path):
    path = tmp_path / "lines"
    case = Case("autotp", "8B", 2, 1, ["train", "prefill"])
    old = Results(path, ABOUT | {"commit": "b"})
    old.add(case.key("train") | {"ms": 1.0})
    results = Results(path, ABOUT)
    assert results.find(**case.key("train")) is None
    results.add(case.key("train") | {"error": "out of time", "said": []})
    assert results.find(**case.key("train")) is None and len(find_failed(results)) == 1
    results.add(case.key("train") | {"ms": 3.0})
    again = Results(path, ABOUT)
    assert again.find(**case.key("train"))["ms"] == 3.0 and again.find(**case.key("prefill")) is None
    assert not find_failed(again) and len(path.read_text().splitlines()) == 3


def test_speed_ups_are_over_the_fastest_on_one_gpu(tmp_path, capsys):
    results = Results(tmp_path / "lines", ABOUT)
    works = ["train"]
    cases = [Case("autotp", "8B", 4, 2, works), Case("autotp", "8B", 1, 1, works), Case("one GPU", "8B", 1, 1, works)]
    cases.append(Case("transformers TP", "8B", 4, 1, works))
    for case, ms in zip(cases, (50.0, 100.0, 120.0), strict=False):
        line = {"ms": ms, "tokens": 64 * case.dp, "peak_gib": 3.5, "exposed_ms": 4.0 if case.tp > 1 else None}
        results.add(case.key("train") | line)
    results.add(cases[0].key("check") | {"good": False, "logits": 1e-2, "gradients": 1e-5})
    capsys.readouterr()
    print_table(cases, results)
    out = capsys.readouterr().out
    assert "| autotp | 4 x 2 | 50.0 | 4.00 | 0.50 | 4.0 | 3.5 |" in out  # twice the tokens in half the time
    assert "| one GPU | 1 x 1 | 120.0 | 0.83 | 0.83 |  | 3.5 |" in out
    assert "| transformers TP | 4 x 1 | not run |  |  |  |  |" in out
    assert "WRONG, logits 1.0e-02" in out


@pytest.mark.parametrize("gpus, sizes", [(2, {(1, 1), (2, 1)}), (4, {(1, 1), (2, 1), (4, 1)}), (8, {(8, 1), (4, 2), (2, 1)})])
def test_cases_use_the_gpus_that_there_are(gpus, sizes):
    cases = bench_scale.list_cases(gpus, ["8B", "70B"])
    assert sizes <= {(case.tp, case.dp) for case in cases} and max(case.ranks for case in cases) == gpus
    keys = [json.dumps(case.key(work)) for case in cases for work in case.works]
    assert len(keys) == len(set(keys))


class Pretended:
    """A case that takes three looks; one whose second work fails at its first run."""

    log: list = []

    def __init__(self, case, gpus, details, end, results, options):
        self.case, self.gpus, self.results, self.looks = case, gpus, results, 0
        self.begun, self.process = "load", SimpleNamespace(returncode=0)
        Pretended.log.append((case, gpus, details))

    def poll(self):
        self.looks += 1
        if self.looks < 3:
            return False
        for work in self.case.works:
            self.begun = work
            if work == "breaks":
                self.process.returncode = 1
                self.results.add(self.case.key(work) | {"error": "exit code 1", "said": []})
                return True
            self.results.add(self.case.key(work) | {"ms": 1.0})
        return True


def test_cases_run_side_by_side_and_go_on_behind_what_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_scale, "Running", Pretended)
    monkeypatch.setattr(bench_scale.time, "sleep", lambda s: None)
    works = ["prefill", "breaks", "train"]
    cases = [Case("autotp", "8B", 4, 1, works), Case("autotp", "8B", 2, 1, ["train"]), Case("one GPU", "8B", 1, 1, ["train"])]
    cases.append(Case("autotp", "8B", 2, 2, ["train"]))
    results = Results(tmp_path / "lines", ABOUT)
    Pretended.log.clear()
    options, end = SimpleNamespace(apart=False, cpu=False), time.monotonic() + 60
    assert bench_scale.run_all(cases, 4, {"8B": "details"}, results, end, options) == []
    ran = [(str(case), gpus, case.works) for case, gpus, _ in Pretended.log]
    assert ran[:3] == [
        ("autotp, 8B, TP=4 x DP=1", [0, 1, 2, 3], works),
        ("autotp, 8B, TP=4 x DP=1", [0, 1, 2, 3], ["train"]),
        ("autotp, 8B, TP=2 x DP=1", [0, 1], ["train"]),
    ]
    assert ran[3][1] == [2] and ran[4][1] == [0, 1, 2, 3] and len(ran) == 5
    assert [line["work"] for line in find_failed(results)] == ["breaks"]
    assert bench_scale.run_all(cases[:1], 4, {"8B": ""}, results, time.monotonic() - 1, options) == cases[:1]


def refuse(*args, **kwargs):
    raise AssertionError("something was communicated")


def check_cut(group, dealt):
    tp = resolve_group(group)
    model = autotp.parallelize(tiny("llama"), tp, sequence_parallel=dealt).train()
    inputs = batch(model)

    def run():
        model.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters()]

    before, names = run(), ("all_reduce", REDUCE_SCATTER)
    real = {name: getattr(dist, name) for name in names}
    with no_communication(tp):
        vars(dist).update(dict.fromkeys(names, refuse))
        try:
            cut = run()
        finally:
            vars(dist).update(real)
    assert cut[0].isfinite() and all(grad.isfinite().all() for grad in cut[1]) and not torch.equal(cut[0], before[0])
    after = run()
    assert torch.equal(after[0], before[0]) and all(map(torch.equal, after[1], before[1]))


@pytest.mark.parametrize("dealt", [False, True])
def test_nothing_is_summed_while_communication_is_cut_out(ranks, dealt):
    ranks.run(check_cut, dealt, size=3)
