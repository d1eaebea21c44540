"""Calls that write a full width into a shape, found from a mode and rewritten in the source: toys and transformers' own code."""

import copy
import functools
import inspect
import json
import traceback

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM

from autotp.errors import PlanError
from autotp.inject.callsites import ShapeFix, apply_fixes, find_call_site, remove_fixes
from autotp.inject.reach import find_functions
from autotp.layers.base import insert_class, plain_class

B, S, H, D, T = 2, 3, 4, 5, 2
E, LOCAL = H * D, H // T


class Watch(TorchFunctionMode):
    """Notes the site of every call, with the function called and its arguments."""

    def __init__(self):
        super().__init__()
        self.sites = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        site = find_call_site()
        if site is not None:
            self.sites.append((getattr(func, "__name__", ""), site, args))
        return func(*args, **(kwargs or {}))


def watch(module, *args):
    with Watch() as mode:
        module(*args)
    return mode.sites


def site_of(module, op, *args, nth=0):
    """The nth distinct site of `module` that calls `op`."""
    sites = list(dict.fromkeys(site for name, site, _ in watch(module, *args) if name == op))
    return sites[nth]


def heads(site, axis=2, **how):
    return site.fix("shape", sizes={axis: (LOCAL,) * T}, **how)


def x_full():
    return torch.randn(B, S, E, generator=torch.Generator().manual_seed(0))


def columns(rank, width=E):
    return slice(rank * width // T, (rank + 1) * width // T)


class View(nn.Module):
    def forward(self, x):
        b, s, _ = x.shape
        heads = 4
        y = x.view(b, s, heads, 5)
        return torch.tanh(y)


class Reshape(nn.Module):
    def forward(self, x):
        return torch.tanh(torch.reshape(x, (2, 3, 4, 5)))


class Keyword(nn.Module):
    def forward(self, x):
        return torch.tanh(torch.reshape(input=x, shape=[2, 3, 4, 5]))


class Starred(nn.Module):
    def forward(self, x):
        shape = (2, -1, 4, 5)
        return x.reshape(*shape).tanh()


class Unflatten(nn.Module):
    def forward(self, x):
        return torch.unflatten(x, -1, (4, 5)).tanh()


class ManyLines(nn.Module):
    def forward(self, x):
        return (
            x.mul(2)
            .view(
                x.shape[0],
                x.shape[1],
                4,  # heads
                5,
            )
            .tanh()
        )


class Nested(nn.Module):
    def forward(self, x):
        return F.softmax(torch.stack([x.view(2, 3, 4, 5).tanh(), x.view(2, 3, -1, 5)]).sum(0), dim=-1)


class Inner(nn.Module):
    def forward(self, x):
        heads = 4

        def split_heads(t):
            return torch.cat([t.view(2, 3, heads, 5) for _ in range(1)]).tanh()

        return split_heads(x)


class Helper(nn.Module):
    def _shape(self, t, heads):
        return t.view(2, 3, heads, 5)

    def forward(self, x):
        return self._shape(x, 4).tanh()


def to_heads(t, heads=4):
    return t.view(2, 3, heads, 5)


def twice_removed(t):
    return to_heads(t)


class Global(nn.Module):
    def forward(self, x):
        return twice_removed(x).tanh()


class Base(nn.Module):
    def forward(self, x):
        return self.__finish(x.view(2, 3, 4, 5))

    def __finish(self, y):  # a private name is spelt out when its class is compiled
        return y.tanh()


class Derived(Base):
    def forward(self, x, *, scale=1):
        return super().forward(x) * scale


class Super(Base):
    def forward(self, x):
        y = x.view(2, 3, 4, 5)
        return super(Super, self).forward(y.flatten(2)) + 0 * y  # noqa: UP008


def decorate(function):
    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        return function(self, *args, **kwargs) * 2

    return wrapper


class Decorated(nn.Module):
    @torch.no_grad()
    @decorate
    def forward(self, x):
        return x.view(2, 3, 4, 5)


TOYS = [
    (View, "view", 2),
    (Reshape, "reshape", 2),
    (Keyword, "reshape", 2),
    (Starred, "reshape", 2),
    (Unflatten, "unflatten", 0),
    (ManyLines, "view", 2),
    (Nested, "view", 2),
    (Inner, "view", 2),
    (Helper, "view", 2),
    (Global, "view", 2),
    (Derived, "view", 2),
    (Decorated, "view", 2),
]


@pytest.mark.parametrize("cls, op, axis", TOYS, ids=[cls.__name__ for cls, _, _ in TOYS])
def test_a_view_to_heads_takes_local_widths(cls, op, axis):
    module, x = cls(), x_full()
    expected = module(x)
    site = site_of(module, op, x)
    assert site.owner is module and op in site.text()
    for rank in range(T):
        local = x[..., columns(rank)]
        with pytest.raises(RuntimeError):
            module(local)
        forward = apply_fixes(module, [heads(site, axis)], rank)
        torch.testing.assert_close(module(local), expected[:, :, rank * LOCAL : (rank + 1) * LOCAL])
        assert forward.__self__ is module and type(module).__name__ == cls.__name__ and isinstance(module, cls)
        remove_fixes(module)
        assert type(module) is cls
    torch.testing.assert_close(module(x), expected)


def test_both_the_class_and_its_base_are_rewritten():
    module, x = Super(), x_full()
    expected = module(x)
    fixes = [heads(site_of(module, "view", x, nth=n)) for n in (0, 1)]
    apply_fixes(module, fixes, 1)
    torch.testing.assert_close(module(x[..., columns(1)]), expected[:, :, LOCAL:])


class Loop(nn.Module):
    def forward(self, q, k, v):
        q, k, v = [t.view(2, 3, n, 5).tanh() for t, n in ((q, 4), (k, 2), (v, 2))]
        return q, k, v


def test_a_loop_whose_calls_write_different_widths():
    module, x = Loop(), x_full()
    args = (x, x[..., :10], x[..., 10:])
    expected = module(*args)
    site = site_of(module, "view", *args)
    fixes = [heads(site, full={2: 4}), site.fix("shape", sizes={2: (1, 1)}, full={2: 2})]
    with pytest.raises(PlanError, match="together"):
        apply_fixes(module, [fixes[0], site.fix("split", sections=((1,), (1,)))], 0)
    # 4 is a multiple of 2 as well: the fix whose number is written is the one that counts
    apply_fixes(module, fixes, 1)
    for got, whole in zip(module(*(t[..., columns(1, t.shape[-1])] for t in args)), expected, strict=True):
        torch.testing.assert_close(got, whole[:, :, whole.shape[2] // 2 :])


class Batched(nn.Module):
    def forward(self, x):
        b, s, _ = x.shape
        y = x.view(b, s, 4, 5).transpose(1, 2).reshape(b * 4, -1, 5)
        return y.view(b, 4, s, 5).transpose(1, 2).reshape(b, s, 20)


def test_a_width_multiplied_with_the_batch_is_scaled():
    module, x = Batched(), x_full()
    sites = {(name, n): site_of(module, name, x, nth=n) for name in ("view", "reshape") for n in (0, 1)}
    fixes = [
        heads(sites["view", 0]),
        sites["reshape", 0].fix("shape", sizes={0: (1, 3)}, full={0: 4}),
        sites["view", 1].fix("shape", sizes={1: (1, 3)}),
        sites["reshape", 1].fix("shape", sizes={2: (5, 15)}),
    ]
    fixes[0] = sites["view", 0].fix("shape", sizes={2: (1, 3)})
    for rank, part in enumerate((slice(0, 5), slice(5, 20))):
        apply_fixes(module, fixes, rank)
        for batch in (1, 2, 5):
            local = torch.randn(batch, 3, 20)[..., part]
            assert torch.equal(module(local), local)
        remove_fixes(module)


class Made(nn.Module):
    """State made at the full width."""

    def forward(self, x):
        y = x.view(2, 3, -1, 5)
        a = torch.zeros(2, 4, dtype=x.dtype)
        b = x.new_ones((2, 4))
        c = torch.ones(size=(2, 4))
        d = torch.full((2, 4), 2.0)
        e = y[:, :1, :1].expand(2, 3, 4, 5)
        return y + (a + b + c + d)[:, None, :, None] + e * 0


def test_tensors_made_at_the_full_width():
    module, x = Made(), x_full()
    expected = module(x)
    axes = {"zeros": 1, "new_ones": 1, "ones": 1, "full": 1, "expand": 2}
    sites = {}
    for name, site, _ in watch(module, x):
        sites.setdefault(name, site)
    apply_fixes(module, [heads(sites[name], axis) for name, axis in axes.items()], 1)
    torch.testing.assert_close(module(x[..., columns(1)]), expected[:, :, LOCAL:])


class NanoGPT(nn.Module):
    """nanoGPT's spelling of attention."""

    def __init__(self):
        super().__init__()
        self.n_head, self.n_embd, self.c_attn = 4, 20, nn.Linear(20, 60)

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        q = q.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        v = v.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).contiguous().view(b, t, c)


def nanogpt(rank):
    """A module with local weights of 1 and 3 heads, its fixes, an input and its slice of the full output."""
    torch.manual_seed(0)
    module, x = NanoGPT(), x_full()
    expected = module(x)
    units = (1, 3)
    fixes = [site_of(module, "split", x).fix("split", sections=((5,) * 3, (15,) * 3))]
    fixes += [site_of(module, "view", x, nth=n).fix("shape", sizes={2: units}) for n in range(3)]
    fixes += [site_of(module, "view", x, nth=3).fix("shape", sizes={2: (5, 15)})]
    part = (slice(0, 5), slice(5, 20))[rank]
    weight = module.c_attn.weight.data.view(3, 20, 20)[:, part]
    module.c_attn.weight = nn.Parameter(weight.flatten(0, 1))
    module.c_attn.bias = nn.Parameter(module.c_attn.bias.data.view(3, 20)[:, part].flatten())
    return module, fixes, x, expected[..., part]


@pytest.mark.parametrize("rank", range(T))
def test_nanogpt_with_uneven_heads(rank):
    module, fixes, x, expected = nanogpt(rank)
    data = json.loads(json.dumps([fix.to_json() for fix in fixes]))
    again = [ShapeFix.from_json(fix) for fix in data]
    assert again == fixes and "/" not in json.dumps([{**d, "text": ""} for d in data])
    apply_fixes(module, again, rank)
    torch.testing.assert_close(module(x), expected)


def test_it_runs_copied_compiled_and_checkpointed():
    module, fixes, x, expected = nanogpt(1)
    apply_fixes(module, fixes, 1)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        module.c_attn.weight.zero_()
    torch.testing.assert_close(twin(x), expected)
    assert "forward" not in twin.__dict__ and twin.forward.__self__ is twin
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    x = x.requires_grad_()
    checkpoint(twin, x, use_reentrant=False).sum().backward()
    grad = x.grad.clone()
    x.grad = None
    twin(x).sum().backward()
    torch.testing.assert_close(x.grad, grad)


class Splits(nn.Module):
    def forward(self, x):
        a, b = x.chunk(2, -1)
        c, d = torch.chunk(x, chunks=2, dim=-1)
        e, f = torch.tensor_split(x, 2, dim=-1)
        g, h = x.split(split_size=10, dim=-1)
        i, j = torch.split(x, [10, 10], -1)
        return a * b + c * d + e * f + g * h + i * j


def test_pieces_of_any_spelling():
    module, x = Splits(), x_full()
    expected = module(x)
    sites = list(dict.fromkeys(s for name, s, _ in watch(module, x) if name in ("chunk", "split", "tensor_split")))
    assert len(sites) == 5
    keep = [[0, 1, 2, 10, 11, 12], [*range(3, 10), *range(13, 20)]]
    fixes = [site.fix("split", sections=((3, 3), (7, 7))) for site in sites]
    for rank in range(T):
        apply_fixes(module, fixes, rank)
        part = slice(0, 3) if rank == 0 else slice(3, 10)
        torch.testing.assert_close(module(x[..., keep[rank]]), expected[..., part])
        remove_fixes(module)


class Rope(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.randn(20)

    def forward(self, x):
        y = x * self.table + self.table
        y += self.table
        y = torch.where(y > self.table, y, torch.add(y, self.table))
        return y.mul(self.table)


def test_an_operand_that_is_full_is_narrowed():
    module, x = Rope(), x_full()
    expected = module(x)
    runs = (((0, 2, 4, 5),), ((2, 2, 4, 5),))  # every other pair
    part = [[i for i in range(20) if i % 4 // 2 == rank] for rank in range(T)]
    sites = list(dict.fromkeys((name, site) for name, site, _ in watch(module, x) if name not in ("__get__", "where")))
    fixes = [site.fix("narrow", operand=site.operand(1), dim=-1, size=20, runs=runs) for _, site in sites]
    assert [fix.operand for fix in fixes] == ["right"] * 4 + ["1", "0"]
    assert len(fixes) == 6
    for rank in range(T):
        apply_fixes(module, fixes, rank)
        torch.testing.assert_close(module(x[..., part[rank]]), expected[..., part[rank]])
        torch.testing.assert_close(module(x[..., part[rank]]), module(x[..., part[rank]]))
        remove_fixes(module)


def test_tracebacks_name_the_line_and_signatures_stay():
    module, x = Derived(), x_full()
    site = site_of(module, "view", x)
    apply_fixes(module, [heads(site)], 0)
    assert str(inspect.signature(module.forward)) == "(x, *, scale=1)"
    with pytest.raises(RuntimeError) as caught:
        module(x)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].filename == __file__ and "x.view(2, 3, 4, 5)" in frames[-1].line
    assert frames[-1].lineno == site.span[0] and module.forward.__func__.__code__.co_qualname == "Derived.forward"
    with Watch() as mode:
        module(x[..., columns(0)])
    assert site in [found for _, found, _ in mode.sites]  # the same name once rewritten


class Region(nn.Module):
    """Stands in front of a module's class, as the rewritten layers do."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) + 1


@pytest.mark.parametrize("first", [True, False])
def test_with_a_layer_in_front(first):
    module, x = Derived(), x_full()
    expected = module(x) + 1
    fixes = [heads(site_of(module, "view", x))]
    if first:
        apply_fixes(module, fixes, 1)
    insert_class(module, Region)
    if first:
        with pytest.raises(PlanError, match="put in front"):
            remove_fixes(module)
    else:
        apply_fixes(module, fixes, 1)
    torch.testing.assert_close(module(x[..., columns(1)]), expected[:, :, LOCAL:])
    if first:
        module.__class__ = plain_class(module)
    remove_fixes(module)
    if not first:
        module.__class__ = plain_class(module)
    assert type(module) is Derived


def test_alike_modules_share_a_class():
    a, b, x = View(), View(), x_full()
    fixes = [heads(site_of(a, "view", x))]
    apply_fixes(a, fixes, 0), apply_fixes(b, fixes, 0)
    assert type(a) is type(b) is not View and a.forward.__self__ is a


def test_a_class_made_in_a_function():
    scale, heads_written = 3, 4

    class Local(nn.Module):
        def forward(self, x):
            return self.finish(x.view(2, 3, heads_written, 5)) * scale

        @staticmethod
        def finish(y):
            return y.expand(2, 3, 4, 5).tanh()

        @property
        def made(self):
            return torch.zeros(heads_written)

    module, x = Local(), x_full()
    expected = module(x)
    with Watch() as mode:
        assert module.made.shape == (4,)
    zeros = next(site for name, site, _ in mode.sites if name == "zeros")
    apply_fixes(module, [heads(site_of(module, "view", x)), heads(site_of(module, "expand", x)), heads(zeros, 0)], 1)
    torch.testing.assert_close(module(x[..., columns(1)]), expected[:, :, LOCAL:])
    assert module.made.shape == (2,)
    scale = 5  # the cells are the class' own
    torch.testing.assert_close(module(x[..., columns(1)]), expected[:, :, LOCAL:] / 3 * 5)


def rearrange(x, pattern, **sizes):
    """As einops: a literal names the heads."""
    return x.unflatten(-1, (sizes["h"], -1)) if pattern == "b s (h d) -> b s h d" else x


class Einops(nn.Module):
    def __init__(self):
        super().__init__()
        self.child = Helper()

    def forward(self, x):
        y = rearrange(x, "b s (h d) -> b s h d", h=4)
        assert y.shape[-1] == 5
        return lend(self.child, x) * y


def lend(module, x):
    return module._shape(x, 4)


def test_an_argument_is_replaced_and_each_site_has_its_owner():
    module, x = Einops(), x_full()
    expected = module(x)
    view = site_of(module, "view", x)
    inner = site_of(module, "unflatten", x)
    assert view.owner is module.child and inner.owner is module
    code = Einops.forward.__code__
    line = code.co_firstlineno + 1
    text = "rearrange(x, 'b s (h d) -> b s h d', h=4)"
    span = (line, line, 12, 12 + len(text))
    fix = ShapeFix(f"{__name__}:Einops.forward", span, "argument", text, sizes={"h": (LOCAL, LOCAL)})
    assert ShapeFix.from_json(json.loads(json.dumps(fix.to_json()))) == fix
    apply_fixes(module, [fix], 1)
    apply_fixes(module.child, [heads(view)], 1)
    torch.testing.assert_close(module(x[..., columns(1)]), expected[:, :, LOCAL:])


TABLE = {"plain": to_heads}


class Tabled(nn.Module):
    def forward(self, x):
        return TABLE["plain"](x)


def test_what_can_not_be_rewritten_is_refused():
    x = x_full()
    module = Tabled()
    with pytest.raises(PlanError, match="no plain Python function leads to it"):
        apply_fixes(module, [heads(site_of(module, "view", x))], 0)
    module = View()
    fix = heads(site_of(module, "view", x))
    with pytest.raises(PlanError, match="source differs"):
        apply_fixes(module, [ShapeFix(**{**vars(fix), "text": "x.view(1)"})], 0)
    with pytest.raises(PlanError, match="not written in a form"):
        apply_fixes(module, [ShapeFix(**{**vars(fix), "kind": "narrow", "operand": "4", "runs": ((), ())})], 0)
    assert type(module) is View
    apply_fixes(module, [fix], 0)
    with pytest.raises(PlanError, match="replaced already"):
        apply_fixes(module, [fix], 0)
    assert find_call_site() is not None  # this very line
    inner = nn.Sequential(nn.Unflatten(-1, (4, 5)))
    assert all("inner" not in site.text() for _, site, _ in watch(inner, x))


def trocr():
    from transformers.models.trocr.configuration_trocr import TrOCRConfig
    from transformers.models.trocr.modeling_trocr import TrOCRAttention

    config = TrOCRConfig(d_model=20, decoder_attention_heads=4, decoder_layers=1)
    return TrOCRAttention(config, embed_dim=20, num_heads=4, is_decoder=True)


def prophetnet():
    from transformers.models.prophetnet.configuration_prophetnet import ProphetNetConfig
    from transformers.models.prophetnet.modeling_prophetnet import ProphetNetAttention

    return ProphetNetAttention(ProphetNetConfig(hidden_size=20, num_encoder_attention_heads=4, attention_dropout=0.0), 4)


def cut_attention(module, rank):
    """Column slices of q, k, v and a row slice of out_proj, its bias on rank 0 only, so that partial outputs add up."""
    local = copy.deepcopy(module)
    part = (slice(0, 5), slice(5, 20))[rank]
    for name, child in local.named_children():
        if isinstance(child, nn.Linear) and name != "out_proj":
            child.weight = nn.Parameter(child.weight.data[part])
            child.bias = nn.Parameter(child.bias.data[part])
        elif isinstance(child, nn.Linear):
            child.weight = nn.Parameter(child.weight.data[:, part])
            child.bias = nn.Parameter(child.bias.data * (rank == 0))
    return local


def fixes_by_record(module, x, units):
    """What discovery does, in short: the calls that write the width; the heads are an attribute, read by a check as well."""
    fixes = {}
    with Watch() as mode:
        module(x)
    for name, site, args in mode.sites:
        if name in ("view", "reshape") and 20 in args[1:]:
            axis = args[1:].index(20)
            fixes[site.span] = site.fix("shape", sizes={axis: tuple(5 * u for u in units)}, full={axis: 20})
    return list(fixes.values())


@pytest.mark.parametrize("make", [trocr, prophetnet])
def test_attention_of_transformers(make):
    torch.manual_seed(0)
    module = make().eval()
    x = torch.randn(3, 7, 20)
    expected = module(x)[0]
    fixes = fixes_by_record(module, x, (1, 3))
    total, heads_name = 0, "num_heads" if hasattr(module, "num_heads") else "num_attn_heads"
    assert len(fixes) == 1
    for rank in range(T):
        local = cut_attention(module, rank)
        setattr(local, heads_name, (1, 3)[rank])
        with pytest.raises(RuntimeError):
            local(x)
        apply_fixes(local, fixes, rank)
        total = total + local(x)[0]
    torch.testing.assert_close(total, expected)


def test_functions_are_looked_for_near_a_class_alone():
    """What the library's wrappers call is much to read, and none of it computes with what the model does."""
    for cls in (LlamaForCausalLM, LlamaAttention):
        found = {each.function.__module__ for each in find_functions(cls)}
        assert LlamaForCausalLM.__module__ in found and found <= {base.__module__ for base in cls.__mro__}
    names = {each.function.__name__ for each in find_functions(LlamaAttention)}
    assert {"forward", "apply_rotary_pos_emb", "rotate_half"} <= names
