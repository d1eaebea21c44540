"""LayerNormLinear against plain PyTorch's norm then linear, in float64, whole and dealt; every option of its table."""

import copy
import inspect
import itertools
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autotp
from autotp import LayerNormLinear, LinearLayer
from autotp.errors import AutoTPError, PlanError
from autotp.groups import resolve_group
from autotp.kernels import blocks
from autotp.layers import norm_product, norm_wgrad
from autotp.layers.linear import prepare
from autotp.layers.siblings import SiblingInput
from autotp.shard import Shard
from tests.layers.test_siblings import Reductions

WIDTH, OUT, EPS = 6, 8, 1e-3
NORMS = [(norm, zero) for norm in ("LayerNorm", "RMSNorm") for zero in (False, True)]
SPLITS = [None, ("query_", "key"), {"query": 5, "key_": 1, "value": 2}]


def plain_norm(x, gamma, beta, norm, zero):
    gamma = gamma + 1 if zero else gamma
    if norm == "LayerNorm":
        return F.layer_norm(x, x.shape[-1:], gamma, beta, EPS)
    return F.rms_norm(x, x.shape[-1:], gamma, EPS)


class Plain(nn.Module):
    """The whole layer, of torch's own operations; parameter names are LayerNormLinear's."""

    def __init__(self, norm="LayerNorm", zero=False, split=None, bias=True, dtype=torch.float64, seed=0):
        super().__init__()
        self.norm, self.zero = norm, zero
        if split is None:
            parts = {"": OUT}
        else:
            parts = {n.rstrip("_"): split[n] if isinstance(split, dict) else OUT // len(split) for n in split}
        self.weight_names = [f"{part}_weight" if part else "weight" for part in parts]
        self.bias_names = [f"{part}_bias" if part else "bias" for part in parts] if bias else []
        shapes = {"layer_norm_weight": (WIDTH,)} | ({"layer_norm_bias": (WIDTH,)} if norm == "LayerNorm" else {})
        shapes |= {name: (n, WIDTH) for name, n in zip(self.weight_names, parts.values(), strict=True)}
        shapes |= {name: (n,) for name, n in zip(self.bias_names, parts.values(), strict=False)}
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            self.register_parameter(name, nn.Parameter(value + (name == "layer_norm_weight")))

    def forward(self, x):
        h = plain_norm(x, self.layer_norm_weight, self._parameters.get("layer_norm_bias"), self.norm, self.zero)
        weight = torch.cat([self._parameters[name] for name in self.weight_names])
        bias = torch.cat([self._parameters[name] for name in self.bias_names]) if self.bias_names else None
        return F.linear(h, weight, bias), h


def build(plain, split=None, **options):
    """A LayerNormLinear with `plain`'s values, which it takes whole; the saved ones load back, strictly."""
    dtype = plain.layer_norm_weight.dtype
    options = dict(eps=EPS, normalization=plain.norm, zero_centered_gamma=plain.zero, params_dtype=dtype) | options
    layer = LayerNormLinear(WIDTH, OUT, bias=bool(plain.bias_names), parameters_split=split, **options)
    layer.load_state_dict(plain.state_dict())
    return layer


def rows(*shape, seed=1, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def as_input(kind):
    x = rows(3, 4, WIDTH)
    return {
        "3-D": x,
        "2-D": x[0],
        "1-D": x[0, 0],
        "transposed": x.transpose(0, 1),
        "columns of more": rows(5, 2 * WIDTH)[:, ::2],
        "expanded": x[:1].expand(3, 4, WIDTH),
        "no rows": x[:0],
        "no columns of rows": x[:, :0],
    }[kind]


def compare_gradients(outputs, expected, cotangents, inputs, references):
    """Gradients of every input and parameter, those of `inputs` beside those of `references`."""
    got = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
    want = torch.autograd.grad(expected, references, cotangents, allow_unused=True)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)


# -- one rank -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", ["3-D", "2-D", "1-D", "transposed", "columns of more", "expanded", "no rows", "no columns of rows"]
)
@pytest.mark.parametrize("norm, zero", NORMS)
def test_values_and_gradients(norm, zero, shape):
    for split, bias in itertools.product(SPLITS, (True, False)):
        plain = Plain(norm, zero, split, bias)
        layer = build(plain, split, return_layernorm_output=True)
        x, whole = as_input(shape).requires_grad_(), as_input(shape).requires_grad_()
        got, want = layer(x), plain(whole)
        torch.testing.assert_close(got, want)
        assert [name for name, _ in layer.named_parameters()] == [name for name, _ in plain.named_parameters()]
        parameters, references = list(layer.parameters()), list(plain.parameters())
        cotangents = [rows(*y.shape, seed=2 + i) for i, y in enumerate(want)]
        compare_gradients(got, want, cotangents, [x, *parameters], [whole, *references])
        got, want = layer(x), plain(whole)
        compare_gradients(got[0].sum(), want[0].sum(), None, [x, *parameters], [whole, *references])  # an expanded gradient
        got, want = layer(x), plain(whole)
        compare_gradients(got[1], want[1], cotangents[1:], [x, *parameters], [whole, *references])  # y is not used


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("give", [False, True])
def test_each_combination_of_frozen_parts(norm, give):
    plain = Plain(norm, split=("q", "k"))
    layer = build(plain, ("q", "k"), return_layernorm_output=give)
    names = [name for name, _ in plain.named_parameters()]
    for trained in itertools.product([True, False], repeat=len(names) + 1):
        x, whole = rows(5, WIDTH).requires_grad_(trained[0]), rows(5, WIDTH).requires_grad_(trained[0])
        for name, wanted in zip(names, trained[1:], strict=True):
            for module in (layer, plain):
                module.get_parameter(name).requires_grad_(wanted)
                module.get_parameter(name).grad = None
        got, want = layer(x), plain(whole)
        got, want = (got, want) if give else ((got,), want[:1])
        assert got[0].requires_grad == any(trained)
        if not any(trained):
            continue
        loss = [sum((y * rows(*y.shape, seed=i)).sum() for i, y in enumerate(ys) if y.requires_grad) for ys in (got, want)]
        for each in loss:
            each.backward()
        tensors = [(x, whole), *((layer.get_parameter(name), plain.get_parameter(name)) for name in names)]
        for (mine, theirs), wanted in zip(tensors, trained, strict=True):
            assert (mine.grad is not None) == wanted
            torch.testing.assert_close(mine.grad, theirs.grad)


def kept_bytes(module, x):
    """Bytes of distinct storages, parameters aside, that autograd keeps of a forward."""
    own, kept = {p.untyped_storage().data_ptr() for p in module.parameters()}, {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(x)  # alive until all are counted, so that no address is used twice
    del y
    return sum(n_bytes for address, n_bytes in kept.items() if address not in own)


def test_the_norm_output_is_not_kept():
    plain = Plain(dtype=torch.float32)
    layer, x = build(plain), rows(64, WIDTH, dtype=torch.float32).requires_grad_()
    row_bytes = 64 * 4
    assert kept_bytes(layer, x) == WIDTH * row_bytes + 2 * row_bytes  # x, the mean and 1/rms
    assert kept_bytes(plain, x) >= 2 * WIDTH * row_bytes  # x, and the norm's output as well
    layer.weight.requires_grad_(False)
    layer.layer_norm_weight.requires_grad_(False)
    assert kept_bytes(layer, x.detach()) == 0  # the biases' gradients need no rows


def test_writing_to_what_is_returned_or_kept():
    plain = Plain()
    layer, x, whole = build(plain, return_layernorm_output=True), rows(4, WIDTH).requires_grad_(), rows(4, WIDTH).requires_grad_()
    y, h = layer(x)
    h.data.add_(1)  # computed again in backward, so what became of it does no harm
    y.sum().backward()
    plain(whole)[0].sum().backward()
    torch.testing.assert_close(x.grad, whole.grad)
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad)
    y = layer(x)[0]
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_is_returned_may_be_changed_in_place():
    for options in (dict(), dict(return_bias=True), dict(parameters_split=("q", "k"))):
        layer = LayerNormLinear(WIDTH, OUT, return_layernorm_output=True, params_dtype=torch.float64, **options)
        x, whole = rows(3, 4, WIDTH).requires_grad_(), rows(3, 4, WIDTH).requires_grad_()
        y, *_, h = layer(x)
        y.mul_(2)
        h.mul_(3)
        (y.square().sum() + h.square().sum()).backward()
        y, *_, h = layer(whole)
        ((2 * y).square().sum() + (3 * h).square().sum()).backward()
        torch.testing.assert_close(x.grad, whole.grad)


def test_second_derivatives_are_refused():
    layer, x = build(Plain()), rows(4, WIDTH).requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("norm, zero", NORMS)
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16])
def test_autocast(norm, zero, input_dtype):
    exact, plain = Plain(norm, zero), Plain(norm, zero, dtype=torch.float32)
    layer = build(plain, return_layernorm_output=True)
    x, whole = (rows(64, WIDTH, dtype=input_dtype).requires_grad_() for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (y, h), (want, _) = layer(x), plain(whole)
    assert y.dtype is want.dtype is torch.bfloat16 and h.dtype is input_dtype
    known = whole.detach().double().requires_grad_()
    true = exact(known)[0]
    assert (y.double() - true).abs().max() <= 2 * (want.double() - true).abs().max()
    for each in (y, want, true):
        each.backward(rows(*y.shape, dtype=torch.bfloat16).to(each.dtype))
    pairs = [(x, whole, known)]
    pairs += [(layer.get_parameter(n), plain.get_parameter(n), exact.get_parameter(n)) for n, _ in plain.named_parameters()]
    for mine, theirs, best in pairs:
        assert mine.grad.dtype is theirs.grad.dtype
        error = (theirs.grad.double() - best.grad).abs().max()
        assert (mine.grad.double() - best.grad).abs().max() <= 2 * error + 1e-3 * best.grad.abs().max()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert build(exact)(rows(4, WIDTH)).dtype is torch.float64  # as autocast leaves it


@pytest.mark.parametrize("norm, zero", NORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(norm, zero, dtype):
    plain = Plain(norm, zero, dtype=dtype)
    exact = copy.deepcopy(plain).double()
    layer, x = build(plain, return_layernorm_output=True), rows(128, WIDTH, dtype=dtype).requires_grad_()
    theirs, best = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    outputs = [layer(x), plain(theirs), exact(best)]
    for each in outputs:
        torch.autograd.backward(each, [rows(*y.shape, seed=i, dtype=dtype).to(y.dtype) for i, y in enumerate(each)])
    pairs = [*zip(*outputs, strict=True), (x.grad, theirs.grad, best.grad)]
    pairs += [tuple(m.get_parameter(n).grad for m in (layer, plain, exact)) for n, _ in plain.named_parameters()]
    for mine, their, true in pairs:
        assert mine.dtype is their.dtype is dtype
        error = (their.double() - true).abs().max()
        assert (mine.double() - true).abs().max() <= 2 * error


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("main", [False, True])
@pytest.mark.parametrize("delay", [False, True])
def test_activation_checkpointing(reentrant, delay, main):
    plain = Plain(split=("q", "k"))
    options = dict(delay_wgrad_compute=delay, fuse_wgrad_accumulation=main, return_layernorm_output=True)
    layer = build(plain, ("q", "k"), **options)
    for name in layer.weight_names if main else ():
        layer.get_parameter(name).main_grad = torch.zeros(OUT // 2, WIDTH, dtype=torch.float64)
    x, whole = rows(3, 4, WIDTH).requires_grad_(), rows(3, 4, WIDTH).requires_grad_()
    got, want = checkpoint(layer, x, use_reentrant=reentrant), plain(whole)
    for pair in (got, want):
        (pair[0].square().sum() + pair[1].square().sum()).backward()
    layer.backward_dw()
    assert not layer.pending
    torch.testing.assert_close(x.grad, whole.grad)
    for name, parameter in plain.named_parameters():
        mine = layer.get_parameter(name)
        torch.testing.assert_close(mine.main_grad if main and name in layer.weight_names else mine.grad, parameter.grad)


def test_main_gradients_wider_than_the_weights():
    plain, x = Plain(dtype=torch.bfloat16), rows(64, WIDTH, dtype=torch.bfloat16)
    layer, exact = build(plain, fuse_wgrad_accumulation=True), copy.deepcopy(plain).double()
    layer.weight.main_grad = torch.zeros(OUT, WIDTH)
    for _ in range(4):
        layer(x).sum().backward()
        exact(x.double())[0].sum().backward()
        plain(x)[0].sum().backward()
    error = (plain.weight.grad.double() - exact.weight.grad).abs().max()
    assert (layer.weight.main_grad - exact.weight.grad).abs().max() <= 2 * error and not layer.weight.grad.any()


@pytest.mark.parametrize("norm, zero", NORMS)
def test_compiled_into_one_graph(norm, zero):
    plain = Plain(norm, zero, ("q", "k"))
    layer = build(plain, ("q", "k"), return_layernorm_output=True)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, whole = rows(3, 4, WIDTH).requires_grad_(), rows(3, 4, WIDTH).requires_grad_()
    got, want = compiled(x), plain(whole)
    torch.testing.assert_close(got, want)
    cotangents = [rows(*y.shape, seed=2) for y in want]
    compare_gradients(got, want, cotangents, [x, *layer.parameters()], [whole, *plain.parameters()])


def test_compiled_with_main_gradients_it_stays_out_of_the_graph():
    plain = Plain()
    layer = build(plain, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(OUT, WIDTH, dtype=torch.float64)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: layer(x * 2) * 3, backend="aot_eager")
    x, whole = rows(4, WIDTH).requires_grad_(), rows(4, WIDTH).requires_grad_()
    compiled(x).sum().backward()
    (plain(whole * 2)[0] * 3).sum().backward()
    torch.testing.assert_close(x.grad, whole.grad)
    torch.testing.assert_close(layer.weight.main_grad, plain.weight.grad)


# -- options ------------------------------------------------------------------------------------------------------------


def test_return_bias():
    for split in SPLITS:
        plain = Plain(split=split)
        layer, x, whole = build(plain, split, return_bias=True), rows(4, WIDTH).requires_grad_(), rows(4, WIDTH).requires_grad_()
        y, bias = layer(x)
        want = plain(whole)[0]
        torch.testing.assert_close(y + bias, want)
        cotangent = rows(*want.shape)
        compare_gradients(y + bias, want, cotangent, [x, *layer.parameters()], [whole, *plain.parameters()])
        y, bias, h = build(plain, split, return_bias=True, return_layernorm_output=True)(x)
        torch.testing.assert_close((y + bias, h), plain(x))
    y, bias = build(Plain(bias=False), return_bias=True)(x)
    assert bias is None and y.shape == (4, OUT)


def test_arguments_that_do_not_fit_are_refused():
    for options, message in [
        (dict(normalization="GroupNorm"), "normalization is one of"),
        (dict(parallel_mode="diagonal"), "parallel_mode one of"),
        (dict(parameters_split=()), "parameters_split"),
        (dict(parameters_split=("q", "q_")), "all different"),
        (dict(parameters_split=("a", "b", "c")), "add up to 8"),
        (dict(parameters_split={"a": 3, "b": 4}), "add up to 8"),
        (dict(parameters_split={"a": 3, "_": 5}), "must give names"),
        (dict(tp_size=2, parallel_mode="column"), "without tp_group"),
        (dict(tp_size=3, parallel_mode="column", device="meta"), "dealt unevenly"),
    ]:
        with pytest.raises(PlanError, match=message):
            LayerNormLinear(WIDTH, OUT, **options)
    layer = LayerNormLinear(WIDTH, OUT, name="block.0.qkv")
    with pytest.raises(AutoTPError, match=r"block.0.qkv takes \[..., 6\], and was given \[2, 5\]"):
        layer(torch.zeros(2, 5))
    with pytest.raises(AutoTPError, match=r"torch.float32 weights, and was given torch.float16"):
        layer(torch.zeros(2, WIDTH, dtype=torch.float16))


def test_meta_draws_nothing_until_it_is_asked_to():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    layer = LayerNormLinear(WIDTH, OUT, device="meta", parameters_split=("q", "k"))
    with torch.device("meta"):
        other = LayerNormLinear(WIDTH, OUT)
    assert all(p.is_meta for p in [*layer.parameters(), *other.parameters()]) and torch.equal(torch.get_rng_state(), state)
    layer.to_empty(device="cpu").reset_parameters()
    torch.manual_seed(3)
    again = LayerNormLinear(WIDTH, OUT, parameters_split=("q", "k"))
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), again.parameters(), strict=True))
    loaded = LayerNormLinear(WIDTH, OUT, device="meta", parameters_split=("q", "k"))
    loaded.load_state_dict(again.state_dict(), assign=True)
    x = rows(3, WIDTH, dtype=torch.float32)
    torch.testing.assert_close(loaded(x), again(x))  # as one product or two


def test_initial_values():
    torch.manual_seed(0)
    layer = LayerNormLinear(64, 512, zero_centered_gamma=True, params_dtype=torch.float64)
    assert not layer.layer_norm_weight.any() and not layer.layer_norm_bias.any() and not layer.bias.any()
    assert abs(layer.weight.std().item() - 0.023) < 0.001 and layer.weight.dtype is torch.float64
    assert LayerNormLinear(WIDTH, OUT).layer_norm_weight.eq(1).all()
    seen = []
    layer = LayerNormLinear(WIDTH, OUT, parameters_split={"a": 3, "b": 5}, init_method=lambda w: seen.append(w.fill_(7).shape))
    assert seen == [(3, WIDTH), (5, WIDTH)] and layer.a_weight.eq(7).all() and layer.b_weight.eq(7).all()


class Tracker:
    """A random stream of its own, entered by `fork`, as Megatron's."""

    def __init__(self, seed):
        self.state = torch.Generator().manual_seed(seed).get_state()

    def fork(self):
        return self

    def __enter__(self):
        self.outside = torch.get_rng_state()
        torch.set_rng_state(self.state)

    def __exit__(self, *error):
        self.state = torch.get_rng_state()
        torch.set_rng_state(self.outside)


def test_initial_weights_from_a_tracked_stream():
    before = torch.get_rng_state()
    first, second = (LayerNormLinear(WIDTH, OUT, get_rng_state_tracker=lambda t=t: t) for t in [Tracker(5)] * 2)
    assert torch.equal(torch.get_rng_state(), before) and not torch.equal(first.weight, second.weight)
    torch.manual_seed(5)
    assert torch.equal(first.weight, LayerNormLinear(WIDTH, OUT).weight)
    torch.set_rng_state(before)


def test_state_dict_keys_and_strict_loads():
    assert list(LayerNormLinear(WIDTH, OUT).state_dict()) == ["layer_norm_weight", "layer_norm_bias", "weight", "bias"]
    layer = LayerNormLinear(WIDTH, OUT, normalization="RMSNorm", bias=False, parameters_split=("q_", "k_"))
    assert list(layer.state_dict(prefix="a.")) == ["a.layer_norm_weight", "a.q_weight", "a.k_weight"]
    for extra in (torch.empty(0, dtype=torch.uint8), None):
        layer.load_state_dict({**layer.state_dict(), "_extra_state": extra})
    with pytest.warns(UserWarning, match="8-bit scaling state"):
        layer.load_state_dict({**layer.state_dict(), "_extra_state": torch.ones(4, dtype=torch.uint8)})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        layer.load_state_dict({**layer.state_dict(), "bias": torch.zeros(OUT)})
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({"layer_norm_weight": torch.ones(WIDTH)})


# -- parts as one product -----------------------------------------------------------------------------------------------


class Products:
    """How many products of each kind run inside the `with`: `[forward, dgrad, wgrad]`."""

    def __enter__(self):
        self.counts, self.real = [0, 0, 0], {}
        for i, (home, name) in enumerate([(norm_product, "linear"), (blocks, "dgrad"), (norm_wgrad, "wgrad")]):
            self.real[name] = home, getattr(home, name)
            setattr(home, name, lambda *args, i=i, name=name: self.count(i, name, args))
        return self

    def count(self, i, name, args):
        self.counts[i] += 1
        return self.real[name][1](*args)

    def __exit__(self, *error):
        for name, (home, function) in self.real.items():
            setattr(home, name, function)


def count_products(layer, plain, x):
    """Products of a step whose numbers are right."""
    for module in (layer, plain):
        module.zero_grad()
    with Products() as ran:
        y = layer(x)
        y.square().sum().backward()
    want = plain(x)[0]
    want.square().sum().backward()
    torch.testing.assert_close(y, want)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(layer.get_parameter(name).grad, parameter.grad)
    return ran.counts


def test_parts_are_one_product_while_they_lie_side_by_side():
    split = {"query": 4, "key": 2, "value": 2}
    for bias in (True, False):
        plain, x = Plain(split=split, bias=bias), rows(5, WIDTH)
        layer = build(plain, split)
        assert count_products(layer, plain, x) == [1, 1, 1]
        for name in layer.weight_names:  # separate tensors to whoever saves them
            weight = layer.get_parameter(name)
            assert weight.untyped_storage().nbytes() == weight.numel() * 8 and weight.is_contiguous()
        twin = copy.deepcopy(layer)
        assert count_products(twin, plain, x) == [1, 1, 1]
        with torch.no_grad():
            twin.key_weight.add_(1)
        assert torch.equal(layer.key_weight, plain.key_weight)
        layer.float().double()
        layer.load_state_dict(plain.state_dict())
        assert count_products(layer, plain, x) == [1, 1, 1]
        layer.key_weight.requires_grad_(False)
        plain.key_weight.requires_grad_(False)
        assert count_products(layer, plain, x) == [1, 1, 2]  # of what is trained
        layer.key_weight.requires_grad_()
        plain.key_weight.requires_grad_()
        layer.key_weight.data = layer.key_weight.data.clone()
        assert count_products(layer, plain, x) == [3, 3, 1]
        layer = build(plain, split)
        layer.load_state_dict(plain.state_dict(), assign=True)
        assert count_products(layer, plain, x) == [3, 3, 1]


def check_shared_memory(group):
    """What parallelize laid side by side is read where it lies."""
    tp, members = resolve_group(group), SiblingInput(resolve_group(group), 2)
    wholes = [nn.Linear(8, 8, dtype=torch.float64, bias=i == 0) for i in range(2)]
    for whole in wholes:
        nn.init.constant_(whole.weight, 0.5)
    linears = [LinearLayer(copy.deepcopy(whole), group) for whole in wholes]
    for linear in linears:
        linear.siblings = members
        members.add(linear)
    members.lay()
    norm, x = nn.LayerNorm(8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    layer = LayerNormLinear.from_modules(norm, linears)
    with Products() as ran:
        y = layer(x)
        y.square().sum().backward()
    assert ran.counts == [1, 1, 1]
    own = [linear.shards["weight"].cuts[0].indices(tp.tp_rank) for linear in linears]
    want = [whole(norm(x))[:, columns] for whole, columns in zip(wholes, own, strict=True)]
    torch.testing.assert_close(y, torch.cat(want, -1))
    linears[1].weight.data = linears[1].weight.data.clone()
    with Products() as ran:
        torch.testing.assert_close(layer(x), y)
    assert ran.counts == [2, 0, 0]


def test_from_modules_reads_what_parallelize_laid_side_by_side(ranks):
    ranks.run(check_shared_memory)


# -- where weight gradients go ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("main", [False, True])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_micro_batches(main, delay, split):
    """Three micro-batches, the last two pending together; a frozen part; gradients are added to what is there."""
    plain = Plain(split=split)
    layer = build(plain, split, fuse_wgrad_accumulation=main, delay_wgrad_compute=delay)
    ran = []
    weights = [(layer.get_parameter(n), plain.get_parameter(n)) for n in layer.weight_names]
    if split:
        for each in weights[0]:
            each.requires_grad_(False)
    for weight, _ in weights:
        if weight.requires_grad and main:
            weight.main_grad = torch.ones(weight.shape, dtype=torch.float64)
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(lambda _: ran.append(1))
    for step in range(3):
        for module in (layer, plain):
            y = module(rows(4, WIDTH, seed=step))
            (y if module is layer else y[0]).square().sum().backward()
        if delay and step == 0:
            layer.backward_dw()
    for _ in range(2 if delay else 0):
        layer.backward_dw()
    for mine, theirs in weights:
        if not theirs.requires_grad:
            assert mine.grad is None and not hasattr(mine, "main_grad")
        elif main:
            torch.testing.assert_close(mine.main_grad, theirs.grad + 1)
            assert mine.grad_added_to_main_grad and not mine.grad.any()
        else:
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert len(ran) == 3 * sum(theirs.requires_grad for _, theirs in weights)  # once its gradient is there, not before
    for name in ("layer_norm_weight", "layer_norm_bias", *plain.bias_names):
        torch.testing.assert_close(layer.get_parameter(name).grad, plain.get_parameter(name).grad)
    if delay:
        with pytest.raises(AutoTPError, match="no weight gradient is pending"):
            layer.backward_dw()


def test_main_gradients_are_overwritten_where_the_weight_says_so():
    plain, x = Plain(), rows(4, WIDTH)
    layer = build(plain, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.full((OUT, WIDTH), float("nan"), dtype=torch.float64)
    layer.weight.overwrite_main_grad = True
    for _ in range(2):
        layer(x).sum().backward()
    plain(x)[0].sum().backward()
    torch.testing.assert_close(layer.weight.main_grad, plain.weight.grad)


def test_a_missing_main_gradient_is_named():
    layer = LayerNormLinear(WIDTH, OUT, fuse_wgrad_accumulation=True, parameters_split=("q", "k"), name="qkv")
    layer.q_weight.main_grad = torch.zeros(4, WIDTH)
    with pytest.raises(AutoTPError, match=r"qkv.k_weight.*main_grad"):
        layer(torch.ones(2, WIDTH)).sum().backward()
    assert not layer.q_weight.main_grad.any()  # looked for before anything is added
    layer.k_weight.requires_grad_(False)
    layer(torch.ones(2, WIDTH)).sum().backward()  # a frozen weight needs none


def test_backward_dw_has_nothing_to_do_where_nothing_is_delayed_or_trained():
    LayerNormLinear(WIDTH, OUT).backward_dw()
    layer = LayerNormLinear(WIDTH, OUT, delay_wgrad_compute=True)
    layer.weight.requires_grad_(False)
    layer(torch.ones(2, WIDTH)).sum().backward()
    layer.backward_dw()
    assert not layer.pending


def test_a_copy_computes_its_own_pending_gradients():
    layer = build(Plain(), delay_wgrad_compute=True)
    layer(rows(4, WIDTH) * 1).sum().backward()
    twin = copy.deepcopy(layer)
    for each in (layer, twin):
        each.backward_dw()
    assert torch.equal(twin.weight.grad, layer.weight.grad) and twin.weight.grad is not layer.weight.grad
    assert twin.layer_norm_weight is not layer.layer_norm_weight and not layer.pending and not twin.pending


# -- several ranks ------------------------------------------------------------------------------------------------------


def places(tp, mode, dealt, layer):
    """Which rows and columns of x and of y this rank has: `(x rows, x columns, y rows, y columns)`."""
    share = slice(tp.tp_rank * 6 // tp.tp_size, (tp.tp_rank + 1) * 6 // tp.tp_size) if dealt else slice(None)
    every = slice(None)
    if mode is None:
        return share, every, share, every
    if mode == "row":
        return every, layer.shards["layer_norm_weight"].cuts[0].indices(tp.tp_rank), share, every
    starts = itertools.accumulate([0, *(layer.shards[name].shape[0] for name in layer.weight_names)])
    columns = [layer.shards[n].cuts[0].indices(tp.tp_rank) + s for n, s in zip(layer.weight_names, starts, strict=False)]
    return share, every, every, torch.cat(columns)


def check_dealt(group, norm, zero, split, mode, dealt, delay):
    tp, plain = resolve_group(group), Plain(norm, zero, split)
    options = dict(tp_group=group, parallel_mode=mode, sequence_parallel=dealt, return_layernorm_output=True)
    layer = build(plain, split, **options, delay_wgrad_compute=delay, fuse_wgrad_accumulation=delay)
    for name in layer.weight_names if delay else ():
        layer.get_parameter(name).main_grad = torch.ones(layer.get_parameter(name).shape, dtype=torch.float64)
    full = rows(6, 2, WIDTH).requires_grad_()
    x_rows, x_columns, y_rows, y_columns = places(tp, mode, dealt, layer)
    x = full.detach()[x_rows][..., x_columns].requires_grad_()
    for step in range(2):
        (y, h), (want_y, want_h) = layer(x), plain(full)
        torch.testing.assert_close(y, want_y[y_rows][..., y_columns])
        torch.testing.assert_close(h, want_h[x_rows][..., x_columns])
        dy, dh = rows(*want_y.shape, seed=3 + step), rows(*want_h.shape, seed=5 + step)
        torch.autograd.backward([want_y, want_h], [dy, dh])
        torch.autograd.backward([y, h], [dy[y_rows][..., y_columns], dh[x_rows][..., x_columns]])
    for _ in range(2 if delay else 0):
        layer.backward_dw()
    torch.testing.assert_close(x.grad, full.grad[x_rows][..., x_columns])
    for name, parameter in plain.named_parameters():
        mine = layer.get_parameter(name)
        grad = mine.main_grad - 1 if hasattr(mine, "main_grad") else mine.grad
        expected = layer.shards[name].split(parameter.grad, tp.tp_rank) if name in layer.shards else parameter.grad
        torch.testing.assert_close(grad, expected, msg=f"{name}: {grad} for {expected}")
    assert f"tp={tp.tp_rank}/{tp.tp_size}" in repr(layer) and layer.weight_names[0] in layer.state_dict()


def check_all_dealt(group, norm, zero, split):
    for mode, dealt, delay in itertools.product([None, "column", "row"], [False, True], [False, True]):
        check_dealt(group, norm, zero, split, mode, dealt, delay)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("norm, zero", NORMS)
def test_dealt_to_ranks(ranks, norm, zero, split, size):
    """Uneven shards where 8 or fewer outputs meet 3 ranks; a part of one output leaves ranks with none of it."""
    ranks.run(check_all_dealt, norm, zero, split, size=size)


def check_gathered_output(group):
    """Each rank uses all rows of the norm output in its own way, so what each sends back is a part of its gradient."""
    tp = resolve_group(group)
    for bias, split in itertools.product((True, False), SPLITS):
        plain = Plain(split=split, bias=bias)
        options = dict(return_layernorm_output=True, return_layernorm_output_gathered=True, tp_group=group)
        layer = build(plain, split, parallel_mode="column", sequence_parallel=True, **options)
        full = rows(6, 2, WIDTH).requires_grad_()
        own, _, _, columns = places(tp, "column", True, layer)
        x = full.detach()[own].requires_grad_()
        (y, h), (want_y, want_h) = layer(x), plain(full)
        torch.testing.assert_close((y, h), (want_y[..., columns], want_h))
        parts = [rows(*want_h.shape, seed=10 + rank) for rank in range(tp.tp_size)]
        dy = rows(*want_y.shape, seed=3)
        with Reductions() as seen:
            torch.autograd.backward([y, h], [dy[..., columns], parts[tp.tp_rank]])
        assert seen.shapes == [(WIDTH,)] * 2  # gamma's and beta's
        torch.autograd.backward([want_y, want_h], [dy, sum(parts)])
        torch.testing.assert_close(x.grad, full.grad[own])
        for name, parameter in plain.named_parameters():
            expected = layer.shards[name].split(parameter.grad, tp.tp_rank) if name in layer.shards else parameter.grad
            torch.testing.assert_close(layer.get_parameter(name).grad, expected)
        x.grad = None
        layer(x)[1].backward(parts[tp.tp_rank])  # y is not used
        full.grad = None
        plain(full)[1].backward(sum(parts))
        torch.testing.assert_close(x.grad, full.grad[own])
        plainly = build(plain, split, parallel_mode="column", **options)  # rows are not dealt: nothing to gather
        torch.testing.assert_close(plainly(full)[1], want_h)
        assert not build(plain, split, return_layernorm_output_gathered=True).return_layernorm_output_gathered


def test_the_gathered_norm_output_has_its_gradient(ranks):
    ranks.run(check_gathered_output, size=2)
    ranks.run(check_gathered_output, size=3)


def check_returned_bias(group):
    tp = resolve_group(group)
    for mode, dealt in itertools.product([None, "column", "row"], [False, True]):
        plain = Plain()
        layer = build(plain, return_bias=True, tp_group=group, parallel_mode=mode, sequence_parallel=dealt)
        full = rows(6, 2, WIDTH)
        x_rows, x_columns, y_rows, y_columns = places(tp, mode, dealt, layer)
        y, bias = layer(full[x_rows][..., x_columns])
        want, _ = plain(full)
        torch.testing.assert_close(y + bias, want[y_rows][..., y_columns])
        dy = rows(*want.shape, seed=3)
        (y + bias).backward(dy[y_rows][..., y_columns])
        want.backward(dy)
        for name, parameter in plain.named_parameters():
            expected = layer.shards[name].split(parameter.grad, tp.tp_rank) if name in layer.shards else parameter.grad
            torch.testing.assert_close(layer.get_parameter(name).grad, expected)


def test_a_returned_bias_has_its_whole_gradient(ranks):
    ranks.run(check_returned_bias, size=3)


def check_initial_weights(group):
    tp = resolve_group(group)
    for split, mode in itertools.product(SPLITS, ["column", "row"]):
        torch.manual_seed(7)
        whole = LayerNormLinear(WIDTH, OUT, parameters_split=split)
        after = torch.get_rng_state()
        torch.manual_seed(7)
        layer = LayerNormLinear(WIDTH, OUT, parameters_split=split, tp_group=group, parallel_mode=mode)
        assert torch.equal(torch.get_rng_state(), after)
        for name, parameter in whole.named_parameters():
            mine = layer.get_parameter(name)
            expected = layer.shards[name].split(parameter, tp.tp_rank) if name in layer.shards else parameter
            assert torch.equal(mine, expected) and mine.is_contiguous()
        with autotp.GatherReplacedLayerParams(layer.parameters(), layer):
            assert all(torch.equal(layer.get_parameter(name), parameter) for name, parameter in whole.named_parameters())
        full = autotp.full_state_dict(layer)
        if tp.tp_rank == 0:
            assert list(full) == list(whole.state_dict()) and all(torch.equal(full[k], v) for k, v in whole.state_dict().items())
        saved = {name: value.clone() for name, value in layer.state_dict().items()}
        layer.load_state_dict(saved)  # its own part
        assert all(torch.equal(value, saved[name]) for name, value in layer.state_dict().items())


def test_initial_weights_are_slices_of_the_whole_layers(ranks):
    ranks.run(check_initial_weights, size=3)


def check_late_group(group):
    tp = resolve_group(group)
    layer = LayerNormLinear(WIDTH, OUT, tp_size=2, parallel_mode="column", device="meta", name="late")
    assert tuple(layer.weight.shape) == (OUT // 2, WIDTH) and "tp=?/2" in repr(layer)
    layer.to_empty(device="cpu")
    for use in (layer.reset_parameters, lambda: layer(torch.ones(2, WIDTH))):
        with pytest.raises(AutoTPError, match="late: its 2 ranks are not known yet"):
            use()
    layer.set_tensor_parallel_group(group)
    torch.manual_seed(1)
    layer.reset_parameters()
    torch.manual_seed(1)
    direct = LayerNormLinear(WIDTH, OUT, tp_group=group, parallel_mode="column")
    assert torch.equal(layer.weight, direct.weight)
    x = rows(3, WIDTH, dtype=torch.float32)
    assert torch.equal(layer(x), direct(x)) and layer.tp.tp_rank == tp.tp_rank
    with pytest.raises(PlanError, match="a group of 2 ranks"):
        LayerNormLinear(WIDTH, OUT, tp_group=group, tp_size=4)
    with pytest.raises(PlanError, match="a group of 2 ranks"):
        LayerNormLinear(WIDTH, OUT, tp_size=4, parallel_mode="column", device="meta").set_tensor_parallel_group(group)
    whole = LayerNormLinear(WIDTH, OUT, tp_size=2)  # nothing is dealt, so nothing depends on the rank
    whole.set_tensor_parallel_group(group)
    assert whole(x).shape == (3, OUT)
    dealt = LayerNormLinear(WIDTH, OUT, tp_group=group, parallel_mode="row", sequence_parallel=True, params_dtype=torch.float64)
    with pytest.raises(AutoTPError, match="can't be dealt evenly to 2 ranks"):
        dealt(rows(5, WIDTH // 2))
    with pytest.raises(AutoTPError, match="deals rows along dim 0"):
        dealt(rows(WIDTH // 2))


def test_a_group_that_is_named_later(ranks):
    ranks.run(check_late_group)


def check_frozen_dealt(group):
    """What is frozen costs no collective; what is trained is right whatever else is frozen."""
    tp = resolve_group(group)
    for mode, dealt in itertools.product([None, "column", "row"], [False, True]):
        for trained in itertools.product([True, False], repeat=3):
            plain = Plain()
            layer = build(plain, tp_group=group, parallel_mode=mode, sequence_parallel=dealt)
            for module in (plain, layer):
                for name, parameter in module.named_parameters():
                    parameter.requires_grad_(trained[1 if name.startswith("layer_norm") else 2])
            full = rows(6, 2, WIDTH).requires_grad_(trained[0])
            x_rows, x_columns, y_rows, y_columns = places(tp, mode, dealt, layer)
            x = full.detach()[x_rows][..., x_columns].requires_grad_(trained[0])
            y, want = layer(x), plain(full)[0]
            assert y.requires_grad == any(trained)
            if not any(trained):
                continue
            dy = rows(*want.shape, seed=3)
            y.backward(dy[y_rows][..., y_columns])
            want.backward(dy)
            torch.testing.assert_close(x.grad, None if full.grad is None else full.grad[x_rows][..., x_columns])
            for name, parameter in plain.named_parameters():
                expected = parameter.grad
                if name in layer.shards and expected is not None:
                    expected = layer.shards[name].split(expected, tp.tp_rank)
                torch.testing.assert_close(layer.get_parameter(name).grad, expected)


def test_frozen_parts_of_dealt_layers(ranks):
    ranks.run(check_frozen_dealt)


def check_compiled(group):
    for mode, dealt in itertools.product(["column", "row"], [False, True]):
        tp, plain = resolve_group(group), Plain("RMSNorm")
        layer = build(plain, tp_group=group, parallel_mode=mode, sequence_parallel=dealt)
        x_rows, x_columns, _, _ = places(tp, mode, dealt, layer)
        x = rows(6, 2, WIDTH)[x_rows][..., x_columns].clone().requires_grad_()
        torch._dynamo.reset()
        got, want = torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x)
        torch.testing.assert_close(got, want)
        inputs = [x, *layer.parameters()]
        compare_gradients(got, want, rows(*want.shape), inputs, inputs)


def test_dealt_and_compiled_into_one_graph(ranks):
    ranks.run(check_compiled)


# -- from modules -------------------------------------------------------------------------------------------------------


def test_from_modules_shares_their_parameters():
    torch.manual_seed(0)
    norms = [nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, elementwise_affine=False)]
    norms.append(nn.RMSNorm(WIDTH, eps=1e-6))
    for norm in norms:
        linears = {"q": nn.Linear(WIDTH, 5), "k": nn.Linear(WIDTH, 1, bias=False), "v": nn.Linear(WIDTH, 2)}
        for given in (linears, list(linears.values()), linears["q"], [linears["v"]]):
            layer = LayerNormLinear.from_modules(norm, given, return_layernorm_output=True, name="block")
            each = list(given.values()) if isinstance(given, dict) else given if isinstance(given, list) else [given]
            x, whole = (rows(3, 4, WIDTH, dtype=torch.float32).requires_grad_() for _ in range(2))
            h = norm(whole)
            got, want = layer(x), (torch.cat([linear(h) for linear in each], -1), h)
            torch.testing.assert_close(got, want)
            assert layer.part_sizes == [linear.out_features for linear in each] and layer.full_name == "block"
            own = [*norm.parameters(), *(p for linear in each for p in linear.parameters())]
            assert {id(p) for p in layer.parameters()} == {id(p) for p in own}
            compare_gradients(got, want, [rows(*y.shape, dtype=torch.float32) for y in want], [x, *own], [whole, *own])


class OwnNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))


def test_from_modules_refuses_what_it_does_not_know():
    linear, norm = nn.Linear(WIDTH, OUT), nn.LayerNorm(WIDTH)

    class Scaled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    for given, message in [
        ((OwnNorm(), linear), "OwnNorm: give normalization"),
        ((nn.RMSNorm(WIDTH), linear), "RMSNorm: give normalization"),  # its eps depends on what it is given
        ((norm, Scaled(WIDTH, OUT)), "'' is a Scaled"),
        ((norm, {"a": linear, "b": nn.Linear(WIDTH + 1, OUT)}), r"read \[6, 7\] columns"),
        ((nn.LayerNorm(WIDTH + 1), linear), r"weight is \[7\], and the linears read 6"),
    ]:
        with pytest.raises(PlanError, match=message):
            LayerNormLinear.from_modules(*given)
    with pytest.raises(PlanError, match="give normalization"):
        LayerNormLinear.from_modules(norm, linear, normalization="RMSNorm")
    layer = LayerNormLinear.from_modules(OwnNorm(), linear, normalization="RMSNorm", eps=1e-6, zero_centered_gamma=True)
    x = rows(3, WIDTH, dtype=torch.float32)
    torch.testing.assert_close(layer(x), linear(F.rms_norm(x, (WIDTH,), torch.ones(WIDTH), 1e-6)))


def shard_linear(linear, tp, indices):
    """`linear` as a LinearLayer of which rank r holds `indices[r]` of the outputs, copies included."""
    layer = LinearLayer(linear, tp)
    layer.gather_params()
    shards = LinearLayer.shards_of(Shard.from_indices(tuple(linear.weight.shape), 0, indices), linear.bias is not None)
    prepare(layer, tp, shards, "probe")
    layer._tp_partition()
    return layer


def check_summed_once(group):
    for mode, rows, columns in ((None, 1, 8), ("row", 4, 2)):
        options = dict(tp_group=group, parallel_mode=mode, sequence_parallel=True, params_dtype=torch.bfloat16)
        layer = LayerNormLinear(8, 4, **options)
        dy = torch.ones(1, 4, dtype=torch.bfloat16)
        dy[0, resolve_group(group).tp_rank] = 256
        layer(torch.ones(rows, columns, dtype=torch.bfloat16)).backward(dy)
        assert layer.bias.grad.dtype == torch.bfloat16 and (layer.bias.grad == 260).all(), (mode, layer.bias.grad)


def test_what_many_ranks_have_of_a_gradient_is_rounded_once(ranks):
    """259 is 260 in bfloat16; summed in that dtype, 1 and 256 are 256."""
    ranks.run(check_summed_once, size=4)


def check_copied_heads(group, main, delay):
    """8 ranks over 4 kv heads of two columns: each of two holders computes a part of the head's gradient."""
    tp = resolve_group(group)
    torch.manual_seed(0)
    norm, names = nn.LayerNorm(WIDTH, dtype=torch.float64), ["q", "k", "v"]
    wholes = {name: nn.Linear(WIDTH, 16 if name == "q" else 8, dtype=torch.float64) for name in names}
    heads = {"q": [[2 * r, 2 * r + 1] for r in range(8)]} | {n: [[r // 2 * 2, r // 2 * 2 + 1] for r in range(8)] for n in "kv"}
    linears = {name: shard_linear(copy.deepcopy(whole), tp, heads[name]) for name, whole in wholes.items()}
    own = copy.deepcopy(norm)
    layer = LayerNormLinear.from_modules(own, linears, fuse_wgrad_accumulation=main, delay_wgrad_compute=delay)
    for linear in linears.values() if main else ():
        linear.weight.main_grad = torch.ones(linear.weight.shape, dtype=torch.float64)
    for step in range(2):
        full = rows(3, 4, WIDTH, seed=step).requires_grad_()
        x = full.detach().requires_grad_()
        every = [torch.cat([wholes[n](norm(full))[..., heads[n][rank]] for n in names], -1) for rank in range(8)]
        y = layer(x)
        torch.testing.assert_close(y, every[tp.tp_rank])
        cotangents = [rows(*y.shape, seed=20 + rank) for rank in range(8)]
        torch.autograd.backward(every, cotangents)
        y.backward(cotangents[tp.tp_rank])
        if delay:
            layer.backward_dw()
        torch.testing.assert_close(x.grad, full.grad)
    for name, linear in linears.items():
        grad = linear.weight.main_grad - 1 if main else linear.weight.grad
        torch.testing.assert_close(grad, wholes[name].weight.grad[heads[name][tp.tp_rank]])
        torch.testing.assert_close(linear.bias.grad, wholes[name].bias.grad[heads[name][tp.tp_rank]])
    torch.testing.assert_close(own.weight.grad, norm.weight.grad)
    torch.testing.assert_close(own.bias.grad, norm.bias.grad)


def check_refused_dealt(group):
    linear = LinearLayer(nn.Linear(WIDTH, OUT), group)
    for name, value in (("gather_output", True), ("siblings", None)):
        linear.__dict__[name], before = value, getattr(linear, name)
        with pytest.raises(PlanError, match="whose outputs stay dealt"):
            LayerNormLinear.from_modules(nn.LayerNorm(WIDTH), linear)
        linear.__dict__[name] = before
    with pytest.raises(PlanError, match="over 2 groups"):
        LayerNormLinear.from_modules(nn.LayerNorm(WIDTH), [linear, nn.Linear(WIDTH, OUT)])


def test_from_modules_refuses_layers_whose_sums_are_elsewhere(ranks):
    ranks.run(check_refused_dealt)


def check_reduce_dtype(group):
    """256 + 1 + 1 is 258 in float32 and 256 where 256 + 1 is rounded to bfloat16; in three orders, one adds 1 + 1 first."""
    tp = resolve_group(group)
    weight = (torch.ones(3, 3) + 255 * torch.eye(3)).bfloat16()
    linear = LinearLayer.from_weights(weight, None, group)
    prepare(linear, tp, linear.shards, "probe", torch.float32)
    norm = nn.LayerNorm(3, dtype=torch.bfloat16)
    for dealt in (False, True):
        layer = LayerNormLinear.from_modules(norm, linear, sequence_parallel=dealt)
        x = torch.zeros(1, 3, dtype=torch.bfloat16)
        norm.bias.grad = None
        layer(x).sum().backward()
        assert norm.bias.grad.tolist() == [776.0 if dealt else 258.0] * 3  # of three rows: 774, between 772 and 776


def test_partial_sums_are_added_in_the_linears_dtype(ranks):
    ranks.run(check_reduce_dtype, size=3)


def test_copied_heads_sum_their_gradients(eight_ranks):
    for main, delay in itertools.product((False, True), repeat=2):
        eight_ranks.run(check_copied_heads, main, delay, size=8)


# -- documentation ------------------------------------------------------------------------------------------------------


def test_the_table_names_every_argument_and_tests_that_exist():
    text = (Path(__file__).parents[2] / "docs" / "layer_norm_linear.md").read_text()
    table = text[text.index("| argument |") : text.index("Not there:")].splitlines()[2:]
    cells = [[cell.strip() for cell in line.split(" | ")] for line in table if line.startswith("|")]
    named = [name for row in cells for name in re.findall(r"`(\w+)`", row[0])]
    assert named == list(inspect.signature(LayerNormLinear).parameters)
    shown = [name for row in cells for name in re.findall(r"`(\w+)`", row[2])]
    shown += re.findall(r"\(`(\w+)`", text[text.index("## What is kept") :])
    assert len(shown) > 25 and not [name for name in shown if f"test_{name}" not in globals()]
