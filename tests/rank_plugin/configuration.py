"""How a launch of the rank cases is configured, and which configurations a case runs in."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

BACKENDS = ("hb", "sok")
CARRIERS = ("horovod", "shared_memory", "mixed", "two_levels", "nccl")
TIERS = ("test", "matrix", "all")
RANKS = (1, 2, 3)
# The backend of `make test`. A case marked `backends` runs there on those it names.
DEFAULT_BACKEND = "sok"
# The backend of the configurations that `make test-matrix` adds for other numbers of ranks.
OTHER_BACKEND = "hb"

# How many ranks count as one host, the others as another one.
FIRST_HOST = "COLLECTIVE_TEST_FIRST_HOST"

MARKERS = (
    "ranks(N, ...): a rank case that depends on the number of ranks: `make test-matrix` runs it "
    "at these numbers, too",
    "backends(name, ...): a rank case that depends on the backend: its parameters take turns over "
    "these in `make test`, and `make test-matrix` runs the others",
    "either_backend: a rank case that has nothing to do with the backend: `make test-matrix` "
    "doesn't repeat it on the other one",
    "grouped: a rank case of lookups that share exchanges; left out where grouping is off",
    "ungrouped: a rank case that `make test-matrix` also runs with an exchange for each lookup",
    "carriers: a rank case that depends on what carries collectives: `make test-matrix` runs it "
    "over Horovod, and on two hosts, too",
    "two_levels: a rank case that depends on what travels: `make test-matrix` runs it on two hosts "
    "that merge what they exchange, too",
    "double(tier): a rank case that runs on the double of a GPU, from this tier on: 'matrix' or "
    "'all' (the default)",
    "sample(n): a test of whose parameters `make test` runs n, always the same ones, and "
    "`make test-matrix` the others; sample(n, m): it runs m, less those, where the parameters "
    "are pairs of which more show nothing else",
    "spread: a rank case with a `seed`, which takes turns over two and three ranks on both "
    "backends, "
    "where the tier has these",
)


@dataclass(frozen=True, order=True)
class Configuration:
    """Holds what all cases of a launch share.

    Attributes:
        ranks: how many processes run each case.
        backend: the value of COLLECTIVE_STRATEGY.
        grouping: lookups share exchanges unless a case says otherwise.
        double: tables are on the double of a GPU, whose kernels the emulator runs.
        carrier: of collectives; "auto" is shared memory, and Horovod for the double, as on GPUs;
            "mixed" is what two hosts have, as which the ranks count then; with "two_levels" hosts
            merge what they exchange, too, if each has as many ranks; "nccl" is by the double of
            NCCL.
    """

    ranks: int
    backend: str
    grouping: bool = True
    double: bool = False
    carrier: str = "auto"

    def __str__(self) -> str:
        return (
            f"{self.ranks}-{self.backend}"
            + ("" if self.grouping else "-ungrouped")
            + ("-double" if self.double else "")
            + ("" if self.carrier == "auto" else f"-{self.carrier}")
        )

    @classmethod
    def parse(cls, text: str) -> Configuration:
        """Reads what str() gives."""
        ranks, backend, *rest = text.split("-")
        (carrier,) = [c for c in CARRIERS if c in rest] or ["auto"]
        return cls(int(ranks), backend, "ungrouped" not in rest, "double" in rest, carrier)

    def environment(self) -> dict[str, str]:
        """Returns the variables by which the ranks of a launch are told."""
        carrier = "horovod" if self.double and self.carrier == "auto" else self.carrier
        if carrier in ("mixed", "two_levels"):
            # The launcher believes that Horovod carries nothing at each step, and lets it sleep.
            more = {FIRST_HOST: str((self.ranks + 1) // 2), "HOROVOD_CYCLE_TIME": "1"}
            carrier = "shared_memory"
        else:
            more = {}
        return {
            **more,
            "COLLECTIVE_TEST_CONFIGURATION": str(self),
            "COLLECTIVE_STRATEGY": self.backend,
            "COLLECTIVE_TEST_GROUPING": "on" if self.grouping else "off",
            "COLLECTIVE_KERNELS": "cpu",
            "COLLECTIVE_CARRIER": carrier,
        }


@dataclass(frozen=True)
class Marks:
    """What a case's markers say about its configurations."""

    ranks: tuple[int, ...] = ()
    backends: tuple[str, ...] = ()
    either_backend: bool = False
    grouped: bool = False
    ungrouped: bool = False
    carriers: bool = False
    two_levels: bool = False
    double: str | None = None
    matrix: bool = False
    sample: int | None = None
    sample_in_matrix: int | None = None
    spread: bool = False

    @classmethod
    def of(cls, node: pytest.Item | pytest.Function) -> Marks:
        """Reads the markers of a test function."""
        double, sample = node.get_closest_marker("double"), _arguments(node, "sample")
        return cls(
            ranks=_arguments(node, "ranks"),
            backends=_arguments(node, "backends"),
            either_backend=node.get_closest_marker("either_backend") is not None,
            grouped=node.get_closest_marker("grouped") is not None,
            ungrouped=node.get_closest_marker("ungrouped") is not None,
            carriers=node.get_closest_marker("carriers") is not None,
            two_levels=node.get_closest_marker("two_levels") is not None,
            double=None if double is None else (*double.args, "all")[0],
            matrix=node.get_closest_marker("matrix") is not None,
            sample=sample[0] if sample else None,
            sample_in_matrix=sample[1] if sample[1:] else None,
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
    carrier: str = "auto"

    @property
    def by_hand(self) -> bool:
        return bool(
            self.ranks
            or self.backends
            or not self.grouping
            or self.double
            or self.carrier != "auto"
        )

    def of(self, marks: Marks) -> list[Configuration]:
        """Returns the configurations in which a case with these markers runs, in order."""
        if self.by_hand:
            chosen = [
                Configuration(n, backend, self.grouping, self.double, self.carrier)
                for n in self.ranks or (2,)
                for backend in self.backends or _in_test(marks)
            ]
        elif self.tier == "test":
            chosen = [Configuration(2, backend) for backend in _in_test(marks)]
        elif marks.spread:
            chosen = [Configuration(n, backend) for n in (2, 3) for backend in BACKENDS]
        elif self.tier == "matrix":
            chosen = _in_matrix(marks)
        else:
            chosen = _everywhere(marks)
        return [
            c
            for c in dict.fromkeys(chosen)
            if (c.grouping or not marks.grouped) and (marks.double or not c.double)
        ]

    def runs(self, marks: Marks, configuration: Configuration, number: int, count: int) -> bool:
        """Tells whether a case runs, the `number`-th of `count` with other parameters."""
        if self.by_hand or self.tier == "all" and not marks.spread:
            return True
        if self.tier == "test":
            return self._runs_in_test(marks, configuration, number, count)
        chosen = self.of(marks)
        if marks.spread:
            return chosen[number % len(chosen)] == configuration
        if configuration in Choice().of(marks):
            most = count if marks.sample_in_matrix is None else marks.sample_in_matrix
            return number in sampled(count, most) and not self._runs_in_test(
                marks, configuration, number, count
            )
        # Every parameter runs where `make test` runs the case: half of them elsewhere, too.
        most = (count + 1) // 2 if marks.sample is None else marks.sample
        return number in sampled(count, most)

    @staticmethod
    def _runs_in_test(marks: Marks, configuration: Configuration, number: int, count: int) -> bool:
        if marks.matrix:
            return False
        chosen = Choice().of(marks)
        numbers = sampled(count, count if marks.sample is None else marks.sample)
        if number not in numbers:
            return False
        place = numbers.index(number)
        # The parameters of two decorators come in order: each of the inner one's changes its turn.
        turn = place + place // len(chosen)
        return chosen[turn % len(chosen)] == configuration


def sampled(count: int, most: int) -> list[int]:
    """Returns `most` numbers below `count`: one of each block, at the block's next place each time.

    So of the parameters of two decorators, whose product is in order, each one comes.
    """
    if most >= count:
        return list(range(count))
    return [count * k // most + k % (count // most) for k in range(most)]


def _in_test(marks: Marks) -> tuple[str, ...]:
    return marks.backends or (DEFAULT_BACKEND,)


def _in_matrix(marks: Marks) -> list[Configuration]:
    """Those of `make test`, for the parameters that it leaves out, and what is added for the
    others.
    """
    backends = _in_test(marks) if marks.either_backend else BACKENDS
    chosen = [Configuration(2, backend) for backend in backends]
    chosen += [Configuration(n, OTHER_BACKEND) for n in marks.ranks]
    if marks.ungrouped:
        chosen.append(Configuration(2, OTHER_BACKEND, grouping=False))
    if marks.carriers:
        chosen.append(Configuration(2, DEFAULT_BACKEND, carrier="horovod"))
        chosen.append(Configuration(3, OTHER_BACKEND, carrier="mixed"))
    if marks.two_levels:
        chosen.append(Configuration(4, OTHER_BACKEND, carrier="two_levels"))
    if marks.double == "matrix":
        chosen.append(Configuration(2, DEFAULT_BACKEND, double=True))
    return chosen


def _everywhere(marks: Marks) -> list[Configuration]:
    return (
        [
            Configuration(n, backend, grouping, double)
            for double in ((False, True) if marks.double else (False,))
            for grouping in (True, False)
            for n in sorted({*RANKS, *marks.ranks})
            for backend in BACKENDS
        ]
        + [
            Configuration(3, backend, carrier=carrier)
            for carrier in ("horovod", "mixed", "nccl")
            for backend in BACKENDS
        ]
        + [Configuration(4, backend, carrier="two_levels") for backend in BACKENDS]
    )
