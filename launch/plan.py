"""The plan of a job: everything that is decided before a process starts."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

LONGEST_PAUSE = 60.0  # seconds between two attempts, however many there were


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
      time_to_save: seconds that ranks have to save and to end once the job is told to stop.
      shown_ranks: the ranks whose output is shown.
      log_dir: the folder that keeps all output, if any.
      verbose: whether everything is shown as the ranks write it.
      stall_timeout: seconds without progress after which the job ends; 0 means never.
      preempt_signal: the signal that means TERM, too.
      max_restarts: how often the job is started again after a failure.
      restart_pause: seconds before the first restart; each further pause is twice as long.
      restart_count: how often it was started again so far.
      most_ranks: how many ranks were asked for: fewer may be left of an elastic job.
      min_ranks: how few ranks an elastic job may have; 0 if it isn't elastic.
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
    time_to_save: float = 60.0
    preempt_signal: int = signal.SIGTERM
    max_restarts: int = 0
    restart_pause: float = 1.0
    restart_count: int = 0
    most_ranks: int = 0
    min_ranks: int = 0

    @property
    def size(self) -> int:
        return len(self.devices)

    @property
    def on_gpus(self) -> bool:
        """Tells whether a rank has a GPU."""
        return any(device is not None for device in self.devices)

    @property
    def detects_stalls(self) -> bool:
        """Tells whether the launcher watches progress: a single rank waits for nobody."""
        return self.stall_timeout > 0 and self.size > 1
