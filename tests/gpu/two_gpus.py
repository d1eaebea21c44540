"""The checks that two ranks run under torchrun; prints one line a check and fails if any failed.

`torchrun --nproc-per-node 2 tests/gpu/two_gpus.py [NAME ...]` (4 or 8 ranks where there are as many GPUs); DEVICE=cpu runs
them over gloo. With names, such as `check_many_steps`, those alone; `STEPS=1000` is how many steps that one runs.
"""

import copy
import inspect
import itertools
import os
import shutil
import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, StaticCache

import autotp
from autotp.checkpoint.random_state import random_state, set_random_state
from autotp.generation.engine import find_engine
from autotp.groups import init_process_group_from_env
from autotp.layers.decoding import decoding_step
from autotp.train.optimizer import MasterOptimizer
from tests.gpu import capturing, data_parallel, drawing, generating, moving_rows, peer_sums
from tests.gpu.checks import CUDA, run_checks
from tests.inject.test_families import full_gradients
from tests.models import batch, tiny

RANK = int(os.environ["RANK"])
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")
FAMILIES = ["llama", "qwen3", "gemma2", "gpt_neox"]


def to_device(inputs):
    return {name: value.to(DEVICE) for name, value in inputs.items()}


def relative(got, want):
    """Largest difference over the largest value."""
    return ((got.float() - want.float()).abs().max() / want.float().abs().max().clamp_min(1e-30)).item()


def pair(family):
    """The unsharded model on this rank's device, and the parallelized one, cut from CPU weights."""
    model = tiny(family)
    return copy.deepcopy(model).to(DEVICE), autotp.parallelize(model)


def run_once(model, inputs):
    """Logits `[B, S, V]` in evaluation, then the gradients of the training loss."""
    with torch.no_grad():
        logits = model.eval()(input_ids=inputs["input_ids"]).logits
    loss = model.train()(**inputs).loss
    loss.backward()
    return logits, loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def compare_gradients(got, want, bar=1e-4):
    """Worst relative error; a gradient that is zero but for rounding counts against the model's largest."""
    assert set(got) == set(want), set(got) ^ set(want)
    largest = max(g.abs().max().item() for g in want.values())
    errors = {n: (got[n] - g).abs().max().item() / max(g.abs().max().item(), 1e-3 * largest) for n, g in want.items()}
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= bar, (worst, errors[worst])
    return errors[worst]


def check_float32(family):
    reference, model = pair(family)
    assert all(p.device == DEVICE for p in model.parameters())
    inputs = to_device(batch(reference))
    want, got = run_once(reference, inputs), run_once(model, inputs)
    logits, loss = relative(got[0], want[0]), relative(got[1], want[1])
    assert logits <= 1e-4 and loss <= 1e-4, (logits, loss)
    return f"logits {logits:.1e}, gradients {compare_gradients(full_gradients(model), want[2]):.1e}"


def check_steps(family):
    reference, model = pair(family)
    seen = []
    for each, clip in ((reference, torch.nn.utils.clip_grad_norm_), (model, autotp.clip_grad_norm_)):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-3, fused=True)
        each.train()
        record = []
        for step in range(3):
            loss = each(**to_device(batch(each, seed=step))).loss
            loss.backward()
            record += [loss.item(), clip(each.parameters(), 0.5, foreach=True).item()]
            optimizer.step()
            optimizer.zero_grad()
        seen.append(torch.tensor(record))
    error = ((seen[1] - seen[0]).abs() / seen[0].abs()).max().item()
    assert error <= 1e-4, seen
    return f"losses and norms {error:.1e}"


def check_bf16(family):
    exact = tiny(family)
    inputs = to_device(batch(exact))
    plain, model = copy.deepcopy(exact).bfloat16().to(DEVICE), autotp.parallelize(copy.deepcopy(exact).bfloat16())
    want, one, two = (run_once(m, inputs) for m in (exact.to(DEVICE), plain, model))
    a, b = relative(one[0], want[0]), relative(two[0], want[0])
    assert b <= 2 * a + 1e-6, (a, b)
    return f"logits against float32: one GPU {a:.1e}, two {b:.1e}"


def check_gather_and_save(family):
    reference, model = pair(family)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    want = reference.state_dict()
    with autotp.GatherReplacedLayerParams(list(model.parameters()), model):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, want[name]), name
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    full = autotp.full_state_dict(model)
    assert RANK or (set(full) == set(want) and all(torch.equal(full[n], want[n].cpu()) for n in want))
    shared = [tempfile.mkdtemp() if RANK == 0 else ""]
    dist.broadcast_object_list(shared, 0, device=torch.device("cpu"))
    autotp.save_pretrained(model, shared[0])
    loaded = autotp.from_pretrained(shared[0])
    assert all(torch.equal(p, before[n]) and p.device == DEVICE for n, p in loaded.named_parameters())
    if RANK == 0:
        plain = AutoModelForCausalLM.from_pretrained(shared[0])
        assert all(torch.equal(p.cpu(), want[n].cpu()) for n, p in plain.state_dict().items())
    dist.barrier()
    if RANK == 0:
        shutil.rmtree(shared[0])
    return "bitwise"


def check_no_sync(family):
    _, model = pair(family)
    model.train()(**to_device(batch(model))).loss.backward()
    autotp.clip_grad_norm_(model.parameters(), 0.5)
    if CUDA:
        torch.cuda.set_sync_debug_mode("error")
    try:
        autotp.clip_grad_norm_(model.parameters(), 0.5)
    finally:
        if CUDA:
            torch.cuda.set_sync_debug_mode("default")
    return "no host sync"


def check_generate(family):
    reference, model = pair(family)
    ids = to_device(batch(reference))["input_ids"]
    kw = dict(attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, use_cache=True)
    want, got = reference.eval().generate(ids, **kw), model.eval().generate(ids, **kw)
    assert torch.equal(want, got), (want, got)
    engine = find_engine(model)
    assert (engine.captures or not CUDA) and not engine.broken, engine.broken
    drawn = dict(kw, do_sample=True, top_k=20, attention_mask=torch.ones_like(ids[:1]))
    torch.manual_seed(0)
    want = reference.generate(ids[:1], **drawn)
    torch.manual_seed(0)
    assert torch.equal(want, model.generate(ids[:1], **drawn))
    return f"{got.shape[1] - ids.shape[1]} tokens equal, {engine.captures} graphs"


def decode_steps(model, ids, steps=4):
    """Logits of `steps` more tokens, the same ones for all models."""
    cache, found = StaticCache(config=model.config, max_cache_len=32), []
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    model(input_ids=ids, use_cache=True, **{name: cache})
    with decoding_step():
        for step in range(steps):
            found.append(model(input_ids=ids[:, step : step + 1], use_cache=True, **{name: cache}).logits)
    return torch.cat(found, 1)


@torch.no_grad()
def check_decoding(family):
    reference, model = pair(family)
    ids = to_device(batch(reference))["input_ids"]
    errors = []
    for each in (None, torch.bfloat16):
        want = decode_steps(reference.eval(), ids)
        got = decode_steps(model.eval().to(each) if each else model.eval(), ids)
        errors.append(relative(got, want))
    assert errors[0] <= 1e-4 and errors[1] <= 0.1, errors
    peers = next(m.tp for m in model.modules() if hasattr(m, "tp")).find_peers()
    return f"logits {errors[0]:.1e}, in bfloat16 {errors[1]:.1e}; {'written to peers' if peers and peers._inboxes else 'NCCL'}"


def check_checkpointing(family):
    reference, model = pair(family)
    inputs = to_device(batch(reference))
    want = run_once(reference, inputs)[2]
    errors = []
    for reentrant in (True, False):
        model.zero_grad()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        run_once(model, inputs)
        errors.append(compare_gradients(full_gradients(model), want))
    return f"reentrant {errors[0]:.1e}, not {errors[1]:.1e}"


def check_optimizer_and_random_state(family):
    _, model = pair(family)
    optimizer = MasterOptimizer(model.bfloat16(), 1e-3)
    assert all(group["fused"] is (True if CUDA else None) for group in optimizer.adamw.param_groups)
    assert all(target.dtype == torch.float32 and target.device == DEVICE for target in optimizer.targets)
    state = random_state()
    first, other = (torch.rand(64, device=DEVICE) for _ in range(2))
    set_random_state(state)
    assert torch.equal(torch.rand(64, device=DEVICE), first) and not torch.equal(first, other)
    return f"AdamW on float32 masters{', fused' if CUDA else ''}; {sorted(state)} restored"


def check_training_state(family):
    """bf16, fused AdamW, dropout's numbers: saved beside the next step, gone on from bit for bit."""
    box = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(box, 0, device=torch.device("cpu"))
    losses, weights = [], []
    for first in (0, 2):
        model = autotp.parallelize(tiny(family, attention_dropout=0.2, seed=first).bfloat16()).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=CUDA)
        state = autotp.TrainingState(model, optimizer)
        if first:
            assert state.load(box[0]).step == 2
        for step in range(first, 4):
            if step == 2 and not first:
                state.save(box[0], 2, async_save=True)
            loss = model(**to_device(batch(model, seed=step))).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        state.wait()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert losses[2:4] == losses[4:], losses
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    dist.barrier()
    if RANK == 0:
        shutil.rmtree(box[0])
    return f"losses {losses[4:]} again"


def check_found_inf(family):
    _, model = pair(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=4.0)
    with torch.autocast(DEVICE.type, torch.float16):
        loss = model.train()(**to_device(batch(model))).loss
    scaler.scale(loss).backward()
    if RANK == 1:
        next(p for p in model.parameters() if p.grad is not None and p.ndim == 2).grad.fill_(float("inf"))
    before = [p.detach().clone() for p in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert scaler.get_scale() == 2.0, scaler.get_scale()
    return "both ranks skip"


def check_smollm2_shape():
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=30,
        vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    reference = copy.deepcopy(model).to(DEVICE)
    model = autotp.parallelize(model)
    inputs = to_device(batch(reference, length=64))
    want, got = run_once(reference, inputs), run_once(model, inputs)
    logits, loss = relative(got[0], want[0]), relative(got[1], want[1])
    assert logits <= 1e-4 and loss <= 1e-4, (logits, loss)
    return f"logits {logits:.1e}, loss {loss:.1e}, gradients {compare_gradients(full_gradients(model), want[2], 1e-3):.1e}"


def part_of(layer, mode, dealt, rows, columns, out):
    """Which rows and columns of x, and of y, this rank has."""
    own_rows = rows // dist.get_world_size()
    share = slice(RANK * own_rows, (RANK + 1) * own_rows) if dealt else slice(None)
    own = layer.shards[layer.weight_names[0]].cuts[0].indices(RANK).to(DEVICE) if mode else None
    every = torch.arange(columns, device=DEVICE), torch.arange(out, device=DEVICE)
    if mode == "row":
        return slice(None), own, share, every[1]
    return (share, every[0], slice(None), own) if mode else (share, every[0], share, every[1])


def check_norm_linear(norm):
    """LayerNormLinear in bfloat16 with float32 main gradients, dealt in every way: mean errors beside one GPU's modules."""
    rows, columns, out = 512, 1030, 774
    torch.manual_seed(0)
    plain = torch.nn.Sequential(getattr(torch.nn, norm)(columns, eps=1e-5), torch.nn.Linear(columns, out)).to(DEVICE)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, 0.5, 0.5)
    plain.bfloat16()
    exact = copy.deepcopy(plain).double()
    names = {"0.weight": "layer_norm_weight", "0.bias": "layer_norm_bias", "1.weight": "weight", "1.bias": "bias"}
    full, dy = (torch.randn(rows, 3, n, device=DEVICE).bfloat16() for n in (columns, out))
    outputs, inputs = [], []
    for module in (exact, plain):
        x = full.to(module[1].weight.dtype, copy=True).requires_grad_()
        outputs.append(module(x))
        inputs.append(x)
        outputs[-1].backward(dy.to(x.dtype))
    worst = 0.0
    for mode, dealt, delay in itertools.product([None, "column", "row"], [False, True], [False, True]):
        options = dict(tp_group=dist.group.WORLD, parallel_mode=mode, sequence_parallel=dealt, params_dtype=torch.bfloat16)
        options |= dict(fuse_wgrad_accumulation=True, delay_wgrad_compute=delay, normalization=norm, device=DEVICE)
        layer = autotp.LayerNormLinear(columns, out, **options)
        layer.load_state_dict({names[name]: value for name, value in plain.state_dict().items()})
        layer.weight.main_grad = torch.zeros(layer.weight.shape, device=DEVICE)
        x_rows, x_columns, y_rows, y_columns = part_of(layer, mode, dealt, rows, columns, out)
        x = full[x_rows][..., x_columns].requires_grad_()
        y = layer(x)
        y.backward(dy[y_rows][..., y_columns])
        layer.backward_dw()
        triples = [(y, *(each[y_rows][..., y_columns] for each in outputs))]
        triples += [(x.grad, *(each.grad[x_rows][..., x_columns] for each in inputs))]
        for name, parameter in plain.named_parameters():
            mine, shard = layer.get_parameter(names[name]), layer.shards.get(names[name])
            gradients = exact.get_parameter(name).grad, parameter.grad
            gradients = gradients if shard is None else [shard.split(gradient, RANK) for gradient in gradients]
            triples.append((mine.main_grad if name == "1.weight" else mine.grad, *gradients))
        for got, true, one in triples:
            ratio = ((got - true).abs().mean() / (one - true).abs().mean()).item()
            worst = max(worst, ratio)
            assert ratio <= 2, (mode, dealt, delay, list(got.shape), ratio)
    return f"mean errors at most {worst:.2f} times one GPU's"


ALONE = (check_no_sync, check_generate, check_checkpointing, check_optimizer_and_random_state, check_found_inf)
ALONE += (check_training_state,)


def main():
    init_process_group_from_env()
    checks = [(f, family) for f in (check_float32, check_steps, check_bf16, check_gather_and_save) for family in FAMILIES]
    checks += [(f, "llama") for f in ALONE]
    checks += [(check_generate, "gemma2"), (check_smollm2_shape, None)]
    checks += [(check_decoding, family) for family in FAMILIES]
    checks += [(check_norm_linear, norm) for norm in ("LayerNorm", "RMSNorm")]
    checks += [(check, None) for check in (*peer_sums.CHECKS, *moving_rows.CHECKS, *drawing.CHECKS)]
    checks += generating.CHECKS
    checks += capturing.CHECKS
    checks += data_parallel.CHECKS
    run_checks(checks, sys.argv[1:])


if __name__ == "__main__":
    main()
