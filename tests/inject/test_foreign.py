"""Constructs of models that are not transformers', by hand: asserts, lists with holes, closures, sizes kept in nests."""

import pytest
import torch
from torch import nn

import autotp
from autotp.inject.rules import make_plan
from tests.inject.test_families import full_gradients

HEADS, WIDTH = 4, 32


class Block(nn.Module):
    """Attention and an MLP, whose heads are split by `split`, a module that is given a tensor `[B, S, WIDTH]`."""

    def __init__(self, split):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down, self.split, self.norm = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH), split, nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = self.norm(x)
        q, k, v = (self.split(part) for part in (self.q(x), self.k(x), self.v(x)))
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return self.norm(x + self.down(torch.tanh(self.up(self.norm(x)))))


class Fixed(nn.Module):
    """Splits heads of a fixed width: nothing need be edited."""

    def forward(self, x):
        return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)


class Named(nn.Module):
    """Splits heads by sizes that it keeps by name, as layers of einops do."""

    def __init__(self, sizes):
        super().__init__()
        self._sizes, self.kind = sizes, type(sizes)

    def forward(self, x):
        assert type(self._sizes) is type(self._sizes[0]) is self.kind
        sizes = dict(self._sizes)
        return x.reshape(*x.shape[:2], sizes["h"], sizes["d"]).transpose(1, 2)


class Asserting(Block):
    def __init__(self):
        super().__init__(Fixed())

    def forward(self, x):
        torch._assert(x.shape[-1] == WIDTH, "width")
        torch._assert((x.detach() < 1e9).all(), "size")
        return super().forward(x) * torch.sym_max(x.shape[1], 1)


class Holes(nn.Module):
    """A list with more members than are planned one by one, some of which are None."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(Fixed()), None, Block(Fixed()), None, Block(Fixed()), None, Block(Fixed()), None])

    def forward(self, x):
        for layer in self.layers:
            x = x if layer is None else layer(x)
        return x


class Frozen(dict):
    """A configuration that can't be changed."""

    def update(self, *_):
        raise TypeError("frozen")

    def __deepcopy__(self, memo):
        return Frozen(self)


class Closing(nn.Module):
    """Functions on modules that close over the model and its Parameters: an attribute, one with a default, a hook."""

    def __init__(self):
        super().__init__()
        self.table, self.block = nn.Embedding(24, WIDTH), Block(Fixed())
        self.scale = nn.Parameter(torch.randn(96))
        self.block.register_forward_hook(lambda module, args, y: y * self.scale[0])
        self.kept = Frozen(act=torch.tanh, size=WIDTH)
        self.logits = lambda x: x @ self.table.weight.t()
        self.late = lambda x, weight=self.scale: x * weight[1]

    def forward(self, tokens):
        return self.late(self.logits(self.block(self.table(tokens))))


NESTS = {"names": (("h", HEADS), ("d", 8)), "lists": [["h", HEADS], ["d", 8]]}
KINDS = {
    "asserting": (Asserting, (WIDTH,)),
    "holes": (Holes, (WIDTH,)),
    "closing": (Closing, None),
    **{f"sizes by {kind}": (lambda kind=kind: Block(Named(NESTS[kind])), (WIDTH,)) for kind in NESTS},
}


def build(kind):
    """The model and two calls of it; built anew each time, as functions that close over a model are not copied with it."""
    torch.manual_seed(0)
    make, width = KINDS[kind]
    model = make()
    key = "x" if width else "tokens"
    shapes = ((2, 5), (3, 4))
    return model, [{key: torch.randn(*s, *width) if width else torch.randint(0, 24, s)} for s in shapes]


def check_kind(group, kind):
    model, calls = build(kind)
    sharded = autotp.parallelize(build(kind)[0], group, inputs=calls)
    plan = sharded.autotp_plan
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert plan.proof == "proved"
    assert {name for region in plan.regions for name in region.columns + region.rows} == set(layers)
    for call in calls:
        expected, got = model(**call), sharded(**call)
        torch.testing.assert_close(got, expected)
        weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
        (expected * weights).sum().backward()
        (got * weights).sum().backward()
    whole = full_gradients(sharded)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole[name], parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_other_libraries_write_is_split(ranks, kind):
    ranks.run(check_kind, kind)


def test_edited_sizes_keep_the_kind_of_their_nest():
    for kind, nest in NESTS.items():
        model, calls = build(f"sizes by {kind}")
        plan = make_plan(model, 2, inputs=calls)
        assert plan["split"].attrs == {"_sizes": ((("h", 2), ("d", 8)),) * 2}
        assert make_plan(model, 2, plan=autotp.Plan.from_json(plan.to_json()), inputs=calls) == plan
        assert model.split._sizes == nest


class Gated(nn.Module):
    """Six whole layers reach the rows of one region."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)
        for number in range(6):
            self.add_module(f"gate{number}", nn.Linear(16, 1))

    def forward(self, x):
        y = torch.tanh(self.up(x))
        for number in range(6):
            y = y * torch.sigmoid(getattr(self, f"gate{number}")(x))
        return self.down(y)


def test_a_plan_does_not_depend_on_the_order_of_hashes():
    """Ranks that plan for themselves are processes with other hashes: what comes from a set must be put in order."""
    torch.manual_seed(0)
    (region,) = make_plan(Gated(), 2, inputs={"x": torch.randn(2, 3, 16)}).regions
    assert [name for name, *_ in region.enters] == [f"gate{i}" for i in range(6)]


class Rest(nn.Module):
    """Parameters that stay whole, each for another reason, beside layers that are split."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block(Fixed()) for _ in range(6))
        self.positions, self.table = nn.Parameter(torch.randn(3, WIDTH)), nn.Embedding(8, WIDTH)
        self.head, self.unused = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 6)
        for layer in self.layers:
            layer.bend = nn.Parameter(torch.randn(1, WIDTH))
            layer.register_forward_hook(lambda module, args, y: y + module.bend)

    def forward(self, tokens):
        x = self.table(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_every_matrix_that_is_whole_has_a_reason():
    torch.manual_seed(0)
    plan = make_plan(Rest(), 2, inputs={"tokens": torch.randint(0, 8, (2, 3))})
    reasons = {entry.name: entry.reason for entry in plan.whole}
    assert reasons["positions"] == "not the weight of a linear map"
    assert reasons["table.weight"] == "a lookup table, whose columns no region takes"
    assert reasons["head.weight"] == "no region takes it, and it is too small to gather its output for"
    assert reasons["unused.weight"] == "no example call runs it"
    assert {reasons[f"layers.{i}.bend"] for i in range(6)} == {"not the weight of a linear map"}


class Convolved(nn.Module):
    """The largest region around `last` can't be placed, as a whole convolution enters it: `middle` is a row then, no column."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (nn.Conv2d(a, b, 3, padding=1) for a, b in [(16, 48), (48, 32), (32, 64)])
        self.beside = nn.Conv2d(16, 32, 1)

    def forward(self, x):
        beside = self.beside(x)
        return beside, self.last(torch.tanh(self.middle(torch.tanh(self.first(x))) + beside))


def check_smaller(group):
    torch.manual_seed(0)
    model, x = Convolved(), torch.randn(2, 16, 5, 5)
    torch.manual_seed(0)
    sharded = autotp.parallelize(Convolved(), group, inputs=[{"x": x}, {"x": torch.randn(3, 16, 4, 4)}])
    assert [(r.columns, r.rows) for r in sharded.autotp_plan.regions] == [(("first",), ("middle",))]
    pairs = list(zip(model(x), sharded(x), strict=True))
    for expected, got in pairs:
        torch.testing.assert_close(got, expected)
    for part in zip(*pairs, strict=True):
        sum(out.square().sum() for out in part).backward()
    whole = full_gradients(sharded)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole[name], parameter.grad, rtol=1e-4, atol=1e-3)


def test_smaller_regions_stand_in_for_one_that_does_not_prove(ranks):
    ranks.run(check_smaller)
