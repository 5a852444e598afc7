"""Chooses the placement of one table when no other is known: what a job does without a file.

Other tables are taken to be placed by rows, so that the exchanges and their waits are there anyway.
What is compared is what the table alone adds to a step. A replicated table's gradient is to be part
of a matrix: beyond `MATRIX_ELEMENTS` numbers of all replicated tables it is not replicated. A table
is never whole on one rank: that pays only for several tables, which ranks share evenly.
"""

from __future__ import annotations

from collective.planner.choices import reason
from collective.planner.machines import Machines
from collective.planner.step_model import MATRIX_ELEMENTS, StepModel
from collective.planner.workload import Placement, TableWork, Workload


def choose(
    table: TableWork, machines: Machines, batch: int, replicated_elements: int
) -> tuple[Placement, str]:
    """Returns where a table's rows are best, and why.

    Args:
        table: the table.
        machines: the ranks.
        batch: samples of a step, of all ranks together.
        replicated_elements: numbers of the matrices of the tables that are replicated already.
    """
    if machines.ranks == 1:
        return "rows", "one rank has all rows"
    refusal = table.refusal("replicated")
    if refusal:
        return "rows", refusal
    if replicated_elements + table.elements > MATRIX_ELEMENTS:
        return "rows", f"replicated tables would have more than {MATRIX_ELEMENTS:,} numbers"
    model = StepModel(Workload((table,), batch), machines)
    by_rows, replicated = model.table(table, "rows"), model.table(table, "replicated")
    if replicated.seconds < by_rows.seconds:
        return "replicated", reason(by_rows - replicated, "rows")
    return "rows", reason(replicated - by_rows, "replicated")
