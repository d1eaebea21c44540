"""Masks that transformers is told it need not make: what it is told is what it would have found."""

import functools

import pytest
import torch
import torch.nn.functional as F
from transformers import masking_utils
from transformers.models.llama import modeling_llama

import autotp
from autotp.layers import masks
from autotp.layers.masks import skipping_masks, watch_positions
from tests.models import DENSE, tiny

FAMILIES = [*DENSE, "mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "gpt_oss", "opt", "bloom", "falcon", "gpt2", "gptj"]
SMALL = {"gpt2": dict(n_embd=64, n_layer=2, n_head=4), "gptj": dict(n_embd=64, n_layer=2, n_head=4, rotary_dim=8)}


@pytest.fixture
def asked(monkeypatch):
    """Each time that a mask is made: whether transformers was told without looking, and what it would have found."""
    calls = []
    told, find = masking_utils.find_packed_sequence_indices, masks._find_packed

    def ask(position_ids):
        looked = []
        monkeypatch.setattr(masks, "_find_packed", lambda ids: looked.append(1) or find(ids))
        found = told(position_ids)
        calls.append((not looked, found, find(position_ids)))
        return found

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", ask)
    return calls


@pytest.fixture
def capturing(monkeypatch):
    """As in the capture of a CUDA graph; the masks that attention was given."""
    given = []
    own = F.scaled_dot_product_attention

    def attend(*args, attn_mask=None, **kwargs):
        given.append(attn_mask)
        return own(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    return given


def ids_of(rows):
    return torch.randint(3, 100, (rows, 12), generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_told_is_what_would_be_found(family, asked):
    """Whatever the batch holds, padding tokens too."""
    model = tiny(family, **SMALL.get(family, {}))
    watch_positions(model)
    for rows in (1, 2):
        for ids in (ids_of(rows), torch.zeros(rows, 12, dtype=torch.long), ids_of(rows).index_fill(1, torch.tensor([3, 7]), 0)):
            model(input_ids=ids, use_cache=False)
    assert all(found is None and real is None for _, found, real in asked)
    if family in ("llama", "mistral", "qwen3", "gemma3_text", "mixtral"):  # and where it is asked at all, it does not look
        assert asked and all(told for told, _, _ in asked)


@pytest.mark.parametrize("inner", [False, True])
def test_packed_sequences_are_found_wherever_positions_come_from(inner, asked):
    model, packed = tiny("llama"), torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3])
    ids, called = ids_of(1), model.model if inner else model
    expected = called(input_ids=ids, position_ids=packed.unsqueeze(0), use_cache=False)[0]
    watch_positions(model)
    for given in (packed.unsqueeze(0), packed[None].clone(), packed.view(1, -1)):
        asked.clear()
        assert torch.equal(called(input_ids=ids, position_ids=given, use_cache=False)[0], expected)
        assert [told for told, _, _ in asked] == [False] and asked[0][2] is not None
    positional = called(ids, None, packed.unsqueeze(0), use_cache=False)[0]
    assert torch.equal(positional, expected)
    assert not torch.equal(called(input_ids=ids, use_cache=False)[0], expected)


def test_nothing_is_told_outside_of_the_forward_nor_after_one_that_failed(asked):
    model, row = tiny("llama"), torch.arange(12)
    handles = watch_positions(model)
    with pytest.raises(IndexError):
        model(input_ids=ids_of(1) + 1000, use_cache=False)
    asked.clear()
    masking_utils.find_packed_sequence_indices(row.unsqueeze(0))
    assert [told for told, _, _ in asked] == [False]
    for handle in handles:
        handle.remove()
    model(input_ids=ids_of(2), use_cache=False)
    assert [told for told, _, _ in asked] == [False, False]


def make_packed():
    """Positions `[1, 12]` of packed sequences, a view of one row as those that transformers makes."""
    return torch.cat([torch.arange(5), torch.arange(7)])[None]


def give_in_hook(model):
    model.register_forward_pre_hook(lambda _, args, kw: (args, {**kw, "position_ids": make_packed()}), with_kwargs=True)


def give_in_replaced_forward(model):
    own = model.forward
    model.forward = lambda position_ids=None, **kwargs: own(position_ids=make_packed(), **kwargs)


def give_in_subclass(model):
    class Packing(type(model)):
        def forward(self, input_ids=None, position_ids=None, **kwargs):
            return super().forward(input_ids=input_ids, position_ids=make_packed(), **kwargs)

    model.__class__ = Packing


def give_by_class(model, wraps=False):
    """A forward put in place of the class' own."""
    own = type(model).forward

    class Patched(type(model)):
        pass

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        return own(self, input_ids, position_ids=make_packed(), **kwargs)

    Patched.forward = functools.wraps(own)(forward) if wraps else forward
    model.__class__ = Patched


def give_in_wrapper(model):
    give_by_class(model, wraps=True)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("give", [give_in_hook, give_in_replaced_forward, give_in_subclass, give_by_class, give_in_wrapper])
def test_positions_that_others_give_in_the_forward_are_looked_at(give, first, inner, asked):
    """`first`: before it is watched; `inner`: to the model in the model."""
    model, ids = tiny("llama"), ids_of(1)
    expected = model(input_ids=ids, position_ids=make_packed(), use_cache=False)[0]
    for step in (give, lambda _: watch_positions(model)) if first else (lambda _: watch_positions(model), give):
        step(model.model if inner else model)
    asked.clear()
    assert torch.equal(model(input_ids=ids, use_cache=False)[0], expected)
    assert [told for told, _, _ in asked] == [False]


def test_positions_that_transformers_makes_of_the_batch_are_looked_at(asked):
    """As RoBERTa numbers tokens by what they are: padding in a row may seem to begin a sequence."""
    model, ids = tiny("llama"), ids_of(1).index_fill(1, torch.tensor([3, 7]), 0)
    made = {"__name__": "transformers.models.made_up", "own": type(model.model).forward}
    exec(
        "def forward(self, input_ids=None, position_ids=None, **kwargs):\n"
        "    return own(self, input_ids, position_ids=(input_ids != 0).cumsum(-1) - 1, **kwargs)",
        made,
    )
    model.model.__class__ = type("MadeUp", (type(model.model),), {"forward": made["forward"]})
    expected = model(input_ids=ids, use_cache=False)[0]
    watch_positions(model)
    assert torch.equal(model(input_ids=ids, use_cache=False)[0], expected)
    assert [told for told, _, _ in asked] == [False, False] and asked[0][2] is not None


@pytest.mark.parametrize("stops", [False, True])
def test_a_forward_that_is_called_without_its_hooks_is_looked_at(stops, asked):
    """In its own course, or after Ctrl-C."""
    model, ids, found = tiny("llama"), ids_of(1), []
    expected = model.model(input_ids=ids, position_ids=make_packed(), use_cache=False)[0]
    watch_positions(model)

    def call(*_):
        hook.remove()
        assert masking_utils.find_packed_sequence_indices(make_packed()) is not None
        if stops:
            raise KeyboardInterrupt
        found.append(model.model.forward(input_ids=ids, position_ids=make_packed(), use_cache=False)[0])

    hook = model.model.layers[0].register_forward_hook(call)
    if stops:
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=ids, use_cache=False)
        found.append(model.model.forward(input_ids=ids, position_ids=make_packed(), use_cache=False)[0])
    else:
        model(input_ids=ids, use_cache=False)
    assert torch.equal(found[0], expected)


def test_positions_that_a_patch_of_the_mask_gives_are_looked_at(monkeypatch, asked):
    model, ids = tiny("llama"), ids_of(1)
    own = modeling_llama.create_causal_mask
    monkeypatch.setattr(
        modeling_llama, "create_causal_mask", lambda *args, **kw: own(*args, **{**kw, "position_ids": make_packed()})
    )
    expected = model(input_ids=ids, use_cache=False)[0]
    watch_positions(model)
    assert torch.equal(model(input_ids=ids, use_cache=False)[0], expected)
    assert [told for told, _, _ in asked] == [False, False]


@pytest.mark.parametrize("stops", [False, True])
def test_models_that_run_amid_another_ones_forward_are_looked_at(stops, asked):
    """In a hook, as a teacher may, or after Ctrl-C, which ends a forward without its hooks; of the same config, even."""
    model = tiny("llama")
    other, ids, found = type(model)(model.config), ids_of(1), []
    expected = other(input_ids=ids, position_ids=make_packed().clone(), use_cache=False)[0]
    watch_positions(model)

    def interrupt(*_):
        if stops:
            raise KeyboardInterrupt
        found.append(other(input_ids=ids, position_ids=make_packed(), use_cache=False)[0])

    model.model.layers[0].register_forward_hook(interrupt)
    if stops:
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=ids, use_cache=False)
        found.append(other(input_ids=ids, position_ids=make_packed(), use_cache=False)[0])
    else:
        model(input_ids=ids, use_cache=False)
    assert torch.equal(found[0], expected)
    model.model.layers[0]._forward_hooks.clear()
    asked.clear()
    model(input_ids=ids, use_cache=False)
    assert [told for told, _, _ in asked] == [True]


def count_looks(group, options):
    """How often a parallelized model looks for packed sequences: in steps without positions, and in one with them."""
    model, looks, find = autotp.parallelize(tiny("llama"), group, **options).train(), [], masks._find_packed
    masks._find_packed = lambda ids: looks.append(1) or find(ids)
    try:
        for given in ({}, {}, {"position_ids": make_packed()}):
            if given:
                assert looks == []
            model(input_ids=ids_of(1), labels=ids_of(1), use_cache=False, **given).loss.backward()
    finally:
        masks._find_packed = find
    return len(looks)


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}, {"precision": autotp.Recipe(least=16)}], ids=str)
def test_a_parallelized_model_does_not_look(options, ranks):
    assert ranks.run(count_looks, options, size=2) == [1, 1]


def test_a_capture_makes_no_masks_that_nobody_needs(capturing):
    model, ids = tiny("llama"), ids_of(2)
    model(input_ids=ids, use_cache=False)
    assert capturing and all(mask is not None for mask in capturing)  # transformers by itself
    expected = model(input_ids=ids, use_cache=False).logits
    capturing.clear()
    watch_positions(model)
    found = model(input_ids=ids, use_cache=False).logits
    assert capturing and all(mask is None for mask in capturing)
    torch.testing.assert_close(found, expected)


def test_a_capture_keeps_masks_of_padding_and_of_packing(capturing):
    model, ids = tiny("llama"), ids_of(2)
    watch_positions(model)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    model(input_ids=ids, attention_mask=mask, use_cache=False)
    model(input_ids=ids, position_ids=torch.arange(12).expand(2, -1) % 6, use_cache=False)
    assert len(capturing) == 2 * model.config.num_hidden_layers and all(given is not None for given in capturing)


def test_masks_are_skipped_where_the_caller_says_so(capturing):
    model, ids = tiny("llama"), ids_of(1)
    positions, cached = torch.arange(12)[None], model.config.num_hidden_layers
    with skipping_masks():
        model(input_ids=ids, position_ids=positions, use_cache=True)
    assert len(capturing) == cached and all(mask is None for mask in capturing)
