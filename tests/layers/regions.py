"""A small model with everything a plan can say in it, made by hand, and its plan for 2 or 4 ranks, made by hand too."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from autotp.index_runs import compress_indices
from autotp.inject.module_plan import InputPlan, ModulePlan, NormPlan
from autotp.inject.plan import Plan, Region
from autotp.shard import Cut, Shard

H, HEADS, KV, D, E, WIDTH = 12, 8, 2, 4, 3, 8  # hidden, heads, kv heads, head size, experts, their width


class Config(PreTrainedConfig):
    attribute_map = {"kv": "num_kv_heads"}
    num_kv_heads: int = KV
    scale: float = 1.0


class RMSNorm(nn.Module):
    def __init__(self, width, plus=0.0):
        super().__init__()
        self.weight, self.plus, self.eps = nn.Parameter(torch.randn(width) * 0.1 + 1), plus, 1e-5

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (self.plus + self.weight)


class Attention(nn.Module):
    """Norms over q and k (at 4 ranks kv heads are copied), sinks, a bias table, alibi, buffers, columns of a whole gate."""

    def __init__(self, config):
        super().__init__()
        self.config, self.num_heads = config, HEADS
        self.q, self.k, self.v = nn.Linear(H, HEADS * D), nn.Linear(H, KV * D), nn.Linear(H, KV * D)
        self.o = nn.Linear(HEADS * D, H)
        self.q_norm, self.k_norm = RMSNorm(HEADS * D), nn.LayerNorm(KV * D)
        self.head_norm = RMSNorm(D, 1.0)
        self.table = nn.Embedding(5, HEADS)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.register_buffer("slopes", torch.rand(HEADS))
        self.register_buffer("allowed", torch.arange(HEADS) != 3, persistent=False)

    def forward(self, x, alibi, gate, mask=None):
        b, s, _ = x.shape
        q = self.head_norm((self.q_norm(self.q(x)) * (1 + gate[..., :1])).view(b, s, self.num_heads, D)).transpose(1, 2)
        k = (self.k_norm(self.k(x)) * gate[..., 3:5].sum(-1, keepdim=True)).view(b, s, self.config.kv, D).transpose(1, 2)
        v = self.v(x).view(b, s, -1, D).transpose(1, 2)
        k, v = (t.repeat_interleave(self.num_heads // self.config.num_kv_heads, 1) for t in (k, v))
        places = torch.arange(s)
        far = (places[:, None] - places).abs()
        scores = q @ k.transpose(2, 3) * self.config.scale + alibi.view(b, self.num_heads, 1, s)
        scores = scores + self.table(far.clamp(max=4)).permute(2, 0, 1) - self.slopes[:, None, None] * far
        scores = scores * self.allowed[:, None, None] + (0 if mask is None else mask)
        sinks = self.sinks.view(1, -1, 1, 1).expand(b, -1, s, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return self.o((weights @ v).transpose(1, 2).reshape(b, s, -1)), far


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        for name, shape in {
            "gate_up": (E, 2 * WIDTH, H),
            "gate_up_bias": (E, 2 * WIDTH),
            "down": (E, H, WIDTH),
            "down_bias": (E, H),
        }.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) * 0.3))
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x, routing):
        gate, up = (torch.einsum("...h,eih->...ei", x, self.gate_up) + self.gate_up_bias).chunk(2, -1)
        y = torch.einsum("...ei,ehi->...eh", F.silu(gate) * up * self.gain, self.down) + self.down_bias
        return (y * routing.unsqueeze(-1)).sum(-2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.config = Config()
        self.norm = nn.LayerNorm(H)
        self.attn = Attention(self.config)
        self.router, self.experts = nn.Linear(H, E), Experts()
        self.wide, self.narrow = nn.Conv1d(H, 10, 3, padding=1), nn.Conv1d(10, H, 1)
        self.gate = nn.Linear(H, 6)
        self.alibi = nn.Linear(H, HEADS)
        self.checkpoint = None

    def forward(self, x, mask=None):
        call = self.checkpoint or (lambda module, *args: module(*args))
        b, s, _ = x.shape
        h = self.norm(x)
        alibi = self.alibi(h).permute(0, 2, 1).reshape(b * HEADS, 1, s)
        gate = self.gate(h)
        y, far = call(self.attn, h, alibi, gate, mask)
        x = x + y * (1 + 0.1 * far[0, :, None]) + gate[..., 1:3].sum(-1, keepdim=True)
        x = x + call(self.experts, x, self.router(x).softmax(-1))
        return x + self.narrow(torch.tanh(self.wide(x.transpose(1, 2)))).transpose(1, 2)


def dealt_heads(size):
    """Query heads of each rank, and kv heads: copied where ranks outnumber them."""
    each = HEADS // size
    heads = [list(range(rank * each, rank * each + each)) for rank in range(size)]
    return heads, [sorted({head * KV // HEADS for head in own}) for own in heads]


def columns_of(units, width):
    return [[unit * width + i for unit in own for i in range(width)] for own in units]


def plan_of(size, late=False):
    """The plan of `Net`; `late` enters x at the attention module and reduces its output there, not at its linears."""
    heads, kv = dealt_heads(size)
    q, k = columns_of(heads, D), columns_of(kv, D)

    def cut(shape, dim, indices):
        return Shard.from_indices(shape, dim, indices)

    def linear(name, width, indices):
        shards = {"weight": cut((width, H), 0, indices), "bias": cut((width,), 0, indices)}
        return ModulePlan(f"attn.{name}", "colwise", shards, siblings=None if late else "attn")

    runs = tuple(compress_indices(own) for own in heads)
    enters = (InputPlan("x", 0, True),) if late else ()
    attention = ModulePlan(
        "attn",
        "local_params",
        {name: cut((HEADS,), 0, heads) for name in ("sinks", "slopes", "allowed")},
        attrs={"num_heads": (HEADS // size,) * size, "config.num_kv_heads": (max(1, KV // size),) * size},
        inputs=(*enters, InputPlan("alibi", 1, True, 0, HEADS, runs), InputPlan("mask", 3, False, 1, HEADS, runs)),
        outputs=(0,) if late else (),
    )
    half = Shard.even((WIDTH,), 0, size).cuts[0].runs
    packed = tuple(run + tuple((start + WIDTH, *rest) for start, *rest in run) for run in half)
    experts = ModulePlan(
        "experts",
        "local_params",
        {
            "gate_up": Shard((E, 2 * WIDTH, H), size, (Cut(1, packed),)),
            "gate_up_bias": Shard((E, 2 * WIDTH), size, (Cut(1, packed),)),
            "down": Shard((E, H, WIDTH), size, (Cut(2, half),)),
        },
        summed=("gain",),
        once=("down_bias",),
        inputs=(InputPlan("x", 0, True), InputPlan("routing", 1, True)),
        outputs=(0,),
    )
    channels = Shard.even((10,), 0, size)
    wide = {"weight": Shard((10, H, 3), size, channels.cuts), "bias": channels}
    norms = {"q_norm": ("rms", HEADS * D, q, ("weight",)), "k_norm": ("layernorm", KV * D, k, ("weight", "bias"))}
    modules = (
        attention,
        linear("q", HEADS * D, q),
        linear("k", KV * D, k),
        linear("v", KV * D, k),
        ModulePlan("attn.o", "rowwise_partial" if late else "rowwise", {"weight": cut((H, HEADS * D), 1, q)}),
        ModulePlan("gate", "replicate", columns=((0, 1), (3, 5))),
        *(
            ModulePlan(f"attn.{name}", "local_params", {p: cut((n,), 0, own) for p in params}, norm=NormPlan(kind, 1e-5, n))
            for name, (kind, n, own, params) in norms.items()
        ),
        ModulePlan("attn.head_norm", "replicated_with_grad_allreduce", summed=("weight",)),
        ModulePlan("attn.table", "embedding_colwise_local", {"weight": cut((5, HEADS), 1, heads)}),
        experts,
        ModulePlan("wide", "colwise", wide, siblings="conv"),
        ModulePlan("narrow", "rowwise", {"weight": Shard((H, 10, 1), size, (Cut(1, channels.cuts[0].runs),))}),
    )
    region = Region("attn", ("attn.q", "attn.k", "attn.v"), ("attn.o",), (), ("attn.o",), tuple(map(len, heads)))
    return Plan(size, "Net", modules, (region,))
