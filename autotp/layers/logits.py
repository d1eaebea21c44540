"""Decides, without touching a weight, whether a model's loss can work on each rank's columns of the logits alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import BaseModelOutputWithPast


class _StubOutput(BaseModelOutputWithPast):
    """A base model's output with hidden states alone: every other field that a forward asks for is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _Stub(nn.Module):
    """Stands where a module was and returns what it was given."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output, self.calls = output, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.output


def check_logits_path(model: Any) -> str | None:
    """Why the loss of `model` cannot be computed from sharded logits, or None if it can.

    Runs the class's own forward on a stand-in that shares nothing but the config: the base model returns zeros, the head
    chosen logits L, and what reaches the loss is compared, G(L)[columns] with G(L[columns]). Works on meta.
    """
    try:
        loss = getattr(model, "loss_function", None)
        if loss is None:
            return "the model has no loss_function"
        if loss is not ForCausalLMLoss:
            return f"its loss is {getattr(loss, '__name__', type(loss).__name__)}, not ForCausalLMLoss"
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            return "it has no output embedding that is a linear"
        return _compare_columns(model, head)
    except Exception as error:  # whatever a strange forward does, the answer is that the head gathers
        first_line = next(iter(str(error).splitlines()), "")
        return f"the path from head to loss can't be run alone: {type(error).__name__}: {first_line}"


def _compare_columns(model: nn.Module, head: nn.Linear) -> str | None:
    vocab = head.weight.shape[0]
    generator = torch.Generator(device="cpu").manual_seed(0)
    # Small and large values, so that a soft or hard cap shows.
    logits = torch.randn(2, 4, vocab, generator=generator, device="cpu") * torch.tensor([1.0, 40.0], device="cpu").view(2, 1, 1)
    whole, reason = _run_path(model, head, logits)
    if reason is not None or whole is None:
        return reason
    if whole.shape != logits.shape:
        return f"logits of shape {tuple(logits.shape)} reach the loss as {tuple(whole.shape)}"
    middle = max(1, vocab // 3)
    for start, stop in ((0, middle), (middle, vocab)):
        part, reason = _run_path(model, head, logits[..., start:stop].contiguous())
        if reason is not None or part is None:
            return reason
        if part.shape != (2, 4, stop - start) or not torch.allclose(part, whole[..., start:stop], rtol=1e-5, atol=1e-6):
            return "what is done between the head and the loss mixes the columns of the logits"
    return None


@torch.no_grad()
def _run_path(model: Any, head: nn.Linear, logits: Tensor) -> tuple[Tensor | None, str | None]:
    """The logits that the loss gets when the head returns `logits`; or None and a reason."""
    vocab, seen = head.weight.shape[0], []

    def capture(*args: Any, **kwargs: Any) -> Tensor:
        values = dict(zip(("logits", "labels", "vocab_size"), args, strict=False)) | kwargs
        seen.append((values["logits"], values["vocab_size"]))
        return torch.zeros((), device="cpu")

    base = getattr(model, "base_model", model)
    if base is model:
        return None, "it has no base model apart from its head"
    head_stub = _Stub(logits.clone())
    states = torch.zeros(*logits.shape[:2], head.weight.shape[1], device="cpu")
    stand_in = _replace_modules(model, {id(base): _Stub(_StubOutput(last_hidden_state=states)), id(head): head_stub})
    stand_in.__dict__["_loss_function"] = capture
    ids = torch.zeros(logits.shape[:2], dtype=torch.int64, device="cpu")
    # The stub has no router logits, whose loss is added behind this one.
    options = {"output_router_logits": False} if getattr(model.config, "output_router_logits", False) else {}
    output = type(model).forward(stand_in, input_ids=ids, labels=ids, return_dict=True, **options)
    if head_stub.calls != 1 or len(seen) != 1:
        return None, f"its forward calls the head {head_stub.calls} times and loss_function {len(seen)} times, not once each"
    if seen[0][1] != vocab:
        return None, f"its loss sees a vocabulary of {seen[0][1]}, its head has {vocab} rows"
    if getattr(output, "logits", None) is not seen[0][0]:
        return None, "the logits it returns are not those that its loss gets"
    return seen[0][0], None


def _replace_modules(module: nn.Module, stubs: dict[int, nn.Module]) -> nn.Module:
    """A copy of `module` with some modules below replaced; of the others, those on the way there are copied, shallowly."""
    copied = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    copied.__dict__["training"] = True
    children = dict(module._modules)
    for name, child in children.items():
        if child is None:
            continue
        if id(child) in stubs:
            children[name] = stubs[id(child)]
        elif any(id(below) in stubs for below in child.modules()):
            children[name] = _replace_modules(child, stubs)
    copied.__dict__["_modules"] = children
    return copied
