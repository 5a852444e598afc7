"""Finds placements by rules: what a search starts from, and must not be worse than."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from collective.planner.placement_costs import Costs
from collective.planner.step_model import MATRIX_ELEMENTS, StepModel
from collective.planner.workload import Kind, Placement, TableWork


def all_of(model: StepModel, wanted: Kind) -> dict[str, Placement]:
    """Returns `wanted` for all tables for which it is possible."""
    kinds = {t.name: wanted if wanted in t.kinds else t.kinds[0] for t in model.workload.tables}
    return _with_owners(model, kinds)


def least(model: StepModel) -> dict[str, Placement]:
    """Returns the placements that take the least memory."""

    def size(table: TableWork, kind: Kind) -> float:
        return model.owner_bytes(table) if kind == "whole" else model.table_bytes(table, kind)

    kinds = {t.name: min(t.kinds, key=lambda kind: size(t, kind)) for t in model.workload.tables}
    return _with_owners(model, kinds)


def _with_owners(model: StepModel, kinds: dict[str, Kind]) -> dict[str, Placement]:
    """Gives each whole table, the largest first, to the rank with the fewest bytes of such."""
    placements: dict[str, Placement] = {**kinds}
    whole = [table for table in model.workload.tables if kinds[table.name] == "whole"]
    ranks = model.machines.ranks
    filled: dict[int, float] = {}
    for table in sorted(whole, key=lambda t: (-model.owner_bytes(t), t.name)):
        # Of the ranks that have none, the first one is enough.
        owners = table.owners(ranks)[: len(filled) + 1]
        owner = min(owners, key=lambda rank: (filled.get(rank, 0.0), rank))
        placements[table.name] = f"whole:{owner}"
        filled[owner] = filled.get(owner, 0.0) + model.owner_bytes(table)
    return placements


def greedy(model: StepModel, as_matrices: bool) -> dict[str, Placement]:
    """Returns placements that replicate what saves most for its size, as far as there is room."""
    placements = all_of(model, "rows")
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

    can = [t for t in model.workload.tables if {"rows", "replicated"} <= set(t.kinds)]
    paying = [table for table in can if model.machines.ranks > 1 and saved(table) > 0]
    for table in sorted(paying, key=lambda t: (-saved(t) / max(size(t), 1e-30), t.name)):
        takes = table.elements if as_matrices else 0
        if extra(table) <= room and takes <= elements:
            placements[table.name] = "replicated"
            room, elements = room - extra(table), elements - takes
    return placements


def balanced(costs: Costs, places: Sequence[int], as_matrices: bool) -> Iterator[list[int]]:
    """Yields places that have tables whole on one rank, and the others where they are in `places`.

    Tables are taken if they would be faster with all ranks equally busy with whole tables. A table
    that makes one rank busier than that doesn't belong to these, so each of the results leaves out
    some of the busiest. The others go, the busiest first, to the rank that has least to do.
    """
    ranks = costs.model.machines.ranks

    def gain(table: int) -> float:
        seconds = costs.on_all_ranks(table, places[table])[0][as_matrices]
        return seconds - costs.asks[table] - costs.load(table) / ranks

    able = [t for t in costs.free if places[t] < 0 and "whole" in costs.kinds[t]]
    # Rounding isn't a gain.
    paying = [t for t in able if gain(t) > 1e-9 * (costs.asks[t] + costs.load(t))]
    paying.sort(key=lambda t: (-costs.load(t), costs.tables[t].name))
    left_out = 0
    while left_out < len(paying):
        yield _dealt(costs, places, paying[left_out:])
        left_out += 1 + left_out // 2  # by one where it matters most


def _dealt(costs: Costs, places: Sequence[int], tables: Sequence[int]) -> list[int]:
    """Gives tables, in their order, to the rank that has least to do and room."""
    dealt = list(places)
    sums = costs.sums(places)
    for table in tables:
        sums.take(table, places[table])
    ranks = [(float(a) + float(b), rank) for rank, (a, b) in enumerate(zip(*sums.loads))]
    heapq.heapify(ranks)
    for table in tables:
        full = []
        while ranks and not sums.has_room(table, ranks[0][1]):
            full.append(heapq.heappop(ranks))
        if ranks:
            busy, rank = ranks[0]
            dealt[table] = rank
            heapq.heapreplace(ranks, (busy + costs.load(table), rank))
        sums.put(table, dealt[table])
        for load_and_rank in full:
            heapq.heappush(ranks, load_and_rank)
    return dealt
