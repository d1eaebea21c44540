"""Where tokens can be dealt between regions: chains of layers, where their regions are entered and left; judged by the proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from torch import Tensor, nn

from ..errors import PlanError, ProofError
from ..layers.base import held_parameters
from . import styles
from .module_plan import ModulePlan, TokenPlan
from .plan import Chain, Plan
from .record import Call, ModuleCall, Record, bind_position
from .reduce import Reduction, hold_chain
from .runs import Runs

Prove = Callable[[Plan, Plan], None]  # of a plan: the part about layers that run, and the whole


def deal_tokens(plan: Plan, runs: Runs, kept: Plan, prove: Prove) -> Plan:
    """`plan` with the tokens of every chain dealt for which that proves; for the others the reasons in its `tokens`.

    Args:
        plan: proved; kept: the part of it about the layers that `runs` runs.
        prove: raises ProofError for a plan that does not compute what the model does.
    """
    reasons, accepted = [], [(plan, kept)]
    try:
        found = list(find_chains(runs))
    except ProofError as error:
        found, reasons = [], [str(error)]
    for each in found:
        try:
            accepted.append(deal_chain(*accepted[-1], runs, each, prove))
        except (ProofError, PlanError) as error:
            reasons.append(f"{each.name}: {error}")
    made = accepted[-1][0]
    if not made.chains and not reasons:
        reasons = ["no list of layers in which each reads what the one before it returns"]
    return replace(made, tokens=f"not dealt: {'; '.join(reasons)}" if reasons else "")


def deal_chain(plan: Plan, kept: Plan, runs: Runs, found: Chain, prove: Prove) -> tuple[Plan, Plan]:
    """Both plans with one chain's tokens dealt, in the first way that proves.

    Raises:
        ProofError: none does; why the first did not.
    """
    first: Exception | None = None
    for chain, tokens in list_ways(runs, plan, found):
        whole = put_tokens(plan, runs, chain, runs.reduction, tokens)
        part = put_tokens(kept, runs, hold_chain(chain, runs.reduction), Reduction({}), tokens)
        try:
            prove(part, whole)
            return whole, part
        except ProofError as error:
            first = first or error
    assert first is not None
    raise first


def put_tokens(plan: Plan, runs: Runs, chain: Chain, reduction: Reduction, tokens: Mapping[str, TokenPlan]) -> Plan:
    """`plan` with a chain, and with `tokens` by module; a layer that is not there gets those of the one that stands for it."""
    order = {name: i for i, name in enumerate(dict(runs.recording.model.named_modules()))}
    bare = {name: ModulePlan(name, "local_params", source="discovered", tokens=each) for name, each in tokens.items()}
    grown, _ = reduction.expand(bare, ())
    merged = plan.by_name | {n: replace(plan.by_name[n], tokens=m.tokens) if n in plan.by_name else m for n, m in grown.items()}
    modules = tuple(sorted(merged.values(), key=lambda module: order[module.name]))
    return replace(plan, modules=modules, chains=(*plan.chains, chain))


def without_tokens(plan: Plan) -> Plan:
    """`plan` as it is in a forward that deals nothing."""
    return replace(plan, modules=tuple(replace(m, tokens=None) for m in plan.modules), chains=())


# -- chains -------------------------------------------------------------------------------------------------------------


def find_chains(runs: Runs) -> Iterator[Chain]:
    """The outermost lists of layers, each of which reads what the one before it returns."""
    taken: list[str] = []
    for name, module in runs.recording.model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(name.startswith(f"{other}.") for other in taken):
            continue
        found = _find_chain(runs, name, [f"{name}.{key}" for key in module._modules])
        if found is not None:
            taken.append(name)
            yield found


def _find_chain(runs: Runs, name: str, members: Sequence[str]) -> Chain | None:
    argument = _find_argument([r for r in runs.records if any(member in r.module_calls for member in members)], members)
    if argument is None:
        return None
    ran = {member for record in runs.records for member in record.module_calls}
    layers = tuple(m for m in members if m in ran or not runs.reduction.holds(m))
    if not runs.reduction.holds(layers[0]):
        return None
    position = bind_position(runs.shadow.model.get_submodule(layers[0]), argument)
    join = find_join(runs, [m for m in members if m in ran], members)
    behind = (argument, position) if join is None else join[1]
    return Chain(name, layers, argument, position, layers[-1] if join is None else join[0], behind)


def _find_argument(records: Sequence[Record], members: Sequence[str]) -> str | None:
    """By which argument each member reads what the one before it returns; None if they are no chain, or none runs."""
    found: set[str] = set()
    for record in records:
        called = [member for member in members if member in record.module_calls]
        calls = [record.module_calls[member][0] for member in called]
        if any(len(record.module_calls[member]) > 1 for member in called):
            return None
        for before, after in pairwise(calls):
            read = [key for key, value in after.arguments.items() if before.outputs and value is before.outputs[0]]
            if not read:
                return None
            found.add(read[0])
        if len(calls) == 1:
            found |= set([key for key, value in calls[0].arguments.items() if value.ndim > 1][:1])
        if not found <= set(calls[0].arguments):
            return None
    return found.pop() if len(found) == 1 else None


def find_join(runs: Runs, called: Sequence[str], members: Sequence[str]) -> tuple[str, tuple[str, int | None]] | None:
    """The module that is first to read what the last layer returns, and by which argument; None if it multiplies, or is none."""
    record = next(r for r in runs.records if called[-1] in r.module_calls)
    last = record.module_calls[called[-1]][0].outputs[0]
    sites = {key[0] for each in runs.records for key in each.sites}
    for name, calls in record.module_calls.items():
        inside = any(name == member or name.startswith(f"{member}.") for member in members)
        read = [key for key, value in calls[0].arguments.items() if value is last]
        if read and not inside and len(calls) == 1:
            multiplies = any(site.startswith(f"{name}.") for site in sites)
            module = runs.shadow.model.get_submodule(name)
            return None if multiplies else (name, (read[0], bind_position(module, read[0])))
    return None


# -- regions ------------------------------------------------------------------------------------------------------------


def list_ways(runs: Runs, plan: Plan, found: Chain) -> Iterator[tuple[Chain, dict[str, TokenPlan]]]:
    """The chain, and what its modules do, in a few ways, the one that computes least on whole rows first.

    Raises:
        ProofError: a layer multiplies where no module takes its tokens.
    """
    layers = [Layer(runs, plan, found, name) for name in hold_chain(found, runs.reduction).layers]
    last = replace(found, join=found.layers[-1], join_argument=(found.argument, found.position))
    seen = []
    for chain in (found, last):
        for scatters in (True, False):
            tokens: dict[str, TokenPlan] = {}
            for layer in layers:
                tokens |= layer.list_tokens(scatters)
            if chain.join not in found.layers:
                own = tuple(name for name, _ in held_parameters(runs.shadow.model.get_submodule(chain.join)))
                tokens[chain.join] = TokenPlan(chain.name, summed=own)
            if (chain, tokens) not in seen:
                seen.append((chain, tokens))
                yield chain, tokens


class Layer:
    """Where the regions of one layer are entered and left."""

    def __init__(self, runs: Runs, plan: Plan, chain: Chain, name: str) -> None:
        """Raises:
        ProofError: it multiplies where no module inside it takes its tokens.
        """
        self.runs, self.plan, self.name, self.chain = runs, plan, name, chain
        self.records = [record for record in runs.records if name in record.module_calls]
        self.gathers: dict[str, tuple[tuple[str, int | None], ...]] = {}
        rows = {row for region in plan.regions for row in region.rows}
        for record in self.records:
            for key, number in record.order:
                call = record.sites[key].calls[number]
                if name not in call.modules or call.modules[-1] in rows:
                    continue
                inside = call.modules[call.modules.index(name) + 1 :]
                if not any(module in self.gathers for module in inside):
                    self._add(record, call, inside)

    def _add(self, record: Record, call: Call, inside: tuple[str, ...]) -> None:
        if not inside:
            raise ProofError(f"{self.name} multiplies in its own forward, where no module takes its tokens")
        chosen = self._choose(record, call, inside)
        if chosen is None:
            raise ProofError(f"{inside[-1]} multiplies what no module inside {self.name} is given as its tokens")
        for other in [other for other in self.gathers if other.startswith(f"{chosen[0]}.")]:
            del self.gathers[other]
        self.gathers[chosen[0]] = chosen[1]

    def _choose(
        self, record: Record, call: Call, inside: tuple[str, ...]
    ) -> tuple[str, tuple[tuple[str, int | None], ...]] | None:
        """The smallest module around that is given what the site reads, or else tokens at all; or the one that multiplies."""
        *around, own = inside
        read = [call.x, *(v for c in record.module_calls.get(own, []) for v in c.arguments.values())]
        for identical in (True, False):
            for module in reversed(around):
                tokens = self._find_tokens(record, module, flat=False)
                if tokens and (not identical or any(value is x for value in tokens.values() for x in read)):
                    return module, self._bind(module, tokens)
        tokens = self._find_tokens(record, own, flat=True)
        return (own, self._bind(own, tokens)) if tokens else None

    def _find_tokens(self, record: Record, module: str, flat: bool) -> dict[str, Tensor]:
        """Arguments of a module's call that are the layer's tokens: no other argument of the layer, and with a row for each."""
        own = record.module_calls[self.name][0]
        hidden = own.arguments[self.chain.argument]
        others = [value for key, value in own.arguments.items() if key != self.chain.argument]
        shapes = [hidden.shape[:-1]] + ([hidden.shape[:-1].numel()] if flat else [])
        found: dict[str, Tensor] = {}
        for call in record.module_calls.get(module, [])[:1]:
            for key, value in call.arguments.items():
                lead = value.shape[:-1]
                fits = lead == shapes[0] or (flat and tuple(lead) == (shapes[-1],))
                if fits and not any(value is other for other in others):
                    found[key] = value
        return found

    def _bind(self, module: str, tokens: Mapping[str, Tensor]) -> tuple[tuple[str, int | None], ...]:
        owner = self.runs.shadow.model.get_submodule(module)
        return tuple((key, bind_position(owner, key)) for key in tokens)

    def list_tokens(self, scatters: bool) -> dict[str, TokenPlan]:
        """What the layer and its modules do; `scatters`: row linears whose sum a module returns as it is scatter it."""
        chain = self.chain.name
        found = {name: TokenPlan(chain, gathers) for name, gathers in self.gathers.items()}
        for name, gathers in self.gathers.items():
            outside, last = self._rows_outside(name), self._find_last(name)
            if outside:
                found |= {row: replace(found.get(row, TokenPlan(chain)), leaves="scatter") for row in outside}
            elif scatters and last is not None:
                found[last] = replace(found.get(last, TokenPlan(chain)), leaves="scatter")
            else:
                found[name] = TokenPlan(chain, gathers, leaves="slice")
        found[self.name] = TokenPlan(chain, summed=self._find_summed(found), draws=self._draws(found))
        return found

    def _rows_outside(self, name: str) -> list[str]:
        def holds(other: str) -> bool:
            return other == name or other.startswith(f"{name}.")

        entered = [region for region in self.plan.regions if any(map(holds, region.columns))]
        return [row for region in entered for row in region.rows if not holds(row)]

    def _find_last(self, name: str) -> str | None:
        """The row linear inside a module whose output is the module's own."""
        for record in self.records:
            (returned,) = {id(call.outputs[0]) for call in record.module_calls.get(name, [])[:1]} or {0}
            for row in (row for region in self.plan.regions for row in region.rows):
                calls: list[ModuleCall] = record.module_calls.get(row, []) if row.startswith(f"{name}.") else []
                plain = row in self.plan.by_name and self.plan[row].style in styles.ROW_STYLES
                if plain and any(id(call.outputs[0]) == returned for call in calls):
                    return row
        return None

    def _find_summed(self, found: Mapping[str, TokenPlan]) -> tuple[str, ...]:
        """Names, below the layer, of the parameters that dealt rows read; a row linear sums its bias' gradient itself."""
        scattering = {name for name, each in found.items() if each.leaves == "scatter"}
        names = []
        for leaf, _ in held_parameters(self.runs.shadow.model.get_submodule(self.name)):
            full = f"{self.name}.{leaf}"
            inside = any(full.startswith(f"{gather}.") for gather in self.gathers)
            if not inside and full not in self.plan.shards and full.rpartition(".")[0] not in scattering:
                names.append(leaf)
        return tuple(names)

    def _draws(self, found: Mapping[str, TokenPlan]) -> bool:
        """Whether dropout is called where rows are dealt: outside the modules that gather them, or behind a scatter there."""
        scattering = {name for name, each in found.items() if each.leaves == "scatter"}
        for record in self.records:
            last = {key[0].rpartition(".")[0]: place for place, (key, _) in enumerate(record.order)}
            for drop in (drop for drop in record.drawn if drop.drops):
                stack, place = drop.modules, drop.place
                gather = next((module for module in stack if module in self.gathers), "")
                behind = (row for row in scattering if row.startswith(f"{gather}.") and last.get(row, place) < place)
                if self.name in stack and (not gather or any(behind)):
                    return True
        return False
