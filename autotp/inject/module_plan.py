"""What a plan says of one module. Pure, frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..index_runs import Run
from ..shard import Shard
from .callsites import ShapeFix


@dataclass(frozen=True)
class InputPlan:
    """What is done to an argument of a module's forward before it; an argument that is None or not given is left alone.

    Attributes:
        argument: parameter name of forward; position: its place when it is passed positionally, None if it never is.
        sums: its gradient is summed over the ranks (identity forward), where it is a floating tensor that requires one.
        dim: dimension of which each rank then takes its part, or None; it has `n * period` indices for some n.
        period, indices: rank r takes the indices of `indices[r]` out of each `period`. A dimension of 1 broadcasts: left alone.
    """

    argument: str
    position: int | None
    sums: bool
    dim: int | None = None
    period: int = 0
    indices: tuple[tuple[Run, ...], ...] = ()


@dataclass(frozen=True)
class NormPlan:
    """A norm over a width that is dealt to the ranks; how its columns are dealt is said by the shards of its parameters.

    Attributes:
        kind: "rms" (times weight), "rms1p" (times 1 + weight), "rms_gated" (of x * silu(gate)) or "layernorm".
        eps: added to the mean square or variance; width: columns of the whole tensor that is normalised.
    """

    kind: str
    eps: float
    width: int


@dataclass(frozen=True)
class TokenPlan:
    """What a module does in a chain whose tokens are dealt; that its layers are in it is said by the chain.

    Attributes:
        chain: name of the chain.
        gathers: arguments whose rows are gathered before forward: `(parameter name, position or None)`.
        leaves: "scatter" where this row linear's partial sums are reduce-scattered, "slice" where the module's output, which is
            whole, is dealt on return.
        summed: names, dotted below it, of parameters that dealt rows read: their gradient is summed over the ranks.
        draws: dealt rows draw random numbers in it, which are each rank's own.
    """

    chain: str
    gathers: tuple[tuple[str, int | None], ...] = ()
    leaves: str = ""
    summed: tuple[str, ...] = ()
    draws: bool = False


@dataclass(frozen=True)
class DrawPlan:
    """What a module does about random numbers while it trains; names without one draw as the module around them.

    Attributes:
        name: full module name.
        inside: "apart": each rank draws its own numbers in it; "either": alike, until a module in it says otherwise; "alike".
        after: how the draws behind it in the module around it go on: "apart", "alike" or "" as before.
        parts: rank -> a number that ranks which draw alike share.
        rates: the attributes by which it drops ("config.attention_dropout", "p"); where all are 0, nothing is done. Empty: not
            known.
    """

    name: str
    inside: str = ""
    after: str = ""
    parts: tuple[int, ...] = ()
    rates: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModulePlan:
    """What one module becomes.

    Attributes:
        name: full module name.
        style: transformers' word for it, see styles.py.
        shards: parameter or buffer name -> which slice each rank holds; the gradient of copies is summed over their holders.
        unit: columns (or rows) that must stay together, e.g. the head size; parts: sizes of the packed parts in order.
        siblings: column linears with the same value read one input and share one backward collective; None: their input
            was entered already, by `inputs` of a module around them.
        summed: parameters kept whole whose gradient is partial on each rank and is summed over all.
        columns: for a whole linear, `(start, stop)` pairs of output columns that enter sharded computation.
        attrs: attribute -> its value on each rank; "config.name" is read through a view of the module's live config.
        reduce_dtype: dtype name in which partial sums are added up; None for the tensor's own.
        overlap: a linear's options of layers/overlap.py, by name.
        source: where the line comes from; why: one line for the reader.
        once: parameters kept whole that are added behind a reduced value: read on rank 0 alone, as zeros elsewhere, and their
            gradient, rank 0's, reaches every rank.
        copied: parameters of modules below, parts of which several ranks hold, that this module's forward reads itself; names
            in `summed`, `once` and `copied` may be dotted where a forward reads a parameter of a module that it does not call.
        inputs: what is done to arguments of forward; outputs: which outputs (index into a tuple or by order into a
            ModelOutput, 0 for a lone tensor) are partial sums that are all-reduced when the module returns.
        norm: the module is a norm over a dealt width, and its forward is replaced.
        forward: name of the replacement forward that the module needs; whoever carries the plan out gives the function.
        fixes: calls in the module's own forward, and in what that calls, which write or take another size on each rank.
        tokens: what it does where tokens are dealt between regions.
    """

    name: str
    style: str
    shards: dict[str, Shard] = field(default_factory=dict)
    unit: int = 1
    parts: tuple[int, ...] | None = None
    siblings: str | None = None
    summed: tuple[str, ...] = ()
    columns: tuple[tuple[int, int], ...] = ()
    attrs: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    reduce_dtype: str | None = None
    source: str = "hf"
    why: str = ""
    once: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    inputs: tuple[InputPlan, ...] = ()
    outputs: tuple[int, ...] = ()
    norm: NormPlan | None = None
    forward: str | None = None
    fixes: tuple[ShapeFix, ...] = ()
    overlap: dict[str, Any] = field(default_factory=dict)
    tokens: TokenPlan | None = None

    def __post_init__(self) -> None:
        # Lists would come back from JSON as tuples: one spelling, so that plans compare equal.
        object.__setattr__(self, "attrs", {name: as_tuples(values) for name, values in self.attrs.items()})


def as_tuples(value: Any) -> Any:
    """`value` with tuples for the lists in it, as JSON has them."""
    return tuple(as_tuples(v) for v in value) if isinstance(value, list | tuple) else value
