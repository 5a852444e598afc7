"""Predicts a training step's time and memory for given placements.

The model, for one rank of N, with n ids of its B / N samples in a table [V, D], of which u are
distinct, and row bytes r = D * size:

    'rows'         keys (8 u), rows (r u) and gradients (r u) travel by three all-to-alls that all
                   tables share. Read and written: n ids, pool forward (r n) and backward (2 r n)
                   by who asks; by the owner u keys, rows by gather (2 r u), sums (2 r u), and the
                   update of what it was asked for (2 rows with slots each).
    'whole'        the same, in the same all-to-alls, but one owner answers all N ranks: N u in
                   place of u. The others have nothing to answer, and take part.
    'replicated'   the rank looks up itself: r n. Its gradient travels
                   - as a matrix in the allreduce of the dense gradients, if the matrices of all
                     replicated tables have no more than `MATRIX_ELEMENTS` numbers together,
                   - else as u rows, each with its rank's sum, which an allgather brings to all
                     ranks, and which all ranks sum and apply.
                   TensorFlow's operations take some time for each id, as `Device.id_time` says.

An owner's part has two phases: keys come in, rows are read and go out; gradients come in, are
summed and applied. Each phase lasts as long as its slowest rank. Of 'rows' that is the owner with
most keys, by `imbalance`, or the first ranks if V isn't a multiple of N. Nobody knows whether these
are the same ranks for each table, so all ranks are taken to be as busy with 'rows' as the busiest.
However tables are placed, the owner that answers most has more to send than any rank asks for,
since N - 1 times its share are at least all others' shares: askers' wires needn't be counted.

To these are added the network (6 operations per parameter and sample; its allreduce), what passes
between it and the tables, a wait for each collective, and a start for each operation. A table gives
each sample a row, or its ids' rows pooled to one, and gets a gradient of that: `ACTIVATION_PASSES`
times its bytes are read or written, wherever the table is. Parts of a step follow each other: the
model has no overlap. Of ids that repeat, only the first one's row is read from memory; the others'
are in a cache, which is `CACHED` times as fast.

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
    kind_of,
    owner_of,
)

# `slice_means.MOST_ELEMENTS`: that module loads TensorFlow. A test holds them together.
MATRIX_ELEMENTS = 1 << 18
KEY_BYTES = 8
NETWORK_BYTES = 4  # of a number of the network
CACHED = 4.0
# Pooled rows are written; copied next to other tables' (read, written); read by a product, and
# again for the gradient of its weights. Their gradient is written; cut into the tables' parts
# (read, written), which are read for the tables' gradients.
ACTIVATION_PASSES = 9
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
        self._pooled_bytes = self.samples * sum(t.weight_bytes for t in workload.tables)
        self._known: dict[tuple[str, str, bool], Parts] = {}
        self._answered: dict[str, tuple[Parts, Parts]] = {}

    def step(self, placements: Mapping[str, Placement]) -> Parts:
        """Returns the seconds of a step.

        Args:
            placements: that of each table, by its name.
        """
        as_matrices = self.as_matrices(placements)
        parts = [self.shared(placements), *self.slowest_owners(placements)]
        parts += [
            self.on_all_ranks(table, placements[table.name], as_matrices)
            for table in self.workload.tables
        ]
        return Parts(*map(math.fsum, zip(*(part.values() for part in parts))))

    def slowest_owners(self, placements: Mapping[str, Placement]) -> list[Parts]:
        """Returns what answering for whole tables takes the slowest rank, in each phase."""
        whole: dict[int, list[tuple[Parts, Parts]]] = {}
        for table in self.workload.tables:
            owner = owner_of(placements[table.name])
            if owner is not None:
                whole.setdefault(owner, []).append(self.answers(table))
        phases = [
            [Parts(*map(math.fsum, zip(*(part.values() for part in phase)))) for phase in zip(*own)]
            for _, own in sorted(whole.items())
        ]
        return [max(ranks, key=lambda part: part.seconds) for ranks in zip(*phases)]

    def as_matrices(self, placements: Mapping[str, Placement]) -> bool:
        """Tells whether gradients of replicated tables travel as matrices."""
        replicated = [t for t in self.workload.tables if placements[t.name] == "replicated"]
        return sum(table.elements for table in replicated) <= MATRIX_ELEMENTS

    def shared(self, placements: Mapping[str, Placement]) -> Parts:
        """Returns the seconds that don't belong to any table."""
        types = {t.type for t in self.workload.tables if placements[t.name] == "replicated"}
        exchanged = any(placement != "replicated" for placement in placements.values())
        return self.shared_of(exchanged, types, self.as_matrices(placements))

    def shared_of(self, exchanged: bool, replicated_types: Set[str], as_matrices: bool) -> Parts:
        """Returns the seconds that don't belong to any table.

        Args:
            exchanged: whether there is a table that isn't replicated.
            replicated_types: the types of the replicated tables.
            as_matrices: whether their gradients travel as matrices.
        """
        machines, parameters = self.machines, self.workload.parameters
        device = machines.device
        rate = device.flops.value * device.flop_share.value
        collectives = 1 + 3 * exchanged  # the agreement; keys, rows and gradients
        collectives += parameters > 0 or (bool(replicated_types) and as_matrices)
        if not as_matrices:
            collectives += len(replicated_types)  # an allgather each
        return Parts(
            network=6.0 * parameters * self.samples / rate,
            memory=self._memory(ACTIVATION_PASSES * self._pooled_bytes),
            dense=self._allreduce(parameters * NETWORK_BYTES),
            waits=collectives * machines.wait,
            starts=STEP_STARTS * device.start.value,
        )

    def table(self, table: TableWork, placement: Placement, as_matrices: bool = True) -> Parts:
        """Returns the seconds that a table adds to a step, of a whole one on its owner.

        Args:
            table: the table.
            placement: where its rows are.
            as_matrices: whether gradients of replicated tables travel as matrices.
        """
        parts = self.on_all_ranks(table, placement, as_matrices)
        if owner_of(placement) is not None:
            for phase in self.answers(table):
                parts += phase
        return parts

    def on_all_ranks(
        self, table: TableWork, placement: Placement, as_matrices: bool = True
    ) -> Parts:
        """Returns the seconds that a table takes on every rank: see `table`."""
        kind = kind_of(placement)
        if kind == "replicated" and self.machines.ranks == 1:
            kind = "rows"
        key = (table.name, kind, as_matrices)
        if key not in self._known:
            if kind == "replicated":
                self._known[key] = self._replicated(table, as_matrices)
            else:
                self._known[key] = self._asks(table)
                if kind == "rows":
                    for phase in self._answers(table, *self._own(table)):
                        self._known[key] += phase
        return self._known[key]

    def answers(self, table: TableWork) -> tuple[Parts, Parts]:
        """Returns the seconds of the owner of a whole table: until rows are with those who asked,
        and from when gradients leave these until rows are updated."""
        if table.name not in self._answered:
            self._answered[table.name] = self._answers(table, 1.0, table.rows)
        return self._answered[table.name]

    def _own(self, table: TableWork) -> tuple[float, float]:
        """Returns what the busiest owner of a table by rows is asked for, as a share of all ranks'
        keys, and how many rows it has."""
        ranks = self.machines.ranks
        rows = math.ceil(table.rows / ranks)
        fullest = 0.0 if table.dynamic else rows / table.rows
        return min(max(table.imbalance / ranks, fullest), 1.0), rows

    def _asks(self, table: TableWork) -> Parts:
        ids = self.samples * table.ids
        row = self._touched(table.weight_bytes)
        memory = 2 * KEY_BYTES * ids + 3 * row * _read(ids, table.distinct_of(ids))
        starts = ROWS_STARTS * self.machines.device.start.value
        return Parts(memory=self._memory(memory), starts=starts)

    def _answers(self, table: TableWork, share: float, own_rows: float) -> tuple[Parts, Parts]:
        """Returns the seconds of the two phases of an owner that is asked for `share` of all keys.

        What several ranks ask for is updated once.
        """
        row = self._touched(table.weight_bytes)
        keys = table.distinct_of(self.samples * table.ids) * self.machines.ranks
        updated = min(distinct_of_equally_likely(keys, table.rows) * share, own_rows)
        asked = keys * share
        given = 2 * (KEY_BYTES + row) * asked
        taken = 2 * row * asked + self._update(table, updated, own_rows)
        all_to_all = self.machines.all_to_all
        return (
            Parts(
                memory=self._memory(given),
                exchange=all_to_all(asked * (KEY_BYTES + table.weight_bytes)),
            ),
            Parts(memory=self._memory(taken), exchange=all_to_all(asked * table.weight_bytes)),
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

    def owner_bytes(self, table: TableWork) -> float:
        """Returns the bytes of a whole table on its rank, with rows and gradients on their way to
        and from the other ranks."""
        keys = table.distinct_of(self.samples * table.ids) * (self.machines.ranks - 1)
        return table.rows * table.row_bytes + 2 * table.weight_bytes * keys

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
        on_all_ranks, whole = self.buffer_bytes(), dict[int, float]()
        for table in self.workload.tables:
            owner = owner_of(placements[table.name])
            if owner is None:
                on_all_ranks += self.table_bytes(table, placements[table.name])
            else:
                whole[owner] = whole.get(owner, 0.0) + self.owner_bytes(table)
        return on_all_ranks + max(whole.values(), default=0.0)


def _read(ids: float, distinct: float) -> float:
    """Returns how many rows are read from memory as slowly as `ids` are, most from a cache."""
    return distinct + (ids - distinct) / CACHED
