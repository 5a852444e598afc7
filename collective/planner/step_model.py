"""Predicts a training step's time and memory for given placements.

The model, for one rank of N, with n ids of its B / N samples in a table [V, D], of which u are
distinct, and row bytes r = D * size:

    'rows'         keys (8 u), rows (r u) and gradients (r u) travel by three all-to-alls that all
                   tables share. Read and written: n + u keys, rows by gather (2 r u), pool
                   forward (r n) and backward (2 r n), sums at the owner (2 r u), and the update of
                   what the owner was asked for (2 rows with slots each).
    'replicated'   the rank looks up itself: r n. Its gradient travels
                   - as a matrix in the allreduce of the dense gradients, if the matrices of all
                     replicated tables have no more than `MATRIX_ELEMENTS` numbers together,
                   - else as u rows, each with its rank's sum, which an allgather brings to all
                     ranks, and which all ranks sum and apply.
                   TensorFlow's operations take some time for each id, as `Device.id_time` says.

To these are added the network (6 operations per parameter and sample; its allreduce), a wait for
each collective, and a start for each operation. Parts of a step follow each other: the model has no
overlap. Of ids that repeat, only the first one's row is read from memory; the others' are in a
cache, which is `CACHED` times as fast.

It describes the backend 'hb', rows in their own type on the wire, keys that are not prefetched.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping, Set

from collective.planner.machines import Machines
from collective.planner.workload import (
    TYPE_BYTES,
    Placement,
    TableWork,
    Workload,
    distinct_of_equally_likely,
)

# `slice_means.MOST_ELEMENTS`: that module loads TensorFlow. A test holds them together.
MATRIX_ELEMENTS = 1 << 18
KEY_BYTES = 8
NETWORK_BYTES = 4  # of a number of the network
CACHED = 4.0
# A row that comes from all ranks is made unique, summed, and applied by an operation each; a slice
# is made unique and summed before it travels; one that becomes a part of a matrix is added once.
RECEIVED_WORK, SENT_WORK = 5, 2
# Operations that a step runs, and those for each table by its placement: in a group all tables
# share the exchange's, a replicated table has TensorFlow's own.
STEP_STARTS, ROWS_STARTS, REPLICATED_STARTS = 60, 3, 18


@dataclasses.dataclass(frozen=True)
class Parts:
    """Holds the seconds of a step, or of a table's part of it, by what they are spent on.

    Attributes:
        network: matrix products of the dense network, forward and backward.
        memory: rows, gradients and slots, read and written.
        exchange: keys, rows, gradients on the wires.
        dense: the allreduce of dense gradients, with matrices of replicated tables.
        waits: what collectives take whatever they carry.
        starts: what operations take whatever they compute, and what TensorFlow's take for each id.
    """

    network: float = 0.0
    memory: float = 0.0
    exchange: float = 0.0
    dense: float = 0.0
    waits: float = 0.0
    starts: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self.values())

    def values(self) -> tuple[float, ...]:
        """Returns the seconds in the order of the attributes."""
        return self.network, self.memory, self.exchange, self.dense, self.waits, self.starts

    def __add__(self, other: Parts) -> Parts:
        return Parts(*map(operator.add, self.values(), other.values()))

    def __sub__(self, other: Parts) -> Parts:
        return Parts(*map(operator.sub, self.values(), other.values()))


class StepModel:
    """Predicts steps of a workload on machines."""

    def __init__(self, workload: Workload, machines: Machines):
        self.workload, self.machines = workload, machines
        self.samples = workload.batch / machines.ranks
        self._known: dict[tuple[str, Placement, bool], Parts] = {}

    def step(self, placements: Mapping[str, Placement]) -> Parts:
        """Returns the seconds of a step.

        Args:
            placements: that of each table, by its name.
        """
        as_matrices = self.as_matrices(placements)
        parts = [self.shared(placements).values()]
        parts += [
            self.table(table, placements[table.name], as_matrices).values()
            for table in self.workload.tables
        ]
        return Parts(*map(math.fsum, zip(*parts)))

    def as_matrices(self, placements: Mapping[str, Placement]) -> bool:
        """Tells whether gradients of replicated tables travel as matrices."""
        replicated = [t for t in self.workload.tables if placements[t.name] == "replicated"]
        return sum(table.elements for table in replicated) <= MATRIX_ELEMENTS

    def shared(self, placements: Mapping[str, Placement]) -> Parts:
        """Returns the seconds that don't belong to any table."""
        types = {t.type for t in self.workload.tables if placements[t.name] == "replicated"}
        return self.shared_of("rows" in placements.values(), types, self.as_matrices(placements))

    def shared_of(self, by_rows: bool, replicated_types: Set[str], as_matrices: bool) -> Parts:
        """Returns the seconds that don't belong to any table.

        Args:
            by_rows: whether there is a table with placement 'rows'.
            replicated_types: the types of the replicated tables.
            as_matrices: whether their gradients travel as matrices.
        """
        machines, parameters = self.machines, self.workload.parameters
        device = machines.device
        rate = device.flops.value * device.flop_share.value
        collectives = 1 + 3 * by_rows  # the agreement; keys, rows and gradients
        collectives += parameters > 0 or (bool(replicated_types) and as_matrices)
        if not as_matrices:
            collectives += len(replicated_types)  # an allgather each
        return Parts(
            network=6.0 * parameters * self.samples / rate,
            dense=self._allreduce(parameters * NETWORK_BYTES),
            waits=collectives * machines.wait,
            starts=STEP_STARTS * device.start.value,
        )

    def table(self, table: TableWork, placement: Placement, as_matrices: bool = True) -> Parts:
        """Returns the seconds that a table adds to a step.

        Args:
            table: the table.
            placement: where its rows are.
            as_matrices: whether gradients of replicated tables travel as matrices.
        """
        key = (table.name, placement, as_matrices)
        if key not in self._known:
            if placement == "rows" or self.machines.ranks == 1:
                self._known[key] = self._by_rows(table)
            else:
                self._known[key] = self._replicated(table, as_matrices)
        return self._known[key]

    def _by_rows(self, table: TableWork) -> Parts:
        machines, ranks = self.machines, self.machines.ranks
        ids = self.samples * table.ids
        distinct = table.distinct_of(ids)
        row = self._touched(table.weight_bytes)
        own_rows = table.rows / ranks
        # All ranks' distinct keys; what several of them ask for is updated once.
        updated = distinct_of_equally_likely(distinct * ranks, table.rows) / ranks
        updated = min(updated * table.imbalance, own_rows)
        sent = distinct * table.imbalance
        memory = KEY_BYTES * (ids + distinct) * 2 + row * (4 * sent + 3 * _read(ids, distinct))
        memory += self._update(table, updated, own_rows)
        travelling = sent * (KEY_BYTES + 2 * table.weight_bytes)
        return Parts(
            memory=self._memory(memory),
            exchange=machines.all_to_all(travelling),
            starts=ROWS_STARTS * machines.device.start.value,
        )

    def _replicated(self, table: TableWork, as_matrices: bool) -> Parts:
        machines, ranks = self.machines, self.machines.ranks
        ids = self.samples * table.ids
        row = self._touched(table.weight_bytes)
        distinct = table.distinct_of(ids)
        received = distinct * ranks
        updated = distinct_of_equally_likely(received, table.rows)
        memory = (
            KEY_BYTES * ids * 2
            + row * 3 * _read(ids, distinct)
            + self._update(table, updated, table.rows)
        )
        starts = REPLICATED_STARTS * machines.device.start.value
        starts += ids * machines.device.id_time.value
        if as_matrices:
            matrix = table.elements * TYPE_BYTES[table.type]
            memory += row * _read(ids, distinct) + 4 * matrix  # zeros, sums, the mean, its rows
            return Parts(memory=self._memory(memory), dense=self._allreduce(matrix), starts=starts)
        memory += row * _read(ids, distinct)  # sums before they travel
        memory += (row + KEY_BYTES) * 4 * received  # received, sorted, summed
        work = SENT_WORK * ids + RECEIVED_WORK * received
        starts += work * machines.device.id_time.value
        travelling = (table.weight_bytes + KEY_BYTES) * distinct * (ranks - 1)
        return Parts(memory=self._memory(memory), exchange=machines.ring(travelling), starts=starts)

    def _update(self, table: TableWork, updated: float, here: float) -> float:
        """Returns the bytes that an update reads and writes."""
        rows = here if table.rule.all_rows else updated
        return 2 * rows * self._touched(table.row_bytes)

    def _touched(self, count: float) -> float:
        """Returns the bytes of memory that `count` bytes at any place take."""
        sector = self.machines.device.sector
        return math.ceil(count / sector) * sector

    def _memory(self, count: float) -> float:
        device = self.machines.device
        return count / (device.memory_rate.value * device.memory_share.value)

    def _allreduce(self, count: float) -> float:
        """Returns the seconds of the sum of `count` bytes over all ranks, by a ring."""
        ranks = self.machines.ranks
        return self.machines.ring(2 * (ranks - 1) / ranks * count) if ranks > 1 else 0.0

    # ---- Memory

    def table_bytes(self, table: TableWork, placement: Placement) -> float:
        """Returns the bytes of a table and its slots on the rank that has most."""
        ranks = self.machines.ranks if placement == "rows" else 1
        return math.ceil(table.rows / ranks) * table.row_bytes

    def buffer_bytes(self) -> float:
        """Returns the bytes of rows and gradients on their way, and of the network."""
        rows = 0.0
        for table in self.workload.tables:
            ids = self.samples * table.ids
            rows += 2 * table.weight_bytes * (table.distinct_of(ids) + self.samples)
        # Numbers, gradients, and two slots at most.
        return rows + 4 * NETWORK_BYTES * self.workload.parameters

    def bytes_of(self, placements: Mapping[str, Placement]) -> float:
        """Returns the bytes that a step takes on the rank that has most."""
        tables = (self.table_bytes(t, placements[t.name]) for t in self.workload.tables)
        return sum(tables) + self.buffer_bytes()


def _read(ids: float, distinct: float) -> float:
    """Returns how many rows are read from memory as slowly as `ids` are, most from a cache."""
    return distinct + (ids - distinct) / CACHED
