"""Describes PERSIA's embedding_config.yml: slots, how their ids become embeddings, groups."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import Annotated

import pydantic
from pydantic import Field

from collective import yaml_file
from collective.ops.counting import counted
from collective.yaml_file import Contradictions, Place, StrictModel, nearest

# Names of slots and groups become names of variables.
_NAME = re.compile(r"[A-Za-z0-9.](?:[A-Za-z0-9_./-]*[A-Za-z0-9_.-])?")
Count = Annotated[int, Field(ge=1)]


class HashStack(StrictModel):
    """Describes the hashing of a slot's ids into a bounded number of rows.

    In each round an id is hashed, with another salt, to one of `embedding_size` rows, which other
    rounds don't share. Its embedding is the sum of the rows of all rounds. So two ids have the same
    embedding only if they collide in every round.

    Attributes:
        hash_stack_rounds: how many rounds; 0: ids aren't hashed.
        embedding_size: how many rows a round has.
    """

    hash_stack_rounds: Annotated[int, Field(ge=0, le=1000)] = 0
    embedding_size: Annotated[int, Field(ge=0, lt=2**53)] = 0

    @pydantic.model_validator(mode="after")
    def _check(self) -> HashStack:
        if self.hash_stack_rounds and not self.embedding_size:
            text = "hash_stack_rounds hashes ids to rows: give their number, from 1."
            raise Contradictions([(("embedding_size",), text)])
        return self


class Slot(StrictModel):
    """Describes a slot: a feature whose samples have any number of ids.

    Attributes:
        dim: D, the dimension of an id's embedding.
        sample_fixed_size: L, how many embeddings a sample has with `embedding_summation: false`; of
            more ids the first L count.
        embedding_summation: true: a sample's embedding is the sum of its ids' embeddings, [D];
            false: it has the embeddings of its first L ids, [L, D], and a mask.
        sqrt_scaling: divides a sum by the square root of the number of rows that it has: the
            sample's ids, times the rounds of hashing.
        hash_stack_config: hashes ids.
        index_prefix: 0. (PERSIA computes it, and refuses any other.)
    """

    dim: Count
    sample_fixed_size: Count = 10
    embedding_summation: bool = True
    sqrt_scaling: bool = False
    hash_stack_config: HashStack = HashStack()
    index_prefix: Annotated[int, Field(ge=0, le=0)] = 0

    @property
    def rounds(self) -> int:
        """Returns how many rounds of hashing there are; 0: ids aren't hashed."""
        return self.hash_stack_config.hash_stack_rounds


class Slots(StrictModel):
    """Describes all slots, as PERSIA's embedding_config.yml does.

    Attributes:
        feature_index_prefix_bit: how many bits of an id PERSIA takes for the number of the id's
            group. Here each group has a table of its own, so that the ids of two groups never meet,
            and all 64 bits are an id's. The number is checked as in PERSIA, for the same groups.
        slots_config: slots by their names; also spelt `slot_configs` and `slot_config`.
        feature_groups: slots that share one table, by the name of the group. A slot that no group
            has is a group of its own.
    """

    feature_index_prefix_bit: Annotated[int, Field(ge=1, le=63)] = 8
    slots_config: dict[str, Slot] = Field(
        min_length=1,
        validation_alias=pydantic.AliasChoices("slots_config", "slot_configs", "slot_config"),
    )
    feature_groups: dict[str, Annotated[list[str], Field(min_length=1)]] = {}

    @pydantic.model_validator(mode="after")
    def _check(self) -> Slots:
        found = [*self._bad_names(), *self._bad_groups()]
        if not found:
            found = [*self._unequal_slots()]
        groups = len(set(map(self.table_of, self.slots_config)))
        if groups >= 2**self.feature_index_prefix_bit:
            text = f"too few bits for {counted(groups, 'table')}; give more."
            found.append((("feature_index_prefix_bit",), text))
        if found:
            raise Contradictions(found)
        return self

    def table_of(self, slot: str) -> str:
        """Returns the name of a slot's table: its group's, or its own.

        Args:
            slot: the slot's name.
        """
        return next((name for name, of in self.feature_groups.items() if slot in of), slot)

    def dimensions(self) -> dict[str, int]:
        """Returns the dimension of each table, by the tables' names, in the order of names."""
        found = {self.table_of(name): slot.dim for name, slot in self.slots_config.items()}
        return dict(sorted(found.items()))

    def _bad_names(self) -> Iterator[tuple[Place, str]]:
        of_tables: dict[str, str] = {}
        for key, names in (
            ("slots_config", self.slots_config),
            ("feature_groups", self.feature_groups),
        ):
            for name in names:
                if not _NAME.fullmatch(name):
                    text = "a name names a variable: letters, digits and _ . - / only."
                    yield (key, name), text
                same = of_tables.setdefault(name.lower(), name)
                if same != name:
                    # TensorFlow would number the second one.
                    yield (key, name), f"it differs from '{same}' only in case. Rename one."

    def _bad_groups(self) -> Iterator[tuple[Place, str]]:
        times = Counter(slot for group in self.feature_groups.values() for slot in group)
        for group, slots in self.feature_groups.items():
            if group in self.slots_config:
                yield (
                    ("feature_groups", group),
                    "a slot has this name, and may have a table of its own. Rename the group.",
                )
            for i, slot in enumerate(slots):
                if slot not in self.slots_config:
                    text = f"there is no slot '{slot}'.{nearest(slot, self.slots_config)}"
                    yield ("feature_groups", group, i), text
                elif times[slot] > 1:
                    text = f"slot '{slot}' is listed {times[slot]} times; a slot has one group."
                    yield ("feature_groups", group, i), text

    def _unequal_slots(self) -> Iterator[tuple[Place, str]]:
        """Finds slots that can't share the table of their group."""
        for group, (first, *others) in self.feature_groups.items():
            want = self.slots_config[first]
            for i, name in enumerate(others, 1):
                slot = self.slots_config[name]
                if slot.dim != want.dim:
                    text = f"slot '{first}' has dim {want.dim}, and '{name}' {slot.dim}"
                elif slot.hash_stack_config != want.hash_stack_config:
                    text = f"slots '{first}' and '{name}' hash ids differently"
                else:
                    continue
                yield ("feature_groups", group, i), f"{text}; slots of a group share a table."


def load(path: str | os.PathLike[str]) -> Slots:
    """Reads PERSIA's embedding_config.yml.

    Args:
        path: of the file.

    Raises:
        OSError: there is no such file.
        ValueError: it is no YAML, has a key that isn't known or occurs twice, a value of another
            type or out of range, or keys that contradict each other. The message lists all errors,
            with the line and, for a key, the nearest one that is known.
    """
    return yaml_file.load(path, Slots)
