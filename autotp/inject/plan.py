"""A plan: which module becomes what, which slice of each parameter every rank holds, and why. Pure, frozen data.

`print(plan)` is the explanation a user reads; `to_json` / `from_json` make it reviewable and reusable.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from ..errors import PlanError
from ..kernels.fp8 import Recipe
from ..shard import Run, Shard
from .callsites import ShapeFix
from .describe import describe_plan, fold_name

__all__ = [
    "Chain",
    "DrawPlan",
    "Fusion",
    "InputPlan",
    "ModulePlan",
    "NormPlan",
    "Plan",
    "ProductPlan",
    "Region",
    "TokenPlan",
    "WholePlan",
    "fold_name",
]

COLUMN_STYLES = ("colwise", "packed_colwise", "colwise_gather_output", "colwise_rep")
ROW_STYLES = ("rowwise", "packed_rowwise", "rowwise_split_input", "rowwise_rep")
GATHERING_STYLES = ("colwise_gather_output", "colwise_rep")
SPLITTING_STYLES = ("rowwise_split_input", "rowwise_rep")
EMBEDDING_STYLES = ("embedding_rowwise", "embedding_colwise")
# Only in plans that say themselves who reduces and who enters, not in a caller's dict.
PARTIAL_STYLES = ("rowwise_partial",)
CALLED_STYLES = COLUMN_STYLES + ROW_STYLES + EMBEDDING_STYLES + PARTIAL_STYLES  # of modules that compute by themselves
ATTENTION_STYLES = ("multihead_attention",)  # nn.MultiheadAttention with its out_proj: a rule of its own
SUM_STYLES = ("replicated_with_grad_allreduce",)
MISC_STYLES = ("mla_kv_a_proj", "local_params", "replicate", "whole")
NOT_BUILT_STYLES = {
    "sequence_parallel": "whole; its tokens are dealt if sequence_parallel= asks for it",
    "moe_tp_experts": "stacked experts are not split yet",
    "moe_identity_expert": "stacked experts are not split yet",
    "grouped_gemm": "expert parallelism is not built",
    "ep_dispatch_experts": "expert parallelism is not built",
    "ep_router": "expert parallelism is not built",
    "gather": "expert parallelism is not built",
    "all_reduce": "reducing a module's output is not built yet",
}
STYLES = COLUMN_STYLES + ROW_STYLES + EMBEDDING_STYLES + SUM_STYLES + MISC_STYLES + tuple(NOT_BUILT_STYLES)


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
class Chain:
    """Layers, each of which reads what the one before it returns; between their regions tokens are dealt to the ranks.

    Attributes:
        name: of the list that holds them; layers: their names in order, the first of which deals the tokens.
        argument, position: by which a layer takes the hidden states.
        join: the module whose output is whole again: the last layer, or one behind it; by join_argument it takes them.
    """

    name: str
    layers: tuple[str, ...]
    argument: str
    position: int | None
    join: str
    join_argument: tuple[str, int | None]


@dataclass(frozen=True)
class ModulePlan:
    """What one module becomes.

    Attributes:
        name: full module name.
        style: transformers' word for it, see `STYLES`.
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
        object.__setattr__(self, "attrs", {name: _tuples(values) for name, values in self.attrs.items()})


@dataclass(frozen=True)
class Region:
    """A column -> row pair: sites that are split together with no communication between them.

    Attributes:
        scope: the module that holds all of them.
        columns, rows: names of the linears split on their outputs, and on their inputs.
        entry: `(module name, argument)` at which whole activations enter; exit: modules whose output is reduced.
        units: how many units each rank is dealt.
        enters: `(module name, start, stop)`: output columns of whole linears that need their gradient summed.
    """

    scope: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    entry: tuple[tuple[str, str], ...]
    exit: tuple[str, ...]
    units: tuple[int, ...]
    enters: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class Fusion:
    """What runs as one kernel in a module; it computes the same, by itself and on any part of its columns or heads.

    Attributes:
        name: full module name.
        kind: "rms", "rms1p" or "layernorm"; "gated_mlp", "experts", "rotary"; "add_norm": a residual sum, the norm that reads it.
        eps: of a norm. variant: the gate's activation, how the experts lie, or how rotary pairs columns ("half", "interleaved").
        parts: names of the gate, up and down linears, `linear[0]` being one half of its columns; the calls of rotary, as written;
            the norms that read a sum; the experts' weights and arguments.
    """

    name: str
    kind: str
    eps: float = 0.0
    variant: str = ""
    parts: tuple[str, ...] = ()

    def describe(self) -> str:
        """In short: `rms norm, eps 1e-05`."""
        if self.eps:
            return f"{self.kind} norm, eps {self.eps:g}"
        return f"{self.kind.replace('_', ' ')} ({self.variant or ', '.join(self.parts)})"


@dataclass(frozen=True)
class ProductPlan:
    """How a linear multiplies: as a recipe says, or, where it is None, in its tensors' own dtype, and why."""

    name: str
    recipe: Recipe | None
    why: str = ""


@dataclass(frozen=True)
class WholePlan:
    """Parameters left whole on every rank: how many elements, and why."""

    name: str
    numel: int
    reason: str


@dataclass(frozen=True)
class Plan:
    """A tensor-parallel plan of one model over `tp_size` ranks.

    Attributes:
        model: class name of the model it was made for.
        modules, regions, whole: what changes, in pairs; what does not, and why.
        tied: names of parameters that are one tensor, as tuples.
        head: name of the output embedding if it is split over the vocabulary; loss: what computes the loss then.
        param_bytes: parameter name -> bytes of the full tensor.
        versions: library versions it was made with.
        proof: "proved", or why it could not be.
        fused: what runs as one kernel; `dataclasses.replace(plan, fused=())` runs everything as the model is written.
        sequence_parallel: False, True (tokens are dealt where there are as many as ranks) or "auto" (where they are many enough).
        products: where FP8 was asked for, how each linear multiplies.
        chains: the layers between whose regions tokens are dealt; tokens: why not of others, if they were asked for.
        draws: which modules draw random numbers on split values, and are each rank's own then.
    """

    tp_size: int
    model: str
    modules: tuple[ModulePlan, ...] = ()
    regions: tuple[Region, ...] = ()
    whole: tuple[WholePlan, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    head: str | None = None
    loss: str = ""
    param_bytes: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    proof: str = ""
    fused: tuple[Fusion, ...] = ()
    sequence_parallel: bool | str = False
    chains: tuple[Chain, ...] = ()
    tokens: str = ""
    products: tuple[ProductPlan, ...] = ()
    draws: tuple[DrawPlan, ...] = ()

    def __getitem__(self, name: str) -> ModulePlan:
        return self.by_name[name]

    @cached_property
    def by_name(self) -> dict[str, ModulePlan]:
        """Module name -> its plan."""
        return {module.name: module for module in self.modules}

    @property
    def shards(self) -> dict[str, Shard]:
        """Full parameter name -> Shard, for every parameter that is not whole."""
        return self._shards

    @cached_property
    def _shards(self) -> dict[str, Shard]:
        return {f"{m.name}.{p}" if m.name else p: shard for m in self.modules for p, shard in m.shards.items()}

    @property
    def _once(self) -> dict[str, int]:
        """`param_bytes` with a tied tensor listed under its first name alone."""
        repeats = {name for group in self.tied for name in group[1:]}
        return {name: size for name, size in self.param_bytes.items() if name not in repeats}

    def bytes_of_rank(self, rank: int) -> int:
        """Bytes of parameters that `rank` holds; a tied tensor counts once."""
        total = 0
        for name, size in self._once.items():
            shard = self.shards.get(name)
            total += size if shard is None else size * shard.local_numel(rank) // max(1, prod(shard.shape))
        return total

    @property
    def full_bytes(self) -> int:
        """Bytes of all parameters; a tied tensor counts once."""
        return sum(self._once.values())

    @property
    def split_share(self) -> float:
        """Share of the parameter bytes that is split over the ranks."""
        split = sum(size for name, size in self._once.items() if name in self.shards)
        return split / max(1, self.full_bytes)

    # -- JSON ---------------------------------------------------------------------------------------------------------

    def to_json(self, indent: int | None = None) -> str:
        """The plan as JSON text; `Plan.from_json` gives an equal plan."""
        data = asdict(replace(self, modules=()))
        data["modules"] = []
        for module in self.modules:
            entry = asdict(replace(module, shards={}, fixes=()))
            entry["fixes"] = [fix.to_json() for fix in module.fixes]
            entry["shards"] = {name: shard.to_json() for name, shard in module.shards.items()}
            data["modules"].append(entry)
        return json.dumps(data, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of `to_json`.

        Raises:
            PlanError: the text is not a plan.
        """
        try:
            data = json.loads(text)
            modules = []
            for entry in data["modules"]:
                shards = {name: Shard.from_json(shard) for name, shard in entry.pop("shards").items()}
                attrs = entry.pop("attrs")
                inputs = tuple(InputPlan(**{k: _tuples(v) for k, v in one.items()}) for one in entry.pop("inputs"))
                norm = entry.pop("norm")
                norm = None if norm is None else NormPlan(**norm)
                fixes = tuple(ShapeFix.from_json(fix) for fix in entry.pop("fixes", ()))
                tokens = entry.pop("tokens", None)
                tokens = None if tokens is None else TokenPlan(**{k: _tuples(v) for k, v in tokens.items()})
                own = {"shards": shards, "attrs": attrs, "inputs": inputs, "norm": norm, "fixes": fixes, "tokens": tokens}
                modules.append(ModulePlan(**{k: _tuples(v) for k, v in entry.items()}, **own))
            regions = tuple(Region(**{k: _tuples(v) for k, v in entry.items()}) for entry in data["regions"])
            whole = tuple(WholePlan(**entry) for entry in data["whole"])
            fused = tuple(Fusion(**{k: _tuples(v) for k, v in entry.items()}) for entry in data.pop("fused", ()))
            chains = tuple(Chain(**{k: _tuples(v) for k, v in entry.items()}) for entry in data.pop("chains", ()))
            products = tuple(
                ProductPlan(**{**entry, "recipe": entry["recipe"] and Recipe(**entry["recipe"])})
                for entry in data.pop("products", ())
            )
            draws = tuple(DrawPlan(**{k: _tuples(v) for k, v in entry.items()}) for entry in data.pop("draws", ()))
            rest = {k: _tuples(v) for k, v in data.items() if k not in ("modules", "regions", "whole")}
            rest |= {"chains": chains, "products": products, "draws": draws}
            return cls(modules=tuple(modules), regions=regions, whole=whole, fused=fused, **rest)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"this is not a plan that Plan.to_json wrote: {error!r}") from error

    def digest(self) -> str:
        """A short hash of everything in the plan: equal on all ranks or nothing is rewritten."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    # -- for the reader -----------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return self.describe()

    def describe(self, rank: int = 0, width: int | None = None) -> str:
        """What a user reads: styles and `rank`'s shapes by name pattern, bytes, collectives, what is whole and why.

        Args:
            rank: whose shapes; width: of the longest line, in characters; None lets lines be as long as they are.
        """
        return describe_plan(self, rank, width)

    @property
    def collectives(self) -> tuple[int, int]:
        """All-reduces and all-gathers of activations between the embedding and the head, `(forward, backward)`.

        Forward: one where partial sums leave a row linear or a module, one where a column linear's output is gathered. Backward:
        one for each group of siblings' input, for an argument and for columns that enter, one where a whole input was split.
        Where tokens are dealt, reduce-scatters are counted in the all-reduces' place, and the all-gathers that come with them.
        Neither the statistics of dealt norms (a number a token) nor gradients of parameters are counted.
        """
        modules = [m for m in self.modules if m.name != self.head]
        forward = sum(m.style in ROW_STYLES + GATHERING_STYLES for m in modules) + sum(len(m.outputs) for m in modules)
        attentions = sum(m.style in ATTENTION_STYLES for m in modules)
        forward += attentions
        backward = len({m.siblings for m in modules if m.siblings}) + sum(entry.sums for m in modules for entry in m.inputs)
        backward += sum(m.style in SPLITTING_STYLES for m in modules) + sum(bool(m.columns) for m in modules)
        backward += attentions
        tokens = [m.tokens for m in self.modules if m.tokens is not None]
        forward += len(self.chains) + sum(bool(t.gathers) for t in tokens)
        backward += len(self.chains) + sum(bool(t.leaves) for t in tokens)
        return forward, backward


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list | tuple) else value
