"""Says for each table of a plan why it is where it is, and what the next best placement costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from collective.planner.placement_costs import Costs, Sums, place_of, placement_of
from collective.planner.step_model import Parts
from collective.planner.workload import KINDS, Kind, Placement, TableWork, kind_of


@dataclasses.dataclass(frozen=True)
class Choice:
    """Describes what was chosen for a table.

    Attributes:
        table: the table.
        placement: where its rows are.
        bytes: of a rank for it and its slots; of a whole one, of its owner.
        parts: the seconds that it adds to a step; a whole one, on its owner.
        other: the next best placement of another kind.
        other_costs: how much longer the whole step would be with it, all other tables as they are;
            None if there is no other that is possible and fits.
        why: a sentence.
    """

    table: TableWork
    placement: Placement
    bytes: float
    parts: Parts
    other: Placement
    other_costs: float | None
    why: str


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


def explained(costs: Costs, placements: Mapping[str, Placement]) -> tuple[Choice, ...]:
    """Describes the placements of all tables, in the order of the workload."""
    sums = costs.sums(costs.places(placements))
    replicated = [table for table in costs.tables if placements[table.name] == "replicated"]
    as_matrices = sum((_as_matrix(costs, table) for table in replicated), Parts())
    choices = []
    for number, table in enumerate(costs.tables):
        place = place_of(placements[table.name])
        sums.take(number, place)
        choices.append(_choice(costs, sums, placements[table.name], number, as_matrices))
        sums.put(number, place)
    return tuple(choices)


def _as_matrix(costs: Costs, table: TableWork) -> Parts:
    """Returns how much longer a replicated table's parts take if its gradient is a matrix."""
    as_slices, as_matrix = (
        costs.model.on_all_ranks(table, "replicated", as_matrices) for as_matrices in (False, True)
    )
    return as_matrix - as_slices


def _choice(
    costs: Costs, sums: Sums, placement: Placement, number: int, all_as_matrices: Parts
) -> Choice:
    """Describes the placement of a table that `sums` is without.

    Args:
        costs: of all tables.
        sums: of all tables but this one.
        placement: the table's.
        number: the table's.
        all_as_matrices: how much longer all replicated tables' parts take as matrices.
    """
    model, table = costs.model, costs.tables[number]
    others, problems = _others(costs, sums, number, placement)
    here, as_matrices = _dependent(costs, sums, number, placement)
    parts = model.table(table, placement, as_matrices)
    size = model.table_bytes(table, placement)
    if not others:
        other, why = problems[0]
        return Choice(table, placement, size, parts, other, None, why)
    _, other = min(others)
    there, other_as_matrices = _dependent(costs, sums, number, other)
    difference = there - here
    if as_matrices != other_as_matrices:  # so other tables' parts change, too
        of_others = all_as_matrices
        if placement == "replicated":
            of_others -= _as_matrix(costs, table)
        difference = difference + of_others if other_as_matrices else difference - of_others
    why = reason(difference, other)
    return Choice(table, placement, size, parts, other, difference.seconds, why)


def _others(
    costs: Costs, sums: Sums, number: int, placement: Placement
) -> tuple[list[tuple[float, Placement]], list[tuple[Placement, str]]]:
    """Returns the seconds of a step by the placements of other kinds that are possible, and for
    those that aren't, why."""
    model, table = costs.model, costs.tables[number]
    kinds = sorted(set(KINDS) - {kind_of(placement)}, key=_ORDER.index)
    others: list[tuple[float, Placement]] = []
    problems: list[tuple[Placement, str]] = []
    for kind in kinds:
        refusal = "one rank has all rows" if model.machines.ranks == 1 else table.refusal(kind)
        if refusal:
            problems.append((kind, refusal))
            continue
        seconds, there = sums.best(number, kind)
        if seconds < float("inf"):
            others.append((seconds, placement_of(there)))
        else:
            count = sums.bytes_with(number, there)
            why = f"'{kind}' takes {count / 1e9:,.1f} GB of a rank: too much"
            problems.append((kind, why))
    return others, problems


_ORDER: tuple[Kind, ...] = ("replicated", "rows", "whole")  # in which problems are named


def _dependent(costs: Costs, sums: Sums, number: int, placement: Placement) -> tuple[Parts, bool]:
    """Returns the parts of a step that depend on where a table is, which is away, and whether
    gradients of replicated tables then travel as matrices."""
    sums.put(number, place_of(placement))
    parts, as_matrices = sums.parts(), sums.as_matrices
    sums.take(number, place_of(placement))
    table = costs.tables[number]
    return parts + costs.model.on_all_ranks(table, placement, as_matrices), as_matrices
