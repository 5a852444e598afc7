"""The plan of a job: which ranks, on which devices, with what command and environment. It starts
nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from .devices import NO_GPUS
from .environment import World, rank_environment
from .usage import UsageError

_PORT_TO_COME = "<a free port>"
_BOARD_TO_COME = "<memory of the launcher>"


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before a process starts.

    devices: of each rank its CUDA_VISIBLE_DEVICES entry, None for a CPU rank.
    shown: the ranks whose output is shown.
    stall_timeout: after how many seconds without progress the job ends; 0 is never.
    """

    command: tuple[str, ...]
    devices: tuple[str | None, ...]
    outer: Mapping[str, str]
    cores: int
    terminal: bool = False
    columns: int | None = None
    grace: float = 5.0
    shown: frozenset[int] = frozenset()
    log_dir: str | None = None
    stall_timeout: float = 600.0

    @property
    def size(self) -> int:
        return len(self.devices)

    def environment(
        self, rank: int, port: str = _PORT_TO_COME, board: str = _BOARD_TO_COME
    ) -> dict[str, str]:
        board = board if self.stall_timeout and self.size > 1 else ""
        world = World(self.size, port, self.cores, self.terminal, self.columns, board)
        return rank_environment(self.outer, world, rank, self.devices[rank])

    def describe(self) -> str:
        """The plan for people: what --dry-run prints."""
        environments = [self.environment(rank) for rank in range(self.size)]
        names = sorted(
            {
                name
                for environment in environments
                for name in environment
                if environment[name] != self.outer.get(name)
                or name in self.environment(0).keys() - self.outer.keys()
            }
        )
        same = [
            name for name in names if len({environment[name] for environment in environments}) == 1
        ]
        lines = [
            f"ranks        {self.size}",
            f"command      {shlex.join(self.command)}",
            f"cores        {self.cores}",
            f"output       {self._output()}",
            f"stall        {f'after {self.stall_timeout:g} s' if self.stall_timeout else 'never'}",
            f"environment  of every rank, beside what the launcher's own holds{self._removed()}:",
            *(f"  {name}={environments[0][name]}" for name in same),
        ]
        for rank, environment in enumerate(environments):
            device = self.devices[rank]
            lines.append(
                f"rank {rank}       on {'the CPU' if device is None else f'GPU {device}'}:"
            )
            lines += [f"  {name}={environment[name]}" for name in names if name not in same]
        return "\n".join(lines)

    def _output(self) -> str:
        if len(self.shown) == self.size:
            shown = "shown"
        else:
            shown = (
                f"shown of ranks {','.join(map(str, sorted(self.shown)))}"
                if self.shown
                else "not shown"
            )
        return shown + (f", kept in {self.log_dir}" if self.log_dir else "")

    def _removed(self) -> str:
        removed = sorted(self.outer.keys() - self.environment(0).keys())
        return f" (without {', '.join(removed)})" if removed else ""


def choose_devices(
    ranks: int | str, device: str, gpus: tuple[str, ...], cores: int
) -> tuple[str | None, ...]:
    """The device of each rank.

    Args:
      ranks: how many, or "auto", "gpu" (all visible ones), "cpu" (one for each core).
      device: "auto", "cpu" or "gpu".
      gpus: the visible ones.
      cores: those available.

    Raises:
      UsageError: it can't be had.
    """
    if isinstance(ranks, int) and ranks < 1:
        raise UsageError(f"-np {ranks}: a job has at least one rank")
    if {str(ranks), device} == {"cpu", "gpu"}:
        raise UsageError(
            f"-np {ranks} and --device {device} contradict each other; leave one of them out"
        )
    if device == "cpu" or ranks == "cpu":
        gpus = NO_GPUS
    elif not gpus and "gpu" in (device, ranks):
        asked = "-np gpu" if ranks == "gpu" else "--device gpu"
        raise UsageError(
            f"{asked}: no GPU is visible; --device cpu makes CPU ranks, --check tells more"
        )
    if not gpus:
        count = ranks if isinstance(ranks, int) else cores if ranks == "cpu" else 1
        return (None,) * count
    count = ranks if isinstance(ranks, int) else len(gpus)
    if count > len(gpus):
        visible = (
            f"{len(gpus)} GPU{'s are' if len(gpus) > 1 else ' is'} visible ({', '.join(gpus)})"
        )
        raise UsageError(
            f"-np {count} asks for {count} ranks, but {visible}; --device cpu makes CPU ranks"
        )
    return gpus[:count]


def shown_ranks(text: str, size: int) -> frozenset[int]:
    """The ranks that --tee names: "all", "none", or numbers and ranges like "0,2-3".

    Raises:
      UsageError: it isn't that, or names a rank that isn't there.
    """
    if text in ("all", "none"):
        return frozenset(range(size) if text == "all" else ())
    ranks: set[int] = set()
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        if not (first.isdigit() and (last.isdigit() or not dash)):
            raise UsageError(f'--tee {text}: give "all", "none" or ranks like 0,2-3')
        ranks.update(range(int(first), int(last or first) + 1))
    if max(ranks, default=0) >= size:
        raise UsageError(f"--tee {text}: there is no rank {max(ranks)}, the last one is {size - 1}")
    return frozenset(ranks)
