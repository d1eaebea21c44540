"""What a captured step depends on: each change of a model shows, and what may change freely does not."""

import gc
import types
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from autotp.generation.fingerprint import Fingerprint
from tests.models import tiny


def attention(model):
    return model.model.layers[1].self_attn


def set_items(model, name, value):
    setattr(attention(model), name, value)


def put_forward(model, factor):
    layer = attention(model)
    layer.forward = types.MethodType(lambda self, *args, **kwargs: factor, layer)


def load_other_weights(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def change_data(model):
    attention(model).q_proj.weight.data = attention(model).q_proj.weight.data.clone()


def narrow(model):
    weight = attention(model).q_proj.weight
    weight.data = weight.data.view(torch.float16)[:, :64]  # where it was


def replace_module(model):
    model.model.layers[1].mlp.act_fn = nn.ReLU()


def append_layer(model):
    model.model.layers.append(nn.Identity())


def remove_module(model):
    model.model.norm = None


CHANGES = {
    "a number": lambda model: set_items(model, "scaling", 2.0),
    "a number gone": lambda model: delattr(attention(model), "scaling"),
    "None for a number": lambda model: set_items(model, "scaling", None),
    "a new name": lambda model: set_items(model, "more", None),
    "another name": lambda model: (delattr(attention(model), "scaling"), set_items(model, "other", 1.0)),
    "in a list": lambda model: attention(model).names.append("b"),
    "in a dictionary": lambda model: attention(model).table.update(a=2),
    "in a tuple": lambda model: set_items(model, "pair", (1, 3)),
    "a tuple of objects and numbers": lambda model: set_items(model, "mixed", (object(), 2)),
    "a callable": lambda model: set_items(model, "called", lambda: 1),
    "a callable for an object": lambda model: set_items(model, "thing", lambda: 1),
    "in a list of lists": lambda model: attention(model).nested[0].append(2),
    "in a dictionary of dictionaries": lambda model: attention(model).tables["a"].update(b=2),
    "in a list in a tuple": lambda model: attention(model).holder[0].append(2),
    "the config": lambda model: setattr(model.config, "logits_scaling", 7.0),
    "a number for an object": lambda model: set_items(model, "thing", 1),
    "a forward": lambda model: set_items(model, "forward", attention(model).forward),
    "a hook": lambda model: attention(model).register_forward_hook(lambda *args: None),
    "a hook before": lambda model: attention(model).register_forward_pre_hook(lambda *args: None),
    "training": lambda model: attention(model).train(),
    "a class": lambda model: setattr(attention(model), "__class__", type("Other", (type(attention(model)),), {})),
    "attention": lambda model: model.set_attn_implementation("eager"),
    "weights": load_other_weights,
    "data": change_data,
    "a dtype": narrow,
    "a parameter gone": lambda model: setattr(attention(model).q_proj, "weight", None),
    "a buffer": lambda model: attention(model).register_buffer("more", torch.ones(1)),
    "a module": replace_module,
    "one more module": append_layer,
    "a module gone": remove_module,
}
FREE = {
    "an equal number": lambda model: set_items(model, "large", float("1e30")),
    "another object": lambda model: set_items(model, "thing", object()),
    "an object of another class": lambda model: set_items(model, "thing", Exception()),
    "a tensor": lambda model: set_items(model, "kept", torch.zeros(3)),
    "objects in a list": lambda model: attention(model).names.append(object()),
    "an equal list": lambda model: set_items(model, "names", ["a"]),
    "what transformers notes": lambda model: setattr(model, "_previous_max_cache_length", 5),
    "what a weight holds": lambda model: attention(model).q_proj.weight.data.zero_(),
}


def make():
    model = tiny("llama").eval()
    for name, value in dict(
        names=["a"], table={"a": 1}, pair=(1, 2), mixed=(object(), 1), called=lambda: 0, thing=object(), large=float("1e30"),
        kept=torch.ones(3), nested=[[1], []], tables={"a": {"b": 1}}, holder=([1], 2),
    ).items():  # fmt: skip
        setattr(attention(model), name, value)
    return model


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_shows(name):
    model = make()
    seen = Fingerprint(model)
    assert seen.holds(model)
    CHANGES[name](model)
    assert not seen.holds(model) and Fingerprint(model).holds(model)


def test_a_forward_shows_that_lies_where_another_lay():
    model = make()
    put_forward(model, 1)
    seen = Fingerprint(model)
    del attention(model).forward
    put_forward(model, 2)
    assert not seen.holds(model)


def test_a_config_in_the_models_shows():
    model: Any = nn.Linear(1, 1)
    text = types.SimpleNamespace(window=4)
    model.config = types.SimpleNamespace(sub_configs={"text_config": type(text)}, text_config=text)
    seen = Fingerprint(model)
    assert seen.holds(model)
    text.window = 2
    assert not seen.holds(model)


@pytest.mark.parametrize("name", FREE)
def test_what_may_change_does_not_show(name):
    model = make()
    seen = Fingerprint(model)
    FREE[name](model)
    assert seen.holds(model)


def test_settings_of_the_process_show():
    model = make()
    seen = Fingerprint(model)
    for register in (nn.modules.module.register_module_forward_hook, nn.modules.module.register_module_forward_pre_hook):
        hook = register(lambda *args: None)
        assert not seen.holds(model)
        hook.remove()
    with torch.autocast("cpu"):
        assert not seen.holds(model)
    try:
        torch.use_deterministic_algorithms(True)
        assert not seen.holds(model)
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert not seen.holds(model)
    assert seen.holds(model)


def test_nothing_of_the_model_is_kept_alive():
    model = make()
    weight, module = weakref.ref(attention(model).q_proj.weight), weakref.ref(model.model.layers[1].mlp)
    called, kept = weakref.ref(attention(model).called), weakref.ref(attention(model).kept)
    seen = Fingerprint(model)
    del attention(model).called, attention(model).kept
    model.model.layers[1].mlp = nn.Identity()
    attention(model).q_proj.weight = nn.Parameter(torch.ones(1))
    gc.collect()
    assert [each() for each in (weight, module, called, kept)] == [None] * 4
    assert not seen.holds(model)
