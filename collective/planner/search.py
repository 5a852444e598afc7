"""Searches the placements whose predicted step is the shortest within a rank's memory.

What a table adds to a step depends on the others in two ways: the slowest rank decides how long
whole tables take (`placement_costs.py`), and whether gradients of replicated tables travel as
matrices depends on all of these together (`StepModel.as_matrices`). The search starts from several
rules (`first_placements.py`). It changes the best of these placements by single tables, then by
exchanging the places of two, as long as that helps. For the same input, in any order, it finds the
same.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping

from collective.ops.counting import counted
from collective.planner import choices, first_placements
from collective.planner.choices import Choice
from collective.planner.machines import MOST_RANKS, Machines
from collective.planner.placement_costs import Costs, Sums
from collective.planner.step_model import Parts, StepModel
from collective.planner.workload import KINDS, Placement, TableWork, Workload, owner_of

MOST_EXCHANGED = 400  # pairs of tables that are tried at a time


class DoesNotFit(ValueError):
    """Says which table takes more memory than ranks have, and what to do."""


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
    costs = Costs(model)
    placements = best(costs)
    by_rows = first_placements.all_of(model, "rows")
    return Forecast(
        ordered,
        machines,
        choices.explained(costs, placements),
        model.step(placements),
        model.bytes_of(placements),
        model.step(by_rows).seconds if _fits(model, by_rows) else None,
    )


def best(costs: Costs) -> dict[str, Placement]:
    """Returns the best placements, by the tables' names.

    Raises:
        DoesNotFit: as for `forecast`.
    """
    model = costs.model
    least = first_placements.least(model)
    _check_room(model, least)

    def order(places: list[int]) -> tuple[float, list[int]]:
        # Of steps that differ by rounding, one by rows comes before one with whole tables.
        return float(f"{costs.seconds(places):.9g}"), places

    def shortest(starts: Iterable[list[int]]) -> list[list[int]]:
        """Returns the best of those that fit, or none."""
        seconds, places = min(map(order, starts), default=(math.inf, []))
        return [places] if seconds < math.inf else []

    rules = [first_placements.all_of(model, kind) for kind in KINDS]
    promising = shortest(map(costs.places, [*rules, least]))
    for as_matrices in (True, False):
        greedy = costs.places(first_placements.greedy(model, as_matrices))
        promising += shortest([greedy])
        promising += shortest(first_placements.balanced(costs, greedy, as_matrices))
    improved = [_improved(costs, places, by_pairs=False) for places in promising]
    # What is best by single tables isn't always what is best by pairs, too.
    found = [_improved(costs, places, by_pairs=True) for places in sorted(improved, key=order)[:2]]
    for places in shortest(found):
        return costs.placements(places)
    return least  # to the last byte


def smallest(workload: Workload, machines: Machines, ranks_of_host: int) -> Machines:
    """Returns the fewest ranks that hold the tables: a part of a host, or whole hosts.

    Args:
        workload: the tables, and the samples of all ranks together.
        machines: its device counts.
        ranks_of_host: of a full host.

    Raises:
        DoesNotFit: `MOST_RANKS` are too few.
    """

    def cluster(step: int) -> Machines:
        hosts = max(1, step - ranks_of_host + 1)
        ranks = step if step < ranks_of_host else hosts * ranks_of_host
        return dataclasses.replace(machines, ranks=ranks, hosts=hosts)

    def fits(step: int) -> bool:
        model = StepModel(workload, cluster(step))
        return _fits(model, first_placements.least(model))

    low, high = 1, 1
    most = ranks_of_host - 1 + MOST_RANKS // ranks_of_host  # steps: a part of a host, whole hosts
    while not fits(high):
        if high == most:
            model = StepModel(workload, cluster(high))
            _check_room(model, first_placements.least(model))
        low, high = high + 1, min(2 * high, most)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return cluster(high)


def _fits(model: StepModel, placements: Mapping[str, Placement]) -> bool:
    return model.bytes_of(placements) <= model.machines.room


def _improved(costs: Costs, start: list[int], by_pairs: bool) -> list[int]:
    """Changes one table, or two, as long as the step becomes shorter."""
    places, before = list(start), math.inf
    while True:
        sums = costs.sums(places)  # again, so that rounding doesn't add up
        seconds = sums.seconds()
        # Rounding must not make it go round.
        if seconds >= before * (1 - 1e-12):
            return places
        before = seconds
        for table in costs.free:
            sums.take(table, places[table])
            options = [sums.best(table, kind) for kind in costs.kinds[table]]
            shortest, place = min(options)
            if shortest < seconds * (1 - 1e-12):
                places[table], seconds = place, shortest
            sums.put(table, places[table])
        if by_pairs:
            _exchange(costs, sums, places, seconds)


def _exchange(costs: Costs, sums: Sums, places: list[int], seconds: float) -> None:
    """Gives two tables each other's places wherever the step becomes shorter."""
    heaviest = sorted(costs.free, key=lambda t: (-costs.load(t), costs.tables[t].name))
    pairs = itertools.combinations(heaviest, 2)
    for a, b in itertools.islice(pairs, MOST_EXCHANGED):
        if places[a] == places[b] or not (
            costs.can_be(a, places[b]) and costs.can_be(b, places[a])
        ):
            continue
        sums.take(a, places[a])
        sums.take(b, places[b])
        sums.put(a, places[b])
        changed = sums.seconds_with(b, places[a])
        if changed < seconds * (1 - 1e-12):
            places[a], places[b] = places[b], places[a]
            seconds = changed
        else:
            sums.take(a, places[b])
            sums.put(a, places[a])
        sums.put(b, places[b])


def _check_room(model: StepModel, least: Mapping[str, Placement]) -> None:
    """Raises a `DoesNotFit` if the tables don't even fit where they take least."""
    machines = model.machines
    needed = model.bytes_of(least)
    if needed <= machines.room:
        return
    sizes = {t.name: model.table_bytes(t, least[t.name]) for t in model.workload.tables}
    worst = max(model.workload.tables, key=lambda t: (sizes[t.name], t.name))
    device = machines.device
    where = "one rank" if owner_of(least[worst.name]) is not None else "each rank"
    raise DoesNotFit(
        f"{counted(machines.ranks, 'rank')} can't hold these tables. The largest, '{worst.name}' "
        f"[{worst.rows:,}, {worst.dimension}] with its slots, takes "
        f"{_gigabytes(sizes[worst.name])} of {where} with placement '{least[worst.name]}'; "
        f"everything takes {_gigabytes(needed)}, and may take {_gigabytes(machines.room)} of "
        f"the {_gigabytes(device.memory.value)} of {device.name}. {_remedy(model, worst, least)}"
    )


def _remedy(model: StepModel, worst: TableWork, least: Mapping[str, Placement]) -> str:
    if least[worst.name] != "rows":
        return f"Leave out the placement of '{worst.name}', or give ranks more memory."
    by_rows = [t for t in model.workload.tables if least[t.name] == "rows"]
    others = model.bytes_of(least) - sum(model.table_bytes(t, "rows") for t in by_rows)
    rows = sum(t.rows * t.row_bytes for t in by_rows)
    left = model.machines.room - others
    if left <= 0:
        return "More ranks don't help: give ranks more memory, or take a smaller batch for each."
    ranks = -(-rows // left)
    return (
        f"Take at least {counted(round(ranks), 'rank')} (--smallest finds the number), devices "
        "with more memory, fewer rows, or an optimizer with fewer slots."
    )


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.1f} GB"
