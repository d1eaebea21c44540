"""Shard: split and join are exact inverses, every element is owned once, and layouts cost what they should."""

import json
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotp.errors import PlanError
from autotp.index_runs import take_runs
from autotp.shard import Cut, Shard, deal_units

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.complex64,
)
quick = settings(max_examples=60, deadline=None)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, so that NaNs and signed zeros count."""
    return tensor.contiguous().view(torch.uint8) if tensor.dtype != torch.bool else tensor.to(torch.uint8)


def random_full(shape, dtype, seed=0) -> torch.Tensor:
    """Random bits of `dtype`: NaN payloads, infinities and denormals included."""
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=torch.Generator().manual_seed(seed)).bool()
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (prod(shape) * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).view(tuple(shape))


def check_inverse(shard: Shard, dtype=torch.float32, seed: int = 0) -> None:
    """join(split) and split(join) are bitwise the identity, paste writes only its own part, JSON keeps the shard."""
    full = random_full(shard.shape, dtype, seed)
    parts = [shard.split(full, rank) for rank in range(shard.tp_size)]
    for rank, part in enumerate(parts):
        assert tuple(part.shape) == shard.local_shape(rank) and part.numel() == shard.local_numel(rank)
        expected = full
        for cut in shard.cuts:
            expected = bits_select(expected, cut.dim, cut.indices(rank))
        assert torch.equal(bits(part), bits(expected))
    joined = shard.join([part.clone() for part in parts])
    assert torch.equal(bits(joined), bits(full))
    for rank, part in enumerate(parts):
        assert torch.equal(bits(shard.split(joined, rank)), bits(part))
    assert Shard.from_json(json.loads(json.dumps(shard.to_json()))) == shard


def bits_select(tensor: torch.Tensor, dim: int, indices: torch.Tensor) -> torch.Tensor:
    """`index_select` by a plain loop, the reference."""
    return torch.stack([tensor.select(dim, int(i)) for i in indices], dim) if len(indices) else tensor.narrow(dim, 0, 0)


def count_owners(shard: Shard) -> torch.Tensor:
    """How many ranks own each element of the full tensor."""
    counts = torch.zeros(shard.shape, dtype=torch.int64)
    for rank in range(shard.tp_size):
        if not shard.cuts and rank:
            continue
        mine = torch.ones(shard.local_shape(rank), dtype=torch.int64)
        for dim, mask in shard.owned(rank):
            shape = [1] * mine.dim()
            shape[dim] = -1
            mine = mine * mask.view(shape)
        places = torch.arange(prod(shard.shape)).view(shard.shape)
        counts.view(-1).index_add_(0, shard.split(places, rank).reshape(-1), mine.reshape(-1))
    return counts


@st.composite
def index_shards(draw):
    """Any deal of one dimension: permuted, strided, held by several ranks, repeated inside a rank, ranks with nothing."""
    tp_size, size = draw(st.integers(1, 4)), draw(st.integers(0, 24))
    ranks = draw(st.lists(st.lists(st.integers(0, max(0, size - 1)), max_size=30), min_size=tp_size, max_size=tp_size))
    ranks = [r if size else [] for r in ranks]
    missing = sorted(set(range(size)) - {i for r in ranks for i in r})
    where = draw(st.integers(0, tp_size - 1))
    ranks[where] = ranks[where] + missing
    shape = draw(st.sampled_from([(size,), (size, 3), (2, size), (2, size, 3)]))
    return Shard.from_indices(shape, shape.index(size) if len(shape) == 1 else {(size, 3): 0}.get(shape, 1), ranks)


@quick
@given(index_shards(), st.sampled_from(DTYPES), st.integers(0, 9))
def test_any_indices_are_exact(shard, dtype, seed):
    check_inverse(shard, dtype, seed)
    assert bool((count_owners(shard) == 1).all())


@quick
@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 1), st.sampled_from(DTYPES))
def test_even_and_uneven(size, tp_size, dim, dtype):
    shape = (size, 3) if dim == 0 else (3, size)
    shard = Shard.even(shape, dim, tp_size)
    check_inverse(shard, dtype)
    widths = [shard.local_shape(rank)[dim] for rank in range(tp_size)]
    assert sum(widths) == size and max(widths) - min(widths) <= 1 and widths == sorted(widths, reverse=True)
    assert shard.holders == () and bool((count_owners(shard) == 1).all())
    assert shard.is_whole == (tp_size == 1)


@quick
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(sum), st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_packed_parts_are_cut_one_by_one(dealt, widths):
    units = sum(dealt)
    parts = tuple(width * units for width in widths)
    shard = Shard.dealt((sum(parts), 2), 0, dealt, parts)
    check_inverse(shard)
    full = random_full(shard.shape, torch.float32)
    pieces = full.split(parts)
    for rank, count in enumerate(dealt):
        before = sum(dealt[:rank])
        expected = torch.cat([p[w * before : w * (before + count)] for p, w in zip(pieces, widths, strict=True)])
        assert torch.equal(bits(shard.split(full, rank)), bits(expected))
    assert shard.is_whole == (len(dealt) == 1)


def test_interleaved_and_strided():
    heads, size = 6, 4  # per head q k v
    order = torch.arange(heads * 3 * size).view(heads, 3, size)
    interleaved = Shard.from_indices((heads * 3 * size, 5), 0, [order[:4].flatten().tolist(), order[4:].flatten().tolist()])
    check_inverse(interleaved)
    assert [len(runs) for runs in interleaved.cuts[0].runs] == [1, 1]
    queries = Shard.from_indices((heads * 3 * size,), 0, [order[:, :1].flatten().tolist(), order[:, 1:].flatten().tolist()])
    check_inverse(queries)
    assert queries.cuts[0].runs == (((0, 4, 12, 6),), ((4, 8, 12, 6),))


@pytest.mark.parametrize("rows", [8192, 8191])
def test_thousands_of_strided_rows_are_one_run(rows):
    indices = list(range(0, rows * 2, 2))
    shard = Shard.from_indices((rows * 2, 1), 0, [indices, [i + 1 for i in indices]])
    assert shard.cuts[0].runs == (((0, 1, 2, rows),), ((1, 1, 2, rows),))
    assert len(json.dumps(shard.to_json())) < 200
    full = torch.arange(rows * 2).view(-1, 1)
    assert torch.equal(shard.split(full, 1), full[1::2]) and torch.equal(shard.join([full[::2], full[1::2]]), full)


def test_held_by_several_ranks():
    kv = Shard.from_indices((4, 2), 0, [[0, 1], [0, 1], [2, 3], [2, 3]])
    check_inverse(kv)
    assert kv.holders == ((0, (0, 1), ((0, 2, 2, 1),)), (0, (2, 3), ((2, 2, 2, 1),)))
    assert kv.owned(0) == () and kv.owned(2) == ()
    ((dim, mask),) = kv.owned(1)
    assert dim == 0 and mask.tolist() == [False, False]
    parts = [kv.split(torch.zeros(4, 2), rank) + rank for rank in range(4)]
    assert kv.join(parts).flatten().tolist() == [0, 0, 0, 0, 2, 2, 2, 2]  # the lowest holder's value
    overlapping = Shard.from_indices((5,), 0, [[0, 1, 2], [2, 3, 4]])
    assert overlapping.holders == ((0, (0, 1), ((2, 1, 1, 1),)),)
    assert overlapping.owned(1)[0][1].tolist() == [False, True, True]


def test_repeated_inside_a_rank():
    shard = Shard.from_indices((4, 2), 0, [[0, 0, 1, 1], [2, 3, 3, 2]])
    check_inverse(shard)
    assert shard.holders == ()
    assert shard.owned(0)[0][1].tolist() == [True, False, True, False]
    assert shard.owned(1)[0][1].tolist() == [True, True, False, False]
    local = torch.tensor([[1.0], [2.0], [3.0], [4.0]]).expand(4, 2)
    full = torch.zeros(4, 2)
    shard.paste(full, local, 0)
    assert full[:, 0].tolist() == [1, 3, 0, 0]  # the first of a repeated index wins


@quick
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 4), st.integers(0, 4), st.integers(1, 2))
def test_two_dimensions(rows, cols, more_rows, more_cols, copies):
    """A grid of `rows` x `cols` blocks, each held by `copies` ranks: no element is lost, shared ones are owned once."""
    row_deal, col_deal = deal_units(rows + more_rows, rows), deal_units(cols + more_cols, cols)
    grid = [(r, c) for r in range(rows) for c in range(cols) for _ in range(copies)]
    shape = (rows + more_rows, 2, cols + more_cols)
    by_row = [list(range(sum(row_deal[:r]), sum(row_deal[: r + 1]))) for r, _ in grid]
    by_col = [list(range(sum(col_deal[:c]), sum(col_deal[: c + 1]))) for _, c in grid]
    # and_cut meets two one-dimensional shards of one tensor
    shard = Shard.from_indices(shape, 2, by_col).and_cut(Shard.from_indices(shape, 0, by_row))
    assert [cut.dim for cut in shard.cuts] == [0, 2]
    check_inverse(shard, torch.bfloat16)
    assert bool((count_owners(shard) == 1).all())
    if copies == 1:
        assert shard.holders == ()
    elif shard.tp_size > 1:
        with pytest.raises(PlanError, match="several cuts"):
            _ = shard.holders


def test_two_dimensions_permuted():
    shape = (4, 6)
    shard = Shard.from_indices(shape, 0, [[3, 0, 1, 2], [0, 1, 2, 3]]).and_cut(
        Shard.from_indices(shape, 1, [[4, 0, 2], [1, 3, 5]])
    )
    check_inverse(shard, torch.int8)
    assert bool((count_owners(shard) == 1).all())


def test_paste_leaves_the_rest():
    shard = Shard.even((5, 3), 0, 2)
    full = torch.full((5, 3), -1.0)
    shard.paste(full, torch.ones(2, 3), 1)
    assert full[:3].eq(-1).all() and full[3:].eq(1).all()
    transposed = torch.full((3, 5), -1.0).t()  # strides of the target do not matter
    shard.paste(transposed, torch.ones(2, 3), 1)
    assert torch.equal(transposed, full)


def test_split_is_a_view_where_it_can_be():
    full = torch.zeros(6, 4)
    assert Shard.even((6, 4), 0, 3).split(full, 1).data_ptr() == full[2:].data_ptr()
    assert Shard.whole((6, 4), 3).split(full, 1) is full


def test_whole():
    shard = Shard.whole((3, 2), 4)
    assert shard.is_whole and shard.owned(0) == () and shard.holders == () and shard.local_shape(3) == (3, 2)
    check_inverse(shard)
    one = Shard.dealt((12, 2), 0, (1,), (4, 4, 4))
    assert one.is_whole and one.owned(0) == ()
    assert Shard.from_indices((4,), 0, [[0, 1, 2, 3]] * 2).is_whole
    assert not Shard.from_indices((4,), 0, [[1, 0, 2, 3]] * 2).is_whole
    assert not Shard.from_indices((4,), 0, [[0, 1, 2, 3], []]).is_whole


def test_owned_is_fast_at_vocabulary_size():
    """Vectorised: a Python loop over 262,144 indices would allocate a list of that length for each rank."""
    size = 1 << 18
    shard = Shard.from_indices((size, 1), 0, [range(size // 2 + 7), range(size // 2, size)])
    ((_, mask),) = shard.owned(1)
    assert mask[:7].eq(False).all() and mask[7:].all()
    assert shard.holders == ((0, (0, 1), ((size // 2, 7, 7, 1),)),)


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize(
    "shard",
    [
        Shard.even((7, 4), 0, 2),
        Shard.even((7, 4), 1, 2),
        Shard.whole((7, 4), 3),
        Shard.dealt((12, 2), 0, (2, 1), parts=(6, 3, 3)),
        Shard.from_indices((6, 2), 0, [[0, 1, 2, 3], [2, 3, 4, 5]]),
    ],
)
def test_dealt_further_as_torch_chunks(shard, parts):
    full = torch.arange(prod(shard.shape)).reshape(shard.shape)
    further = shard.deal_further(0, parts)
    locals_ = [further.split(full, rank) for rank in range(further.tp_size)]
    for rank in range(shard.tp_size):
        chunks = [*shard.split(full, rank).chunk(parts), *[full[:0]] * parts]
        for chunk in range(parts):
            mine = locals_[chunk * shard.tp_size + rank]
            assert mine.numel() == chunks[chunk].numel() == 0 or torch.equal(mine, chunks[chunk])
    assert torch.equal(further.join(locals_), full)
    owned = 0
    for rank in range(further.tp_size):
        mine = locals_[rank]
        for dim, mask in further.owned(rank):
            mine = mine.index_select(dim, mask.nonzero().flatten())
        owned += mine.numel()
    assert owned == full.numel()


@quick
@given(st.lists(st.sets(st.integers(0, 9)), min_size=2, max_size=4), st.randoms())
def test_copied_says_where_the_copies_lie(sets, random):
    held = [list(own) for own in sets]
    held[0] += sorted(set(range(10)).difference(*sets))
    for own in held:
        random.shuffle(own)
    shard = Shard.from_indices((3, 10), 1, held)
    several = [i for i in range(10) if sum(i in own for own in held) > 1]
    if not several:
        assert shard.copied is None
        return
    dim, count, by_rank = shard.copied
    assert (dim, count) == (1, len(several))
    for own, (places, slots) in zip(held, by_rank, strict=True):
        at = take_runs(torch.arange(len(own)), 0, places).tolist()
        numbers = take_runs(torch.arange(count), 0, slots).tolist()
        assert [own[i] for i in at] == [several[i] for i in numbers]
        assert sorted(numbers) == [i for i, index in enumerate(several) if index in own]


def test_copied_refuses_what_repeats_inside_a_rank():
    assert Shard.even((6, 2), 0, 3).copied is None and Shard.whole((4,), 2).copied is None
    with pytest.raises(PlanError, match=r"rank 1 holds an index of dim 0 of shape .* twice"):
        _ = Shard.from_indices((3,), 0, [[0, 1], [2, 2]]).copied
    both = Shard.even((4, 4), 0, 2).and_cut(Shard.whole((4, 4), 2))
    assert both.copied is None


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Shard((4,), 2, (Cut(1, (((0, 2, 2, 1),), ((2, 2, 2, 1),))),)), "does not fit"),
        (lambda: Shard((4,), 2, (Cut(0, (((0, 4, 4, 1),),)),)), "over 1 ranks"),
        (lambda: Shard((4,), 1, (Cut(0, (((0, 5, 5, 1),),)),)), "leaves dim 0"),
        (lambda: Shard((4,), 1, (Cut(0, (((-1, 2, 2, 1),),)),)), "not a run"),
        (lambda: Shard((4,), 1, (Cut(0, (((0, 2, 1, 2),),)),)), "not a run"),
        (lambda: Shard((4,), 1, (Cut(0, (((0, 0, 1, 2),),)),)), "not a run"),
        (lambda: Shard.from_indices((4, 2), 0, [[0, 1], [3]]), "1 indices of dim 0 of shape .* held by no rank, first 2"),
        (lambda: Shard.dealt((10, 2), 0, (2, 1)), "not made of parts"),
        (lambda: Shard.dealt((10, 2), 0, (1, 1), (4, 4)), "not made of parts"),
        (lambda: Shard.even((2, 2), 0, 2).and_cut(Shard.even((2, 2), 1, 2)), "no rank that holds them"),
        (lambda: Shard.even((2, 2), 0, 2).and_cut(Shard.even((2, 2), 0, 2)), "different dimensions"),
        (
            lambda: Shard.from_indices((3, 3), 0, [[0, 1], [1, 2]]).and_cut(Shard.from_indices((3, 3), 1, [[0, 1], [1, 2]])),
            "overlapping blocks",
        ),
        (lambda: Shard.even((4,), 0, 2).split(torch.zeros(5), 0), "cannot split a tensor of shape"),
        (lambda: Shard.even((4,), 0, 2).paste(torch.zeros(4), torch.zeros(3), 0), "was given"),
        (lambda: Shard.even((4,), 0, 2).join([torch.zeros(2)]), "cannot join 1 parts"),
    ],
)
def test_bad_layouts_are_refused(make, words):
    with pytest.raises(PlanError, match=words):
        make()
