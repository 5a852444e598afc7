"""The plan of a job: everything that is decided before a process starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchPlan:
    """Says which ranks run what, on which devices, and how the launcher looks after them.

    Attributes:
      command: the command line of every rank.
      devices: each rank's entry for CUDA_VISIBLE_DEVICES, None for a CPU rank.
      launcher_environment: the launcher's own environment variables.
      cores: how many cores the launcher may use.
      terminal: whether the launcher's stderr is a terminal.
      columns: the width of that terminal, None if it isn't known.
      grace: seconds between TERM and KILL.
      shown_ranks: the ranks whose output is shown.
      log_dir: the folder that keeps all output, if any.
      verbose: whether everything is shown as the ranks write it.
      stall_timeout: seconds without progress after which the job ends; 0 means never.
    """

    command: tuple[str, ...]
    devices: tuple[str | None, ...]
    launcher_environment: Mapping[str, str]
    cores: int
    terminal: bool = False
    columns: int | None = None
    grace: float = 5.0
    shown_ranks: frozenset[int] = frozenset()
    log_dir: str | None = None
    verbose: bool = False
    stall_timeout: float = 600.0

    @property
    def size(self) -> int:
        return len(self.devices)

    @property
    def detects_stalls(self) -> bool:
        """Tells whether the launcher watches progress: a single rank waits for nobody."""
        return self.stall_timeout > 0 and self.size > 1
