"""Describes machines by figures, each of which says where it comes from.

What is published about devices is in `published.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import reprlib
from collections.abc import Mapping
from typing import Any, Literal

from collective.ops.counting import counted

Origin = Literal["published", "measured", "kept", "given", "assumed"]
RANKS_OF_HOST = 8  # where it isn't said
MOST_RANKS = 1_000_000  # a search takes time and memory for each


@dataclasses.dataclass(frozen=True)
class Figure:
    """Holds a number about a machine.

    Attributes:
        value: the number; bytes, seconds, or one of these per second.
        origin: who says so; 'kept' is measured by an earlier job on this host.
        source: where it is published, measured or kept, or why it is assumed.
    """

    value: float
    origin: Origin
    source: str


@dataclasses.dataclass(frozen=True)
class Device:
    """Describes what one rank computes with, and the wires to the others.

    Attributes:
        name: with its memory: 'H100-SXM-80GB'.
        memory: bytes.
        memory_rate: bytes per second that are read or written.
        flops: floating-point operations per second of matrix products.
        within_rate: bytes per second that a rank sends to ranks of its host.
        between_rate: bytes per second that a rank sends to other hosts, all of them at once.
        start: seconds that an operation takes if it has next to nothing to do.
        id_time: seconds that TensorFlow's operations take for an id of a replicated table, besides
            its row.
        within_wait: seconds of a collective of a host's ranks that carries next to nothing.
        between_wait: the same between hosts.
        usable: share of the memory that tables, slots and buffers may have.
        memory_share: share of `memory_rate` that lookups and updates reach.
        wire_share: share of the wires' rates that exchanges reach.
        flop_share: share of `flops` that a network reaches.
        sector: bytes of the smallest piece that is read from memory.
    """

    name: str
    memory: Figure
    memory_rate: Figure
    flops: Figure
    within_rate: Figure
    between_rate: Figure
    start: Figure
    id_time: Figure
    within_wait: Figure
    between_wait: Figure
    usable: Figure
    memory_share: Figure
    wire_share: Figure
    flop_share: Figure
    sector: int = 32

    def figures(self) -> dict[str, Figure]:
        """Returns the figures by their names."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Figure)}


@dataclasses.dataclass(frozen=True)
class Machines:
    """Describes a cluster of equal devices, one for each rank.

    Attributes:
        device: of every rank.
        ranks: N.
        hosts: by which N can be divided.

    Raises:
        ValueError: there is no rank or host, or hosts have different numbers of ranks.
    """

    device: Device
    ranks: int
    hosts: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.hosts < 1 or self.ranks % self.hosts:
            raise ValueError(
                f"{counted(self.ranks, 'rank')} on {counted(self.hosts, 'host')}: every host has "
                "the same number of ranks, and at least one. Change one of the two numbers."
            )

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> Machines:
        """Returns the machines of which `dataclasses.asdict` made `values`."""
        device: dict[str, Any] = {
            name: Figure(**value) if isinstance(value, Mapping) else value
            for name, value in values["device"].items()
        }
        return cls(Device(**device), values["ranks"], values["hosts"])

    @property
    def ranks_of_host(self) -> int:
        return self.ranks // self.hosts

    @property
    def name(self) -> str:
        return f"{self.ranks:,} x {self.device.name} on {counted(self.hosts, 'host')}"

    @property
    def room(self) -> float:
        """The bytes of a rank's memory that tables, slots and buffers may have."""
        return self.device.memory.value * self.device.usable.value

    def all_to_all(self, count: float) -> float:
        """Returns the seconds in which a rank sends `count` bytes, equal parts to all ranks.

        Both wires work at once, so the slower one counts.
        """
        n, here = self.ranks, self.ranks_of_host
        return max(
            count * (here - 1) / n / self._rate(self.device.within_rate),
            count * (n - here) / n / self._rate(self.device.between_rate),
        )

    def ring(self, count: float) -> float:
        """Returns the seconds in which `count` bytes pass each rank of a ring of all ranks.

        A host's ranks share its wires to the others: a ring for each of them.
        """
        rate = self._rate(self.device.within_rate) if self.ranks_of_host > 1 else math.inf
        if self.hosts > 1:
            rate = min(rate, self._rate(self.device.between_rate) * self.ranks_of_host)
        return count / rate

    @property
    def wait(self) -> float:
        """The seconds of a collective that carries next to nothing; none for one rank."""
        if self.ranks == 1:
            return 0.0
        device = self.device
        return device.between_wait.value if self.hosts > 1 else device.within_wait.value

    def _rate(self, figure: Figure) -> float:
        return figure.value * self.device.wire_share.value


def counted_devices(text: str) -> tuple[int, str]:
    """Reads '64 x H100-80GB': how many, and the device's name.

    Raises:
        ValueError: it isn't of that form, or there are more than `MOST_RANKS`.
    """
    match = re.fullmatch(r"\s*(\d[\d_,]*)\s*(?:x|×|\*)\s*(\S.*?)\s*", text, re.IGNORECASE)
    digits = re.sub("[_,]", "", match.group(1)) if match else "0"
    count = int(digits[:100])  # of thousands of digits it would make another error
    if not match or count < 1:
        raise ValueError(
            f"{text!r} doesn't say how many devices there are, and which: '64 x H100-80GB'."
        )
    if count > MOST_RANKS:
        raise ValueError(
            f"{reprlib.repr(text)}: a plan is for at most {counted(MOST_RANKS, 'device')}. "
            "Write fewer."
        )
    return count, match.group(2)


def find(name: str, devices: tuple[Device, ...]) -> Device:
    """Returns the first device that has all parts of a name: 'A100' has A100-SXM-40GB, too.

    Raises:
        ValueError: there is none.
    """
    wanted = _parts(name)
    for device in devices:
        if wanted and wanted <= _parts(device.name):
            return device
    known = [device.name for device in devices]
    near = difflib.get_close_matches(name.upper(), [k.upper() for k in known], 1, 0.4)
    guess = f" Did you mean '{known[[k.upper() for k in known].index(near[0])]}'?" if near else ""
    raise ValueError(f"there is no device '{name}'.{guess} The devices are {', '.join(known)}.")


def _parts(name: str) -> set[str]:
    return set(filter(None, re.split(r"[\s\-_/]+", name.upper()))) - {"NVIDIA"}


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)(B|bit)(/s)?\s*")
_UNITS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}


def size_of(text: str, per_second: bool = False) -> float:
    """Reads '80 GB' (of 1,000 each) or '80 GiB' in bytes; '400 Gbit/s' or '50 GB/s' per second.

    Raises:
        ValueError: it is neither.
    """
    match = _SIZE.fullmatch(text)
    example = "'400 Gbit/s' or '50 GB/s'" if per_second else "'80 GB'"
    if not match or bool(match.group(5)) != per_second or not 0 < float(match.group(1)) < 1e100:
        raise ValueError(f"{text!r} is no size: write {example}.")
    number, unit, binary, kind, _ = match.groups()
    value = float(number) * (1024 if binary else 1000) ** _UNITS[unit]
    return value / 8 if kind == "bit" else value
