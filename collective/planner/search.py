"""Searches the placements whose predicted step is the shortest within a rank's memory.

All ranks have the same share of everything, so their memory is one number. A table's part of a step
doesn't depend on the others', but for one thing: whether gradients of replicated tables travel as
matrices depends on all of these together (`StepModel.as_matrices`). For each of the two ways, the
search first takes the tables in the order of what replicating them saves for its size; then it
changes the best of these placements by single tables and by pairs as long as that helps. For the
same input, in any order, it finds the same.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from collective.ops.counting import counted
from collective.planner.machines import Machines
from collective.planner.step_model import MATRIX_ELEMENTS, Parts, StepModel
from collective.planner.workload import PLACEMENTS, Placement, TableWork, Workload

MOST_SWAPPED = 64  # tables on one side whose pairs are tried


class DoesNotFit(ValueError):
    """Says which table takes more memory than ranks have, and what to do."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Describes what was chosen for a table.

    Attributes:
        table: the table.
        placement: where its rows are.
        bytes: of a rank for it and its slots.
        parts: the seconds that it adds to a step.
        other: the other placement.
        other_parts: the seconds that it would add, all other tables as they are; None if it is not
            possible.
        other_costs: how much longer the whole step would be.
        why: a sentence.
    """

    table: TableWork
    placement: Placement
    bytes: float
    parts: Parts
    other: Placement
    other_parts: Parts | None
    other_costs: float | None
    why: str


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Describes the best placements, and the step that is predicted.

    Attributes:
        workload: the step's work.
        machines: that do it.
        choices: of the tables, by their names.
        parts: the seconds of a step.
        bytes: of a rank, with buffers and the network.
        by_rows: the seconds of a step if all tables are placed by rows that can be; None if that
            doesn't fit.
    """

    workload: Workload
    machines: Machines
    choices: tuple[Choice, ...]
    parts: Parts
    bytes: float
    by_rows: float | None

    @property
    def placements(self) -> dict[str, Placement]:
        return {choice.table.name: choice.placement for choice in self.choices}


def forecast(workload: Workload, machines: Machines) -> Forecast:
    """Chooses placements, and predicts a step.

    Args:
        workload: its tables have different names.
        machines: the ranks.

    Raises:
        DoesNotFit: the tables don't fit into the memory of these ranks, however they are placed.
    """
    ordered = dataclasses.replace(
        workload, tables=tuple(sorted(workload.tables, key=lambda t: t.name))
    )
    model = StepModel(ordered, machines)
    placements = best(model)
    by_rows = _start(model, "rows")
    fits = model.bytes_of(by_rows) <= machines.room
    parts, size = model.step(placements), model.bytes_of(placements)
    return Forecast(
        ordered,
        machines,
        tuple(_choice(model, placements, table, parts, size) for table in ordered.tables),
        parts,
        size,
        model.step(by_rows).seconds if fits else None,
    )


def best(model: StepModel) -> dict[str, Placement]:
    """Returns the best placements, by the tables' names.

    Raises:
        DoesNotFit: as for `forecast`.
    """
    _check_room(model)

    def order(placements: dict[str, Placement]) -> tuple[object, ...]:
        return model.step(placements).seconds, sorted(placements.items())

    greedy = [_greedy(model, as_matrices) for as_matrices in (True, False)]
    starts = [*greedy, *(_start(model, placement) for placement in PLACEMENTS), _least(model)]
    fitting = [start for start in starts if _fits(model, start)]
    costs = _Costs(model)
    promising = [min(fitting, key=order), *(start for start in greedy if start in fitting)]
    return min((_improved(costs, start) for start in promising), key=order)


def smallest(workload: Workload, machines: Machines, ranks_of_host: int) -> Machines:
    """Returns the fewest ranks that hold the tables: a part of a host, or whole hosts.

    Args:
        workload: the tables, and the samples of all ranks together.
        machines: its device counts.
        ranks_of_host: of a full host.

    Raises:
        DoesNotFit: a million hosts are too few.
    """

    def cluster(step: int) -> Machines:
        hosts = max(1, step - ranks_of_host + 1)
        ranks = step if step < ranks_of_host else hosts * ranks_of_host
        return dataclasses.replace(machines, ranks=ranks, hosts=hosts)

    def fits(step: int) -> bool:
        model = StepModel(workload, cluster(step))
        return _fits(model, _least(model))

    low, high = 1, 1
    while not fits(high):
        if high > 1_000_000:
            _check_room(StepModel(workload, cluster(high)))
        low, high = high + 1, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return cluster(high)


def _possible(table: TableWork) -> list[Placement]:
    return [p for p in PLACEMENTS if not table.refusal(p)]


def _start(model: StepModel, wanted: Placement) -> dict[str, Placement]:
    """Returns `wanted` for all tables for which it is possible."""
    return {
        t.name: wanted if wanted in _possible(t) else _possible(t)[0] for t in model.workload.tables
    }


def _least(model: StepModel) -> dict[str, Placement]:
    """Returns the placements that take the least memory."""
    return {
        t.name: min(_possible(t), key=lambda p: model.table_bytes(t, p))
        for t in model.workload.tables
    }


def _fits(model: StepModel, placements: Mapping[str, Placement]) -> bool:
    return model.bytes_of(placements) <= model.machines.room


def _free(model: StepModel) -> list[TableWork]:
    """Returns the tables that have a choice."""
    if model.machines.ranks == 1:
        return []
    return [t for t in model.workload.tables if len(_possible(t)) > 1]


def _greedy(model: StepModel, as_matrices: bool) -> dict[str, Placement]:
    """Returns placements that replicate what saves most for its size, as far as there is room."""
    placements = _start(model, "rows")
    room = model.machines.room - model.bytes_of(placements)
    elements = MATRIX_ELEMENTS - sum(
        t.elements for t in model.workload.tables if placements[t.name] == "replicated"
    )

    def saved(table: TableWork) -> float:
        by_rows = model.table(table, "rows").seconds
        return by_rows - model.table(table, "replicated", as_matrices).seconds

    def extra(table: TableWork) -> float:
        return model.table_bytes(table, "replicated") - model.table_bytes(table, "rows")

    def size(table: TableWork) -> float:
        shares = [extra(table) / max(room, 1.0)]
        if as_matrices:
            shares.append(table.elements / max(elements, 1))
        return max(shares)

    paying = [table for table in _free(model) if saved(table) > 0]
    for table in sorted(paying, key=lambda t: (-saved(t) / max(size(t), 1e-30), t.name)):
        takes = table.elements if as_matrices else 0
        if extra(table) <= room and takes <= elements:
            placements[table.name] = "replicated"
            room, elements = room - extra(table), elements - takes
    return placements


def _improved(costs: _Costs, start: Mapping[str, Placement]) -> dict[str, Placement]:
    """Changes one table, or two, as long as the step becomes shorter."""
    state, before = costs.state(start), math.inf
    while True:
        totals = costs.totals(state)
        seconds = costs.seconds(totals)
        # Rounding must not make it go round.
        if seconds >= before * (1 - 1e-12):
            return {**start, **costs.placements(state)}
        before = seconds
        for name in costs.free:
            change = (name, "") if name in state else ("", name)
            changed = costs.after(totals, *change)
            if changed < seconds * (1 - 1e-12):
                state, seconds = state ^ {name}, changed
                totals = costs.totals_after(totals, *change)
        pairs = {pair: costs.after(totals, *pair) for pair in costs.pairs(state)}
        best_pair = min(pairs, key=lambda pair: (pairs[pair], pair), default=None)
        if best_pair is not None and pairs[best_pair] < seconds:
            state, seconds = state ^ set(best_pair), pairs[best_pair]


State = frozenset[str]  # the names of the free tables that are replicated


@dataclasses.dataclass
class _Totals:
    """Holds sums over the replicated ones of the free tables.

    Attributes:
        extra: bytes of a rank more than by rows.
        elements: numbers of their matrices.
        gains: seconds more than by rows, as slices and as matrices.
        types: how many have each type.
    """

    extra: float
    elements: int
    gains: list[float]
    types: dict[str, int]


class _Costs:
    """Holds what each free table costs by placement, so that a change costs one addition."""

    def __init__(self, model: StepModel):
        self.model = model
        self.free = {table.name: table for table in _free(model)}
        self._base = _start(model, "rows")
        fixed = [t for t in model.workload.tables if self._base[t.name] == "replicated"]
        self._elements = sum(t.elements for t in fixed)
        self._room = model.machines.room - model.bytes_of(self._base)
        self._of = {name: self._totals_of(table) for name, table in self.free.items()}
        self._tables = [
            sum(
                model.table(t, self._base[t.name], as_matrices).seconds
                for t in model.workload.tables
            )
            for as_matrices in (False, True)
        ]
        self._shared: dict[tuple[object, ...], float] = {}

    def _totals_of(self, table: TableWork) -> _Totals:
        model = self.model
        by_rows = model.table(table, "rows").seconds
        return _Totals(
            model.table_bytes(table, "replicated") - model.table_bytes(table, "rows"),
            table.elements,
            [model.table(table, "replicated", m).seconds - by_rows for m in (False, True)],
            {table.type: 1},
        )

    def state(self, placements: Mapping[str, Placement]) -> State:
        return frozenset(name for name in self.free if placements[name] == "replicated")

    def placements(self, state: State) -> dict[str, Placement]:
        return {name: "replicated" if name in state else "rows" for name in self.free}

    def totals(self, state: State) -> _Totals:
        totals = _Totals(0.0, self._elements, [0.0, 0.0], {})
        for name in sorted(state):
            totals = self._plus(totals, name, 1)
        return totals

    def after(self, totals: _Totals, removed: str, added: str) -> float:
        """Returns the seconds of a step after a change (see `totals_after`)."""
        return self.seconds(self.totals_after(totals, removed, added))

    def totals_after(self, totals: _Totals, removed: str, added: str) -> _Totals:
        """Returns the sums if one table is no longer replicated, and one now is; '' for none."""
        if removed:
            totals = self._plus(totals, removed, -1)
        return self._plus(totals, added, 1) if added else totals

    def _plus(self, totals: _Totals, name: str, sign: int) -> _Totals:
        own = self._of[name]
        types = dict(totals.types)
        for type_ in own.types:
            types[type_] = types.get(type_, 0) + sign
        return _Totals(
            totals.extra + sign * own.extra,
            totals.elements + sign * own.elements,
            [a + sign * b for a, b in zip(totals.gains, own.gains)],
            types,
        )

    def seconds(self, totals: _Totals) -> float:
        """Returns the seconds of a step; infinite if it doesn't fit."""
        if totals.extra > max(self._room, 0.0):
            return math.inf
        as_matrices = totals.elements <= MATRIX_ELEMENTS
        types = frozenset(name for name, count in totals.types.items() if count)
        none_by_rows = sum(totals.types.values()) == len(self.free)
        key = (as_matrices, none_by_rows, types)
        if key not in self._shared:
            self._shared[key] = self._seconds_shared(as_matrices, none_by_rows, types)
        return self._tables[as_matrices] + totals.gains[as_matrices] + self._shared[key]

    def _seconds_shared(
        self, as_matrices: bool, none_by_rows: bool, types: frozenset[str]
    ) -> float:
        of_fixed = {
            t.type for t in self.model.workload.tables if self._base[t.name] == "replicated"
        }
        has_rows = not none_by_rows or any(
            self._base[t.name] == "rows" and t.name not in self.free
            for t in self.model.workload.tables
        )
        return self.model.shared_of(has_rows, types | of_fixed, as_matrices).seconds

    def pairs(self, state: State) -> Iterator[tuple[str, str]]:
        """Yields a replicated table and one that isn't, if these aren't too many."""
        out = [name for name in self.free if name not in state]
        if len(out) <= MOST_SWAPPED and len(state) <= MOST_SWAPPED:
            yield from itertools.product(sorted(state), out)


def _check_room(model: StepModel) -> None:
    """Raises a `DoesNotFit` if the tables fit in no way."""
    machines, least = model.machines, _least(model)
    needed = model.bytes_of(least)
    if needed <= machines.room:
        return
    sizes = {t.name: model.table_bytes(t, least[t.name]) for t in model.workload.tables}
    worst = max(model.workload.tables, key=lambda t: (sizes[t.name], t.name))
    device = machines.device
    raise DoesNotFit(
        f"{counted(machines.ranks, 'rank')} can't hold these tables. The largest, '{worst.name}' "
        f"[{worst.rows:,}, {worst.dimension}] with its slots, takes "
        f"{_gigabytes(sizes[worst.name])} of each rank with placement '{least[worst.name]}'; "
        f"everything takes {_gigabytes(needed)}, and may take {_gigabytes(machines.room)} of "
        f"the {_gigabytes(device.memory.value)} of {device.name}. {_remedy(model, worst, least)}"
    )


def _remedy(model: StepModel, worst: TableWork, least: Mapping[str, Placement]) -> str:
    if least[worst.name] == "replicated":
        return f"Leave out the placement of '{worst.name}', or give ranks more memory."
    tables, buffers = model.workload.tables, model.buffer_bytes()
    whole = sum(model.table_bytes(t, least[t.name]) for t in tables if least[t.name] != "rows")
    rows = sum(t.rows * t.row_bytes for t in tables if least[t.name] == "rows")
    left = model.machines.room - whole - buffers
    if left <= 0:
        return "More ranks don't help: give ranks more memory, or take a smaller batch for each."
    ranks = -(-rows // left)
    return (
        f"Take at least {counted(round(ranks), 'rank')} (--smallest finds the number), devices "
        "with more memory, fewer rows, or an optimizer with fewer slots."
    )


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.1f} GB"


def _choice(
    model: StepModel,
    placements: Mapping[str, Placement],
    table: TableWork,
    step: Parts,
    size: float,
) -> Choice:
    """Describes a table's placement in a step that takes `step`, and `size` bytes of a rank."""
    placement = placements[table.name]
    other: Placement = "rows" if placement == "replicated" else "replicated"
    parts = model.table(table, placement, model.as_matrices(placements))
    refusal = table.refusal(other)
    changed: dict[str, Placement] = {**placements, table.name: other}
    other_bytes = size + model.table_bytes(table, other) - model.table_bytes(table, placement)
    other_parts, costs = None, None
    if model.machines.ranks == 1:
        why = "one rank has all rows"
    elif refusal:
        why = refusal
    elif other_bytes > model.machines.room:
        why = f"'{other}' takes {_gigabytes(other_bytes)} of a rank: too much"
    else:
        as_matrices = model.as_matrices(changed)
        other_parts = model.table(table, other, as_matrices)
        if as_matrices == model.as_matrices(placements):  # so no other table's part changes
            difference = other_parts - parts + model.shared(changed) - model.shared(placements)
        else:
            difference = model.step(changed) - step
        costs = difference.seconds
        why = reason(difference, other)
    return Choice(
        table,
        placement,
        model.table_bytes(table, placement),
        parts,
        other,
        other_parts,
        costs,
        why,
    )


NAMES_OF_PARTS = {
    "network": "the network",
    "memory": "reading and writing memory",
    "exchange": "exchanging keys, rows and gradients",
    "dense": "adding up dense gradients",
    "waits": "waiting for collectives",
    "starts": "starting operations",
}


def reason(difference: Parts, other: Placement) -> str:
    """Says what would take longest with another placement.

    Args:
        difference: how much longer the parts of a step would take.
        other: the other placement.
    """
    by_part: Sequence[tuple[str, float]] = list(dataclasses.asdict(difference).items())
    if difference.seconds <= 0:
        return f"'{other}' takes as long"
    part, seconds = max(by_part, key=lambda pair: pair[1])
    return f"'{other}': {1e3 * seconds:.3g} ms more for {NAMES_OF_PARTS[part]}"
