"""AdamW on float32 masters of the weights, with decay on matrices only; each rank updates its shards."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..comm import TPGroup
from ..errors import AutoTPError
from ..layers.base import stand_in

BUCKET = 1 << 25  # gradient elements that are summed over data ranks at once
FIRST_SCALE, GROW_AFTER = 2.0**16, 2000


class MasterOptimizer:
    """AdamW for a model in any dtype.

    With masters, a weight that is not float32 has a float32 copy: gradients of the micro-batches are summed up there, and the
    copy is updated and rounded into the weight. For float16 the loss is scaled (by `scale`, which halves when a gradient
    overflows and doubles after 2000 steps without).

    Args:
        model: its trainable parameters are taken, a tied one once.
        lr, weight_decay, betas, eps: AdamW's. Decayed are parameters of two dims or more, outside norms.
        master_weights: see above.

    Attributes:
        targets: what AdamW updates: masters, or the parameters themselves; their `.grad` is the step's gradient.
        adamw: the torch optimizer.
        scale: what the loss is to be multiplied with.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, ...] = (0.9, 0.999),
        eps: float = 1e-8,
        master_weights: bool = True,
    ) -> None:
        named = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.names, self.params = list(named), list(named.values())
        if not self.params:
            raise AutoTPError("no parameter of the model requires a gradient, so there is nothing to train")
        self.targets = [self._make_master(param) if master_weights else param for param in self.params]
        kept = _undecayed(model)
        groups = [[], []]
        for param, target in zip(self.params, self.targets, strict=True):
            groups[id(param) in kept].append(target)
        decayed, rest = ({"params": group} for group in groups)
        fused = all(target.is_cuda for target in self.targets)
        self.adamw = torch.optim.AdamW(
            [{**decayed, "weight_decay": weight_decay}, {**rest, "weight_decay": 0.0}],
            lr=lr, betas=(betas[0], betas[1]), eps=eps, fused=fused or None,
        )  # fmt: skip
        half = any(p.dtype == torch.float16 for p in self.params)
        self.scale, self._good = (FIRST_SCALE if half and master_weights else 1.0), 0

    def _make_master(self, param: Tensor) -> Tensor:
        if param.dtype in (torch.float32, torch.float64):
            return param
        master = nn.Parameter(param.detach().float())
        stand_in(master, param)

        def move_gradient(param: Tensor) -> None:
            assert param.grad is not None
            if master.grad is None:
                master.grad = param.grad.float()
            else:
                master.grad += param.grad
            param.grad = None

        param.register_post_accumulate_grad_hook(move_gradient)
        return master

    @torch.no_grad()
    def reduce_gradients(self, dp: TPGroup) -> None:
        """Sum the gradients over data ranks, in float32, and take the scale out."""
        if dp.tp_size > 1:
            has = torch.tensor([target.grad is not None for target in self.targets], dtype=torch.uint8, device=dp.device)
            used = dp.all_reduce_owned(has, "max").tolist()
            for bucket in _buckets([target for target, any_has in zip(self.targets, used, strict=True) if any_has]):
                _sum_bucket(bucket, dp)
        if self.scale != 1:
            torch._foreach_mul_([target.grad for target in self.targets if target.grad is not None], 1 / self.scale)

    @torch.no_grad()
    def clip(self, max_norm: float, norm: float) -> None:
        """Scale the gradients, whose norm is `norm`, down to `max_norm`."""
        if max_norm and norm > max_norm:
            torch._foreach_mul_([t.grad for t in self.targets if t.grad is not None], max_norm / (norm + 1e-6))

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights and forget the gradients."""
        self.adamw.step()
        for param, target in zip(self.params, self.targets, strict=True):
            if param is not target:
                param.copy_(target)
        self.zero_grad()
        self._good += 1
        if self.scale != 1 and self._good % GROW_AFTER == 0:
            self.scale *= 2

    def skip(self) -> bool:
        """Leave this step out since a scaled gradient overflowed; False if that can't be the reason."""
        if self.scale <= 1:
            return False
        self.scale, self._good = self.scale / 2, 0
        self.zero_grad()
        return True

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for param, target in zip(self.params, self.targets, strict=True):
            param.grad = target.grad = None

    @property
    def masters(self) -> dict[str, Tensor]:
        """The copies that are updated in place of weights, by the weights' names."""
        every = zip(self.names, self.params, self.targets, strict=True)
        return {name: target for name, param, target in every if param is not target}

    def scale_state(self) -> list[float]:
        """The scale, and the steps since it last changed."""
        return [self.scale, self._good]

    def load_scale_state(self, state: list[float]) -> None:
        """Go on from what `scale_state` gave."""
        self.scale, self._good = state[0], int(state[1])


def _undecayed(model: nn.Module) -> set[int]:
    """Ids of parameters without weight decay: vectors and numbers (biases, norms), and whatever else a norm holds."""
    kept = {id(param) for param in model.parameters() if param.ndim < 2}
    for module in model.modules():
        if "norm" in type(module).__name__.lower() and not list(module.children()):
            kept |= {id(param) for param in module.parameters(recurse=False)}
    return kept


def _buckets(targets: list[Tensor]) -> list[list[Tensor]]:
    """Neighbours of one dtype, of `BUCKET` elements or one tensor at least."""
    found: list[list[Tensor]] = []
    size = 0
    for target in targets:
        if not found or size >= BUCKET or found[-1][0].dtype != target.dtype:
            found.append([])
            size = 0
        found[-1].append(target)
        size += target.numel()
    return found


def _sum_bucket(targets: list[Tensor], dp: TPGroup) -> None:
    for target in targets:
        if target.grad is None:
            target.grad = torch.zeros_like(target)
    grads = [target.grad for target in targets if target.grad is not None]
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    flat = dp.all_reduce_owned(torch.cat([grad.reshape(-1).to(wide) for grad in grads]))
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))
