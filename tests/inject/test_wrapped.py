"""Adapters put around a model's modules after its tokens were dealt: the numbers of the same adapters on the unsharded model."""

import copy

import pytest
import torch
from torch import nn

import autotp
from autotp.collectives import copy_to_group, reduce_from_group
from autotp.errors import PlanError
from autotp.layers.base import TensorParallel_Layer
from tests.inject.test_tokens import Scaled, check_close, watch
from tests.models import batch, tiny


class Adapter(nn.Module):
    """A linear plus a product of two thin ones, of whose wide sides this rank has the linear's part."""

    def __init__(self, base, seed, rank=3):
        super().__init__()
        self.base, generator = base, torch.Generator().manual_seed(seed)
        self.shard = base.shards["weight"] if isinstance(base, TensorParallel_Layer) else None
        rows, columns = (base.out_features, base.in_features) if self.shard is None else self.shard.shape
        down, up = torch.randn(rank, columns, generator=generator) * 0.2, torch.randn(rows, rank, generator=generator) * 0.2
        self.row = self.shard is not None and self.shard.cuts[0].dim == 1
        if self.shard is not None:
            wide = self.shard.cuts[0].indices(base.tp.tp_rank)
            down, up = (down[:, wide], up) if self.row else (down, up[wide])
        self.down, self.up = nn.Parameter(down), nn.Parameter(up)

    def forward(self, x):
        thin = x @ self.down.T
        if self.shard is not None:
            thin = reduce_from_group(thin, self.base.tp) if self.row else copy_to_group(thin, self.base.tp)
        return self.base(x) + thin @ self.up.T


def wrap(model):
    for index, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        attention.q_proj, attention.o_proj = Adapter(attention.q_proj, index), Adapter(attention.o_proj, 2 + index)
        mlp.up_proj, mlp.down_proj = Adapter(mlp.up_proj, 4 + index), Adapter(mlp.down_proj, 6 + index)
        layer.mlp = Scaled(mlp)  # reads dealt rows
    return model


def check_adapters(group):
    reference = tiny("llama")
    model = wrap(autotp.parallelize(copy.deepcopy(reference), group, sequence_parallel=True))
    wrap(reference)
    seen, found = watch(model), []
    for one in (model, reference):
        call = batch(reference, 0, 3, 7)
        loss = one(**call).loss
        loss.backward()
        grads = {name: p.grad for name, p in one.named_parameters() if p.requires_grad}
        ids = one.generate(call["input_ids"], max_new_tokens=5, do_sample=False)
        found.append((loss.detach(), grads, ids))
    (loss, grads, ids), (expected, whole, tokens) = found
    assert seen[0] is not None and torch.equal(ids, tokens)
    torch.testing.assert_close(loss, expected)
    for name, module in list(model.named_modules()):
        for key, shard in getattr(module, "shards", {}).items() if isinstance(module, TensorParallel_Layer) else ():
            whole[f"{name}.{key}"] = shard.split(whole[f"{name}.{key}"], module.tp.tp_rank)
        if isinstance(module, Adapter):
            wide, (narrow, dim) = module.shard.cuts[0].indices(module.base.tp.tp_rank), ("down", 1) if module.row else ("up", 0)
            whole[f"{name}.{narrow}"] = whole[f"{name}.{narrow}"].index_select(dim, wide)
    check_close(grads, whole)


def check_refused(group):
    model = autotp.parallelize(tiny("opt", do_layer_norm_before=True), group, sequence_parallel=True)
    assert model.autotp_plan.chains
    layer = model.model.decoder.layers[1]
    layer.fc2 = Adapter(layer.fc2, 0)
    with pytest.raises(PlanError, match=r"layers\.1\.fc2 is a Adapter with parameters around a linear.*before parallelize"):
        model(**batch(model, 0, 3, 7))


def test_adapters_around_linears_and_modules_of_dealt_layers(ranks):
    ranks.run(check_adapters)
    ranks.run(check_refused)
