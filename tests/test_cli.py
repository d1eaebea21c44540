"""The command line: plans from a config alone, comparisons of checkpoints, one-line errors, and a training run that plain
transformers can load."""

import io
import json
import subprocess
import sys
import time

import pytest
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    ViTConfig,
    ViTForImageClassification,
)

import autotp.cli.verify
from autotp.cli import main
from autotp.cli.screen import show_progress
from autotp.inject.describe import _table, _wrap_cell
from autotp.inject.plan import Plan
from autotp.train.verify import VerifyReport
from tests.command import llama_config, run_cli, save_checkpoint


def vit_config():
    return ViTConfig(
        **dict(hidden_size=8, num_attention_heads=4, intermediate_size=12, num_hidden_layers=1, image_size=8, patch_size=4)
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("llama"))


def run_in_pool(group, work, args):
    return work(*args)


@pytest.fixture
def launched(ranks, monkeypatch):
    """The command's ranks are the session's, all of them: started they are for the tests that are about starting."""

    def launch(work, size, *args):
        return ranks.run(run_in_pool, work, args, size=size)[0]

    monkeypatch.setattr(autotp.cli.verify, "run_ranks", launch)
    return ranks.count


# -- plan -----------------------------------------------------------------------------------------------------------------


def test_plan_needs_only_the_config(tmp_path, capsys):
    llama_config().save_pretrained(tmp_path)
    out = run_cli("plan", tmp_path, "--tp", 2, capsys=capsys).out
    assert "q_proj" in out and "colwise" in out and "rowwise" in out and "2 ranks" in out


def test_plan_as_json_is_a_plan(tmp_path, capsys):
    llama_config().save_pretrained(tmp_path)
    plan = Plan.from_json(run_cli("plan", tmp_path, "--tp", 2, "--json", capsys=capsys).out)
    assert plan.tp_size == 2 and plan.shards


@pytest.mark.parametrize(
    "config, split",
    [
        (
            GPT2Config(vocab_size=301, n_embd=32, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2),
            "transformer.h.*.attn.c_attn",
        ),
        (MambaConfig(vocab_size=301, hidden_size=32, num_hidden_layers=1, state_size=4), "backbone.layers.*.mixer.in_proj"),
    ],
    ids=["gpt2", "mamba"],
)
def test_plan_of_a_model_without_a_hugging_face_plan(config, split, tmp_path, capsys):
    config.save_pretrained(tmp_path)
    out = run_cli("plan", tmp_path, "--tp", 2, capsys=capsys).out
    assert split in out and "proof: proved" in out


def test_plan_exits_nonzero_if_nothing_is_split(tmp_path, capsys):
    """More ranks than any region has units, and no vocabulary."""
    vit_config().save_pretrained(tmp_path)
    done = run_cli("plan", tmp_path, "--tp", 16, code=1, capsys=capsys)
    assert "over 16 ranks: 0.0%" in done.out
    assert done.err.startswith("autotp: nothing of") and done.err.count("\n") == 1
    assert not Plan.from_json(run_cli("plan", tmp_path, "--tp", 16, "--json", code=1, capsys=capsys).out).shards


def edit_plan(directory, path, drop, capsys, tp=2):
    """The plan of a directory over `tp` ranks without the modules whose names end so, written to `path`."""
    data = json.loads(run_cli("plan", directory, "--tp", tp, "--json", capsys=capsys).out)
    data["modules"] = [module for module in data["modules"] if not module["name"].endswith(drop)]
    path.write_text(json.dumps(data))
    return path


def test_edited_plan_is_proved_again(tmp_path, capsys):
    llama_config().save_pretrained(tmp_path)
    path = edit_plan(tmp_path, tmp_path / "plan.json", ("gate_proj", "up_proj", "down_proj"), capsys)
    plan = Plan.from_json(run_cli("plan", tmp_path, "--tp", 2, "--plan", path, "--json", capsys=capsys).out)
    assert plan.proof == "proved" and "model.layers.0.self_attn.q_proj.weight" in plan.shards
    assert "model.layers.0.mlp.up_proj.weight" not in plan.shards
    assert {entry.name: entry.reason for entry in plan.whole}["model.layers.0.mlp.up_proj.weight"] == "not named by the plan"


def test_plan_that_is_wrong_is_an_error(checkpoint, tmp_path, capsys):
    path = edit_plan(checkpoint, tmp_path / "plan.json", ("gate_proj",), capsys)
    for command in ("plan", "verify"):
        err = run_cli(command, checkpoint, "--tp", 2, "--plan", path, code=2, capsys=capsys).err
        assert err.count("\n") == 1 and "does not compute what LlamaForCausalLM does" in err
    assert "is for 2 ranks" in run_cli("plan", checkpoint, "--tp", 4, "--plan", path, code=2, capsys=capsys).err


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"modules": [1]}', b"\xff"])
def test_plan_file_that_is_none(tmp_path, text, capsys):
    llama_config().save_pretrained(tmp_path)
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    err = run_cli("plan", tmp_path, "--tp", 2, "--plan", path, code=2, capsys=capsys).err
    assert err.startswith(f"autotp: error: --plan {path}") and err.count("\n") == 1


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("width", [80, 60])
def test_plan_fits_the_terminal(width, tmp_path, monkeypatch, capsys):
    llama_config().save_pretrained(tmp_path)
    whole = run_cli("plan", tmp_path, "--tp", 2, capsys=capsys).out
    assert max(map(len, whole.splitlines())) > 80
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    found = run_cli("plan", tmp_path, "--tp", 2, capsys=capsys).out
    assert max(map(len, found.splitlines())) <= width
    assert "model.layers.* (2x)" in found.splitlines() and "  mlp.up_" in found and "\x1b" not in found


def test_cells_go_on_in_the_next_line_without_loss():
    rows = [["model.layers.*.self_attn.q_proj (4x)", "64x64", "a reason of several words"], ["lm_head", "8x8", "small"]]
    lines = _table(["module", "full", "why"], rows, 38)
    assert lines == [
        "module              full   why",
        "--------------------------------------",
        "model.layers.* (4x)",
        "  self_attn.q_proj  64x64  a reason of",
        "                           several",
        "                           words",
        "lm_head             8x8    small",
    ]
    assert _wrap_cell("abcdefgh", 3) == ["abc", "def", "gh"]


def test_progress_is_for_terminals_and_for_what_takes_long(monkeypatch):
    for stream, after_s, shown in [(Terminal(), 0.01, True), (Terminal(), 60, False), (io.StringIO(), 0.01, False)]:
        monkeypatch.setattr(sys, "stderr", stream)
        with show_progress("planning", after_s, 0.01):
            time.sleep(0.1)
        assert bool(stream.getvalue()) == shown
        assert not shown or (stream.getvalue().startswith("\rplanning: 0 s\r") and stream.getvalue().endswith("\r\x1b[K"))


def test_errors_are_one_line_and_exit_code_2(tmp_path, capsys):
    err = run_cli("plan", tmp_path / "nowhere", "--tp", 2, code=2, capsys=capsys).err
    assert err.startswith("autotp: error:") and err.count("\n") == 1


@pytest.mark.parametrize("args", [["plan"], ["plan", "x"], ["plan", "x", "--tp", "0"], ["nothing"], []])
def test_wrong_arguments(args, capsys):
    with pytest.raises(SystemExit) as exit:
        main(args)
    assert exit.value.code == 2 and "usage:" in capsys.readouterr().err


# -- verify ---------------------------------------------------------------------------------------------------------------


def test_verify_passes_on_text(checkpoint, launched, capsys):
    out = run_cli("verify", checkpoint, "--tp", launched, capsys=capsys).out
    assert "proof: proved" in out and "inputs: text as input_ids; float32" in out and out.endswith("verify passed\n")
    assert "99.6% of the parameters split" in out and "grad_norm" in out and "gradient of model." in out


def test_verify_prints_one_json_object(tmp_path, forked_launch, capfd):
    """Without a tokenizer, in ranks of its own: nothing else may reach stdout."""
    config = GPT2Config(vocab_size=301, n_embd=32, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    said = json.loads(run_cli("verify", tmp_path, "--tp", 2, "--json", capsys=capfd).out)
    assert said["passed"] and said["proof"] == "proved" and said["inputs"] == "random input_ids" and said["tp_size"] == 2
    assert 0 < said["split_share"] < 1 and abs(said["loss"] - said["reference_loss"]) < 1e-4
    assert said["errors"]["transformer.h.0.attn.c_attn.weight"] < said["tolerances"]["gradient"]


def test_verify_of_pictures_and_an_edited_plan(tmp_path, launched, capsys):
    ViTForImageClassification(vit_config()).save_pretrained(tmp_path)
    drop = ("mlp.fc1", "mlp.fc2", "intermediate.dense", "output.dense")
    path = edit_plan(tmp_path, tmp_path / "plan.json", drop, capsys, launched)
    said = json.loads(run_cli("verify", tmp_path, "--tp", launched, "--plan", path, "--json", capsys=capsys).out)
    assert said["passed"] and said["inputs"] == "random pixel_values" and said["split_share"] > 0


@pytest.mark.parametrize("error, said", [(0.5, 0.5), (float("inf"), None)])
def test_verify_exits_1_where_they_differ(error, said, checkpoint, monkeypatch, capsys):
    errors = {"loss": 0.0, "logits": 0.0, "grad_norm": 0.0, "model.norm.weight": error}
    report = VerifyReport(1.0, 1.0, errors, {"loss": 1e-5, "logits": 1e-4, "gradient": 1e-3})
    monkeypatch.setattr(autotp.cli.verify, "run_ranks", lambda *args: (report, "text"))
    out = run_cli("verify", checkpoint, "--tp", 2, code=1, capsys=capsys).out
    assert "verify FAILED: 1 of 4" in out and "gradient of model.norm.weight" in out
    data = json.loads(run_cli("verify", checkpoint, "--tp", 2, "--json", code=1, capsys=capsys).out)
    assert not data["passed"] and data["worst"]["name"] == "model.norm.weight" and data["errors"]["model.norm.weight"] == said


def test_verify_errors_are_one_line(checkpoint, tmp_path, monkeypatch, capsys):
    assert run_cli("verify", tmp_path / "no", "--tp", 2, code=2, capsys=capsys).err.count("\n") == 1
    llama_config().save_pretrained(tmp_path)
    err = run_cli("verify", tmp_path, "--tp", 2, code=2, capsys=capsys).err
    assert err.count("\n") == 1 and "safetensors" in err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "without torchrun" in run_cli("verify", checkpoint, "--tp", 2, code=2, capsys=capsys).err


# -- the script ----------------------------------------------------------------------


def test_script_trains_under_torchrun(checkpoint, tmp_path):
    """scripts/train.py, the page people copy, as its docstring says to run it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "scripts/train.py"]
    command += ["--model", str(checkpoint), "--data", str(checkpoint / "text.txt"), "--out", str(tmp_path), "--steps", "4"]
    done = subprocess.run([*command, "--seq-length", "16", "--grad-accum", "2"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss") == 4 and "one whole weight: [32, 32]" in done.stdout
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.num_attention_heads == 4
