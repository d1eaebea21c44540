"""Dropout on two GPUs: each rank's own masks in attention, in graphs too; and compiled training steps as CUDA graphs."""

import copy
import itertools
import os

import torch
import torch.distributed as dist

import autotp
from autotp.comm import resolve_group
from tests.inject.test_dropout import independent, make_gpt2, solve_weights, telling_llama, watch
from tests.models import batch, tiny

CUDA = os.environ.get("DEVICE", "cuda") == "cuda"
VISIBLE = torch.ones(16, 16).tril().bool()


def read_masks(seen, tp):
    """All ranks' masks `[B, h, pairs]` of what an output projection read."""
    weights = [solve_weights(read.unflatten(-1, (-1, 16)).transpose(1, 2)) for read in tp.gather_objects(seen.float().cpu())]
    return [(each > 1e-3)[..., VISIBLE] for each in weights]


def all_independent(masks):
    return all(independent(*pair) for pair in itertools.combinations(masks, 2))


def check_masks():
    """SDPA's own dropout draws from a state of this rank; a captured graph draws anew at each replay."""
    if dist.get_world_size() > 4:
        return "the model has 4 heads"
    model = autotp.parallelize(telling_llama(attn_implementation="sdpa"))
    tp, seen, ids = model.autotp_group, [], torch.arange(16, device=model.device).expand(24, 16)
    layer = model.model.layers[0]
    watch(layer.self_attn.o_proj, seen)
    torch.manual_seed(3)
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert all_independent(read_masks(seen[-1], tp))
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
        assert all(torch.equal(whole[0], other) for other in whole)
    assert all(map(all_independent, masks)) and independent(masks[0][0], masks[1][0])
    return "masks differ between ranks, and between replays of a graph"


def find_wrong(mode, steps=4, bar=1e-3):
    """Train steps of a model compiled in `mode` beside those of the eager one: the worst relative gradient error, and lines on
    each gradient that is over the bar, or that is another after a synchronize: a replay wrote to it, or it came late.

    With CUDA graphs, step 0 warms up, step 1 records (a step whose saved tensors lie elsewhere, again), and later ones replay.
    """
    reference = autotp.parallelize(tiny("llama", num_hidden_layers=1)).train()
    model = copy.deepcopy(reference)
    compiled, worst, wrong = torch.compile(model, mode=mode), 0.0, []
    for step in range(steps):
        inputs = {name: value.to(reference.device) for name, value in batch(reference, step).items()}
        torch.compiler.cudagraph_mark_step_begin()
        losses, grads = [], []
        for each, run in ((reference, reference), (model, compiled)):
            each.zero_grad()
            loss = run(**inputs, use_cache=False).loss
            loss.backward()
            losses.append(loss.item())
            # Read as a step would read them, at once: those of a graph lie in its memory, which its next run overwrites.
            grads.append({name: p.grad.clone() for name, p in each.named_parameters() if p.grad is not None})
        assert abs(losses[0] - losses[1]) <= 1e-4 * abs(losses[0]), (mode, step, losses)
        missing = set(dict(reference.named_parameters())) - (set(grads[0]) & set(grads[1]))
        assert not missing, (mode, step, missing)
        if CUDA:
            torch.cuda.synchronize()
        for name, want in grads[0].items():
            got, later = grads[1][name], [each.get_parameter(name).grad for each in (reference, model)]
            error = ((got - want).abs().max() / want.abs().max().clamp_min(1e-6)).item()
            worst = max(worst, error)
            if not error <= bar or not torch.equal(want, later[0]) or not torch.equal(got, later[1]):
                norms = ", ".join(f"{grad.norm().item():.6e}" for grad in (want, got, *later))
                wrong.append(
                    f"{mode} step {step} {name}: error {error}; norms eager, compiled, both after a synchronize: {norms}"
                )
    return worst, wrong


def check_compiled_steps():
    """Whole models compiled, without and with CUDA graphs: loss and gradients of train steps, on every rank."""
    found, wrong = [], []
    for mode in ("default", "reduce-overhead") if CUDA else ("default",):
        worst, lines = find_wrong(mode)
        found.append(f"{mode} {worst:.1e}")
        every = resolve_group().gather_objects(lines)
        wrong += [f"rank {rank} {line}" for rank, lines in enumerate(every) for line in lines]
    assert not wrong, "\n".join(["", *wrong])
    return f"worst gradients: {', '.join(found)}"


def check_dropout_goes_on():
    """Whole models under mode="reduce-overhead": dropout goes on from step to step, alike on all ranks."""
    if not CUDA:
        return "needs CUDA graphs"
    torch.manual_seed(0)
    dropping = autotp.parallelize(make_gpt2()).train()
    ids, found = torch.arange(3, 15, device=dropping.device).expand(4, 12), []
    compiled = torch.compile(dropping, mode="reduce-overhead")
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        dropping.zero_grad()  # gradients lie in the graph's memory: the next step may not add to them
        loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.append(loss.item())
    assert len(set(found)) == 6 and len(set(map(tuple, dropping.autotp_group.gather_objects(found)))) == 1, found
    return f"dropout goes on: {len(set(found))} losses"


CHECKS = (check_masks, check_compiled_steps, check_dropout_goes_on)
