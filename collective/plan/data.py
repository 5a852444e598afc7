"""Defines the plan of a graph as data.

Symbols: N ranks, V rows of dimension D.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any


@dataclasses.dataclass(frozen=True)
class PlanData:
    """Describes what was built for a graph.

    Attributes:
        backend: its name.
        ranks: N.
        tables: all of the graph.
        groups: all of the graph.
        alone: the lookups that are in no group, and why.
        exchanges: of a step; of the whole graph as long as it isn't known what a step is.
        imbalance: the largest rank's bytes over their mean; None if it isn't known.
        notes: remarks of other parts of the library, by their names.
        estimate: the step's time compared with one rank's, if it can be estimated; else None.
    """

    backend: str
    ranks: int
    tables: tuple[TablePlan, ...]
    groups: tuple[GroupPlan, ...]
    alone: tuple[UngroupedLookupPlan, ...]
    exchanges: tuple[ExchangePlan, ...]
    imbalance: float | None
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    estimate: StepEstimate | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns dictionaries, tuples and plain values, with the names of the attributes."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict())


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """Describes a table.

    Attributes:
        name: the variable's.
        rows: V; None for a dynamic table.
        dim: D.
        dtype: of its rows.
        slots: the names of the optimizers' slots that it has.
        row_bytes: of one row with its slots.
        shard_rows: [N], each rank's; of a dynamic table the rows on this rank so far, None where it
            isn't known.
        shard_bytes: [N], slots included; None where shard_rows is.
        groups: the groups in which it is looked up.
        packed: how many tables share the operations that read rows and sum gradients: the tables of
            its (largest) group, of whatever dimensions; 1 for ungrouped lookups. Each table has its
            own memory, and its own update.
        imbalance: the largest of shard_bytes over their mean; None if it isn't known.
        keys_per_owner: [N], the keys a step that each rank was asked for, in the last profile of
            the graph; else None.
        key_imbalance: the largest of keys_per_owner over their mean.
        policy: the options of its `collective.TablePolicy` that aren't at their defaults, without
            the initializer, by their names; 'admission' is 'host' where kernels have other tables
            on a GPU, and this one stays in the host's memory.
    """

    name: str
    rows: int | None
    dim: int
    dtype: str
    slots: tuple[str, ...]
    row_bytes: int
    shard_rows: tuple[int | None, ...]
    shard_bytes: tuple[int | None, ...]
    groups: tuple[str, ...]
    packed: int
    imbalance: float | None
    keys_per_owner: tuple[float, ...] | None = None
    key_imbalance: float | None = None
    policy: dict[str, float | str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """Describes lookups that share three all-to-alls.

    Attributes:
        name: the middle of its collectives' names.
        level: 1; one more for keys that depend on the rows of the level before.
        lookups: how many.
        sections: what travels, in this order.
        hierarchical: the ranks of a host merge what they exchange with other hosts.
    """

    name: str
    level: int
    lookups: int
    sections: tuple[SectionPlan, ...]
    hierarchical: bool = False


@dataclasses.dataclass(frozen=True)
class SectionPlan:
    """Describes what travels for a table of a group: distinct keys, or a pooled lookup's samples.

    Attributes:
        table: the table's name.
        dim: D.
        pooled: the owner pools a sample's rows; else each distinct key's row travels once.
        lookups: how many lookups share it.
    """

    table: str
    dim: int
    pooled: bool
    lookups: int


@dataclasses.dataclass(frozen=True)
class UngroupedLookupPlan:
    """Describes a lookup with an exchange of its own.

    Attributes:
        lookup: its name; '' for one in a function.
        table: the table's name.
        why: what kept it out of a group.
    """

    lookup: str
    table: str
    why: str


@dataclasses.dataclass(frozen=True)
class ExchangePlan:
    """Describes a collective.

    Attributes:
        name: under which the ranks meet.
        kind: 'Alltoall', 'Allreduce', 'Allgather' or 'Broadcast'.
        phase: 'keys', 'rows', 'gradients', 'dense gradients', 'agreement' or 'other'.
        of: the group, or the table of an ungrouped lookup; '' for others.
        level: of the gate that it waits for.
        tables, sections, members: how many of them it carries.
        dtype: in which it travels.
        bytes: of one rank in one step, as far as the graph tells: the keys or gradients that the
            rank sends or the rows that it gets, its own share included; None if it depends on the
            data.
        exact: `bytes` is exact; else it is the most there can be, since keys that repeat travel
            once.
        received: bytes a step that this rank received, in the last profile of the graph, its own
            share included; else None.
        reach: 'within host' or 'between hosts', where it is one of a pair; else ''.
    """

    name: str
    kind: str
    phase: str
    of: str
    level: int
    tables: int
    sections: int
    members: int
    dtype: str
    bytes: int | None
    exact: bool
    received: float | None = None
    reach: str = ""


@dataclasses.dataclass(frozen=True)
class StepEstimate:
    """Estimates a step's time on all ranks compared with one rank's
    (`collective.plan.step_estimate`).

    Attributes:
        samples: of a step, all ranks together, for which the times are; None if the graph doesn't
            tell.
        one_rank_ms: of a step of one rank that holds every table and takes all samples; None
            without `samples`.
        all_ranks_ms: of a step of all ranks; None without `samples`.
        break_even_samples: the samples of a step, all ranks together, below which one rank is
            faster.
    """

    samples: int | None
    one_rank_ms: float | None
    all_ranks_ms: float | None
    break_even_samples: int
