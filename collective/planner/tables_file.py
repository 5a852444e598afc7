"""Reads a file of tables: what a step has to do, for the planner.

batch: 65536
parameters: 2500000
tables:
  user: {rows: 40000000, dimension: 128, distinct: 0.4}
  country: {rows: 200, dimension: 16, ids: 3}
"""

from __future__ import annotations

import decimal
import json
import os
import re
from collections.abc import Mapping
from typing import Annotated, Literal, Optional

import pydantic

from collective import yaml_file
from collective.planner.workload import MOST, OPTIMIZERS, TYPE_BYTES, TableWork, Workload, kind_of
from collective.yaml_file import Contradictions, Place, StrictModel

MOST_TIMES = 1e12  # beyond it, a step would be infinite
Count = Annotated[int, pydantic.Field(ge=1, le=MOST)]
Optimizer = Literal[
    "sgd",
    "momentum",
    "adagrad",
    "rowwise_adagrad",
    "adam",
    "lazy_adam",
    "rmsprop",
    "adadelta",
    "ftrl",
]
PLACEMENTS = re.compile("auto|rows|replicated|whole(:[0-9]{1,9})?")
assert set(Optimizer.__args__) == set(OPTIMIZERS)  # type: ignore[attr-defined]


class TableEntry(StrictModel):
    """Describes a table; see `TableWork` for each key."""

    rows: Count
    dimension: Annotated[
        Count, pydantic.Field(validation_alias=pydantic.AliasChoices("dimension", "dim"))
    ]
    type: Literal["float32", "float64", "float16", "bfloat16"] = "float32"
    ids: Annotated[float, pydantic.Field(gt=0, le=MOST_TIMES)] = 1.0
    # pydantic evaluates these, and Python 3.9 has no `| None`.
    distinct: Optional[Annotated[float, pydantic.Field(gt=0, le=1)]] = None  # noqa: UP045
    distinct_at: Optional[Annotated[float, pydantic.Field(gt=1, le=MOST)]] = None  # noqa: UP045
    optimizer: Optional[Optimizer] = None  # noqa: UP045
    imbalance: Annotated[float, pydantic.Field(ge=1, le=MOST_TIMES)] = 1.0
    dynamic: bool = False
    weight_bound: bool = False
    placement: str = "auto"

    @pydantic.model_validator(mode="after")
    def _check(self) -> TableEntry:
        found: list[tuple[Place, str]] = []
        table = TableWork("", 1, 1, dynamic=self.dynamic, bounded=self.weight_bound)
        if not PLACEMENTS.fullmatch(self.placement):
            known = "'auto', 'rows', 'replicated', 'whole' or 'whole:K' (on rank K)"
            found.append((("placement",), f"it is {known}, not {self.placement!r}."))
        elif self.placement != "auto" and (refusal := table.refusal(kind_of(self.placement))):
            found.append((("placement",), f"{refusal}. Write 'rows'."))
        if self.distinct_at is not None and self.distinct is None:
            needs = "it says at how many ids `distinct` was measured, which is missing. Add it."
            found.append((("distinct_at",), needs))
        if found:
            raise Contradictions(found)
        return self


class TablesFile(StrictModel):
    """Describes a training step.

    Attributes:
        tables: by their names.
        batch: samples of a step, of all ranks together.
        parameters: numbers of the dense network.
        optimizer: of tables that don't name one.
    """

    tables: Annotated[dict[str, TableEntry], pydantic.Field(min_length=1)]
    batch: Count = 8192
    parameters: Annotated[int, pydantic.Field(ge=0, le=MOST)] = 0
    optimizer: Optimizer = "adagrad"

    def workload(self) -> Workload:
        """Returns the step's work."""
        return Workload(
            tuple(
                TableWork(
                    name,
                    entry.rows,
                    entry.dimension,
                    type=entry.type,
                    ids=entry.ids,
                    distinct=entry.distinct,
                    optimizer=entry.optimizer or self.optimizer,
                    imbalance=entry.imbalance,
                    dynamic=entry.dynamic,
                    bounded=entry.weight_bound,
                    placement=None if entry.placement == "auto" else entry.placement,
                    distinct_at=entry.distinct_at,
                )
                for name, entry in self.tables.items()
            ),
            self.batch,
            self.parameters,
        )


assert set(TYPE_BYTES) == set(TableEntry.model_fields["type"].annotation.__args__)  # type: ignore[union-attr]


def text_of(workload: Workload, head: str = "", remarks: Mapping[str, str] | None = None) -> str:
    """Returns the text of a file that describes a workload; `parse` makes the same of it again.

    Args:
        workload: the step's work.
        head: lines of a comment with which the file begins.
        remarks: comments on tables, by their names.
    """
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    lines += [f"batch: {workload.batch}", f"parameters: {workload.parameters}", "tables:"]
    for table in workload.tables:
        remark = (remarks or {}).get(table.name, "")
        entry = ", ".join(f"{key}: {_scalar(value)}" for key, value in _entry(table).items())
        comment = f"  # {remark}" if remark else ""
        lines.append(f"  {json.dumps(table.name)}: {{{entry}}}{comment}")
    return "\n".join(lines) + "\n"


def _entry(table: TableWork) -> dict[str, object]:
    """Returns a table's keys, without those whose values are the default."""
    values: dict[str, object] = {
        "rows": table.rows,
        "dimension": table.dimension,
        "type": table.type,
        "ids": table.ids,
        "distinct": table.distinct,
        "distinct_at": table.distinct_at,
        "optimizer": table.optimizer,
        "imbalance": table.imbalance,
        "dynamic": table.dynamic,
        "weight_bound": table.bounded,
        "placement": table.placement or "auto",
    }
    defaults = {name: field.default for name, field in TableEntry.model_fields.items()}
    return {key: value for key, value in values.items() if value != defaults[key]}


def _scalar(value: object) -> str:
    """Returns a number, or one of a few words, as YAML."""
    if isinstance(value, float):
        return format(decimal.Decimal(f"{value:.6g}"), "f")  # YAML takes 1e-05 for a text
    return str(value).lower()


def parse(text: str, name: str) -> TablesFile:
    """Reads the text of a file.

    Args:
        text: YAML or JSON.
        name: the file's, for messages.

    Raises:
        yaml_file.FileError: it isn't a file of tables. All errors are listed, with their lines.
    """
    return yaml_file.parse(text, name, TablesFile)


def load(path: str | os.PathLike[str]) -> TablesFile:
    """Reads a file, YAML or JSON.

    Raises:
        OSError: there is no such file, or it can't be read.
        yaml_file.FileError: it isn't a file of tables. All errors are listed, with their lines.
    """
    return yaml_file.load(path, TablesFile)
