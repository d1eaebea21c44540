"""What CUDA graphs hold, run without them: prompts and steps in the contexts that they are captured in."""

import pytest
import torch

import autotp
from autotp.generation.engine import find_engine
from autotp.generation.prompt import PromptStep
from autotp.generation.step import Step
from autotp.kernels import reference_decode
from tests.inject.test_decoding import GlooPeers
from tests.models import tiny


class Peers(GlooPeers):
    def best_columns(self, logits, start, halt):
        gather = self.tp.gather_objects
        return reference_decode.best_columns(gather(logits), gather(start), gather(halt))

    def check(self):
        """Nothing of a sum can be missing here."""


def generate(group, family):
    reference_model, model = tiny(family).eval(), autotp.parallelize(tiny(family), group).eval()
    engine = find_engine(model)
    engine.group._peers = peers = Peers(engine.group)
    kinds = []
    engine.graphs, engine.can_capture = True, lambda kind: True
    engine.capture = lambda step, model: kinds.append(type(step))
    ids = torch.randint(3, 131, (2, 70), generator=torch.Generator().manual_seed(1))
    options = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
    run = [each.generate(ids, attention_mask=torch.ones_like(ids), **options).tolist() for each in (reference_model, model)]
    return run, {PromptStep, Step} <= set(kinds), engine.special, len(peers.kinds)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with GPUs they are captured: tests/gpu")
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_prompts_and_steps_give_the_unsharded_models_tokens(ranks, family):
    for (want, got), both, special, sums in ranks.run(generate, family):
        assert got == want
        assert both and special and sums, (both, special, sums)
