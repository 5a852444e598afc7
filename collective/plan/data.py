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
        backend: the backend's name.
        ranks: N.
        tables: all tables of the graph.
        groups: all groups of the graph.
        alone: the lookups that aren't in a group, and why.
        exchanges: those of a step; those of the whole graph until the first training run.
        imbalance: the largest rank's bytes divided by the mean; None if it isn't known.
        notes: remarks from other parts of the library, by name.
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
        """Returns dictionaries, tuples and plain values under the names of the attributes."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict())


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """Describes a table.

    Attributes:
        name: the variable's.
        rows: V; None for dynamic tables.
        dim: D.
        dtype: the type of its rows.
        slots: the names of its optimizer slots.
        row_bytes: the bytes of one row with its slots.
        shard_rows: [N], the rows of each rank: all of them on each, if the table is replicated. For
            a dynamic table, the rows on this rank so far, and None if a number isn't known.
        shard_bytes: [N], slots included; None where shard_rows is.
        groups: the groups in which it is looked up.
        packed: how many tables share the operations that read rows and sum gradients: the tables of
            its (largest) group, of whatever dimensions; 1 for ungrouped lookups. Each table has its
            own memory, and its own update.
        imbalance: the largest of shard_bytes divided by their mean; None if it isn't known.
        keys_per_owner: [N], the keys requested from each rank per step, in the last profile of the
            graph; None without a profile.
        key_imbalance: the largest of keys_per_owner divided by their mean.
        policy: the options of its `collective.TablePolicy` that differ from the defaults, by name,
            without the initializer; 'admission' is 'host' if other tables are on a GPU but this one
            stays in the host's memory.
        placement: 'rows' if rows are dealt to all ranks, 'whole:K' if rank K has all rows,
            'replicated' if every rank has.
        why: why placement='auto' chose that; '' if it was given.
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
    placement: str = "rows"
    why: str = ""


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """Describes lookups that share three all-to-alls.

    Attributes:
        name: the middle part of its collectives' names.
        level: 1, or one more than the level of the rows on which its keys depend.
        lookups: the number of lookups.
        sections: what is exchanged, in this order.
        hierarchical: whether the ranks of a host merge their messages to other hosts.
    """

    name: str
    level: int
    lookups: int
    sections: tuple[SectionPlan, ...]
    hierarchical: bool = False


@dataclasses.dataclass(frozen=True)
class SectionPlan:
    """Describes what a group exchanges for a table: distinct keys, or a pooled lookup's samples.

    Attributes:
        table: the table's name.
        dim: D.
        pooled: whether the owner pools a sample's rows; else each distinct key's row is sent once.
        lookups: the number of lookups that share it.
    """

    table: str
    dim: int
    pooled: bool
    lookups: int


@dataclasses.dataclass(frozen=True)
class UngroupedLookupPlan:
    """Describes a lookup with its own exchange.

    Attributes:
        lookup: its name; '' for one in a function.
        table: the table's name.
        why: the reason why it isn't in a group.
    """

    lookup: str
    table: str
    why: str


@dataclasses.dataclass(frozen=True)
class ExchangePlan:
    """Describes a collective.

    Attributes:
        name: the name by which the ranks match it.
        kind: 'Alltoall', 'Allreduce', 'Allgather' or 'Broadcast'.
        phase: 'keys', 'rows', 'gradients', 'dense gradients', 'agreement' or 'other'.
        of: the group, or the table of an ungrouped lookup; '' for other collectives.
        level: the level of the gate that it waits for.
        tables, sections, members: how many of them it carries.
        dtype: the type in which values are sent.
        bytes: the bytes of one rank in one step, if the graph determines them: the keys or
            gradients that the rank sends or the rows that it receives, its own share included; None
            if they depend on the data.
        exact: whether `bytes` is exact; else it is the maximum, since repeated keys are sent once.
        received: the bytes that this rank received per step in the last profile of the graph, its
            own share included; None without a profile.
        reach: 'within host' or 'between hosts' if it is one of a pair; else ''.
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
        samples: the samples of a step, all ranks together, for which the times hold; None if the
            graph doesn't determine them.
        one_rank_ms: the time of a step on one rank that holds every table and takes all samples;
            None without `samples`.
        all_ranks_ms: the time of a step on all ranks; None without `samples`.
        break_even_samples: the samples of a step, all ranks together, below which one rank is
            faster.
    """

    samples: int | None
    one_rank_ms: float | None
    all_ranks_ms: float | None
    break_even_samples: int
