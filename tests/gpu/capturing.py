"""Training steps that the caller captures as one CUDA graph, beside the same steps called one by one."""

import copy
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import autotp
from tests.gpu.checks import CUDA

ROWS, TOKENS, STEPS = 2, 512, 3
WAYS = {
    "bf16": dict(),
    "sequence_parallel": dict(sequence_parallel=True),
    "fp8": dict(precision="fp8"),
    "fp8 rowwise": dict(precision="fp8-rowwise"),
    "fp8 sequence_parallel": dict(precision="fp8", sequence_parallel=True),
}


class Steps:
    """Training steps on `ids`, which stay where they are: forward, backward, clipping, AdamW."""

    def __init__(self, model, ids):
        self.model, self.ids, self.loss = model.train(), ids, torch.zeros(())
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)

    def look(self):
        """Gradients and loss, and no step."""
        self.loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        self.loss.backward()

    def run(self):
        self.optimizer.zero_grad(set_to_none=True)
        self.look()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def capture(self):
        """As PyTorch asks: a few steps on another stream first, and no gradients that lie elsewhere. Attention gets no mask."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.run()
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        attend = F.scaled_dot_product_attention
        with torch.cuda.graph(graph), mock.patch.object(F, "scaled_dot_product_attention", wraps=attend) as attending:
            self.run()
        masks = [call.kwargs.get("attn_mask") for call in attending.call_args_list]
        assert len(masks) == self.model.config.num_hidden_layers and masks == [None] * len(masks), masks
        return graph


def check_captured_steps(way):
    """Loss and weights after replays on new batches, of a step called by itself after them, and of looks between replays."""
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2048, num_attention_heads=8, num_key_value_heads=4, vocab_size=1024,
        num_hidden_layers=2, max_position_embeddings=1024, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = LlamaForCausalLM(config).bfloat16()
    models: list[Any] = [autotp.parallelize(copy.deepcopy(plain), **WAYS[way]) for _ in range(2)]
    device = models[0].device
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 1024, (ROWS, TOKENS), generator=generator).to(device) for _ in range(STEPS + 2)]
    one_by_one, captured = (Steps(model, batches[0].clone()) for model in models)
    for _ in range(3):
        one_by_one.run()
    graph = captured.capture()
    worst = 0.0
    for i, ids in enumerate(batches[1:]):
        one_by_one.ids.copy_(ids)
        captured.ids.copy_(ids)
        one_by_one.run()
        if i < STEPS:
            graph.replay()
        else:  # what replays changed, unseen by the host, is there
            captured.run()
        losses = one_by_one.loss.item(), captured.loss.item()
        worst = max(worst, abs(losses[0] - losses[1]) / losses[0])
        assert worst < 1e-3, (i, losses)
    for _ in range(2):  # FP8 weights that were read by the first are others by the second, and no optimizer counts that
        one_by_one.look()
        captured.look()
        losses = one_by_one.loss.item(), captured.loss.item()
        assert abs(losses[0] - losses[1]) < 1e-3 * losses[0], losses
        one_by_one.run()
        graph.replay()
    moved = [(a - b).abs().mean().item() for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True)]
    far = max(moved)
    assert far < 1e-4, far  # steps are of 1e-2
    assert len(set(models[1].autotp_group.gather_objects(captured.loss.item()))) == 1
    return f"losses within {worst:.1e}, the last {losses[1]:.3f}; weights within {far:.1e}"


CHECKS = [(check_captured_steps, way) for way in WAYS] if CUDA else []
