"""The first willing backend runs; a named one runs or says why not."""

import logging
import re
import sys
from pathlib import Path

import pytest
import torch

from autotp import KernelUnsupported
from autotp.kernels import Problem, dispatch, explain, reference
from autotp.kernels.dispatch import Backend, select

BF16_ROWS = Problem("norm_forward", "cuda", torch.bfloat16, "rms", 8, 64, torch.bfloat16)


@pytest.fixture(autouse=True)
def no_choice_is_remembered():
    yield
    dispatch._choose.cache_clear()
    dispatch._named_for.cache_clear()
    dispatch._say_once.cache_clear()


@pytest.fixture
def picky(monkeypatch):
    """linear with a backend in front that wants bfloat16, and one that is slow below 4 rows."""
    first = Backend("picky", lambda: "picky", lambda p: [] if p.dtype is torch.bfloat16 else ["wants bfloat16"])
    slow = Backend("slow", lambda: "slow", rather_not=lambda p: ["is slow below 4 rows"] if p.rows < 4 else [])
    monkeypatch.setitem(dispatch.BACKENDS, "linear", [first, slow, *dispatch.BACKENDS["linear"]])
    dispatch._choose.cache_clear()


def test_the_first_willing_backend_is_taken(picky):
    assert select(Problem("linear")) is reference.linear
    assert select(Problem("linear", dtype=torch.bfloat16))() == "picky"
    assert select(Problem("linear", rows=4))() == "slow"
    with pytest.raises(KernelUnsupported, match="wants bfloat16"):
        select(Problem("linear"), "picky")
    text = explain(Problem("linear"))
    assert "reference runs" in text and "picky: wants bfloat16" in text and "reference: can run it" in text
    assert "slow: is slow below 4 rows" in text


def test_a_named_backend_runs_where_auto_would_rather_not(picky, monkeypatch):
    assert select(Problem("linear"), "slow")() == "slow"
    monkeypatch.setenv("AUTOTP_BACKEND", "linear=slow")
    assert select(Problem("linear"))() == "slow"
    assert select(Problem("linear"), "reference") is reference.linear, "what the caller names comes first"
    text = explain(Problem("linear"))
    assert "AUTOTP_BACKEND asks for slow" in text and "slow runs" in text


def test_the_variable_names_a_backend_for_all_or_for_one_operation(picky, monkeypatch):
    monkeypatch.setenv("AUTOTP_BACKEND", "slow")
    assert select(Problem("linear"))() == "slow"
    assert select(Problem("linear_transposed")) is reference.linear_transposed, "it has no backend of that name"
    monkeypatch.setenv("AUTOTP_BACKEND", "reference, linear=picky")
    with pytest.raises(KernelUnsupported, match="picky: wants bfloat16"):
        select(Problem("linear"))
    assert select(Problem("norm_forward", rows=2, width=3)) is reference.norm_forward
    monkeypatch.setenv("AUTOTP_BACKEND", "linear_transposed=slow")
    with pytest.raises(KernelUnsupported, match="backends are"):
        select(Problem("linear_transposed"))
    for wrong in ("fast", "convolve=reference"):
        monkeypatch.setenv("AUTOTP_BACKEND", wrong)
        with pytest.raises(KernelUnsupported, match=f"AUTOTP_BACKEND='{wrong}'"):
            select(Problem("linear"))


def test_an_unknown_operation_or_backend_is_refused():
    for problem, backend in ((Problem("convolve"), "auto"), (Problem("linear"), "cuda")):
        with pytest.raises(KernelUnsupported):
            select(problem, backend)


def test_why_a_better_backend_declined_is_said_once(picky, caplog):
    with caplog.at_level(logging.INFO, "autotp.kernels.dispatch"):
        for rows in (5, 6, 5):
            select(Problem("linear", rows=rows))
    assert [record.message for record in caplog.records] == ["linear on cpu in torch.float32: slow runs; picky: wants bfloat16"]


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(dtype=torch.float64), "float32, not in torch.float64"),
        (dict(device="mps"), "runs on CUDA, not on mps"),
        (dict(rows=0), "empty"),
        (dict(width=16385), "wider than 16384"),
    ],
)
def test_why_not_triton(change, reason):
    assert dispatch.BACKENDS["norm_forward"][0].why_not(BF16_ROWS) == []
    with pytest.raises(KernelUnsupported, match=reason):
        select(BF16_ROWS._replace(**change), "triton")


def test_triton_runs_on_the_cpu_in_its_interpreter_only(monkeypatch):
    problem = BF16_ROWS._replace(device="cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select(problem) is reference.norm_forward, "auto leaves it to the tests"
    assert dispatch.BACKENDS["norm_forward"][0].why_not(problem) == []
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(KernelUnsupported, match="not on cpu"):
        select(problem, "triton")


def test_without_triton_everything_else_works(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    dispatch._is_installed.cache_clear()
    assert "triton: triton is not installed" in explain(BF16_ROWS) and "torch runs" in explain(BF16_ROWS)
    dispatch._is_installed.cache_clear()


def test_triton_is_imported_by_its_own_files_alone():
    for path in Path(dispatch.__file__).parent.glob("*.py"):
        imported = re.search(r"^\s*(import|from) (triton|\.triton_|\. import triton_)", path.read_text(), re.MULTILINE)
        assert not imported or path.name.startswith("triton_"), path


def test_the_linear_references_mean_what_they_say():
    x, weight, bias = torch.randn(2, 3, 5), torch.randn(4, 5), torch.randn(4)
    torch.testing.assert_close(reference.linear(x, weight, bias), x @ weight.t() + bias)
    for b in (bias, None):
        expected = x @ weight.t() + (0 if b is None else b)
        torch.testing.assert_close(reference.linear_transposed(x, weight.t().contiguous(), b), expected)
