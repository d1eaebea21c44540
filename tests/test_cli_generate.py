"""`autotp generate`: the same text as the unsharded model's, numbers, and one-line errors."""

import json

import pytest

import autotp.cli.generate
import autotp.cli.speak
from tests.command import run_cli, save_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("llama"))


def run_in_pool(group, work, args):
    """What the work returns, and what it sent on its way."""
    said = []
    autotp.cli.speak.send_message = said.append
    return work(*args), said


@pytest.fixture
def launched(ranks, monkeypatch):
    def launch(work, size, *args, on_message):
        (report, said), *others = ranks.run(run_in_pool, work, args, size=size)
        assert not any(words for _, words in others)  # one rank speaks for all
        for text in said:
            on_message(text)
        return report

    monkeypatch.setattr(autotp.cli.generate, "run_ranks", launch)
    return ranks.count  # the command's ranks are the session's, all of them


def test_text_is_streamed_and_equals_the_unsharded_models(launched, checkpoint, capsys):
    args = ["generate", checkpoint, "--tp", launched, "--prompt", "the quick brown", "--max-new-tokens", 9, "--dtype", "float32"]
    report = json.loads(run_cli(*args, "--bench", "--json", capsys=capsys).out)
    whole, split = report["runs"][1], report["runs"][0]
    assert (split["name"], whole["name"]) == ("4 ranks", "unsharded")
    assert report["equal_tokens"] == split["new_tokens"] == whole["new_tokens"] > 0 and report["prompt_tokens"] > 0
    assert all(run["first_token_ms"] > 0 and run["tokens_per_s"] > 0 and run["memory_gib"] > 0 for run in (whole, split))
    shown = run_cli(*args, "--sample", "--top-k", 5, "--temperature", 0.5, capsys=capsys)
    drawn = json.loads(run_cli(*args, "--sample", "--top-k", 5, "--temperature", 0.5, "--json", capsys=capsys).out)
    assert shown.out == drawn["text"] + "\n" and "tokens/s" in shown.err and "4 ranks" in shown.err


@pytest.mark.parametrize(
    "more, said",
    [
        (["--top-p", 0.5], "--top-p is for sampling: add --sample"),
        (["--prompt", "  "], "--prompt is empty"),
        (["--dtype", "float32", "--chat"], "has no chat template: leave --chat out"),
    ],
)
def test_what_can_not_be_done_is_said_in_one_line(checkpoint, more, said, capsys, monkeypatch):
    def launch(work, size, *args, on_message):
        return autotp.cli.speak.encode(autotp.cli.speak.load_tokenizer(checkpoint), args[0])

    monkeypatch.setattr(autotp.cli.generate, "run_ranks", launch)
    err = run_cli("generate", checkpoint, "--tp", 2, "--prompt", "the", *more, code=2, capsys=capsys).err
    assert err.startswith("autotp: error: ") and said in err and err.count("\n") == 1


@pytest.mark.parametrize("more, said", [(["--temperature", 0], "not above zero"), (["--top-p", 1.5], "at most 1")])
def test_settings_of_the_draws_are_checked_before_anything_is_loaded(checkpoint, more, said, capsys):
    with pytest.raises(SystemExit):
        run_cli("generate", checkpoint, "--tp", 2, "--prompt", "the", "--sample", *more)
    assert said in capsys.readouterr().err
