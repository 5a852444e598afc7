"""How a launch of the rank cases is configured, and which configurations a case runs in."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

BACKENDS = ("hb", "sok")
TIERS = ("test", "matrix", "all")
RANKS = (1, 2, 3)
# The backend of `make test`. A case marked `backends` runs there on those it names.
DEFAULT_BACKEND = "sok"
# The backend of the configurations that `make test-matrix` adds for other numbers of ranks.
OTHER_BACKEND = "hb"

MARKERS = (
    "ranks(N, ...): a rank case that depends on the number of ranks: `make test-matrix` runs it "
    "at these numbers, too",
    "backends(name, ...): a rank case that depends on the backend: `make test` runs it on each of "
    "these",
    "grouped: a rank case of lookups that share exchanges; left out where grouping is off",
    "ungrouped: a rank case that `make test-matrix` also runs with an exchange for each lookup",
    "double(tier): a rank case that runs on the double of a GPU, from this tier on: 'matrix' or "
    "'all' (the default)",
    "spread: a rank case with a `seed`, which takes turns over two and three ranks on both backends, "
    "where the tier has these",
)


@dataclass(frozen=True, order=True)
class Configuration:
    """What all cases of a launch share.

    Attributes:
        ranks: how many processes run each case.
        backend: the value of COLLECTIVE_STRATEGY.
        grouping: lookups share exchanges unless a case says otherwise.
        double: the kernels of GPUs are replaced by their references in NumPy.
    """

    ranks: int
    backend: str
    grouping: bool = True
    double: bool = False

    def __str__(self) -> str:
        return (
            f"{self.ranks}-{self.backend}"
            + ("" if self.grouping else "-ungrouped")
            + ("-double" if self.double else "")
        )

    @classmethod
    def parse(cls, text: str) -> Configuration:
        """Reads what str() gives."""
        ranks, backend, *rest = text.split("-")
        return cls(int(ranks), backend, "ungrouped" not in rest, "double" in rest)

    def environment(self) -> dict[str, str]:
        """Returns the variables by which the ranks of a launch are told."""
        return {
            "COLLECTIVE_TEST_CONFIGURATION": str(self),
            "COLLECTIVE_STRATEGY": self.backend,
            "COLLECTIVE_TEST_GROUPING": "on" if self.grouping else "off",
            "COLLECTIVE_KERNELS": "cpu",
        }


@dataclass(frozen=True)
class Marks:
    """What a case's markers say about its configurations."""

    ranks: tuple[int, ...] = ()
    backends: tuple[str, ...] = ()
    grouped: bool = False
    ungrouped: bool = False
    double: str | None = None
    spread: bool = False

    @classmethod
    def of(cls, node: pytest.Item | pytest.Function) -> Marks:
        """Reads the markers of a test function."""
        double = node.get_closest_marker("double")
        return cls(
            ranks=_arguments(node, "ranks"),
            backends=_arguments(node, "backends"),
            grouped=node.get_closest_marker("grouped") is not None,
            ungrouped=node.get_closest_marker("ungrouped") is not None,
            double=None if double is None else (*double.args, "all")[0],
            spread=node.get_closest_marker("spread") is not None,
        )


def _arguments(node: pytest.Item | pytest.Function, marker: str) -> tuple:
    found = node.get_closest_marker(marker)
    return () if found is None else found.args


@dataclass(frozen=True)
class Choice:
    """The configurations that the command line asks for; an empty part leaves it to the tier."""

    tier: str = "test"
    ranks: tuple[int, ...] = ()
    backends: tuple[str, ...] = ()
    grouping: bool = True
    double: bool = False

    def of(self, marks: Marks) -> list[Configuration]:
        """Returns the configurations in which a case with these markers runs, in order."""
        if self.ranks or self.backends or not self.grouping or self.double:
            chosen: Iterable[Configuration] = itertools.starmap(
                Configuration,
                itertools.product(
                    self.ranks or (2,),
                    self.backends or marks.backends or (DEFAULT_BACKEND,),
                    (self.grouping,),
                    (self.double,),
                ),
            )
        else:
            chosen = _of_tier(marks, self.tier)
        return [c for c in dict.fromkeys(chosen) if c.grouping or not marks.grouped]


def _of_tier(marks: Marks, tier: str) -> list[Configuration]:
    if marks.spread and tier != "test":
        return [Configuration(n, backend) for n in (2, 3) for backend in BACKENDS]
    in_test = [Configuration(2, backend) for backend in marks.backends or (DEFAULT_BACKEND,)]
    if tier == "test":
        return in_test
    if tier == "matrix":
        added = [Configuration(2, backend) for backend in BACKENDS]
        added += [Configuration(n, OTHER_BACKEND) for n in marks.ranks]
        if marks.ungrouped:
            added.append(Configuration(2, OTHER_BACKEND, grouping=False))
        if marks.double == "matrix":
            added.append(Configuration(2, DEFAULT_BACKEND, double=True))
        return [c for c in added if c not in in_test]
    return [
        Configuration(n, backend, grouping, double)
        for double in ((False, True) if marks.double else (False,))
        for grouping in (True, False)
        for n in RANKS
        for backend in BACKENDS
    ]
