"""A plan: which module becomes what, which slice of each parameter every rank holds, and why. Pure, frozen data.

`print(plan)` is the explanation a user reads; `to_json` / `from_json` make it reviewable and reusable.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import prod

from ..errors import PlanError
from ..kernels.fp8 import Recipe
from ..shard import Shard
from .callsites import ShapeFix
from .describe import describe_plan
from .module_plan import DrawPlan, InputPlan, ModulePlan, NormPlan, TokenPlan, as_tuples
from .styles import ATTENTION_STYLES, GATHERING_STYLES, ROW_STYLES, SPLITTING_STYLES


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
                inputs = tuple(InputPlan(**{k: as_tuples(v) for k, v in one.items()}) for one in entry.pop("inputs"))
                norm = entry.pop("norm")
                norm = None if norm is None else NormPlan(**norm)
                fixes = tuple(ShapeFix.from_json(fix) for fix in entry.pop("fixes", ()))
                tokens = entry.pop("tokens", None)
                tokens = None if tokens is None else TokenPlan(**{k: as_tuples(v) for k, v in tokens.items()})
                own = {"shards": shards, "attrs": attrs, "inputs": inputs, "norm": norm, "fixes": fixes, "tokens": tokens}
                modules.append(ModulePlan(**{k: as_tuples(v) for k, v in entry.items()}, **own))
            regions = tuple(Region(**{k: as_tuples(v) for k, v in entry.items()}) for entry in data["regions"])
            whole = tuple(WholePlan(**entry) for entry in data["whole"])
            fused = tuple(Fusion(**{k: as_tuples(v) for k, v in entry.items()}) for entry in data.pop("fused", ()))
            chains = tuple(Chain(**{k: as_tuples(v) for k, v in entry.items()}) for entry in data.pop("chains", ()))
            products = tuple(
                ProductPlan(**{**entry, "recipe": entry["recipe"] and Recipe(**entry["recipe"])})
                for entry in data.pop("products", ())
            )
            draws = tuple(DrawPlan(**{k: as_tuples(v) for k, v in entry.items()}) for entry in data.pop("draws", ()))
            rest = {k: as_tuples(v) for k, v in data.items() if k not in ("modules", "regions", "whole")}
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
