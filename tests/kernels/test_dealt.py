"""Products whose rows are dealt to the ranks, in one piece and block by block, against the same product in one process."""

import itertools
import time
import weakref
from itertools import chain

import pytest
import torch

from autotp.errors import AutoTPError
from autotp.exchange import Exchange, Gather, Scatter
from autotp.groups import resolve_group
from autotp.kernels.dealt import Dealt, backward_linear, block_of, multiply_gathered, multiply_scattered
from autotp.kernels.moves import Decision, Moves
from autotp.kernels.product import Merged, ProductSpec, multiply


def made(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class BlockExchange(Exchange):
    """Gives blocks one by one as a GPU's exchange does, and nothing before it was waited for or after it was taken."""

    def decide(self, n_bytes, way):
        return Decision(way is not False, "for this test")

    def gather(self, local, way=None, full=None, lent=False):
        return BlockGather(self.group, local)

    def scatter(self, rows, width, like, dtype=None, way=None):
        return BlockScatter(self.group, rows, width, like, dtype)


class BlockGather(Gather):
    def __init__(self, group, local):
        self.all, self.local, self.rank = group.gather_rows(local), local, group.tp_rank
        order = [(group.tp_rank + i) % group.tp_size for i in range(group.tp_size)]
        super().__init__(torch.full_like(self.all, float("nan")), order)

    def wait(self, rank):
        if rank == self.rank:
            return self.local
        size = self.local.shape[0]
        self.full[rank * size : (rank + 1) * size] = self.all[rank * size : (rank + 1) * size]
        return super().wait(rank)

    def wait_all(self):
        self.full.copy_(self.all)
        return self.full


class BlockScatter(Scatter):
    def __init__(self, group, rows, width, like, dtype):
        super().__init__(group, dtype)
        self.order = [(group.tp_rank + i) % group.tp_size for i in range(1, group.tp_size)]
        self.size, self.rows = -(-rows // group.tp_size), rows
        self.parts = like.new_zeros(group.tp_size * self.size, width)
        self.sent = []

    def place(self, rank):
        block = block_of(self.rows, rank, self.group.tp_size)
        return self.parts[rank * self.size :][: block.stop - block.start]

    def send(self, rank):
        self.sent.append(rank)

    def receive(self):
        assert self.sent == list(self.order)
        own = block_of(self.rows, self.group.tp_rank, self.group.tp_size)
        parts = self.parts if self.dtype is None else self.parts.to(self.dtype)
        return self.group.reduce_scatter_rows(parts)[: own.stop - own.start].clone()


def how(group, exchange, shape, **options):
    rows = torch.Size(shape).numel()
    local = -(-rows // group.tp_size)
    return Dealt(exchange, group.tp_rank, group.tp_size, shape, (1, local) if len(shape) == 2 else (local,), **options)


def deal(group, x, shape):
    """This rank's rows of `x` `[*shape, K]`, padded."""
    flat = x.reshape(-1, x.shape[-1])
    size = -(-flat.shape[0] // group.tp_size)
    flat = torch.cat([flat, flat.new_zeros(size * group.tp_size - flat.shape[0], flat.shape[1])])
    own = flat[group.tp_rank * size : (group.tp_rank + 1) * size]
    return own.view(1, size, -1) if len(shape) == 2 else own


def check_column(group, exchange_class, shape, merged, transposed):
    tp = resolve_group(group)
    sizes, width = ((4, 6) if merged else (5,)), 8
    every = [[made(10 * rank + i, n, width) for i, n in enumerate(sizes)] for rank in range(tp.tp_size)]
    x = made(1, *shape, width).requires_grad_()
    whole = [[(x @ w.t() + w.sum(1)) for w in ws] for ws in every]
    cotangents = [[made(99 + rank, *y.shape) for y in ys] for rank, ys in enumerate(whole)]
    torch.autograd.backward(list(chain(*whole)), list(chain(*cotangents)))
    own = every[tp.tp_rank]
    weights = [(w.t() if transposed else w).clone().requires_grad_() for w in own]
    biases = [w.sum(1).requires_grad_() for w in own]
    one = Merged(torch.cat([w.detach() for w in weights]), torch.cat([b.detach() for b in biases])) if merged else None
    local = deal(tp, x.detach(), shape).clone().requires_grad_()
    linear = (lambda x, w, b=None: x @ w + (0 if b is None else b)) if transposed else ProductSpec().run
    copies = (None,) * (2 * len(sizes))
    exchange = exchange_class(tp)
    gather = exchange.gather(local.detach().reshape(-1, width))
    spec = ProductSpec(linear, None, None, transposed, copies, copies, dealt=how(tp, exchange, shape))
    outputs = multiply_gathered(spec, local, weights, biases, one, gather)
    for got, want in zip(outputs, whole[tp.tp_rank], strict=True):
        torch.testing.assert_close(got, want.detach())
    gathered = weakref.ref(gather.full)
    del gather, spec
    tp.all_reduce(torch.ones(1))  # gloo lets go of the last collective's tensors at the next one
    end = time.monotonic() + 10  # gloo's threads let go of what they sent a moment later
    while gathered() is not None and time.monotonic() < end:
        time.sleep(0.001)
    assert gathered() is None, "the gathered rows are kept for backward"
    torch.autograd.backward(outputs, cotangents[tp.tp_rank])
    torch.testing.assert_close(local.grad, deal(tp, x.grad, shape))
    for w, b, full, cotangent in zip(weights, biases, own, cotangents[tp.tp_rank], strict=True):
        rows = cotangent.reshape(-1, full.shape[0])
        want = rows.t() @ x.detach().reshape(-1, width)
        torch.testing.assert_close(w.grad, want.t() if transposed else want)
        torch.testing.assert_close(b.grad, rows.sum(0))


def check_row(group, exchange_class, shape, transposed):
    tp = resolve_group(group)
    width, out = 6, 4
    parts = [made(20 + rank, *shape, width).requires_grad_() for rank in range(tp.tp_size)]
    weights = [made(30 + rank, out, width).requires_grad_() for rank in range(tp.tp_size)]
    y = sum(x @ w.t() for x, w in zip(parts, weights, strict=True))
    cotangent = made(3, *y.shape)
    y.backward(cotangent)
    x, want = parts[tp.tp_rank].detach().clone().requires_grad_(), weights[tp.tp_rank]
    w = (want.t() if transposed else want).detach().clone().requires_grad_()
    linear = (lambda x, w, b=None: x @ w) if transposed else ProductSpec().run
    spec = ProductSpec(linear, transposed=transposed, dealt=how(tp, exchange_class(tp), shape))
    got = multiply_scattered(spec, x, w)
    rows = block_of(y[..., 0].numel(), tp.tp_rank, tp.tp_size)
    torch.testing.assert_close(got, deal(tp, y.detach(), shape))
    noise = deal(tp, cotangent, shape).clone()
    noise.view(-1, out)[rows.stop - rows.start :] = 7.0  # what the padding's gradient is must not matter
    got.backward(noise)
    torch.testing.assert_close(x.grad, parts[tp.tp_rank].grad)
    torch.testing.assert_close(w.grad, want.grad.t() if transposed else want.grad)


@pytest.mark.parametrize("exchange", [Exchange, BlockExchange])
@pytest.mark.parametrize("size", [2, 3])
def test_dealt_products_are_the_whole_ones(ranks, exchange, size):
    for shape in ((2, 6), (1, 7), (3, 5), (8,), (1, 1)):
        for transposed in (False, True):
            ranks.run(check_column, exchange, shape, False, transposed, size=size)
            ranks.run(check_row, exchange, shape, transposed, size=size)
        ranks.run(check_column, exchange, shape, True, False, size=size)


def check_main_grad(group):
    """Weight gradients go into main_grad; where that does not fit, it is named before anything moves."""
    tp = resolve_group(group)
    x, dy = made(2, 2, 4, 8), made(3 + tp.tp_rank, 2, 4, 4)
    weight = torch.nn.Parameter(made(1, 4, 8))
    spec = ProductSpec(main_grads=("here.weight", None), dealt=how(tp, BlockExchange(tp), (2, 4)))
    for shape in ((4, 8), (4, 7)):
        weight.main_grad = torch.ones(shape)
        (y,) = multiply_gathered(spec, deal(tp, x, (2, 4)).clone().requires_grad_(), (weight,), (None,))
        if shape == (4, 7):
            with pytest.raises(AutoTPError, match=r"here\.weight"):
                y.backward(dy)
        else:
            y.backward(dy)
            torch.testing.assert_close(weight.main_grad, 1 + dy.reshape(-1, 4).t() @ x.reshape(-1, 8))
    assert tp.all_reduce(torch.ones(1)).item() == tp.tp_size  # the ranks are in step


def test_main_grad_in_dealt_products(ranks):
    ranks.run(check_main_grad)


def check_sums(group, transposed):
    """Sums of rows that all ranks have: a column's input gradient, with a residual's, and a row's output with its bias."""
    tp = resolve_group(group)
    exchange = BlockExchange(tp)
    for rows, dtype in itertools.product((7, 1, 6), (None, torch.float64)):
        sums = Dealt(exchange, tp.tp_rank, tp.tp_size, (rows,), (-(-rows // tp.tp_size),), dtype)
        linear = (lambda x, w, b=None: x @ w + (0 if b is None else b)) if transposed else ProductSpec().run
        spec = ProductSpec(linear, tp.all_reduce, None, transposed, (None,) * 4, (None,) * 4, True, tp.tp_rank == 0)
        turn = (lambda w: w.t().contiguous()) if transposed else torch.clone
        weights = [turn(made(9 * tp.tp_rank + i, n, 6)).requires_grad_() for i, n in enumerate((4, 3))]
        x, dys = (
            made(7, rows, 6).requires_grad_(),
            [made(70 + tp.tp_rank, rows, 4), made(71 + tp.tp_rank, rows, 3), made(5, rows, 6)],
        )
        leaves, found = [x, *weights], []
        for each in (spec, spec._replace(sums=sums)):
            outputs = multiply(each, x, weights, (None, None))
            found.append(torch.autograd.grad(outputs, leaves, dys))
        torch.testing.assert_close(*found)
        bias, spec = (
            made(3, 4),
            spec._replace(
                sum_input=None, sum_output=tp.all_reduce, residual=False, sum_copies=(None,) * 2, main_grads=(None,) * 2
            ),
        )
        found = [multiply(each, x, weights[:1], (bias,)) for each in (spec, spec._replace(sums=sums))]
        torch.testing.assert_close(*found)
        found = [torch.autograd.grad(y, leaves[:2], made(8, rows, 4)) for y in found]
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("transposed", [False, True])
def test_sums_of_whole_rows(ranks, transposed):
    ranks.run(check_sums, transposed, size=3)


def check_pieces(group, exchange_class):
    """The functional backward against the steps of autograd, each gradient wanted for its own sake."""
    tp = resolve_group(group)
    exchange = exchange_class(tp)
    for rows, early, dtype in itertools.product((7, 1), (False, True), (None, torch.float64)):
        dealt = how(tp, exchange, (rows,), reduce_dtype=dtype, moves=Moves(early=early))
        own = dealt.local_shape[0]
        spec = ProductSpec(dealt=dealt)
        for mode in ("column", "row"):
            count, given = (own, rows) if mode == "column" else (rows, own)
            x, dy = made(5 + tp.tp_rank, count, 6), made(50 + tp.tp_rank, given, 4)
            weight = made(500 + tp.tp_rank, 4, 6)
            leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
            y = (
                multiply_gathered(spec, leaves[0], leaves[1:], (None,))[0]
                if mode == "column"
                else multiply_scattered(spec, *leaves)
            )
            want = torch.autograd.grad(y, leaves, dy)
            whole = dy if mode == "column" else tp.gather_rows(dy)[:rows]
            for dx, dw, db in itertools.product((False, True), repeat=3):
                wants = dict(wants_dx=dx, wants_dw=dw, wants_db=db)
                got = backward_linear(dy, x if dw else None, weight if dx else None, mode=mode, dealt=dealt, **wants)
                for value, wanted, expected in zip(got, wants.values(), (*want, whole.sum(0)), strict=True):
                    assert (value is not None) == wanted
                    if wanted:
                        torch.testing.assert_close(value, expected)
            main = torch.ones(4, 6)
            got = backward_linear(dy, x, weight, mode=mode, dealt=dealt, main_grad=main)
            assert got[1] is main
            torch.testing.assert_close(main, 1 + want[1])
            backward_linear(dy, x, weight, mode=mode, dealt=dealt, main_grad=main, overwrite=True)
            torch.testing.assert_close(main, want[1])
            for wrong in (dict(x=x[1:]), dict(x=None), dict(weight=weight.t()), dict(mode="rows"), dict(main_grad=main.t())):
                with pytest.raises(AutoTPError, match="backward_linear: "):
                    backward_linear(**(dict(dy=dy, x=x, weight=weight, mode=mode, dealt=dealt) | wrong))
    assert tp.all_reduce(torch.ones(1)).item() == tp.tp_size  # nothing moved where a piece was refused


@pytest.mark.parametrize("exchange", [Exchange, BlockExchange])
def test_backward_of_given_pieces(ranks, exchange):
    ranks.run(check_pieces, exchange, size=3)
