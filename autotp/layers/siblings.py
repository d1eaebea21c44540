"""Linears that read one input: one product for all, and their input's gradient is summed over the ranks once.

The weights (and biases) of siblings lie side by side in one allocation, each as a tensor with a storage of its own: savers,
optimizers and `state_dict` see separate tensors. Whether they still do is looked at in every call:

| the group in a call | products forward | backward |
|---|---|---|
| members read one input, weights side by side | one | one dgrad, one wgrad |
| members read one input, weights moved | one each | dgrads add up in one buffer |
| another input for some member; `torch.compile`   | one each | autograd adds up before the one all-reduce |
"""

from __future__ import annotations

import copy
import ctypes
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..collectives import copy_to_group
from ..comm import TPGroup
from ..exchange import Gather
from ..kernels import few_rows
from ..kernels.autocast import autocast_dtype
from ..kernels.dealt import Dealt, multiply_gathered
from ..kernels.moves import Moves
from ..kernels.product import Merged, ProductSpec, multiply
from .fp8 import Scaling
from .overlap import choose_moves, deal_sums, refuse_copies
from .product import make_spec, watches_operations
from .side_by_side import ALIGNMENT_BYTES, Laid, can_lie, find_place, is_foreign, lay_together
from .tokens import TokenStream


class SiblingInput:
    """What the linears that read one input share: their allocation, and for the length of a call what the first one computed.

    The first sibling that is called with an input computes the outputs of all; the others take theirs while the input is the
    same tensor at the same version, in the same grad mode, under the same autocast dtype, and their weight is unchanged. The
    outputs are dropped when the last was taken, or when the region's row linear ends it, so nothing lives into the next step.
    A group whose members turn out to read different inputs computes each member alone from the next forward on; what is
    recomputed in backward does as its forward did.

    Args:
        group: the ranks; members: how many linears there are; reduce_dtype: in which the input's gradient is summed.
        tokens: the stream whose dealt rows the input may have been gathered from: its gradient is reduce-scattered then.

    Attributes:
        scaling: how the members' products are FP8, as one; None where they are of the tensors' own dtype.
    """

    def __init__(
        self, group: TPGroup, members: int, reduce_dtype: torch.dtype | None = None, tokens: TokenStream | None = None
    ) -> None:
        self.group, self.members, self.reduce_dtype, self.tokens = group, members, reduce_dtype, tokens
        self._slots: list[Any] = [lambda: None] * members  # weak: a copy of one member is a member of no group
        self._spec: ProductSpec | None = None
        self._dealt: tuple[ProductSpec, Dealt, ProductSpec] | None = None  # the last one, and what it was made of
        self._laid: Laid | None = None
        self.scaling: Scaling | None = None
        self._stored: tuple[Any, Tensor] | None = None
        self._strikes, self._alone = {True: 0, False: 0}, {True: False, False: False}  # by whether a gradient is wanted
        self._seen = {True: False, False: False}  # whether such a forward ran that a backward may recompute
        self._round: _Round | None = None
        self.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> SiblingInput:
        tokens = copy.deepcopy(self.tokens, memo)
        twin = memo[id(self)] = SiblingInput(self.group, self.members, self.reduce_dtype, tokens)
        twin.scaling = copy.deepcopy(self.scaling, memo)
        twin._strikes, twin._alone = dict(self._strikes), dict(self._alone)
        laid = self.find_laid()
        if laid is not None:
            weights, biases = ([copy.deepcopy(each, memo) for each in part] for part in (laid.weights, laid.biases))
            twin._laid = lay_together(weights, biases)
        return twin

    def clear(self) -> None:
        """Forget what was entered or computed for members that did not come."""
        if self._round is not None:
            self._drop(self._round, 2)
            self._round = None
        self._source: Tensor | None = None
        self._entered: Tensor | None = None
        self._state: tuple[Any, ...] = ()
        self._left = 0

    def forget_options(self) -> None:
        """Read the members' options again: one has changed."""
        self._spec = None

    # -- members and their memory -----------------------------------------------------------------------------------------

    def add(self, layer: nn.Module) -> None:
        """Count a linear layer as the next member; others (convolutions, Conv1Ds) only enter their input here."""
        place = next(i for i, slot in enumerate(self._slots) if slot() is None)
        layer.__dict__["place"] = place
        self._slots[place] = weakref.ref(layer)

    def follow_copy(self, layer: nn.Module) -> None:
        """Take a copied layer for the member that it is, if the group was copied with it."""
        place = layer.__dict__.get("place", -1)
        if place >= 0 and self._slots[place]() is None:
            self._slots[place] = weakref.ref(layer)

    def lay(self) -> None:
        """Move the members' weights and biases side by side, where they are all there and alike."""
        params = self._read_parameters()
        layers = [slot() for slot in self._slots]
        if params is not None and can_lie(params[0]) and all(_keeps_alignment(layer) for layer in layers):
            self._laid = lay_together(*params)

    def lies_in_file(self) -> bool:
        """Whether a member's weight lies in memory that torch did not allocate: in a mapped checkpoint, say."""
        params = self._read_parameters()
        return params is not None and any(is_foreign(weight) for weight in params[0])

    def follow(self, moved: bool) -> None:
        """After a member's data was converted or moved: let go of the old memory, and lay the new when all have moved."""
        if self.find_laid() is None and moved and not any(_is_gathered(slot()) for slot in self._slots):
            self.lay()

    def find_laid(self) -> Laid | None:
        """The allocation, if it is still what the members' parameters lie in; where it is not, it is let go."""
        laid = self._laid
        if laid is None:
            return None
        for slot, weight, bias, place in zip(self._slots, laid.weights, laid.biases, laid.places, strict=True):
            layer = slot()
            if layer is None or _is_gathered(layer):
                return None
            table = layer._parameters
            if table.get("weight") is not weight or table.get("bias") is not bias or place != find_place(weight, bias):
                self._laid = None
                return None
        return laid

    def _read_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter | None]] | None:
        """The members' own weights and biases; None where some are quantised, computed of others, sharded further, or gone."""
        weights, biases = [], []
        for slot in self._slots:
            layer = slot()
            if layer is None:
                return None
            weight, bias = layer._parameters.get("weight"), getattr(layer, "bias", None)  # pruned, it is no Parameter
            if layer.packed or type(weight) is not nn.Parameter or (bias is not None and type(bias) is not nn.Parameter):
                return None
            weights.append(weight)
            biases.append(bias)
        return weights, biases

    # -- one call ---------------------------------------------------------------------------------------------------------

    def multiply(self, layer: Any, x: Tensor) -> Tensor:
        """`layer`'s product with `x`, taken from what its siblings had computed, or computed for them all."""
        place = layer.place
        if place < 0 or watches_operations():
            return self._multiply_alone(layer, x)
        held = self._round
        if held is None or held.served[place]:
            y = self._begin(layer, x)
        else:
            y = held.take(layer, x)
            if y is None:
                self._drop(held, 2)
            if not held.left:
                self._round = None
                if not held.broken:
                    self._strikes[held.wants] = 0
        return self._multiply_alone(layer, x) if y is None else y

    def _multiply_alone(self, layer: Any, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            x = self.enter(x)
        return layer.multiply(x)

    def _begin(self, layer: Any, x: Tensor) -> Tensor | None:
        """`layer`'s output, and its siblings' kept for them; None where nothing is gained by computing them together."""
        if self._round is not None:  # begun again by one that had its output: a forward that died half way
            self._drop(self._round, 1)
            self._round = None
        if self._slots[layer.place]() is not layer:  # a copy of the model: its members come one by one
            self._slots[layer.place], self._spec = weakref.ref(layer), None
            return None
        laid = self.find_laid()
        params = self._read_parameters() if laid is None else (laid.weights, laid.biases)
        if params is None or not _is_plain(x):
            return None
        weights, biases = params
        spec, grad = self._spec or self._make_spec(), torch.is_grad_enabled()
        wants = grad and (x.requires_grad or any(t is not None and t.requires_grad for t in (*weights, *biases)))
        dtype = autocast_dtype(x)
        if self._stays_alone(wants):
            return None
        if self.scaling is not None and (scale := self.stored_scale()) is not None:
            if laid is None or wants:  # one by one: each is differentiated by itself
                return None
            merged = laid.merge()
            y = self.scaling.multiply_stored(x, merged.weight, scale, merged.bias)
            outputs = torch.unsafe_split_with_sizes(y, laid.sizes, -1)
        elif wants or (self.scaling is not None and not few_rows.fits(x, weights[0])):
            if laid is None and any(w.device != x.device or w.dtype != weights[0].dtype for w in weights):
                return None
            outputs = self._run_product(spec, x, weights, biases, None if laid is None else laid.merge())
        elif laid is None or dtype is not None:
            return None
        elif self.tokens is not None and self.tokens.find_local(x) is not None:
            outputs = self._run_product(spec, x, weights, biases, laid.merge())
        else:
            merged = laid.merge()
            outputs = torch.unsafe_split_with_sizes(layer.run(x, merged.weight, merged.bias), laid.sizes, -1)
        self._round = held = _Round(x, grad, dtype, wants, weights, outputs)
        return held.give(layer.place)

    def stored_scale(self) -> Tensor | None:
        """`[N1 + N2 + ..., 1]`, the scales of weights that are kept in 8 bits; None where they are not."""
        scales = [None if (layer := slot()) is None else layer._buffers.get("weight_scale") for slot in self._slots]
        if any(scale is None for scale in scales):
            return None
        key = tuple(scale.data_ptr() for scale in scales)  # type: ignore[union-attr]
        if self._stored is None or self._stored[0] != key:
            self._stored = key, torch.cat(scales)  # type: ignore[arg-type]
        return self._stored[1]

    def _run_product(self, spec: ProductSpec, x: Tensor, weights: Any, biases: Any, merged: Merged | None) -> Any:
        tokens, local = self.tokens, None if self.tokens is None else self.tokens.find_local(x)
        if self.scaling is not None:
            refuse_copies([layer for slot in self._slots if (layer := slot()) is not None])
            if local is not None:
                x, spec = self._sum_gradient(x), spec._replace(sum_input=None)
            return self.scaling.multiply(spec, x, weights, biases, None if merged is None else merged.weight)
        if tokens is None or local is None:
            if self.group.tp_size > 1 and x.requires_grad:
                members = [layer for slot in self._slots if (layer := slot()) is not None]
                spec = spec._replace(sums=deal_sums(members, self.group, x, x.shape[-1], self.reduce_dtype))
            return multiply(spec, x, weights, biases, merged)
        tokens.note_reader(self)
        gather = Gather(x.detach().view(-1, x.shape[-1]))
        dealt = tokens.describe(x, self.reduce_dtype, self.choose_moves())
        return multiply_gathered(self._deal(spec, dealt), local, weights, biases, merged, gather)

    def _deal(self, spec: ProductSpec, dealt: Dealt) -> ProductSpec:
        if self._dealt is None or self._dealt[0] is not spec or self._dealt[1] is not dealt:
            self._dealt = spec, dealt, spec._replace(sum_input=None, dealt=dealt)
        return self._dealt[2]

    def choose_moves(self) -> Moves:
        """Which way rows move in this call, as the members' options say."""
        return choose_moves([layer for slot in self._slots if (layer := slot()) is not None], self.group)

    def begin_ahead(self, local: Tensor, gather: Gather, moves: Moves) -> Callable[[Tensor], None] | None:
        """Compute all members' outputs of rows that are still on their way.

        Args:
            local: this rank's rows; gather: what brings the others'; moves: which way.

        Returns:
            what is to be told the tensor of all rows, by which the members will ask; None if they compute when they are called.
        """
        if self._round is not None:  # nobody asked for the last one's
            self._drop(self._round, 2)
            self._round = None
        laid, tokens = self.find_laid(), self.tokens
        if laid is None or tokens is None or self.scaling is not None or not _is_plain(local):
            return None
        grad, dtype, weights = torch.is_grad_enabled(), autocast_dtype(local), laid.weights
        wants = grad and (local.requires_grad or any(t is not None and t.requires_grad for t in (*weights, *laid.biases)))
        if self._stays_alone(wants) or (dtype is not None and not wants):
            return None
        spec = self._deal(self._spec or self._make_spec(), tokens.describe(local, self.reduce_dtype, moves))
        outputs = multiply_gathered(spec, local, weights, laid.biases, laid.merge(), gather)

        def hold(full: Tensor) -> None:
            self._round = _Round(full, grad, dtype, wants, weights, outputs)

        return hold

    def _stays_alone(self, wants: bool) -> bool:
        """Whether members compute one by one; that changes between forwards, never between one and its recomputation."""
        recomputes = torch._C._current_graph_task_id() != -1
        if self._strikes[wants] > 1 and not (recomputes and self._seen[wants]):
            self._alone[wants] = True
        if not recomputes:
            self._seen[wants] = True
        return self._alone[wants]

    def _drop(self, held: _Round, strikes: int) -> None:
        """Let go of outputs that nobody took: after two strikes in a row members compute alone."""
        if not held.broken:
            self._strikes[held.wants] += strikes
            held.drop()

    def _make_spec(self) -> ProductSpec:
        layers = [slot() for slot in self._slots]
        if any(getattr(layer.__dict__.get("autotp_border"), "names", ()) for layer in layers):
            self._alone = {True: True, False: True}  # its forward reads its parameters in another way than they lie there
        keys = [(layer, key) for key in ("weight", "bias") for layer in layers]
        copied = tuple(layer.copied.get(key) for layer, key in keys)
        names = tuple(f"{layer.full_name}.{key}" if layer.accumulate_into_main_grad else None for layer, key in keys)
        run, enters = layers[0].run, self.group.tp_size > 1
        self._spec = make_spec(run, self.group, self.reduce_dtype, copied, names, enters)
        return self._spec

    def enter(self, x: Tensor) -> Tensor:
        """`x` as sharded computation reads it; its gradient is the sum over all ranks and siblings."""
        if self.members == 1:
            return self._sum_gradient(x)
        # A compiler knows no versions, but itself sees to it that an edit of x is an edit of what was entered.
        state = (None if torch.compiler.is_compiling() else x._version, autocast_dtype(x))
        if self._source is not x or self._state != state:
            self._source, self._state, self._left = x, state, self.members
            self._entered = self._sum_gradient(x)
        entered = self._entered
        assert entered is not None
        self._left -= 1
        if self._left == 0:
            self.clear()
        return entered

    def _sum_gradient(self, x: Tensor) -> Tensor:
        gathered = None if self.tokens is None else self.tokens.enter(x, self.reduce_dtype)
        return copy_to_group(x, self.group, self.reduce_dtype) if gathered is None else gathered


class _Round:
    """The outputs of all members for one input."""

    __slots__ = ("broken", "dtype", "grad", "left", "outputs", "served", "source", "version", "versions", "wants", "weights")

    def __init__(self, x: Tensor, grad: bool, dtype: Any, wants: bool, weights: Sequence[Any], outputs: Sequence[Tensor]) -> None:
        self.source: Tensor | None = x
        self.version, self.grad, self.dtype, self.wants = x._version, grad, dtype, wants
        self.weights, self.versions = weights, [w._version for w in weights]
        self.outputs: list[Tensor | None] = list(outputs)
        self.left = len(weights)
        self.served = [False] * self.left
        self.broken = False

    def give(self, place: int) -> Tensor:
        """The output of a member that has not come yet."""
        self.served[place] = True
        self.left -= 1
        y, self.outputs[place] = self.outputs[place], None
        assert y is not None
        return y

    def take(self, layer: Any, x: Tensor) -> Tensor | None:
        """The member's output, once; None if the input is another, or if it, the weight, grad mode or autocast changed since."""
        place, outputs = layer.place, self.outputs  # read first: another thread may drop them
        weight = layer._parameters.get("weight")
        if (
            self.source is x
            and self.grad is torch.is_grad_enabled()
            and weight is self.weights[place]
            and weight._version == self.versions[place]
            and x._version == self.version
            and autocast_dtype(x) is self.dtype
        ):
            y, outputs[place] = outputs[place], None
        else:
            y = None
        self.served[place] = True
        self.left -= 1
        return y

    def drop(self) -> None:
        """Keep nothing but who came."""
        self.source, self.broken, self.outputs = None, True, []


def lay_siblings(model: nn.Module) -> None:
    """Move the weights of each group of siblings below `model` side by side; their Parameters stay the objects they are.

    What lies in a mapped file stays there: one product in place of a few would cost the CPU a copy of the weights.
    """
    groups = {id(g): g for g in (m.__dict__.get("siblings") for m in model.modules()) if isinstance(g, SiblingInput)}
    for group in groups.values():
        if not group.lies_in_file():
            group.lay()
            trim_heap()
    if groups and torch.cuda.is_available():
        torch.cuda.empty_cache()  # the old memory lies in pieces that the next allocation, a larger one, can't use


def trim_heap() -> None:
    """Give freed memory on the CPU back to the system: glibc keeps it in pieces, and what is laid next needs larger ones."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # another C library has none
        trim(0)


def _is_plain(x: Tensor) -> bool:
    """Whether `x` is memory whose changes are counted: no subclass, no inference tensor, nothing of torch.func."""
    if type(x) is not Tensor and type(x) is not nn.Parameter:
        return False
    return not x.is_inference() and torch._C._functorch.maybe_current_level() is None


def _is_gathered(layer: nn.Module | None) -> bool:
    """Whether a `GatherReplacedLayerParams` has made some of its tensors whole, which go back to where they were."""
    return layer is not None and "gathered" in layer.__dict__


def _keeps_alignment(layer: Any) -> bool:
    """Whether the next weight would begin where reads are fast, on every rank alike: ranks must lay the same groups."""
    weight, shard = layer._parameters["weight"], layer.shards.get("weight")
    shapes = [tuple(weight.shape)] if shard is None else [shard.local_shape(rank) for rank in range(shard.tp_size)]
    return all(rows * columns * weight.element_size() % ALIGNMENT_BYTES == 0 for rows, columns in shapes)
