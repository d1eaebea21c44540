"""A small model sharded by hand, beside its unsharded twin, for tests of what works on any shards."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from autotp.collectives import copy_to_group, reduce_from_group
from autotp.comm import TPGroup
from autotp.layers.base import TensorParallel_Layer, index_parameters, insert_class
from autotp.shard import Shard

CPU = torch.device("cpu")


class Column(TensorParallel_Layer, nn.Linear):
    def forward(self, x):
        return F.linear(copy_to_group(x, self.tp), self.weight, self.bias)


class Row(TensorParallel_Layer, nn.Linear):
    def forward(self, x):
        return reduce_from_group(F.linear(x, self.weight), self.tp) + self.bias


class Net(nn.Module):
    """`up` (column, uneven), `down` (row), `norm` (whole), `tied` (the weight of `up` again), a persistent buffer."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("steps", torch.arange(3.0))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.up = nn.Linear(6, 7, dtype=dtype)
        self.down = nn.Linear(7, 6, dtype=dtype)
        self.norm = nn.LayerNorm(6, dtype=dtype)
        self.copied = nn.Linear(6, 4, bias=False, dtype=dtype)  # rows that several ranks hold
        self.tied = nn.Linear(6, 7, bias=False, dtype=dtype)
        self.tied.weight = self.up.weight
        self.norm.bias.requires_grad_(False)

    def forward(self, x):
        return self.norm(self.down(torch.tanh(self.up(x))))


def split_layer(layer, cls, group, name, **shards):
    """Give `layer` the class `cls` and this rank's part of each parameter named in `shards`."""
    insert_class(layer, cls)
    layer.tp, layer.shards, layer.full_name = group, shards, name
    for key, shard in shards.items():
        param = getattr(layer, key)
        if tuple(param.shape) == shard.shape:
            param.data = shard.split(param.data, group.tp_rank).clone()


def build(group, timeout_s=20.0, dtype=torch.float32):
    """`(sharded, unsharded, TPGroup)` over the process group, equal but for the shards."""
    tp = group if isinstance(group, TPGroup) else TPGroup(group, CPU, timeout_s)
    model = Net(dtype)
    full = copy.deepcopy(model)
    size = tp.tp_size
    rows = Shard.even((7, 6), 0, size)
    split_layer(model.up, Column, tp, "up", weight=rows, bias=Shard.even((7,), 0, size))
    split_layer(model.tied, Column, tp, "tied", weight=rows)
    split_layer(model.down, Row, tp, "down", weight=Shard.even((6, 7), 1, size))
    copied = Shard.from_indices((4, 6), 0, [[0, 1, 3, 3], *([1, 2, 3],) * (size - 1)])
    split_layer(model.copied, Column, tp, "copied", weight=copied)
    index_parameters(model)
    return model, full, tp


def shard_of(model, name):
    """The Shard of a parameter by its full name; None for a whole one."""
    path, _, key = name.rpartition(".")
    return getattr(model.get_submodule(path), "shards", {}).get(key)


def give_gradients(model, full, tp, scale=1.0):
    """The same random gradients on both: whole on `full`, this rank's part on `model`."""
    generator = torch.Generator().manual_seed(1)
    mine = dict(model.named_parameters())
    for name, param in full.named_parameters():
        grad = torch.randn(param.shape, generator=generator).to(param.dtype) * scale
        if not param.requires_grad:
            continue
        shard = shard_of(model, name)
        param.grad = grad
        mine[name].grad = (shard.split(grad, tp.tp_rank) if shard else grad).clone()
