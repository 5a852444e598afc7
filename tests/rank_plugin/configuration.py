"""How a launch of the rank cases is configured, and which configurations a case runs in."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import pytest

BACKENDS = ("hb", "sok")
CARRIERS = ("horovod", "shared_memory", "mixed", "two_levels", "nccl")
TIERS = ("test", "slow", "matrix", "all")
RANKS = (1, 2, 3)
# The backend of `make test`. A case marked `backends` runs there on those it names.
DEFAULT_BACKEND = "sok"
# The backend of the configurations that `make test-matrix` adds for other numbers of ranks.
OTHER_BACKEND = "hb"
# Of a case's parameters `make test` runs so many, unless it is marked `sample`, and the matrix so
# many more.
PARAMETERS = 1

# How many ranks count as one host, the others as another one.
FIRST_HOST = "COLLECTIVE_TEST_FIRST_HOST"

# Processes share one GPU, whose matrix products are to be those of the truth: not of 10 bits.
_OF_GPUS = {
    "COLLECTIVE_KERNELS": "gpu",
    "COLLECTIVE_TEST_SHARED_GPU": "1",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "NVIDIA_TF32_OVERRIDE": "0",
}

# Its thread, which has nothing to carry, would take a twentieth of the processor's time.
_OF_IDLE_HOROVOD = {"HOROVOD_CYCLE_TIME": "20"}

MARKERS = (
    "ranks(N, ...): a rank case that depends on the number of ranks: `make test-matrix` runs every "
    "eighth one, half of these at the largest, the others in a turn, to which these belong",
    "backends(name, ...): a rank case that depends on the backend: its parameters take turns over "
    "these in `make test`, and `make test-matrix` runs the others",
    "either_backend: a rank case that has nothing to do with the backend, which is none of its "
    "turns in the matrix",
    "grouped: a rank case of lookups that share exchanges; left out where grouping is off",
    "ungrouped: a rank case of whose turns in the matrix one is an exchange for each lookup",
    "carriers: a rank case that depends on what carries collectives: of its turns in the matrix "
    "one is Horovod, one two hosts",
    "two_levels: a rank case that depends on what travels: of its turns in the matrix one is two "
    "hosts that merge what they exchange",
    "double(tier): a rank case that runs on the double of a GPU, from this tier on: 'test' (which "
    "has it on the double alone), 'matrix' (one of its turns) or 'all' (the default)",
    "sample(n): a test of whose parameters `make test` runs n, always the same ones, and "
    "`make test-matrix` another one",
    "slow(always=False): a test that takes three seconds or more: left to `make test-slow`, which "
    "CI runs, too, and which has every third one, or those that it always has; the matrix runs "
    "every sixteenth slow rank case in one of its turns",
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
            NCCL, or with `gpu` by NCCL itself.
        gpu: tables are on the machine's GPU, which all ranks share.
    """

    ranks: int
    backend: str
    grouping: bool = True
    double: bool = False
    carrier: str = "auto"
    gpu: bool = False

    def __str__(self) -> str:
        return (
            f"{self.ranks}-{self.backend}"
            + ("" if self.grouping else "-ungrouped")
            + ("-double" if self.double else "")
            + ("" if self.carrier == "auto" else f"-{self.carrier}")
            + ("-gpu" if self.gpu else "")
        )

    @classmethod
    def parse(cls, text: str) -> Configuration:
        """Reads what str() gives."""
        ranks, backend, *rest = text.split("-")
        (carrier,) = [c for c in CARRIERS if c in rest] or ["auto"]
        return cls(
            int(ranks), backend, "ungrouped" not in rest, "double" in rest, carrier, "gpu" in rest
        )

    def environment(self) -> dict[str, str]:
        """Returns the variables by which the ranks of a launch are told."""
        on_device = self.double or self.gpu
        carrier = "horovod" if on_device and self.carrier == "auto" else self.carrier
        if carrier in ("mixed", "two_levels"):
            # The launcher believes that Horovod carries nothing at each step, and lets it sleep.
            more = {FIRST_HOST: str((self.ranks + 1) // 2), "HOROVOD_CYCLE_TIME": "1"}
            carrier = "shared_memory"
        elif self.gpu:
            more = _OF_GPUS
        else:
            more = {} if carrier == "horovod" else _OF_IDLE_HOROVOD
        return {
            "COLLECTIVE_KERNELS": "cpu",
            # Cases train in plain TensorFlow, too, to compare.
            "COLLECTIVE_INDEPENDENT": "1",
            **more,
            "COLLECTIVE_TEST_CONFIGURATION": str(self),
            "COLLECTIVE_STRATEGY": self.backend,
            "COLLECTIVE_TEST_GROUPING": "on" if self.grouping else "off",
            "COLLECTIVE_CARRIER": carrier,
        }


@dataclass(frozen=True)
class Marks:
    """What a case's markers say about its configurations.

    Attributes:
        turn: of a case that has turns in the matrix, which one it takes, if any: by its name.
    """

    ranks: tuple[int, ...] = ()
    backends: tuple[str, ...] = ()
    either_backend: bool = False
    grouped: bool = False
    ungrouped: bool = False
    carriers: bool = False
    two_levels: bool = False
    double: str | None = None
    matrix: bool = False
    slow: bool = False
    sample: int | None = None
    spread: bool = False
    turn: int = 0

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
            slow=node.get_closest_marker("slow") is not None,
            sample=sample[0] if sample else None,
            spread=node.get_closest_marker("spread") is not None,
            turn=zlib.crc32(node.nodeid.partition("[")[0].encode()),
        )

    def in_test(self, count: int) -> list[int]:
        """Returns which of `count` parameters `make test` runs, or if slow `make test-slow`."""
        return [] if self.matrix else sampled(count, self.sample or PARAMETERS)

    def in_matrix(self, count: int) -> list[int]:
        """Returns which of those that `make test` leaves out the matrix runs."""
        rest = [number for number in range(count) if number not in self.in_test(count)]
        most = self.sample if self.matrix and self.sample else PARAMETERS
        return [rest[place] for place in sampled(len(rest), most)]


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
    gpu: bool = False

    @property
    def by_hand(self) -> bool:
        return bool(
            self.ranks
            or self.backends
            or not self.grouping
            or self.double
            or self.gpu
            or self.carrier != "auto"
        )

    def of(self, marks: Marks) -> list[Configuration]:
        """Returns the configurations in which a case with these markers runs, in order."""
        if self.by_hand:
            chosen = [
                Configuration(n, backend, self.grouping, self.double, self.carrier, self.gpu)
                for n in self.ranks or (2,)
                for backend in self.backends or _in_test(marks)
            ]
        elif self.tier in ("test", "slow"):
            chosen = _by_default(marks) if marks.slow == (self.tier == "slow") else []
        elif marks.spread:
            chosen = [Configuration(n, backend) for n in (2, 3) for backend in BACKENDS]
        elif self.tier == "matrix":
            chosen = _in_matrix(marks)
        else:
            chosen = _everywhere(marks)
        return [
            c
            for c in dict.fromkeys(chosen)
            if (c.grouping or not marks.grouped) and (marks.double or not (c.double or c.gpu))
        ]

    def runs(self, marks: Marks, configuration: Configuration, number: int, count: int) -> bool:
        """Tells whether a case runs, the `number`-th of `count` with other parameters."""
        if self.by_hand or self.tier == "all" and not marks.spread:
            return True
        chosen = self.of(marks)
        if marks.spread and self.tier not in ("test", "slow"):
            return chosen[number % len(chosen)] == configuration
        numbers = marks.in_matrix(count) if self.tier == "matrix" else marks.in_test(count)
        by_default = _by_default(marks)
        if configuration not in by_default:
            return number in numbers or not numbers and number == marks.turn % count
        if number not in numbers:
            return False
        place = numbers.index(number)
        # The parameters of two decorators come in order: each of the inner one's changes its turn.
        turn = place + place // len(by_default)
        return by_default[turn % len(by_default)] == configuration


def sampled(count: int, most: int) -> list[int]:
    """Returns `most` numbers below `count`: one of each block, at the block's next place each time.

    So of the parameters of two decorators, whose product is in order, each one comes.
    """
    if most >= count:
        return list(range(count))
    return [count * k // most + k % (count // most) for k in range(most)]


def _in_test(marks: Marks) -> tuple[str, ...]:
    return marks.backends or (DEFAULT_BACKEND,)


def _by_default(marks: Marks) -> list[Configuration]:
    return [Configuration(2, b, double=marks.double == "test") for b in _in_test(marks)]


def _in_matrix(marks: Marks) -> list[Configuration]:
    """One that `make test` doesn't have, for every eighth case that depends on the number of ranks
    and every sixteenth of the rest and of slow ones. Of the others every eighth one has those of
    `make test`, for a parameter that it leaves out.
    """
    by_default = _by_default(marks)
    backends = _in_test(marks) if marks.either_backend else BACKENDS
    turns = [Configuration(2, backend) for backend in backends]
    turns += [Configuration(n, OTHER_BACKEND) for n in marks.ranks]
    if marks.ungrouped:
        turns.append(Configuration(2, OTHER_BACKEND, grouping=False))
    if marks.carriers:
        turns.append(Configuration(2, DEFAULT_BACKEND, carrier="horovod"))
        turns.append(Configuration(3, OTHER_BACKEND, carrier="mixed"))
    if marks.two_levels:
        turns.append(Configuration(4, OTHER_BACKEND, carrier="two_levels"))
    if marks.double == "matrix":
        turns.append(Configuration(2, DEFAULT_BACKEND, double=True))
    turns = [c for c in turns if c not in by_default]
    has_turn = (marks.turn >> 8) % (16 if marks.slow or not marks.ranks else 8) == 0
    has_largest, has_parameter = (marks.turn >> 12) % 2 == 0, (marks.turn >> 13) % 8 == 0
    if not turns or not has_turn:
        return by_default if has_parameter or marks.matrix else []
    if marks.ranks and has_largest:
        return [Configuration(max(marks.ranks), OTHER_BACKEND)]
    return [turns[marks.turn % len(turns)]]


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
