"""`generate()` of a parallelized model: the unsharded model's tokens, streamed in order, and ranks that stay in step."""

import copy
import signal

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import autotp
from autotp.errors import AutoTPError
from autotp.generation.engine import find_engine
from autotp.kernels.decode import is_decoding
from autotp.layers.base import find_group
from tests.models import tiny

SAMPLING = dict(do_sample=True, temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.2)
CASES = {
    "greedy": dict(do_sample=False),
    "sampling": SAMPLING,
    "plain sampling": dict(do_sample=True),
    "a least length": dict(do_sample=False, min_new_tokens=9),
    "several of each": dict(**SAMPLING, num_return_sequences=2),
    "beams": dict(num_beams=3, do_sample=False),
}
NEW = 12


def make_model():
    model = tiny("llama")
    model.generation_config.eos_token_id = [2, *range(90, 97)]  # some rows end early
    return model


def make_prompt():
    """Three rows, the first padded on the left."""
    ids = torch.randint(3, 131, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = 0, 0
    return ids, mask


class Kept(BaseStreamer):
    """Keeps what it is given; does `act` with what comes fourth: the third token, as the prompt comes first."""

    def __init__(self, act=None, when=4):
        self.got, self.ended, self.act, self.when = [], False, act, when

    def put(self, value):
        self.got.append(value.flatten().tolist())
        if len(self.got) == self.when and self.act is not None:
            self.act()

    def end(self):
        self.ended = True


class Counting(StoppingCriteria):
    """Ends everything after some calls; one rank's count may differ."""

    def __init__(self, most, act=None):
        self.most, self.calls, self.act = most, 0, act

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        if self.calls == 2 and self.act is not None:
            self.act()
        return torch.full((input_ids.shape[0],), self.calls >= self.most)


class Favour(LogitsProcessor):
    """Adds to a token that depends on all before it."""

    def __call__(self, input_ids, scores):
        return scores.scatter_add(1, input_ids.sum(-1, keepdim=True) % scores.shape[1], torch.full((len(scores), 1), 2.0))


def run_cases(model):
    """Everything that `generate` returns in each case, and the state of the random generator after it."""
    ids, mask = make_prompt()
    out = {}
    for name, options in CASES.items():
        torch.manual_seed(5)
        out[name] = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, **options)
        out[f"{name}: random state"] = torch.get_rng_state()
    made = model.generate(
        ids[1:], max_new_tokens=5, do_sample=False, return_dict_in_generate=True, output_scores=True, output_logits=True
    )
    out["sequences"], out["scores"], out["logits"] = made.sequences, torch.stack(made.scores), torch.stack(made.logits)
    counting = Counting(4)
    out["criterion and processor"] = model.generate(
        ids[1:], max_new_tokens=NEW, do_sample=False, stopping_criteria=[counting], logits_processor=[Favour()]
    )
    out["calls"] = torch.tensor(counting.calls)
    streamer = Kept()
    tokens = model.generate(ids[1:2], max_new_tokens=NEW, do_sample=False, streamer=streamer)
    assert streamer.ended and [t for each in streamer.got for t in each] == tokens[0].tolist()
    return out | {"streamed": tokens}


def check_equal(got, expected):
    for name, value in expected.items():
        if value.is_floating_point():
            torch.testing.assert_close(got[name], value, atol=1e-4, rtol=1e-4)
        else:
            assert torch.equal(got[name], value), name


class Replay:
    """Stands for a CUDA graph where there is no GPU: what it launches is what the step ran."""

    def __init__(self, step, model):
        self.step, self.model = step, model

    def replay(self):
        self.step.run(self.model)


def capture_on_cpu(engine):
    """Make an engine behave as on a GPU, all but the graphs themselves."""

    def capture(step, model):
        step.graph = Replay(step, model)
        engine.captures += 1

    engine.graphs = engine.runs_ahead = engine.pads = True
    engine.capture = capture


def raised(call, kind=AutoTPError):
    with pytest.raises(kind) as info:
        call()
    return str(info.value)


def check_interruptions(model, rank):
    """What fails on one rank is raised there, said on the other, and the next call works."""
    ids, _ = make_prompt()
    options = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = model.generate(ids[1:2], **options)

    def fail():
        raise ValueError("no more paper")

    streamer = Kept(fail if rank == 1 else None)
    text = raised(lambda: model.generate(ids[1:2], **options, streamer=streamer), ValueError if rank == 1 else AutoTPError)
    assert ("no more paper" if rank == 1 else "TP rank(s) [1]") in text
    assert torch.equal(model.generate(ids[1:2], **options), expected)

    counting = Counting(99, fail if rank == 0 else None)
    call = lambda: model.generate(ids[1:2], **options, stopping_criteria=[counting])  # noqa: E731
    text = raised(call, ValueError if rank == 0 else AutoTPError)
    assert ("no more paper" if rank == 0 else "TP rank(s) [0]") in text and counting.calls <= 4

    streamer = Kept(fail if rank == 1 else None, when=1)  # before anything runs
    text = raised(lambda: model.generate(ids[1:2], **options, streamer=streamer), ValueError if rank == 1 else AutoTPError)
    assert rank == 1 or "generate failed on TP rank(s) [1]: ValueError: no more paper" in text
    text = raised(lambda: model.generate(ids[1:2], **options | dict(num_beams=2, num_return_sequences=1 + 2 * rank)), Exception)
    assert rank == 1 or "generate failed on TP rank(s) [1]: ValueError" in text
    hook = model.register_forward_hook(lambda *args: fail() if rank == 0 else None)
    text = raised(lambda: model.generate(ids[1:2], **options), ValueError if rank == 0 else AutoTPError)
    hook.remove()
    assert rank == 0 or "failed on TP rank(s) [0]: ValueError: no more paper" in text
    assert torch.equal(model.generate(ids[1:2], **options), expected)

    kept = signal.signal(signal.SIGINT, signal.default_int_handler)
    streamer = Kept(lambda: signal.raise_signal(signal.SIGINT))  # Ctrl-C in a terminal reaches all ranks
    raised(lambda: model.generate(ids[1:2], **options, streamer=streamer), KeyboardInterrupt)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and len(streamer.got) <= 5
    signal.signal(signal.SIGINT, kept)
    assert torch.equal(model.generate(ids[1:2], **options), expected)

    text = raised(lambda: model.generate(ids[1:2], **options | {"max_new_tokens": NEW - rank}))
    assert "different ways" in text and "length 19" in text and "length 18" in text
    assert "content" in raised(lambda: model.generate(ids[1:2] + rank, **options))
    counting = Counting(3 + rank)  # as a clock would be on one rank: the first one's word counts
    assert model.generate(ids[1:2], **options, stopping_criteria=[counting]).shape[1] == 7 + 3
    torch.manual_seed(rank)
    drawn = model.generate(ids, **options | {"do_sample": True})
    assert len(set(map(str, find_group(model).gather_objects(drawn.tolist())))) == 1
    beams = model.generate(ids, **options | {"do_sample": True, "num_beams": 2})
    assert len(set(map(str, find_group(model).gather_objects(beams.tolist())))) == 1


def check_graphs(model, engine):
    """Captured once for a size, again when the model is another, and not kept by copies."""
    ids, _ = make_prompt()
    autotp.release(model)
    before = engine.captures
    assert autotp.warm_up(model, (1, 3), max_length=257) == 2 * (2 + 4)  # two batch sizes; greedy or not, lengths of prompts
    for rows in (1, 2, 3):
        for new in (2, 30, 200):
            model.generate(ids[:rows], max_new_tokens=new, do_sample=rows == 2, eos_token_id=None, pad_token_id=0)
    seen = engine.captures - before, engine.arena.tokens
    assert seen == (12 + 1, 4 * 256)  # two rows were not asked for; their prompt is padded, and in no graph
    tokens = model.generate(ids[1:2], max_new_tokens=NEW, do_sample=False)
    layer = model.model.layers[0].self_attn.o_proj
    handle = layer.register_forward_hook(lambda module, args, output: output * -3)
    changed = model.generate(ids[1:2], max_new_tokens=NEW, do_sample=False)
    handle.remove()
    assert not torch.equal(changed, tokens) and engine.captures - before == 15
    assert torch.equal(model.generate(ids[1:2], max_new_tokens=NEW, do_sample=False), tokens)
    fail = layer.register_forward_pre_hook(lambda *args: 1 / 0 if is_decoding() else None)
    assert torch.equal(model.generate(ids[1:2], max_new_tokens=NEW, do_sample=False), tokens) and not engine.special
    assert any("ZeroDivisionError" in text for text in engine._said)
    fail.remove()
    other = copy.deepcopy(model)
    assert find_engine(other) is not engine and not find_engine(other).steps
    with torch.inference_mode():
        assert torch.equal(other.generate(ids[1:2], max_new_tokens=NEW, do_sample=False), tokens)
    assert torch.equal(other.generate(ids[1:2], max_new_tokens=NEW, do_sample=False), tokens)
    plain = autotp.unshard(other)
    assert find_engine(plain) is None and torch.equal(plain.generate(ids[1:2], max_new_tokens=NEW, do_sample=False), tokens)
    assert "not parallelized" in raised(lambda: autotp.release(plain))


def check_generation(group, expected):
    model = autotp.parallelize(make_model(), group)
    engine = find_engine(model)
    model.generate(make_prompt()[0], max_new_tokens=2, do_sample=False)
    assert engine.print.holds(model)  # what a first call captures serves the second
    check_equal(run_cases(model), expected)
    capture_on_cpu(engine)
    check_equal(run_cases(model), expected)
    check_interruptions(model, find_group(model).tp_rank)
    check_graphs(model, engine)
    return sorted(engine._said)


def test_generate_gives_the_unsharded_models_tokens_and_keeps_ranks_in_step(ranks):
    said = ranks.run(check_generation, run_cases(make_model()))[0]
    assert len(said) == 2 and "beam search" in said[1]
