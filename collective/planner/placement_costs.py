"""Adds up what placements cost, so that changing a table's costs a few additions.

A place is 'rows' (`ROWS`), 'replicated' (`REPLICATED`), or the number of the rank that has a table
whole. Sums are made of additions and maxima of numbers, one after the other, so that they are the
same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from collective.planner.step_model import MATRIX_ELEMENTS, Parts, StepModel
from collective.planner.workload import Kind, Placement, kind_of, owner_of

ROWS, REPLICATED = -1, -2


def place_of(placement: Placement) -> int:
    owner = owner_of(placement)
    if owner is not None:
        return owner
    return REPLICATED if placement == "replicated" else ROWS


def placement_of(place: int) -> Placement:
    return {ROWS: "rows", REPLICATED: "replicated"}.get(place, f"whole:{place}")


class Costs:
    """Holds what each table of a model costs, by its place.

    Attributes:
        model: predicts steps.
        tables: of its workload.
        kinds: those that each table can have; only the first one if there is one rank.
        owners: the ranks that can have each table whole, [1] or all.
        asks: [T], seconds on every rank of a table that isn't replicated.
        loads: [T, 4], seconds of the two phases of a whole table's owner, and those of them that
            are spent on the wires.
        owner_bytes: [T], of a whole table's owner.
        room: bytes of a rank for tables, slots, and what whole tables' owners send and receive.
    """

    def __init__(self, model: StepModel):
        self.model, self.tables = model, model.workload.tables
        ranks = model.machines.ranks
        self.kinds = [t.kinds if ranks > 1 else t.kinds[:1] for t in self.tables]
        self.owners = [np.asarray(table.owners(ranks)) for table in self.tables]
        self.free = [
            t
            for t, kinds in enumerate(self.kinds)
            if len(kinds) > 1 or (kinds == ["whole"] and len(self.owners[t]) > 1)
        ]
        self.asks = [model.on_all_ranks(table, "whole:0").seconds for table in self.tables]
        answers = [model.answers(table) for table in self.tables]
        self.loads = np.array([[a.seconds, b.seconds, a.exchange, b.exchange] for a, b in answers])
        self.owner_bytes = [model.owner_bytes(table) for table in self.tables]
        # Rounding is never to make fit what doesn't.
        self.room = model.machines.room * (1 - 1e-12) - model.buffer_bytes()
        self._seconds = {
            place: [
                [model.on_all_ranks(table, placement_of(place), m).seconds for m in (False, True)]
                for table in self.tables
            ]
            for place in (ROWS, REPLICATED)
        }
        self._bytes = {
            place: [model.table_bytes(table, placement_of(place)) for table in self.tables]
            for place in (ROWS, REPLICATED)
        }
        self._types = sorted({table.type for table in self.tables})
        self._type = [self._types.index(table.type) for table in self.tables]
        self._shared: dict[tuple[object, ...], tuple[Parts, float]] = {}

    def places(self, placements: Mapping[str, Placement]) -> list[int]:
        return [place_of(placements[table.name]) for table in self.tables]

    def placements(self, places: Sequence[int]) -> dict[str, Placement]:
        return {table.name: placement_of(place) for table, place in zip(self.tables, places)}

    def can_be(self, table: int, place: int) -> bool:
        """Tells whether a table can be at a place."""
        return kind_of(placement_of(place)) in self.kinds[table] and (
            place < 0 or place in self.owners[table]
        )

    def sums(self, places: Sequence[int]) -> Sums:
        return Sums(self, places)

    def seconds(self, places: Sequence[int]) -> float:
        """Returns the seconds of a step; infinite if it doesn't fit."""
        return self.sums(places).seconds()

    def on_all_ranks(self, table: int, place: int) -> tuple[list[float], float]:
        """Returns the seconds of a table on every rank, as slices and as matrices, and its bytes
        there."""
        if place >= 0:
            return [self.asks[table]] * 2, 0.0
        return self._seconds[place][table], self._bytes[place][table]

    def load(self, table: int) -> float:
        """Returns the seconds of a whole table's owner."""
        first, second, *_ = self.loads[table].tolist()
        return first + second

    def shared(
        self, as_matrices: bool, exchanged: bool, types: Sequence[int]
    ) -> tuple[Parts, float]:
        """Returns the seconds of no table, and their sum.

        Args:
            as_matrices: whether gradients of replicated tables travel as matrices.
            exchanged: whether there is a table that isn't replicated.
            types: how many tables of each type are replicated.
        """
        key = (as_matrices, exchanged, *(count > 0 for count in types))
        if key not in self._shared:
            names = {name for name, count in zip(self._types, types) if count}
            parts = self.model.shared_of(exchanged, names, as_matrices)
            self._shared[key] = parts, parts.seconds
        return self._shared[key]


class Sums:
    """Adds up the tables of a step. A table is taken out before it is put elsewhere."""

    def __init__(self, costs: Costs, places: Sequence[int]):
        self.costs = costs
        ranks = costs.model.machines.ranks
        self._seconds = [0.0, 0.0]  # on every rank; gradients as slices, as matrices
        self._room = costs.room
        self._elements = self._exchanged = 0
        self._types = [0] * len(costs._types)
        self._of_owners = np.zeros([4, ranks])
        self.loads, self._exchanges = self._of_owners[:2], self._of_owners[2:]
        self.bytes = np.zeros(ranks)  # of whole tables
        for table, place in enumerate(places):
            self.put(table, place)

    def put(self, table: int, place: int, sign: int = 1) -> None:
        """Adds a table at its place."""
        costs = self.costs
        seconds, count = costs.on_all_ranks(table, place)
        self._seconds[0] += sign * seconds[0]
        self._seconds[1] += sign * seconds[1]
        self._room -= sign * count
        if place == REPLICATED:
            self._elements += sign * costs.tables[table].elements
            self._types[costs._type[table]] += sign
            return
        self._exchanged += sign
        if place >= 0:
            self._of_owners[:, place] += sign * costs.loads[table]
            self.bytes[place] += sign * costs.owner_bytes[table]

    def take(self, table: int, place: int) -> None:
        """Takes a table away that is at `place`."""
        self.put(table, place, -1)

    def has_room(self, table: int, rank: int) -> bool:
        """Tells whether a table, which is away, fits on a rank as a whole one."""
        return bool(self.bytes[rank] + self.costs.owner_bytes[table] <= self._room)

    def seconds(self) -> float:
        """Returns the seconds of a step; infinite if it doesn't fit."""
        if self.bytes.max() > self._room:
            return math.inf
        first, second = self.loads
        on_all_ranks = self._seconds[self.as_matrices] + self._shared()[1]
        return on_all_ranks + (float(first.max()) + float(second.max()))

    @property
    def as_matrices(self) -> bool:
        """Whether gradients of replicated tables travel as matrices."""
        return self._elements <= MATRIX_ELEMENTS

    def _shared(self) -> tuple[Parts, float]:
        return self.costs.shared(self.as_matrices, self._exchanged > 0, self._types)

    def parts(self) -> Parts:
        """Returns the seconds of a step that belong to no table, and those of the slowest owners of
        whole tables."""
        parts = self._shared()[0]
        for loads, exchanges in zip(self.loads, self._exchanges):
            slowest = loads.argmax()
            exchange = float(exchanges[slowest])
            parts += Parts(memory=float(loads[slowest]) - exchange, exchange=exchange)
        return parts

    def best(self, table: int, kind: Kind) -> tuple[float, int]:
        """Returns the seconds of a step with a table, which is away, at the best place of a kind,
        and this place; infinite seconds if it doesn't fit."""
        if kind == "whole":
            return self.best_owner(table)
        place = place_of(kind)
        return self.seconds_with(table, place), place

    def seconds_with(self, table: int, place: int) -> float:
        """Returns the seconds of a step with a table, which is away, at a place."""
        self.put(table, place)
        seconds = self.seconds()
        self.take(table, place)
        return seconds

    def bytes_with(self, table: int, place: int) -> float:
        """Returns the bytes of the fullest rank with a table, which is away, at a place."""
        self.put(table, place)
        count = self.costs.model.machines.room - self._room + float(self.bytes.max())
        self.take(table, place)
        return count

    def best_owner(self, table: int) -> tuple[float, int]:
        """Returns the seconds of a step with a table, which is away, whole on the best rank for it,
        and this rank; infinite seconds, and the rank with most room, if it fits on none."""
        costs = self.costs
        owners = costs.owners[table]
        loads = self.loads[:, owners] + costs.loads[table, :2, None]
        phases = np.maximum(loads, self.loads.max(axis=1)[:, None])
        count = self.bytes[owners] + costs.owner_bytes[table]
        fits = count <= self._room
        if not fits.any() or self.bytes.max() > self._room:
            return math.inf, int(owners[count.argmin()])
        # Of ranks that are equally good, the one that has less to do.
        seconds = np.where(fits, phases[0] + phases[1], math.inf)
        best = np.flatnonzero(seconds == seconds.min())
        owner = int(owners[best[(loads[0] + loads[1])[best].argmin()]])
        return self.seconds_with(table, owner), owner
