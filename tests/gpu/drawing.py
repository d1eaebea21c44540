"""Dropout on two GPUs: each rank's own masks in attention, in graphs too; and compiled training steps as CUDA graphs."""

import copy
import itertools
import os

import torch
import torch.distributed as dist

import autotp
from autotp.groups import resolve_group
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


def make_sharded():
    return autotp.parallelize(tiny("llama", num_hidden_layers=1)).train()


def make_alone():
    """The same model on each rank by itself: what a compiler does without us."""
    return tiny("llama", num_hidden_layers=1).train().to(resolve_group().device)


def run_step(model, run, step):
    """Loss and gradients, read at once as an optimizer reads them: a graph's lie in memory that its next run overwrites."""
    inputs = {name: value.to(model.device) for name, value in batch(model, step).items()}
    model.zero_grad()
    loss = run(**inputs, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def find_wrong(mode, make, apart, steps=4, bar=1e-3):
    """Train steps of a model compiled in `mode` beside those of the eager one: the worst relative gradient error, and lines on
    each loss or gradient that is over the bar, or that is another after a synchronize: a replay wrote to it, or it came late.

    With CUDA graphs, step 0 warms up, step 1 records (a step whose saved tensors lie elsewhere, again), and later ones replay.

    Args:
        make: what makes the eager model; apart: run all eager steps first, so that no eager collective is between replays.
    """
    torch.compiler.reset()
    eager = make()
    model = copy.deepcopy(eager)
    runs = [(eager, eager), (model, torch.compile(model, mode=mode))]
    rounds = [[(pair, step)] for pair in runs for step in range(steps)]
    rounds = rounds if apart else [[(pair, step) for pair in runs] for step in range(steps)]
    found, later = {}, {}
    for together in rounds:
        torch.compiler.cudagraph_mark_step_begin()
        for (each, run), step in together:
            found[each is model, step] = run_step(each, run, step)
        if CUDA:
            torch.cuda.synchronize()
        for (each, _), step in together:
            later[each is model, step] = {name: p.grad.clone() for name, p in each.named_parameters() if p.grad is not None}
    return compare_steps(found, later, steps, bar)


def compare_steps(found, later, steps, bar):
    """The worst relative error of a gradient, and lines on what is wrong, a parameter each."""
    worst, wrong = 0.0, []
    for step in range(steps):
        (loss, wanted), (loss_got, grads) = found[False, step], found[True, step]
        if not abs(loss - loss_got) <= 1e-4 * abs(loss) or set(wanted) != set(grads):
            wrong.append(f"step {step}: losses {loss} and {loss_got}, gradients {sorted(set(wanted) ^ set(grads))} on one side")
        for name in set(wanted) & set(grads):
            want, got, after = wanted[name], grads[name], [later[each, step][name] for each in (False, True)]
            error = ((got - want).abs().max() / want.abs().max().clamp_min(1e-6)).item()
            worst = max(worst, error)
            if not error <= bar or not torch.equal(want, after[0]) or not torch.equal(got, after[1]):
                norms = ", ".join(f"{grad.norm().item():.6e}" for grad in (want, got, *after))
                wrong.append(f"step {step} {name}: error {error}; norms eager, compiled, both after a synchronize: {norms}")
    return worst, wrong


# Which of them fails tells whose fault it is: the compiler's own, its graphs of collectives, or those beside eager collectives.
COMPILED = {
    "default": ("default", make_sharded, False),
    "graphs of one GPU's model": ("reduce-overhead", make_alone, False),
    "graphs, eager steps before": ("reduce-overhead", make_sharded, True),
    "graphs": ("reduce-overhead", make_sharded, False),
}


def check_compiled_steps():
    """Whole models compiled, without and with CUDA graphs: loss and gradients of train steps, on every rank."""
    found, wrong = [], []
    for name, case in COMPILED.items():
        if not CUDA and case[0] != "default":
            case = ("default", *case[1:])
        worst, lines = find_wrong(*case)
        found.append(f"{name} {worst:.1e}")
        every = resolve_group().gather_objects(lines)
        wrong += [f"{name}: rank {rank} {line}" for rank, lines in enumerate(every) for line in lines]
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
