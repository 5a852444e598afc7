"""Chooses where the rows of a table are, when it is made in embedding_scope(placement='auto').

What is known then is the table, and the basis on which all ranks have agreed: this job's machines
and, with 'auto:FILE', the tables of an earlier run. A table that the file has, with the same shape
and type, is placed as the planner places all of the file's tables together: by rows, replicated, or
whole on a rank. Any other is placed by what it alone adds to a step, with assumed ids
(`planner/single_choice.py`). The same table of a graph gets the same placement each time that it is
asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from collective.ops.counting import counted
from collective.ops.graph import graph_state, graphs
from collective.planner import search, single_choice
from collective.planner.machines import Machines
from collective.planner.search import DoesNotFit
from collective.planner.workload import Placement, TableWork, Workload, kind_of

ASSUMED_BATCH = 8192  # of all ranks together; with one id of each table in a sample


@dataclasses.dataclass(frozen=True)
class Basis:
    """Holds what all ranks choose placements by.

    Attributes:
        machines: this job's.
        workload: the step of an earlier run; None if there is no file.
        source: says so, for people.
    """

    machines: Machines
    workload: Workload | None
    source: str


class Choice(NamedTuple):
    """Says where a table's rows are to be, and why."""

    placement: Placement
    why: str


@dataclasses.dataclass
class AutomaticChoices:
    """Records the choices for a graph's tables.

    Attributes:
        basis: by which they were made; None while there are none.
        by_name: of each table.
        elements: numbers of the matrices of the replicated ones that no file has.
    """

    basis: Basis | None = None
    by_name: dict[str, Choice] = dataclasses.field(default_factory=dict)
    elements: int = 0


class AutomaticPlacement:
    """Chooses placements, on a basis that all ranks agree on once for each file."""

    def __init__(self) -> None:
        self._agree: Callable[[str], Basis] | None = None
        self._bases: dict[str, Basis] = {}
        self._of_file: dict[str, dict[str, Choice]] = {}

    def connect(self, agree: Callable[[str], Basis]) -> None:
        """Sets what finds the basis. All ranks call it at the same time.

        Args:
            agree: gets the file of tables, '' for none.
        """
        self._agree = agree

    def basis(self, file: str) -> Basis:
        """Returns the basis of a file; '' for none.

        Raises:
            RankError: it isn't known yet, and another rank does something else.
            OSError, ValueError: the file can't be read, on every rank.
        """
        if file not in self._bases:
            assert self._agree is not None, "scope() connects it"
            self._bases[file] = self._agree(file)
        return self._bases[file]

    def choose(self, file: str, table: TableWork) -> Choice:
        """Returns where a table is to be.

        Args:
            file: of tables; '' for none.
            table: as far as it is known.

        Raises:
            RankError, OSError, ValueError: as for `basis`.
        """
        choices = of_graph()
        known = choices.by_name.get(table.name)
        if known is None:
            choices.basis = basis = self.basis(file)
            known, is_of_file = self._choice(file, basis, table, choices.elements)
            choices.by_name[table.name] = known
            if known.placement == "replicated" and not is_of_file:
                choices.elements += table.elements
        return known

    def _choice(
        self, file: str, basis: Basis, table: TableWork, elements: int
    ) -> tuple[Choice, bool]:
        """Returns a choice, and whether it is that of the file's tables together."""
        workload, remark = basis.workload, ""
        if workload is not None:
            if file not in self._of_file:
                self._of_file[file] = _of_workload(workload, basis.machines)
            there = next((t for t in workload.tables if t.name == table.name), None)
            if there is None:
                remark = f" (not in {file})"
            elif _kind(there) != _kind(table):
                remark = f" (in {file} it is {_described(there)}, here {_described(table)})"
            else:
                chosen = self._of_file[file][table.name]
                refusal = table.refusal(kind_of(chosen.placement))
                return (Choice("rows", refusal) if refusal else chosen), True
        batch = ASSUMED_BATCH if workload is None else workload.batch
        placement, why = single_choice.choose(table, basis.machines, batch, elements)
        return Choice(placement, why + remark), False


def _kind(table: TableWork) -> tuple[int | None, int, str]:
    """Returns the shape and type of a table; of a dynamic one any number of rows will do."""
    return None if table.dynamic else table.rows, table.dimension, table.type


def _described(table: TableWork) -> str:
    rows, dimension, dtype = _kind(table)
    return f"[{rows}, {dimension}] {dtype}"


def _of_workload(workload: Workload, machines: Machines) -> dict[str, Choice]:
    """Returns the planner's choices for all tables of a file."""
    try:
        forecast = search.forecast(workload, machines)
    except DoesNotFit as error:
        why = f"by the planner the tables don't fit, and 'rows' takes the least memory: {error}"
        return {table.name: Choice("rows", why) for table in workload.tables}
    return {choice.table.name: Choice(choice.placement, choice.why) for choice in forecast.choices}


def of_graph(graph: tf.Graph | None = None) -> AutomaticChoices:
    """Returns the choices for tables of a graph, by default the current one."""
    return graph_state.of(graphs.outermost(graph or tf.get_default_graph()), AutomaticChoices)


def note_of(graph: tf.Graph) -> str:
    """Says what was chosen for a graph's tables, and by what; '' if nothing was."""
    choices = of_graph(graph)
    if choices.basis is None:
        return ""
    kinds = [kind_of(choice.placement) for choice in choices.by_name.values()]
    total = counted(len(choices.by_name), "table")
    whole = kinds.count("whole")
    also = f"{whole} {'is' if whole == 1 else 'are'} whole on one rank, " if whole else ""
    text = f"replicates {kinds.count('replicated')} of {total}, {also}the others are by rows"
    return f"{text}; {choices.basis.source}"


AUTOMATIC = AutomaticPlacement()
