"""Saves the profile of a job to split.json, and reads it."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

from collective.plan.formatting import imbalance

FILE = "split.json"


@dataclasses.dataclass(frozen=True)
class Profile:
    """Keeps what a page shows of a job. N ranks were measured.

    Profiles that were saved before a field was introduced have its default.

    Attributes:
        name: tells the profile from another one.
        first, last: the numbers of the training runs that were measured.
        steps: how many.
        ms: [N], of a step.
        phases: [N], milliseconds by phase, or by the name of a collective.
        received: [N], bytes a step by the name of a collective.
        samples_per_s: of all ranks; None without a lookup.
        distinct_share: keys that travelled for each id that was looked up; None without a lookup.
        bytes_per_step: received by a rank, its own share included.
        keys_per_owner: [N] by table, keys a step that each rank was asked for.
        table_bytes: bytes a step by table, then by phase ('keys', 'rows', 'gradients'); the mean
            over ranks.
        dynamic_rows: [N] by dynamic table, rows on each rank at the end.
        history: the job's course, lists of one length: 'step', 'ms', 'samples_per_s', and in
            'rows', by dynamic table, the rows on all ranks.
        plan: `Plan.to_dict`; None if it wasn't saved.
        options: of scope(), those that aren't the default.
        ranks: of the job.
        alone: only rank 0 was measured, since training ended before the last step to be profiled.
        written: the time, in words.
        version: of the library.
    """

    name: str
    first: int
    last: int
    steps: int
    ms: list[float]
    phases: list[dict[str, float]]
    received: list[dict[str, float]]
    samples_per_s: float | None
    distinct_share: float | None
    bytes_per_step: float
    keys_per_owner: dict[str, list[float]]
    table_bytes: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    dynamic_rows: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    history: dict[str, Any] = dataclasses.field(default_factory=dict)
    plan: dict[str, Any] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    ranks: int = 0
    alone: bool = False
    written: str = ""
    version: str = ""

    @property
    def mean_ms(self) -> float:
        return sum(self.ms) / len(self.ms)

    @property
    def size(self) -> int:
        """Returns the number of ranks of the job."""
        return self.ranks or len(self.ms)

    @property
    def keys_by_owner(self) -> list[float]:
        """Returns [N], the keys of all tables a step that each rank was asked for."""
        return [sum(keys) for keys in zip(*self.keys_per_owner.values())]

    @property
    def key_imbalance(self) -> float | None:
        """Returns the most that a rank was asked for over the mean; None if nobody was asked."""
        return imbalance(self.keys_by_owner)

    @property
    def bytes_by_rank(self) -> list[float]:
        """Returns the bytes of tables and slots on each rank; [] if they aren't known of all."""
        totals = [0.0] * self.size
        for table in (self.plan or {}).get("tables", ()):
            counts = self.dynamic_rows.get(table["name"])
            shard_bytes = table["shard_bytes"]
            if counts is not None:
                shard_bytes = [count * table["row_bytes"] for count in counts]
            if len(shard_bytes) != self.size or None in shard_bytes:
                return []
            totals = [total + size for total, size in zip(totals, shard_bytes)]
        return totals if self.plan and self.plan["tables"] else []


def from_record(name: str, record: dict[str, Any]) -> Profile:
    """Returns the profile of what split.json holds; what isn't known is left out.

    Raises:
        KeyError: something is missing that every profile has.
    """
    known = {field.name for field in dataclasses.fields(Profile)} - {"name"}
    required = [
        field.name
        for field in dataclasses.fields(Profile)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    for field_name in required[1:]:
        record[field_name]
    return Profile(name, **{key: value for key, value in record.items() if key in known})


def save(folder: str, record: dict[str, Any]) -> None:
    """Writes split.json into `folder`, whole or not at all."""
    write(os.path.join(folder, FILE), json.dumps(record))


def write(path: str, text: str) -> None:
    """Writes a file, whole or not at all: a reader never sees half of it."""
    partial = f"{path}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(partial, path)


def load(path: str, name: str | None = None) -> Profile:
    """Reads the profile in a folder.

    Args:
        path: the folder, or the file itself.
        name: tells the profile from another one; by default `path`.

    Raises:
        ValueError: there is no profile, or the file holds something else. The message says so.
    """
    file_name = os.path.join(path, FILE) if os.path.isdir(path) else path
    if not os.path.isfile(file_name):
        raise ValueError(
            f"{path}: there is no {FILE}. scope(profile={path!r}) writes it once the steps that "
            "profile_steps names are over, (11, 20) by default, or when scope() ends."
        )
    try:
        with open(file_name, encoding="utf-8") as file:
            record = json.load(file)
        return from_record(name or path, record)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file_name}: this isn't a profile that scope(profile=…) has written "
            f"({type(error).__name__}: {error})."
        ) from None
