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
    """Holds what a page shows about a job. N ranks were measured.

    Profiles saved before a field was introduced have its default.

    Attributes:
        name: distinguishes the profile from another one.
        first, last: the numbers of the first and last measured training runs.
        steps: how many steps were measured.
        ms: [N], milliseconds per step.
        phases: [N], milliseconds by phase, or by the name of a collective.
        received: [N], bytes per step by the name of a collective.
        samples_per_s: of all ranks together; None without a lookup.
        distinct_share: keys that travelled per looked-up id; None without a lookup.
        bytes_per_step: the bytes that a rank received, including its own share.
        keys_per_owner: [N] by table, keys per step that each rank was asked for.
        table_bytes: bytes per step by table, then by phase ('keys', 'rows', 'gradients'); the mean
            over ranks.
        dynamic_rows: [N] by dynamic table, rows on each rank at the end.
        history: the job's course, lists of equal length: 'step', 'ms', 'samples_per_s', and in
            'rows', by dynamic table, the rows on all ranks.
        plan: `Plan.to_dict`; None if it wasn't saved.
        options: the options of scope() that differ from the defaults.
        ranks: the number of ranks of the job.
        alone: whether only rank 0 was measured, because training ended before the last step to
            profile.
        written: the time, as text.
        version: the version of the library.
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
        """Returns [N], the keys per step, over all tables, that each rank was asked for."""
        return [sum(keys) for keys in zip(*self.keys_per_owner.values())]

    @property
    def key_imbalance(self) -> float | None:
        """Returns the most keys that a rank was asked for over the mean; None without keys."""
        return imbalance(self.keys_by_owner)

    @property
    def bytes_by_rank(self) -> list[float]:
        """Returns the bytes of tables and slots on each rank; [] if some are unknown."""
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
    """Returns the profile in split.json; unknown fields are left out.

    Raises:
        KeyError: a field that every profile has is missing.
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
    """Writes split.json into `folder`, completely or not at all."""
    write(os.path.join(folder, FILE), json.dumps(record))


def write(path: str, text: str) -> None:
    """Writes a file, completely or not at all: a reader never sees half of it."""
    partial = f"{path}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(partial, path)


def load(path: str, name: str | None = None) -> Profile:
    """Reads the profile in a folder.

    Args:
        path: the folder, or the file itself.
        name: distinguishes the profile from another one; by default `path`.

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
