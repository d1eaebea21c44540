"""What norms and gates hand to the FP8 linears that read them: who takes it, who does not, and that no number changes."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

import autotp
from autotp.comm import TPGroup
from autotp.groups import resolve_group
from autotp.kernels.fp8 import Recipe
from autotp.layers.handover import Handover, find_source, remove_source
from tests.models import batch, tiny

from .test_fp8 import STYLES, gradients

FUSED = ["self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj"]  # by the name of the first of siblings; o_proj reads attention


def build(recipe, group=None, dealt=False, **sizes):
    model = tiny("llama", **sizes).train()
    inputs = batch(model, rows=4, length=8)
    inputs["labels"] = inputs["input_ids"]
    group = group or TPGroup(None, torch.device("cpu"))
    plan = STYLES if group.tp_size == 1 else "auto"
    autotp.parallelize(model, group, plan=plan, precision=recipe, logits="full", sequence_parallel=dealt)
    return model, inputs


def take_apart(model):
    """A copy whose norms and gates hand over nothing."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        remove_source(module)
    return twin


@pytest.fixture
def taken(monkeypatch):
    """Names of the linears that took what was begun, in the forwards since it was cleared."""
    found, take = [], Handover.take

    def spy(self, reader, x, wish):
        begun = take(self, reader, x, wish)
        if begun is not None:
            found.append(reader.name.removeprefix("model.layers."))
        return begun

    monkeypatch.setattr(Handover, "take", spy)
    return found


def in_layers(names):
    return [f"{layer}.{name}" for layer in (0, 1) for name in names]


def check_same(model, apart, inputs):
    for _ in range(2):
        found, expected = gradients(model, inputs), gradients(apart, inputs)
        assert found and all(torch.equal(grad, expected[name]) for name, grad in found.items())


TRITON = ",".join(f"{op}=triton" for op in ("norm_begun", "norm_forward", "gated_begun", "gated_forward"))


@pytest.mark.parametrize(
    ("scaling", "backend"), [("tensorwise", "auto"), ("rowwise", "auto"), ("blockwise", "auto"), ("rowwise", TRITON)]
)
def test_the_second_forward_hands_over_and_no_gradient_changes(taken, monkeypatch, scaling, backend):
    monkeypatch.setenv("AUTOTP_BACKEND", backend)
    sizes = dict(hidden_size=128, intermediate_size=128) if scaling == "blockwise" else {}
    model, inputs = build(Recipe(scaling, least=16), **sizes)
    apart = take_apart(model)
    gradients(model, inputs)
    assert taken == []
    gradients(model, inputs)
    assert taken == in_layers(FUSED if scaling != "blockwise" else FUSED[1:])
    check_same(model, apart, inputs)


def test_however_it_is_reached(taken):
    """Checkpoints of both kinds, frozen weights, a copy, no gradient, and each grad mode for itself."""
    model, inputs = build(Recipe("rowwise", least=16))
    apart = take_apart(model)
    for reentrant in (False, True):
        for each in (model, apart):
            each.gradient_checkpointing_enable({"use_reentrant": reentrant})
        check_same(model, apart, inputs)
        for each in (model, apart):
            each.gradient_checkpointing_disable()
    for each in (model, apart):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("norm" in name)
    check_same(model, apart, inputs)
    check_same(copy.deepcopy(model), apart, inputs)
    taken.clear()
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, apart(**inputs).logits)
        assert taken == in_layers(FUSED)  # such forwards ran in checkpoints before


def double_in_place(module, args, output):
    output.mul_(2)


def double_data(module, args, output):
    output.data = 2 * output.data  # which no version counts


def double(module, args, output):
    return 2 * output


def read_copy(module, args):
    return (args[0].clone(),)


@pytest.mark.parametrize("hook", [double_in_place, double_data, double, read_copy])
def test_what_changes_between_the_two_is_seen(taken, hook):
    model, inputs = build(Recipe("tensorwise", least=16))
    apart = take_apart(model)
    check_same(model, apart, inputs)
    for each in (model, apart):
        layer = each.model.layers[1]
        if hook is read_copy:
            layer.mlp.down_proj.register_forward_pre_hook(hook)
        else:
            layer.post_attention_layernorm.register_forward_hook(hook)
    taken.clear()
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(**inputs).logits, apart(**inputs).logits)
        layer, missing = model.model.layers[1], "1.mlp.down_proj" if hook is read_copy else "1.mlp.gate_proj"
        source = find_source(layer.mlp if hook is read_copy else layer.post_attention_layernorm)
        assert source.begin(torch.zeros(32, 64)) is None  # nobody takes it: nothing is begun
    assert taken == [name for name in in_layers(FUSED) if name != missing]


def test_weights_kept_in_fp8_read_it_too(taken):
    model, inputs = build(Recipe("rowwise", least=16, weights_only=True))
    del inputs["labels"]
    apart = take_apart(model.eval())
    with torch.no_grad():
        expected = apart(**inputs).logits
        assert all(torch.equal(model(**inputs).logits, expected) for _ in range(2))
        assert taken == in_layers(FUSED)
        few = {name: tensor[:1] for name, tensor in inputs.items()}
        taken.clear()
        assert torch.equal(model(**few).logits, apart(**few).logits) and taken == []
        model(**inputs)
        assert taken == in_layers(FUSED)  # few rows in between are no news


def test_nothing_is_kept_that_is_not_needed(taken):
    model, inputs = build(Recipe("rowwise", least=16))
    gradients(model, inputs)
    alive, offer = [], type(find_source(model.model.layers[0].mlp)).offer

    def spy(self, y, wish):
        if wish is not None:
            rows = wish.begun.row_bits if wish.begun.rows is None else wish.begun.rows.values
            alive.extend(map(weakref.ref, (rows, wish.begun.column_bits)))
        offer(self, y, wish)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(find_source(model.model.layers[0].mlp)), "offer", spy)
        loss = model(**inputs).loss
    gc.collect()
    assert len(alive) == 12 and not any(each() is not None for each in alive)
    loss.backward()


def test_what_is_kept_is_no_part_of_a_copy_or_a_file(taken):
    model, inputs = build(Recipe("rowwise", least=16))
    gradients(model, inputs)
    source = find_source(model.model.layers[0].mlp)
    assert source.wishes and source.handover is find_source(model.model.layers[1].mlp).handover
    twin = copy.deepcopy(model)
    other = find_source(twin.model.layers[0].mlp)
    assert other.handover is find_source(twin.model.layers[1].mlp).handover is twin.model.layers[0].mlp.down_proj.scaling.handover
    assert other.handover is not source.handover and not other.wishes
    assert not pickle.loads(pickle.dumps(source)).wishes
    autotp.unshard(model)
    assert not any(find_source(module) for module in model.modules())


def ranks_run(group, scaling, dealt):
    model, inputs = build(Recipe(scaling, least=16), resolve_group(group), dealt)
    apart, found = take_apart(model), []
    take = Handover.take

    def spy(self, reader, x, wish):
        begun = take(self, reader, x, wish)
        found.append(begun is not None)
        return begun

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handover, "take", spy)
        for _ in range(2):
            ours = gradients(model, inputs)
    assert sum(found) == 2 if dealt else 6  # what norms give is gathered first
    expected = gradients(apart, inputs)
    return all(torch.equal(grad, expected[name]) for name, grad in ours.items())


@pytest.mark.parametrize(("scaling", "dealt"), [("tensorwise", False), ("rowwise", False), ("tensorwise", True)])
def test_over_ranks_no_gradient_changes(ranks, scaling, dealt):
    """The down projection's input is cut: its scales are those of all ranks' parts."""
    assert all(ranks.run(ranks_run, scaling, dealt))
