"""Places tables by other ways, on the planner's model: what its search is compared with."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from collective.planner.placement_costs import REPLICATED, ROWS, Costs, Sums
from collective.planner.step_model import StepModel
from collective.planner.workload import Placement


def seconds_of(model: StepModel, placements: Mapping[str, Placement]) -> float:
    """Returns the seconds of a step; infinite if it doesn't fit."""
    if model.bytes_of(placements) > model.machines.room:
        return math.inf
    return model.step(placements).seconds


def everything(model: StepModel) -> float:
    """Returns the seconds of the best of all placements.

    Ranks are alike, so a table is tried on those ranks that have one already, and on one more.
    """
    tables, ranks = model.workload.tables, model.machines.ranks
    best = math.inf
    placements: dict[str, Placement] = {}

    def place(number: int, used: int) -> None:
        nonlocal best
        if number == len(tables):
            best = min(best, seconds_of(model, placements))
            return
        for kind in tables[number].kinds:
            if kind != "whole":
                placements[tables[number].name] = kind
                place(number + 1, used)
                continue
            for rank in range(min(used + 1, ranks)):
                placements[tables[number].name] = f"whole:{rank}"
                place(number + 1, max(used, rank + 1))

    place(0, 0)
    return best


def by_rows(model: StepModel) -> float:
    """Returns the seconds of all tables by rows."""
    return seconds_of(model, {table.name: "rows" for table in model.workload.tables})


def by_size(model: StepModel) -> float:
    """Returns the seconds of the best rule that replicates what is smaller than some size."""
    return min(
        seconds_of(
            model,
            {
                t.name: "replicated"
                if t.rows * t.weight_bytes < below and "replicated" in t.kinds
                else "rows"
                for t in model.workload.tables
            },
        )
        for below in (0, 1e4, 1e5, 1e6, 1e7, 1e9)
    )


def whole_by_size(model: StepModel) -> float:
    """Returns the seconds of all tables whole: the largest first, each to the emptiest rank."""
    filled = [0.0] * model.machines.ranks
    placements: dict[str, Placement] = {}
    for table in sorted(model.workload.tables, key=lambda t: -t.rows * t.row_bytes):
        if "whole" not in table.kinds:
            placements[table.name] = "rows"
            continue
        rank = filled.index(min(filled))
        filled[rank] += table.rows * table.row_bytes
        placements[table.name] = f"whole:{rank}"
    return seconds_of(model, placements)


def greedy_proposals(model: StepModel) -> float:
    """Returns the seconds of the best proposal that TorchRec's `GreedyProposer` makes.

    Each table's placements are ordered by what it alone would take with them. The first proposal
    has each table's best; from one to the next, the table that takes most memory gets its next
    best. `GreedyPerfPartitioner` then gives whole tables, the slowest first, to the rank with the
    shortest time that has room.
    """
    costs = Costs(model)
    tables = model.workload.tables

    def alone(table: int, kind: str) -> float:
        placement = "whole:0" if kind == "whole" else kind
        return model.table(tables[table], placement).seconds

    def size(table: int, kind: str) -> float:
        if kind == "whole":
            return model.owner_bytes(tables[table])
        return model.table_bytes(tables[table], kind)

    options = [sorted(kinds, key=lambda k: alone(t, k)) for t, kinds in enumerate(costs.kinds)]
    chosen = [0] * len(tables)
    best = math.inf
    while True:
        kinds = [options[t][chosen[t]] for t in range(len(tables))]
        best = min(best, seconds_of(model, costs.placements(_partitioned(costs, kinds))))
        further = [t for t in range(len(tables)) if chosen[t] + 1 < len(options[t])]
        if not further:
            return best
        chosen[max(further, key=lambda t: size(t, kinds[t]))] += 1


def _partitioned(costs: Costs, kinds: Sequence[str]) -> list[int]:
    places = [ROWS if kind == "rows" else REPLICATED for kind in kinds]
    whole = [t for t, kind in enumerate(kinds) if kind == "whole"]
    ranks = costs.model.machines.ranks
    busy, filled = [0.0] * ranks, [0.0] * ranks
    room = costs.model.machines.room
    for table in sorted(whole, key=lambda t: -costs.load(t)):
        for rank in sorted(range(ranks), key=busy.__getitem__):
            if filled[rank] + costs.owner_bytes[table] <= room:
                break
        places[table] = rank
        busy[rank] += costs.load(table)
        filled[rank] += costs.owner_bytes[table]
    return places


def annealed(
    model: StepModel, seed: int, steps: int, starts: Sequence[Mapping[str, Placement]]
) -> float:
    """Returns the seconds of the best placements of simulated annealing, from each of `starts`.

    A table goes anywhere, or two exchange their places; the temperature falls from a tenth of a
    step to nothing.
    """
    draw = random.Random(seed)
    costs = Costs(model)
    ranks = model.machines.ranks
    best = math.inf
    for start in starts:
        places = costs.places(start)
        sums = costs.sums(places)
        now = sums.seconds()
        shortest, found = now, list(places)
        for step in range(steps if costs.free else 0):
            temperature = 0.1 * now * (1e-4 ** (step / steps)) if now < math.inf else 1e-9
            changes = _drawn(draw, costs, places, ranks)
            before = [(t, places[t]) for t, _ in changes]
            _move(sums, places, changes)
            after = sums.seconds()
            if after <= now or draw.random() < math.exp((now - after) / temperature):
                now = after
                if now < shortest:
                    shortest, found = now, list(places)
            else:
                _move(sums, places, before)
        best = min(best, seconds_of(model, costs.placements(found)))
    return best


def _drawn(
    draw: random.Random, costs: Costs, places: Sequence[int], ranks: int
) -> list[tuple[int, int]]:
    table = draw.choice(costs.free)
    other = draw.choice(costs.free)
    if (
        draw.random() < 0.4
        and costs.can_be(table, places[other])
        and costs.can_be(other, places[table])
    ):
        return [(table, places[other]), (other, places[table])] if table != other else []
    kind = draw.choice(costs.kinds[table])
    if kind == "whole":
        return [(table, draw.randrange(ranks))]
    return [(table, ROWS if kind == "rows" else REPLICATED)]


def _move(sums: Sums, places: list[int], changes: Sequence[tuple[int, int]]) -> None:
    for table, place in changes:
        sums.take(table, places[table])
        sums.put(table, place)
        places[table] = place


RULES = {
    "all by rows": by_rows,
    "replicated below a size": by_size,
    "all whole, the largest first": whole_by_size,
    "TorchRec's greedy proposals": greedy_proposals,
}
