"""Replacement forwards: a function that stands for a module's own forward, once it is seen to compute the same.

The module's class becomes a subclass of the same name that has the function as its forward, so that checkpointing and rewritten
calls work as with any other. Both forwards are run on the arguments that the whole model gives the module, in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ..errors import PlanError, ProofError
from .arguments import copy_arguments
from .compare import compare, compare_gradient
from .intercept import Interceptor, flatten, keep_state, running
from .record import ModuleCall
from .shadow import Shadow

Forward = Callable[..., Any]
TRIED = "tried_with"  # the attribute of a module with a replaced forward that says what must be as it was


def name_forward(function: Forward) -> str:
    """`module:qualified name`, by which a plan knows a replacement forward."""
    return f"{function.__module__}:{function.__qualname__}"


def find_forward(forwards: Mapping[str, Forward], module: str, label: str) -> Forward:
    """The function that a plan calls `label`.

    Raises:
        PlanError: it was not given, or another was.
    """
    function = forwards.get(module)
    if function is None or name_forward(function) != label:
        given = "none was given" if function is None else f"{name_forward(function)} was given"
        raise PlanError(
            f"{module}: the plan was proved with the replacement forward {label}, which no plan can hold, and {given}: "
            f"pass attrs={{{module!r}: {{'forward': {label.rpartition('.')[2].rpartition(':')[2]}}}}} beside the plan"
        )
    return function


def replace_forward(module: nn.Module, name: str, function: Forward, tried: tuple[tuple[Any, Any], ...] = ()) -> None:
    """Give `module` `function(module, ...)` as its forward; nothing where it has it already.

    Args:
        tried: what `function` may ask `is_as_tried` about: name of an attribute or child, or `(child, its attribute)`; and value.

    Raises:
        PlanError: something else replaced its forward before.
    """
    if any(base.__dict__.get("replaced_by") == (function,) for base in type(module).__mro__):
        return
    if "forward" in module.__dict__:
        raise PlanError(f"{name}: its forward was replaced on the module itself already. Undo that first.")
    module.__class__ = _replaced_class(type(module), function)
    if tried:
        module.__dict__[TRIED] = tried


def is_as_tried(module: nn.Module) -> bool:
    """Whether the attributes and children that `replace_forward` noted are still those; a deepcopy has copies of both."""
    own, children = module.__dict__, module._modules
    for key, value in own.get(TRIED, ()):
        now = own[key] if key in own else children.get(key) if type(key) is str else getattr(children.get(key[0]), key[1], None)
        if now is not value and not (isinstance(value, float | str) and now == value):
            return False
    return True


def differentiates_forward() -> bool:
    """Whether torch.func or forward-mode AD is at work, which our functions don't take part in."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


@functools.lru_cache(maxsize=256)
def _replaced_class(cls: type, function: Forward) -> type:
    added = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "plain_class": cls}
    return type(cls.__name__, (cls,), {**added, "replaced_by": (function,), "forward": function})


def remove_forward(module: nn.Module) -> None:
    """Give `module` the class that it had before `replace_forward`; nothing where it has no replacement.

    Raises:
        PlanError: another class was put in front since.
    """
    cls = type(module)
    module.__dict__.pop(TRIED, None)
    if "replaced_by" in cls.__dict__:
        module.__class__ = cls.__dict__["plain_class"]
    elif any("replaced_by" in base.__dict__ for base in cls.__mro__):
        raise PlanError(f"{cls.__name__}: a class was put in front of its replacement forward. Undo that first.")


def prove_forward(shadow: Shadow, name: str, function: Forward, calls: Sequence[ModuleCall]) -> None:
    """Run a module's own forward and `function` on `calls`, with numbers for all Parameters, and compare all that comes out.

    Afterwards `shadow` has the replacement there, and is of no use to look for sites.

    Raises:
        PlanError: no call, or a forward that can't be replaced.
        ProofError: an output or a gradient differs.
    """
    module, label = shadow.model.get_submodule(name), name_forward(function)
    if not calls:
        raise PlanError(f"{name}: no example call runs it, so {label} can't be proved: give inputs= that do, or leave it out")
    shadow.transparent |= set(shadow.parameters)
    cls = type(module)
    expected = [_run(shadow, module, call) for call in calls]
    replace_forward(module, name, function)
    try:
        for call, before in zip(calls, expected, strict=True):
            _compare(shadow, name, before, _run(shadow, module, call))
    except Exception as error:
        said = f"{type(error).__name__}: {error}" if not isinstance(error, ProofError) else str(error)
        raise ProofError(
            f"{name}: the replacement forward {label} does not compute what {cls.__name__}.forward does: {said}. Mend it, or "
            f"leave it out of attrs."
        ) from error
    finally:
        shadow.real.clear()


Run = tuple[Any, dict[str, Tensor]]  # what a forward returned, and the floating tensors of its arguments by number


def _run(shadow: Shadow, module: nn.Module, call: ModuleCall) -> Run:
    leaves: dict[str, Tensor] = {}

    def leaf(tensor: Tensor) -> Tensor:
        made = tensor.detach().clone()
        if not made.is_floating_point():
            return made
        leaves[f"floating argument {len(leaves)}"] = made.requires_grad_()
        return made.clone()  # which may be written into

    args, kwargs = copy_arguments((call.args, call.kwargs), leaf)
    with keep_state(shadow.model), running(), Interceptor(shadow, _answer):
        return module(*args, **kwargs), leaves


def _answer(op: Any, name: str, *_: Any) -> Tensor:
    raise ProofError(f"{name} was read as a site")  # all Parameters are transparent


def _compare(shadow: Shadow, name: str, expected: Run, got: Run) -> None:
    """Raise unless two runs returned the same and pull the same random cotangents back to the same gradients."""
    forms = [(type(output), len(output) if isinstance(output, tuple | list) else None) for output, _ in (expected, got)]
    if forms[0] != forms[1]:
        raise ProofError(f"it returns a {_spell(forms[1])}, not a {_spell(forms[0])}")
    wholes, values = ([t for t in flatten(output)] for output, _ in (expected, got))
    if len(wholes) != len(values):
        raise ProofError(f"it returns {len(values)} tensors, not {len(wholes)}")
    for number, (whole, value) in enumerate(zip(wholes, values, strict=True)):
        compare(value, whole, f"output {number}")
    prefix = f"{name}." if name else ""
    own = {n: shadow.leaf(n) for n in shadow.parameters if n.startswith(prefix)}
    own = {n: leaf for n, leaf in own.items() if leaf.requires_grad and not leaf.is_meta}
    for (what, whole), value in zip(_pull(expected, wholes, own).items(), _pull(got, values, own).values(), strict=True):
        compare_gradient(value, whole, f"the gradient of {what}", None)


def _spell(form: tuple[type, int | None]) -> str:
    return form[0].__name__ + (f" of {form[1]}" if form[1] is not None else "")


def _pull(run: Run, outputs: list[Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of random sums of the outputs, zeros where there is no path."""
    generator = torch.Generator().manual_seed(0)
    at = {**run[1], **parameters}
    drawn = [(t, torch.randn(t.shape, generator=generator, dtype=torch.float64)) for t in outputs if t.is_floating_point()]
    pairs = [(t, cotangent) for t, cotangent in drawn if t.requires_grad]
    if not pairs or not at:
        return {name: torch.zeros_like(leaf) for name, leaf in at.items()}
    tensors, cotangents = zip(*pairs, strict=True)
    grads = torch.autograd.grad(tensors, list(at.values()), cotangents, allow_unused=True)
    return {name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in zip(at.items(), grads, strict=True)}
