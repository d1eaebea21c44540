"""Dropout on two GPUs: each rank's own masks in attention, in graphs too; and compiled training steps as CUDA graphs."""

import copy
import os

import torch

import autotp
from tests.inject.test_dropout import independent, make_gpt2, solve_weights, telling_llama, watch
from tests.models import batch, tiny

CUDA = os.environ.get("DEVICE", "cuda") == "cuda"
VISIBLE = torch.ones(16, 16).tril().bool()


def read_masks(seen, tp):
    """Both ranks' masks `[B, h, pairs]` of what an output projection read."""
    weights = [solve_weights(read.unflatten(-1, (2, 16)).transpose(1, 2)) for read in tp.gather_objects(seen.float().cpu())]
    return [(each > 1e-3)[..., VISIBLE] for each in weights]


def check_masks():
    """SDPA's own dropout draws from a state of this rank; a captured graph draws anew at each replay."""
    model = autotp.parallelize(telling_llama(attn_implementation="sdpa"))
    tp, seen, ids = model.autotp_group, [], torch.arange(16, device=model.device).expand(24, 16)
    layer = model.model.layers[0]
    watch(layer.self_attn.o_proj, seen)
    torch.manual_seed(3)
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert independent(*read_masks(seen[-1], tp))
    after = torch.rand((), device=model.device)
    assert len(set(tp.gather_objects((loss.item(), after.item())))) == 1
    torch.manual_seed(3)
    assert torch.equal(model(ids, labels=ids).loss, loss)
    if not CUDA:
        return "masks differ, the ranks agree"
    x = model.model.embed_tokens(ids).detach()
    given = {"position_embeddings": model.model.rotary_emb(x, torch.arange(16, device=x.device)[None])}
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                layer(x, **given)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x, **given)
    masks = []
    for _ in range(2):
        graph.replay()
        masks.append(read_masks(seen[-1], tp))
        whole = tp.gather_objects(out.float().cpu())
        assert torch.equal(*whole)
    assert all(independent(*pair) for pair in masks) and independent(masks[0][0], masks[1][0])
    return "masks differ between ranks, and between replays of a graph"


def check_reduce_overhead():
    """Whole models under mode="reduce-overhead": a train step's numbers, and dropout that goes on from step to step."""
    if not CUDA:
        return "needs CUDA graphs"
    reference = autotp.parallelize(tiny("llama", num_hidden_layers=1)).train()
    model = copy.deepcopy(reference)
    compiled, worst = torch.compile(model, mode="reduce-overhead"), 0.0
    for step in range(4):
        inputs = {name: value.cuda() for name, value in batch(reference, step).items()}
        torch.compiler.cudagraph_mark_step_begin()
        losses = []
        for each, run in ((reference, reference), (model, compiled)):
            each.zero_grad()
            loss = run(**inputs, use_cache=False).loss
            loss.backward()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) <= 1e-4 * abs(losses[0]), losses
        for want, got in zip(reference.parameters(), model.parameters(), strict=True):
            worst = max(worst, ((got.grad - want.grad).abs().max() / want.grad.abs().max().clamp_min(1e-6)).item())
    assert worst <= 1e-3, worst
    torch.manual_seed(0)
    dropping = autotp.parallelize(make_gpt2()).train()
    ids, found = torch.arange(3, 15, device=dropping.device).expand(4, 12), []
    compiled = torch.compile(dropping, mode="reduce-overhead")
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.append(loss.item())
    assert len(set(found)) == 6 and len(set(map(tuple, dropping.autotp_group.gather_objects(found)))) == 1, found
    return f"worst gradient {worst:.1e}; dropout goes on: {len(set(found))} losses"


CHECKS = (check_masks, check_reduce_overhead)
