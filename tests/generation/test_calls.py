"""Unusual calls of `generate`, on one rank: the loop gives what transformers' own gives, or leaves the call to it."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import MaxLengthCriteria, PreTrainedTokenizerFast, StoppingCriteria

from autotp.comm import TPGroup
from autotp.errors import AutoTPError
from autotp.generation.engine import find_engine
from autotp.generation.install import install_generation
from autotp.generation.warm import warm_up
from tests.models import tiny

OPTIONS = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)


def with_engine(model: Any) -> Any:
    """Make `model` decode by our loop, on one rank and without a plan."""
    install_generation()
    model.__dict__["autotp_group"] = TPGroup(None, torch.device("cpu"))
    return model


def engine_of(model: Any) -> Any:
    return find_engine(model)


@pytest.fixture(scope="module")
def llamas():
    """Equal models: ours, and one that transformers decodes."""
    return with_engine(tiny("llama")), tiny("llama")


def make_ids(rows=2, tokens=7):
    return torch.randint(3, 131, (rows, tokens), generator=torch.Generator().manual_seed(1))


class Asking(StoppingCriteria):
    """Generates with the same model in the middle of a generation."""

    def __init__(self, model):
        self.model, self.calls, self.inner = model, 0, torch.empty(0)

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        if self.calls == 3:
            self.inner = self.model.generate(make_ids(tokens=4), **OPTIONS)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_more_eos_tokens_than_a_graph_watches_for(llamas):
    options = OPTIONS | {"eos_token_id": list(range(60, 131))}
    ours, theirs = (model.generate(make_ids(4), **options) for model in llamas)
    assert torch.equal(ours, theirs) and ours.shape[1] < 19


def test_stop_strings_of_a_tokenizer_are_watched_for_by_our_loop():
    ours, theirs = with_engine(tiny("llama")), tiny("llama")
    words = {f"w{token}": token for token in range(3, 131)} | {"abcdef": 0}  # transformers decodes behind that
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="abcdef")))
    ids = make_ids(1)
    word = f"w{theirs.generate(ids, **OPTIONS)[0, 7 + 4]}"
    made = [model.generate(ids, stop_strings=[word], tokenizer=tokenizer, **OPTIONS) for model in (ours, theirs)]
    assert torch.equal(*made) and made[0].shape[1] <= 7 + 5 and not engine_of(ours)._said


def test_a_prompt_longer_than_the_length_that_a_criterion_allows(llamas):
    for do_sample in (False, True):
        made = []
        for model in llamas:
            torch.manual_seed(0)
            criteria = [MaxLengthCriteria(9)]
            made.append(model.generate(make_ids(1, 300), stopping_criteria=criteria, **OPTIONS | {"do_sample": do_sample}))
        assert torch.equal(*made) and made[0].shape == (1, 301)


def test_a_generation_within_another_of_the_same_model(llamas):
    inside = [Asking(model) for model in llamas]
    ours, theirs = (m.generate(make_ids(), stopping_criteria=[i], **OPTIONS) for m, i in zip(llamas, inside, strict=True))
    assert torch.equal(ours, theirs) and torch.equal(inside[0].inner, inside[1].inner)
    assert any("inside another generation" in text for text in engine_of(llamas[0])._said) and not engine_of(llamas[0]).busy


def test_autocast_on_and_off(llamas):
    for wanted in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=wanted):
            made, expected = (m.generate(make_ids(), return_dict_in_generate=True, output_logits=True, **OPTIONS) for m in llamas)
        torch.testing.assert_close(made.logits[0], expected.logits[0], atol=0.05 if wanted else 1e-4, rtol=0)


def test_alibi_of_falcon_runs_transformers_own_decoding():
    models: list[Any] = [tiny("falcon", alibi=True, new_decoder_architecture=False) for _ in range(2)]
    ours, theirs = (model.generate(make_ids(), **OPTIONS) for model in (with_engine(models[0]), models[1]))
    assert torch.equal(ours, theirs) and any("alibi" in text for text in engine_of(models[0])._said)


def test_warm_up_refuses_what_it_would_not_do(llamas):
    model = llamas[0]
    for sizes, length in (((), 256), ((0,), 256), (1, 0)):
        with pytest.raises(AutoTPError, match="1 at least"):
            warm_up(model, sizes, length)
    with pytest.raises(AutoTPError, match="training mode"):
        warm_up(model.train())
    assert warm_up(model.eval(), 1, 16) == 0


def test_graphs_share_a_memory_pool_until_all_are_gone(monkeypatch):
    """PyTorch refuses a pool whose graphs are gone, as all are where the cache grows."""
    asked: list[Any] = []

    class Graph:
        def pool(self):
            return id(self) if asked[-1] is None else asked[-1]

    def capture(graph, pool, capture_error_mode):
        asked.append(pool)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    model = with_engine(tiny("llama"))
    engine = engine_of(model)
    for number in range(4):
        step: Any = SimpleNamespace(graph=None, said="decoding", run=lambda model: None)
        engine.take_step(number, lambda step=step: step)
        engine.capture(step, model)
        if number == 1:
            shared = step.graph.pool()
            engine.take_cache(model.config, 4, 64)  # which grows
            assert not engine.steps
    assert asked[0] is None and asked[1] is not None and shared == asked[1]
    assert asked[2] is None and asked[3] is not None and not engine.broken
