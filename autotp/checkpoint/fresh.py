"""Values for what a checkpoint lacks: transformers' own initialization, drawn whole by one rank, of which all get their parts."""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch
from torch import Tensor, nn

from ..errors import CheckpointError

_FLAG = "_is_hf_initialized"  # by which transformers' initialization knows what it must leave alone


def can_draw(model: nn.Module) -> bool:
    """Whether transformers knows how the tensors of `model` begin."""
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def draw_tensors(model: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """What transformers initializes the tensors `names` of a model on meta with, whole, on the CPU; `model` is left alone.

    Drawn from the default generator, which is left as it was; in transformers' own order, so that under one seed they are what
    its `from_pretrained` gives, but where the rules of other modules draw for nothing.

    Raises:
        CheckpointError: the model's class does not say how one of them begins.
    """
    twin: nn.Module = copy.deepcopy(model)
    source_of = getattr(twin, "all_tied_weights_keys", None) or {}  # a tied tensor is drawn once, under the name it is tied to
    places = {name: source_of.get(name, name) for name in names}
    for tensor in [*twin.parameters(), *twin.buffers()]:
        setattr(tensor, _FLAG, True)
    drawn = {name: _make_undrawn(twin, place) for name, place in places.items()}
    above = {place[:end] for place in places.values() for end in [0, *(i for i, c in enumerate(place) if c == ".")]}
    for path, module in twin.named_modules(remove_duplicate=False):
        setattr(module, _FLAG, path not in above)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        twin.initialize_weights()  # type: ignore[operator]
    for name, tensor in drawn.items():
        if tensor.is_floating_point() and tensor.isnan().any():
            raise CheckpointError(
                f"the checkpoint lacks '{name}', and {type(model).__name__} does not say what a new one holds: add it to the "
                f"checkpoint, or give _init_weights of the model's class a rule for it"
            )
    return drawn


def _make_undrawn(twin: nn.Module, name: str) -> Tensor:
    """A tensor on the CPU in the place of `name`: a parameter of NaN, or a buffer as it was constructed."""
    path, _, own = name.rpartition(".")
    module = twin.get_submodule(path)
    old = module._parameters.get(own)
    if old is None:
        full = twin.get_buffer(name).clone()
        module._buffers[own] = full
        return full
    full = torch.full(old.shape, torch.nan if old.is_floating_point() else 0, dtype=old.dtype)
    module._parameters[own] = nn.Parameter(full, old.requires_grad)
    return full
