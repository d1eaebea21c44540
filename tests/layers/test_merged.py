"""Siblings as one product: numbers of products, every gradient, what outputs may be used for, and where weights lie."""

import copy
import itertools
import threading

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autotp.comm import TPGroup
from autotp.kernels import gradients
from autotp.layers.linear import LinearLayer
from autotp.layers.sibling_memory import lay_siblings
from autotp.layers.siblings import SiblingInput

SIZES = (8, 4, 6)


class Products(TorchDispatchMode):
    """Counts what is run inside the `with`: matrix products and concatenations."""

    def __init__(self):
        super().__init__()
        self.products = self.copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.products += name in ("mm", "addmm", "linear", "bmm")
        self.copies += name == "cat"
        return func(*args, **(kwargs or {}))


class Three(nn.Module):
    """Three linears of one input of 12 features."""

    def __init__(self, biases=(True, True, True), dtype=torch.float64, sizes=SIZES):
        super().__init__()
        torch.manual_seed(0)
        linears = [nn.Linear(12, n, bias=b, dtype=dtype) for n, b in zip(sizes, biases, strict=True)]
        self.linears = nn.ModuleList(linears)

    def forward(self, x):
        return [linear(x) for linear in self.linears]


def pair(lay=True, **options):
    """A plain model, and its twin whose linears are siblings in a group of one rank."""
    plain = Three(**options)
    mine = copy.deepcopy(plain)
    group = TPGroup(None, torch.device("cpu"))
    siblings = SiblingInput(group, len(mine.linears))
    for i, linear in enumerate(mine.linears):
        mine.linears[i] = LinearLayer(linear, group)
        mine.linears[i].siblings = siblings
        siblings.add(mine.linears[i])
    if lay:
        lay_siblings(mine)
    return plain, mine


def made(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def lined_up(model):
    return model.linears[0].siblings.find_laid() is not None


def run(model, x, loss, wants_input=True):
    leaf = x.detach().clone().requires_grad_(wants_input)
    model.zero_grad()
    outputs = model(leaf * 1 if wants_input else leaf)
    total = loss(outputs)
    if total.requires_grad:
        total.backward()
    return [y.detach().clone() for y in outputs], [leaf.grad, *(p.grad for p in model.parameters())]


def compare(plain, mine, x, loss=None, wants_input=True):
    """Outputs and every gradient of both."""
    cotangents = [made(20 + i, *x.shape[:-1], n) for i, n in enumerate(SIZES)]
    loss = loss or (lambda ys: sum((y * c.to(y.dtype)).sum() for y, c in zip(ys, cotangents, strict=True)))
    (expected, wanted), (got, grads) = (run(model, x, loss, wants_input) for model in (plain, mine))
    torch.testing.assert_close(got, expected)
    for grad, reference in zip(grads, wanted, strict=True):
        assert (grad is None) == (reference is None)
        if grad is not None:
            torch.testing.assert_close(grad, reference)


@pytest.mark.parametrize("lay", [True, False])
@pytest.mark.parametrize("biases", [(True, True, True), (False, False, False), (True, False, True)])
def test_one_product_forward_two_backward_and_every_gradient(biases, lay):
    plain, mine = pair(lay, biases=biases)
    for shape in ((2, 5, 12), (7, 12), (12,), (0, 12), (2, 0, 12)):
        compare(plain, mine, made(1, *shape))
    compare(plain, mine, made(1, 12, 7).t())  # not contiguous
    compare(plain, mine, made(1, 1, 12).expand(5, 12))
    x = made(2, 2, 5, 12).requires_grad_()
    with Products() as seen:
        outputs = mine(x)
    assert seen.products == (1 if lay else 3)
    with Products() as seen:
        sum(y.square().sum() for y in outputs).backward()
    assert seen.products == (2 if lay else 6)
    with torch.no_grad(), Products() as seen:
        outputs = mine(x)
    torch.testing.assert_close(outputs, plain(x))
    assert seen.products == (1 if lay else 3) and mine.linears[0].siblings._round is None


@pytest.mark.parametrize("wants_input", [True, False])
def test_each_gradient_is_computed_only_where_it_is_wanted(wants_input):
    for frozen in itertools.product([True, False], repeat=3):
        for frozen_biases in ((False, False, False), (True, True, True), (True, False, True)):
            plain, mine = pair()
            for model in (plain, mine):
                for linear, w, b in zip(model.linears, frozen, frozen_biases, strict=True):
                    linear.weight.requires_grad_(not w)
                    linear.bias.requires_grad_(not b)
            compare(plain, mine, made(1, 3, 12), wants_input=wants_input)
            if wants_input and all(frozen):
                x = made(1, 3, 12).requires_grad_()
                outputs = mine(x)
                with Products() as seen:
                    sum(y.sum() for y in outputs).backward()
                assert seen.products == 1


def test_outputs_are_used_like_any_others():
    plain, mine = pair()

    def in_place(ys):
        a, b, c = ys
        a = a.div_(2.0)
        b += 1
        return (a * b.sum(-1, keepdim=True)).sum() + (c.mul_(a[..., :6].detach())).sum()

    def same_gradient_for_two(ys):  # autograd hands one tensor to both
        return (ys[0][..., :4] + ys[1]).square().sum()

    for loss in (
        in_place,
        same_gradient_for_two,
        lambda ys: sum(y.sum() for y in ys),  # expanded gradients
        lambda ys: ys[1].square().sum(),  # two unused
        lambda ys: torch.cat(ys, -1).square().sum(),  # gradients side by side
        lambda ys: (ys[0].view(2, 5, 2, 4).transpose(1, 2) * 2).square().sum(),
    ):
        compare(plain, mine, made(3, 2, 5, 12), loss)
    y = mine(made(3, 2, 5, 12))[0]
    assert not y._is_view() and y.is_leaf is False
    with torch.no_grad():
        a, b, _ = mine(made(3, 2, 5, 12))
    factor = torch.ones((), dtype=torch.float64, requires_grad=True)
    kept = b * factor  # saves b
    a.mul_(factor)  # must not count as an edit of b
    kept.sum().backward()


def test_gradients_that_lie_side_by_side_are_not_copied():
    _, mine = pair()
    outputs = mine(made(1, 50, 12).requires_grad_())
    buffer = made(2, 50, sum(SIZES))
    with Products() as seen:
        torch.autograd.backward(outputs, list(buffer.split(SIZES, 1)))
    assert (seen.products, seen.copies) == (2, 0)


def test_wide_gradients_are_chained_instead_of_copied(monkeypatch):
    monkeypatch.setattr(gradients, "SMALL", 0)
    plain, mine = pair()
    compare(plain, mine, made(1, 2, 5, 12))
    outputs = mine(made(1, 50, 12).requires_grad_())
    with Products() as seen:
        torch.autograd.backward(outputs, [made(i, 50, n) for i, n in enumerate(SIZES)])
    assert seen.copies == 1  # 18 columns, 24 that two more products would add to
    wide, mine = Three(sizes=(16, 16, 16)), pair(sizes=(16, 16, 16))[1]
    grads = [made(i, 50, 16) for i in range(3)]
    for model in (wide, mine):
        outputs = model(made(1, 50, 12).requires_grad_())
        with Products() as seen:
            torch.autograd.backward(outputs, grads)
        assert seen.copies == 0 and seen.products == 6
    for a, b in zip(wide.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad)


def test_a_weight_changed_before_backward_is_noticed():
    for lay in (True, False):
        _, mine = pair(lay)
        outputs = mine(made(1, 3, 12).requires_grad_())
        with torch.no_grad():
            mine.linears[1].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            sum(y.sum() for y in outputs).backward()
        x = made(1, 3, 12)
        with torch.no_grad():
            mine.linears[0](x)
            mine.linears[2].weight.mul_(2)  # between siblings
            torch.testing.assert_close(mine.linears[2](x), nn.functional.linear(x, *mine.linears[2].parameters()))


# -- where the weights lie ----------------------------------------------------------------------------------------------


def storages(model):
    return [(p.untyped_storage().data_ptr(), p.untyped_storage().nbytes()) for p in model.parameters()]


def test_weights_have_storages_of_their_own_in_one_allocation(tmp_path):
    plain, mine = pair()
    assert lined_up(mine)
    for parameter, (start, size) in zip(mine.parameters(), storages(mine), strict=True):
        assert start == parameter.data_ptr() and size == parameter.numel() * 8 and parameter.storage_offset() == 0
    weights = [linear.weight for linear in mine.linears]
    assert weights[1].data_ptr() == weights[0].data_ptr() + weights[0].numel() * 8
    save_model(mine, str(tmp_path / "model.safetensors"))
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in plain.state_dict().items()) and len(saved) == 6
    torch.save(mine.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt")
    assert all(
        torch.equal(loaded[name], value) and value.untyped_storage().nbytes() == value.numel() * 8
        for name, value in plain.state_dict().items()
    )
    mine.load_state_dict({name: value + 1 for name, value in plain.state_dict().items()})
    plain.load_state_dict({name: value + 1 for name, value in plain.state_dict().items()})
    assert lined_up(mine)
    compare(plain, mine, made(1, 3, 12))


def test_optimizers_train_siblings_as_others():
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        for options in ({"foreach": True}, {"fused": True}):
            plain, mine = pair()
            steps = [optimizer(model.parameters(), lr=0.1, **options) for model in (plain, mine)]
            for step in range(3):
                for micro in range(2):
                    for model in (plain, mine):
                        sum(y.square().sum() for y in model(made(step * 2 + micro, 4, 12))).backward()
                for model, stepper in zip((plain, mine), steps, strict=True):
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    stepper.step()
                    stepper.zero_grad(set_to_none=step % 2 == 0)
            assert lined_up(mine)
            for a, b in zip(plain.parameters(), mine.parameters(), strict=True):
                torch.testing.assert_close(b, a)


def test_conversion_and_moves_lay_the_weights_again():
    plain, mine = pair(dtype=torch.float32)
    for dtype in (torch.float64, torch.bfloat16, torch.float64):
        objects = list(mine.parameters())
        mine.to(dtype)
        plain.to(dtype)
        assert lined_up(mine) and all(a is b for a, b in zip(objects, mine.parameters(), strict=True))
    compare(plain, mine, made(1, 3, 12))
    where = storages(mine)
    mine.to(torch.float64)  # nothing to do
    assert storages(mine) == where
    mine.linears[1].to(torch.float32)  # one of them alone
    assert not lined_up(mine) and mine.linears[0].siblings._laid is None
    mine.linears[1].to(torch.float64)
    assert lined_up(mine)
    compare(plain, mine, made(1, 3, 12))
    mine.share_memory()
    assert all(p.is_shared() for p in mine.parameters())
    compare(plain, mine, made(1, 3, 12))


def test_weights_that_others_moved_are_right_and_the_allocation_is_let_go():
    plain, mine = pair()
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    mine.load_state_dict(state, assign=True)
    assert mine.linears[0].weight.data_ptr() == state["linears.0.weight"].data_ptr()
    compare(plain, mine, made(1, 3, 12))
    assert mine.linears[0].siblings._laid is None
    plain, mine = pair()
    mine.linears[2].weight.data = mine.linears[2].weight.data * 2
    plain.linears[2].weight.data *= 2
    compare(plain, mine, made(1, 3, 12))
    plain, mine = pair()
    mine.linears[1].weight = nn.Parameter(plain.linears[1].weight.detach().clone())
    compare(plain, mine, made(1, 3, 12))
    plain, mine = pair()
    for model in (plain, mine):
        nn.utils.parametrizations.weight_norm(model.linears[1])
    compare(plain, mine, made(1, 3, 12))


def test_a_deep_copy_has_an_allocation_of_its_own():
    plain, mine = pair()
    twin = copy.deepcopy(mine)
    assert not {start for start, _ in storages(twin)} & {start for start, _ in storages(mine)}
    with Products() as seen:  # in its first forward too: one that is recomputed in backward must do as it did
        outputs = twin(made(1, 3, 12))
    torch.testing.assert_close(outputs, plain(made(1, 3, 12)))
    assert seen.products == 1
    assert lined_up(twin)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    compare(plain, mine, made(1, 3, 12))
    alone = copy.deepcopy(mine.linears[1])
    torch.testing.assert_close(alone(made(1, 3, 12)), plain.linears[1](made(1, 3, 12)))
    compare(plain, mine, made(1, 3, 12))


# -- what is kept between siblings --------------------------------------------------------------------------------------


class Apart(nn.Module):
    """Siblings that read two inputs, against what was thought of them."""

    def __init__(self, model):
        super().__init__()
        self.linears = model.linears

    def forward(self, x):
        return self.linears[0](x), self.linears[1](x * 2), self.linears[2](x * 3)


@pytest.mark.parametrize("how", ["plainly", True, False])
def test_members_that_read_different_inputs_compute_alone_after_one_forward(how):
    plain, mine = pair()
    both = Apart(plain), Apart(mine)

    def call(model, x):
        return list(model(x)) if how == "plainly" else list(checkpoint(model, x, use_reentrant=how))

    for step in range(3):
        grads = []
        for model in both:
            model.zero_grad()
            leaf = made(step, 3, 12).requires_grad_()
            outputs = call(model, leaf * 1)
            sum(y.square().sum() for y in outputs).backward()
            grads.append([leaf.grad, *(p.grad for p in model.parameters())])
        torch.testing.assert_close(grads[1], grads[0])
    siblings = mine.linears[0].siblings
    assert siblings._alone == {True: True, False: how is True} and siblings._round is None
    mine.linears[0](made(1, 3, 12))
    assert siblings._round is None
    with torch.no_grad():
        torch.testing.assert_close(mine(made(1, 3, 12)), plain(made(1, 3, 12)))


def test_a_forward_that_died_half_way_does_not_end_merging():
    plain, mine = pair()
    for _ in range(3):
        mine.linears[0](made(1, 3, 12))  # and then something failed
        compare(plain, mine, made(2, 3, 12))
    with torch.no_grad(), Products() as seen:
        mine(made(1, 3, 12))
    assert seen.products == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_siblings_are_merged(reentrant):
    plain, mine = pair()
    grads = []
    for model in (plain, mine):
        leaf = made(1, 3, 12).requires_grad_()
        total = 0
        for _ in range(2):
            total = total + sum(
                y.square().sum() for y in checkpoint(lambda x, m=model: tuple(m(x)), leaf * 1, use_reentrant=reentrant)
            )
        total.backward()
        grads.append([leaf.grad, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(grads[1], grads[0])
    assert not any(mine.linears[0].siblings._alone.values())


def test_autocast_as_plain_linears():
    plain, mine = pair(dtype=torch.float32)
    x = made(1, 6, 12, dtype=torch.float32)
    results = []
    for model in (plain, mine):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(leaf * 1)
            assert all(y.dtype is torch.bfloat16 for y in outputs)
        sum(y.float().square().sum() for y in outputs).backward()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            outputs += model(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):  # a cast that autograd does not know must not be in its cache
            with torch.no_grad():
                model(x)
            trained = model.linears[0](x)
        assert trained.requires_grad
        results.append(([y.detach().float() for y in outputs], leaf.grad, [p.grad for p in model.parameters()]))
        assert all(p.grad.dtype is torch.float32 for p in model.parameters())
    torch.testing.assert_close(results[1], results[0], rtol=2e-2, atol=2e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = mine.linears[0](x)
    assert y.dtype is torch.bfloat16 and mine.linears[1](x).dtype is torch.float32


def test_inference_mode_functional_calls_and_subclasses():
    plain, mine = pair()
    x = made(1, 3, 12)
    with torch.inference_mode():
        y = x * 1
        first = mine.linears[0](y)
        y.add_(1)  # not counted: nothing may be kept for the others
        torch.testing.assert_close(mine.linears[1](y), plain.linears[1](x + 1))
        torch.testing.assert_close(first, plain.linears[0](x))
    doubled = {name: p * 2 for name, p in mine.named_parameters()}
    got = torch.func.functional_call(mine, doubled, (x,))
    torch.testing.assert_close(got, [2 * y for y in plain(x)])
    torch.testing.assert_close(torch.func.vmap(lambda v: tuple(mine(v)))(x), tuple(plain(x)))
    grads = torch.func.grad(lambda v: sum(y.sum() for y in mine(v)))(x)
    torch.testing.assert_close(grads, sum(linear.weight.sum(0) for linear in plain.linears).expand(3, 12))
    compare(plain, mine, x)


def test_threads_that_share_a_model_do_not_mix_their_outputs():
    plain, mine = pair()
    wrong = []

    def work(seed):
        for i in range(100):
            x = made(seed * 1000 + i, 3, 12)
            with torch.no_grad():
                got = mine(x)
            if not all(torch.allclose(a, b) for a, b in zip(got, plain(x), strict=True)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("grad", [True, False])
def test_compiled_without_graph_breaks(grad):
    torch.compiler.reset()  # graphs of other tests count against a limit
    plain, mine = pair()
    x = made(1, 3, 12)
    compiled = torch.compile(mine, backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            torch.testing.assert_close(compiled(x), plain(x))
    if grad:
        compare(plain, compiled, x)
