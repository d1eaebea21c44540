"""Fused forwards for norms, gated MLPs, experts and rotary embeddings, found by what a module computes and never by its name.

A module is tried out by itself: on random numbers, with stand-ins for its parameters and for the linears in it. Where it computes
what a fused kernel does, outputs and gradients, in training and in evaluation, the kernel takes its place. What it was tried with
is what the kernel runs for; any other call (another dtype, autocast, more arguments) goes to the module's own forward, and so
does torch.compile, which fuses that itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..errors import PlanError
from ..kernels.gated import gated
from ..kernels.norm import norm
from ..kernels.reference import ACTIVATIONS
from ..layers.gated_pair import multiply_gated
from ..layers.pending import PendingSum, settle
from .draws import keep_random
from .experts import experts_forward, find_experts
from .forwards import differentiates_forward, is_as_tried, replace_forward
from .plan import Fusion, Plan
from .residual import find_residual, read_shift, rewrite_residual
from .rotary import find_rotary, rewrite_rotary
from .trial import HALVES, OWN, Answer, agree, agree_loosely, make_twin, number_kinds, run_twin, trying

SCALES = (1.0, 3e-3, 1e3)  # of the inputs: the small one tells values of eps apart, the large one reaches what is clamped
HOW = (*((scale, torch.float64) for scale in SCALES), *((1.0, dtype) for dtype in HALVES))
EPSILONS = (1e-5, 1e-6)
NORMS = ("rms", "rms1p", "layernorm")
MOST_COLUMNS = 1 << 16  # of a linear that a stand-in answers for


@keep_random()
@trying()
def find_fusions(model: nn.Module) -> tuple[Fusion, ...]:
    """What can run fused in `model`; reads no weight, so meta will do."""
    found, kinds = [], number_kinds(model)
    tried: dict[int, list[Fusion]] = {}
    for name, module in model.named_modules():
        if "forward" in module.__dict__ or any("replaced_by" in base.__dict__ for base in type(module).__mro__):
            continue
        kind = kinds[id(module)]
        if kind not in tried:
            tried[kind] = list(_try_all(name, module))
        found += [replace(fusion, name=name) for fusion in tried[kind]]
    norms = {fusion.name for fusion in found if fusion.kind in NORMS}
    busy = {fusion.name for fusion in found}
    for name, module in model.named_modules():
        own = {child for child in module._modules if f"{name}.{child}".lstrip(".") in norms}
        if own and name not in busy and (fusion := find_residual(name, module, own)) is not None:
            found.append(fusion)
    return tuple(found)


def _try_all(name: str, module: nn.Module) -> Iterator[Fusion]:
    for find in (find_norm, find_gated, find_rotary, find_experts):
        with suppress(Exception):  # a forward tried out on what it was not made for may fail in any way: it is left as it is
            if (fusion := find(name, module)) is not None:
                yield fusion


def check_fusions(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan that runs something fused which does not compute the same.

    Raises:
        PlanError: naming it.
    """
    known = set(find_fusions(model)) if plan.fused else set()
    for fusion in plan.fused:
        if fusion not in known:
            raise PlanError(
                f"{fusion.name}: the plan runs it as {fusion.describe()}, which is not what it computes. Make the plan again."
            )


@keep_random()  # rank 0 has tried out what the others may have to
def fuse_modules(model: nn.Module, plan: Plan) -> None:
    """Give the modules of `plan.fused` their fused forwards; those that the plan gives another forward keep that."""
    for fusion in plan.fused:
        entry = plan.by_name.get(fusion.name)
        if entry is not None and (entry.norm or entry.forward or entry.fixes):
            continue
        module = model.get_submodule(fusion.name)
        if fusion.kind == "rotary":
            rewrite_rotary(module, fusion)
        elif fusion.kind == "add_norm":
            rewrite_residual(module, fusion)
        elif fusion.kind == "experts":
            forward = experts_forward(type(module).forward, fusion.variant, *fusion.parts)
            replace_forward(module, fusion.name, forward, _tried(module))
        elif fusion.kind == "gated_mlp":
            forward = gated_forward(type(module).forward, *fusion.parts, fusion.variant)
            replace_forward(module, fusion.name, forward, _tried(module, fusion.parts))
        else:
            forward = norm_forward(type(module).forward, fusion.kind, fusion.eps)
            replace_forward(module, fusion.name, forward, _tried(module))


def _tried(module: nn.Module, parts: tuple[str, ...] = ()) -> tuple[tuple[Any, Any], ...]:
    """Attributes and children of `module` that decide what it computes: whoever sets one (an activation, an eps) gets it.

    Not sizes, which sharding edits, nor the children `parts`, which are called as modules, nor objects like configs.
    """
    called = {part.partition("[")[0] for part in parts}
    children = {k: v for k, v in module._modules.items() if k not in called}
    inside = {(k, key): v for k, child in children.items() if child is not None for key, v in _plain(child).items()}
    return tuple((_plain(module) | children | inside).items())


def _plain(module: nn.Module) -> dict[Any, Any]:
    own = {k: v for k, v in vars(module).items() if k not in OWN and not k.startswith("_is_hf")}
    return {k: v for k, v in own.items() if v is None or isinstance(v, bool | float | str) or callable(v)}


# -- norms ----------------------------------------------------------------------------------------------------------------


def find_norm(name: str, module: nn.Module) -> Fusion | None:
    """A module that normalises its one argument over the last dimension and scales it by its own weight."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    others = [p for key, p in module._parameters.items() if key not in ("weight", "bias") and p is not None]
    if weight is None or weight.ndim != 1 or others or module._modules or type(module) is nn.LayerNorm:  # torch's is fused
        return None
    attributes = [value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1e-2]
    for kind in NORMS:
        for eps in dict.fromkeys([*attributes, *EPSILONS]):
            if (bias is None or kind == "layernorm") and all(_is_norm(module, kind, eps, scale) for scale in SCALES):
                return Fusion(name, kind, eps=eps) if all(_is_norm_in(module, kind, eps, dtype) for dtype in HALVES) else None
    return None


def _is_norm(module: nn.Module, kind: str, eps: float, scale: float) -> bool:
    twin = make_twin(module, {})
    x = (torch.randn(2, 3, twin.weight.numel(), dtype=torch.float64) * scale).requires_grad_()
    leaves = [x, twin.weight, *([] if twin._parameters.get("bias") is None else [twin.bias])]
    for mode in (True, False):
        got, want = run_twin(twin.train(mode), x), norm(x, twin.weight, twin._parameters.get("bias"), eps, kind)
        if not isinstance(got, Tensor) or not agree((got,), (want,), leaves):
            return False
    return True


def _is_norm_in(module: nn.Module, kind: str, eps: float, dtype: torch.dtype) -> bool:
    twin = make_twin(module, {}, dtype)
    x = torch.randn(2, 3, twin.weight.numel()).to(dtype)
    return agree_loosely((twin(x),), (norm(x, twin.weight, twin._parameters.get("bias"), eps, kind),))


@functools.lru_cache(maxsize=256)
def norm_forward(own: Callable[..., Any], kind: str, eps: float) -> Callable[..., Any]:
    """The forward of a norm; `own` is the one that it stands for."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or torch.compiler.is_compiling() or differentiates_forward() or not is_as_tried(self):
            return own(self, *args, **kwargs)
        (x,), weight, ready = args, self.weight, self.__dict__.pop("ready", None)
        if isinstance(x, PendingSum) and not torch.is_autocast_enabled(x.device.type):
            y = x.finish_with_norm(weight, read_shift(self, kind), eps, kind) if x.shape[-1:] == weight.shape else None
            if y is not None:
                return y
        x = settle(x)
        if ready is not None and x is ready[0] and (x._version, torch.is_grad_enabled()) == ready[1:3]:
            return ready[3]
        if x.dtype is not weight.dtype or x.shape[-1:] != weight.shape or torch.is_autocast_enabled(x.device.type):
            return own(self, x)
        return norm(x, weight, read_shift(self, kind), eps, kind)

    forward.fused_norm = kind, eps  # type: ignore[attr-defined]
    return forward


# -- gated MLPs -----------------------------------------------------------------------------------------------------------


def find_gated(name: str, module: nn.Module) -> Fusion | None:
    """`down(act(gate(x)) * up(x))`, or the same with gate and up in one linear whose halves they are."""
    linears = {key: child for key, child in module._modules.items() if isinstance(child, nn.Linear | Conv1D)}
    dropouts = any(isinstance(child, nn.modules.dropout._DropoutNd) for child in module._modules.values())  # p may be set later
    if len(linears) not in (2, 3) or module._parameters or dropouts:
        return None
    for down, *ins in permutations(linears):
        if len(ins) == 2 and ins != sorted(ins, key=list(linears).index):
            continue
        found = _try_gated(module, linears, down, ins)
        if found is not None:
            gate, up, activation = found
            return Fusion(name, "gated_mlp", parts=(gate, up, down), variant=activation)
    return None


def _sizes(linear: Any) -> tuple[int, int]:
    return (linear.nx, linear.nf) if isinstance(linear, Conv1D) else (linear.in_features, linear.out_features)


def _try_gated(module: nn.Module, linears: Mapping[str, nn.Module], down: str, ins: list[str]) -> tuple[str, str, str] | None:
    """`(gate, up, activation)`, `linear[0]` being the first half of its columns; None if the module computes something else."""
    width, out = _sizes(linears[down])
    shapes = [_sizes(linears[key])[1] for key in ins]
    if shapes != ([width, width] if len(ins) == 2 else [2 * width]) or max(shapes) > MOST_COLUMNS:
        return None
    found: set[tuple[str, str, str]] | None = None
    for mode, (scale, dtype) in product((True, False), HOW):
        drawn = [(torch.randn(1, 3, n, dtype=torch.float64) * scale).to(dtype) for n in shapes]
        answers = {key: answer.requires_grad_() for key, answer in zip(ins, drawn, strict=True)}
        stubs = {key: Answer(answer) for key, answer in answers.items()} | {down: Answer(torch.randn(1, 3, out, dtype=dtype))}
        x = torch.randn(1, 3, _sizes(linears[ins[0]])[0]).to(dtype)
        result = run_twin(make_twin(module, dict(stubs), dtype).train(mode), x)
        once = all(len(stub.calls) == 1 and len(stub.calls[0][0]) == 1 and not stub.calls[0][1] for stub in stubs.values())
        if not once or result is not stubs[down].answer or any(stubs[key].calls[0][0][0] is not x for key in ins):
            return None
        hidden, halves = stubs[down].calls[0][0][0], list(_halves(answers, ins))
        fit = agree_loosely if dtype in HALVES else functools.partial(agree, leaves=list(answers.values()))
        fits = {
            (gate, up, act)
            for gate, up, a, b in halves
            for act in ACTIVATIONS
            if (found is None or (gate, up, act) in found) and fit((hidden,), (gated(a, b, act),))
        }
        found = fits
        if not found:
            return None
    return min(found) if found else None


def _halves(answers: dict[str, Tensor], ins: list[str]) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    if len(ins) == 2:
        first, second = ins
        yield first, second, answers[first], answers[second]
        yield second, first, answers[second], answers[first]
    else:
        a, b = answers[ins[0]].chunk(2, -1)
        yield f"{ins[0]}[0]", f"{ins[0]}[1]", a, b
        yield f"{ins[0]}[1]", f"{ins[0]}[0]", b, a


@functools.lru_cache(maxsize=256)
def gated_forward(own: Callable[..., Any], gate: str, up: str, down: str, activation: str) -> Callable[..., Any]:
    """The forward of a gated MLP, which still calls its linears as modules: adapters and hooks on them are seen."""

    packed, _, half = gate.partition("[")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or torch.compiler.is_compiling() or differentiates_forward() or not is_as_tried(self):
            return own(self, *args, **kwargs)
        modules = self._modules
        if half != "1]":
            y = multiply_gated(modules[packed], None if half else modules[up], args[0], activation)
            if y is not None:
                return modules[down](y)
        a, b = modules[packed](args[0]).chunk(2, -1) if half else (modules[gate](args[0]), modules[up](args[0]))
        if half == "1]":
            a, b = b, a
        if a.dtype is not b.dtype or a.shape != b.shape:  # an adapter's, say: what plain operations make of them
            return modules[down](ACTIVATIONS[activation](a) * b)
        return modules[down](gated(a, b, activation))

    return forward
