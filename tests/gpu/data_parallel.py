"""DDP and FSDP2 beside TP on GPUs, over every mesh of the ranks that there are: steps of the unsharded model on the whole batch.

Two ranks have 2 x 1 (data x TP) and 1 x 2. For 2 x 2: `torchrun --nproc-per-node 4 -m tests.gpu.data_parallel`; DEVICE=cpu runs
it over gloo.
"""

import copy

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import autotp
from autotp.groups import init_process_group_from_env
from autotp.layers.fully import make_whole
from tests.gpu.checks import CUDA, run_checks
from tests.models import batch, tiny

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def wrap_ddp(model, mesh):
    return DistributedDataParallel(model, process_group=mesh["dp"].get_group(), gradient_as_bucket_view=True)


def wrap_fully(model, mesh, **options):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"], **options)
    return fully_shard(model, mesh=mesh["dp"], **options)


def make_meshes():
    """Every (data, TP) mesh of all ranks."""
    init_process_group_from_env()
    size, kind = dist.get_world_size(), "cuda" if CUDA else "cpu"
    sizes = [tp for tp in range(1, size + 1) if size % tp == 0]
    return [dist.init_device_mesh(kind, (size // tp, tp), mesh_dim_names=("dp", "tp")) for tp in sizes]


def build(mesh):
    """The unsharded model on this rank's device, and the parallelized one, which ranks of a data row share."""
    whole = tiny("llama").train()
    model = autotp.parallelize(copy.deepcopy(whole), mesh["tp"]).train()
    return whole.to(next(model.parameters()).device), model


def take_rows(inputs, mesh):
    return {name: value.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()] for name, value in inputs.items()}


def relative(got, want):
    return ((got.float() - want.float()).abs().max() / want.float().abs().max().clamp_min(1e-30)).item()


def train(whole, model, wrapped, mesh, steps=3):
    """Clipped AdamW steps of both; the worst relative error of losses, norms, and of the weights after them."""
    optimizers, errors = [torch.optim.AdamW(each.parameters(), lr=1e-3, eps=1e-4, fused=CUDA) for each in (whole, model)], []
    for seed in range(steps):
        inputs = {name: value.to(next(whole.parameters()).device) for name, value in batch(whole, seed, rows=4).items()}
        expected, loss = whole(**inputs).loss, wrapped(**take_rows(inputs, mesh)).loss
        expected.backward()
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=mesh["dp"].get_group())
        norms = [torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5), autotp.clip_grad_norm_(model.parameters(), 0.5)]
        errors += [relative(mean / mesh["dp"].size(), expected.detach()), relative(norms[1], norms[0])]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found, want = autotp.full_state_dict(model), whole.state_dict()
    assert dist.get_rank() or set(found) == set(want)
    errors += [relative(value, want[name].cpu()) for name, value in found.items()]
    return max(errors)


def check_wraps(kind):
    said = []
    for mesh in make_meshes():
        whole, model = build(mesh)
        worst = train(whole, model, (wrap_ddp if kind == "ddp" else wrap_fully)(model, mesh), mesh)
        assert worst <= 2e-4, (mesh, worst)
        said.append(f"{mesh['dp'].size()} x {mesh['tp'].size()}: {worst:.1e}")
    return f"losses, norms and weights of three steps, {', '.join(said)}"


def gradient_error(model, mesh, exact):
    """Norm of the difference of this TP rank's gradients, whole over the data ranks, over the norm of the `exact` ones."""
    pairs = []
    for name, parameter in model.named_parameters():
        holder, _, leaf = name.rpartition(".")
        shard, want = getattr(model.get_submodule(holder), "shards", {}).get(leaf), exact[name]
        pairs.append((make_whole(parameter.grad), want if shard is None else shard.split(want, mesh["tp"].get_local_rank())))
    difference = torch.stack([(got.float() - want.float()).norm() for got, want in pairs]).norm()
    return (difference / torch.stack([want.float().norm() for _, want in pairs]).norm()).item()


def check_mixed_precision():
    """float32 parameters and gradients, products in bfloat16: as near to float32's gradients as a bfloat16 model, times 2."""
    said = []
    for mesh in make_meshes():
        whole, model = build(mesh)
        rounded = copy.deepcopy(whole).bfloat16()
        wrap_fully(model, mesh, mp_policy=MIXED)
        inputs = {name: value.to(next(whole.parameters()).device) for name, value in batch(whole, rows=4).items()}
        model(**take_rows(inputs, mesh)).loss.backward()
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
        for each in (whole, rounded):
            each(**inputs).loss.backward()
        exact, one = ({name: p.grad for name, p in each.named_parameters()} for each in (whole, rounded))
        own = torch.stack([(one[name].float() - grad).norm() for name, grad in exact.items()]).norm()
        own = (own / torch.stack([grad.norm() for grad in exact.values()]).norm()).item()
        error = gradient_error(model, mesh, exact)
        assert 0 < error <= 2 * own, (mesh, error, own)
        said.append(f"{mesh['dp'].size()} x {mesh['tp'].size()}: gradients {error:.1e}, one model's in bfloat16 {own:.1e}")
    return ", ".join(said)


CHECKS = [(check_wraps, "ddp"), (check_wraps, "fsdp2"), (check_mixed_precision, None)]

if __name__ == "__main__":
    run_checks(CHECKS)
