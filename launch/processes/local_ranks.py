"""The ranks of this host: starts them, and holds what belongs to them until all have ended."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

from collective.job.errors import UsageError
from collective.job.key_value_store import Entry, KeyValueStore, scope_members
from collective.job.milestones import LauncherMilestones
from collective.job.nameless_memory import nameless_file
from collective.job.progress_board import LauncherBoard
from collective.launch.output.logs import open_loader_logs, open_logs
from collective.launch.planning.environment import loader_environment, rank_environment
from collective.launch.planning.plan import LaunchPlan
from collective.launch.processes import process_tree
from collective.launch.processes.signals import SignalPipe
from collective.launch.processes.supervisor import (
    KILL_PATIENCE,
    RankSpec,
    Supervisor,
    SupervisorEvent,
)

# A rank's pipes have four ends, all of which may be open here or in the supervisor.
_FILES_A_RANK = 4
_OTHER_FILES = 16
# How many seconds to wait for threads that still answer ranks that have ended.
_THREAD_PATIENCE = 5.0


class LocalRanks:
    """Starts the ranks of this host, and holds what belongs to them.

    Attributes:
        ranks: their numbers in the job; none on a host that only starts others.
        board, milestones: boards with a page for each rank of the job.
        rendezvous: the rendezvous of these ranks.
        pipes: the reading ends of each rank's stdout and stderr.
        logs: the files that store the output.
        loaders: the reading ends and the files of each loader.
        supervisor: the parent process of the ranks, None without ranks.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        signals: SignalPipe,
        publish: Callable[[Entry], None] | None = None,
    ) -> None:
        """Starts the ranks. No thread may run before.

        Args:
            plan: the job's plan.
            signals: the launcher's signals.
            publish: is told each entry that a rank makes at the rendezvous.

        Raises:
            UsageError: the logs can't be written, or there are too many ranks for this system.
        """
        self.ranks = plan.local_ranks
        _check_open_files(len(self.ranks) + plan.loaders)
        self.logs = open_logs(plan)
        # A shell that exec'ed the launcher may have had children. They are now the launcher's
        # children, but don't belong to this job.
        self._strangers = frozenset(process_tree.children_by_parent().get(os.getpid(), ()))
        self.rendezvous = KeyValueStore(scope_members(plan.placements), publish)
        try:
            self.board = LauncherBoard(plan.size)
            self.milestones = LauncherMilestones(plan.size)
            self._script_files = nameless_file("collective.script_files")
            pipes = {rank: (os.pipe(), os.pipe()) for rank in self.ranks}
            of_loaders = [(os.pipe(), os.pipe()) for _ in range(plan.loaders)]
        except OSError as error:
            raise UsageError(
                f"the memory by which {plan.size} ranks report their progress is not available: "
                f"{error.strerror}"
            ) from None
        specs = []
        for rank, (stdout, stderr) in pipes.items():
            environment = rank_environment(
                plan,
                rank,
                rendezvous_address=self.rendezvous.address,
                rendezvous_port=str(self.rendezvous.port),
                board=self.board.path,
                milestones=self.milestones.path,
                script_files=f"/proc/{os.getpid()}/fd/{self._script_files}",
            )
            cores = plan.cores_of(rank)
            specs.append(RankSpec(plan.command, environment, stdout[1], stderr[1], cores))
        loaders = [
            RankSpec(plan.loader_command, loader_environment(plan, number), out[1], err[1])
            for number, (out, err) in enumerate(of_loaders)
        ]
        self.supervisor: Supervisor | None = None
        if specs:
            self.supervisor = Supervisor(
                specs, plan.grace, signals.stop_signals, plan.size == 1, loaders
            )
        for stdout, stderr in [*pipes.values(), *of_loaders]:
            os.close(stdout[1])
            os.close(stderr[1])
        logs = open_loader_logs(plan)
        self.loaders = {
            number: ((out[0], err[0]), logs[number]) for number, (out, err) in enumerate(of_loaders)
        }
        self.pipes = {rank: (stdout[0], stderr[0]) for rank, (stdout, stderr) in pipes.items()}
        # Threads may start only now that the supervisor is forked.
        self.rendezvous.serve()

    def rank_of(self, event: SupervisorEvent) -> int:
        """Returns the job-wide number of the rank that an event is about."""
        return self.ranks[event.rank]

    def send_signal(self, signum: int, to_groups: bool) -> None:
        """Sends a signal to the ranks; KILL goes to every descendant."""
        if self.supervisor is not None:
            self.supervisor.send_signal(signum, to_groups)

    def kill(self) -> list[int]:
        """Kills the supervisor and everything else: the launcher has adopted its orphans.

        Returns:
            The processes that are left.
        """
        if self.supervisor is not None:
            try:
                os.kill(self.supervisor.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return process_tree.kill_descendants(KILL_PATIENCE, self._strangers)

    def close(self) -> None:
        """Closes everything of ranks that have ended, except for the threads of a console."""
        self.rendezvous.stop()
        process_tree.reap()
        if self.supervisor is not None:
            self.supervisor.close()
        self.board.close()
        self.milestones.close()
        os.close(self._script_files)

    @staticmethod
    def wait_for_threads() -> None:
        """Waits for threads to end; no process may be forked before."""
        end = time.monotonic() + _THREAD_PATIENCE
        while threading.active_count() > 1 and time.monotonic() < end:
            time.sleep(0.01)


def _check_open_files(ranks: int) -> None:
    """Raises UsageError if this process may not open the files that so many ranks need."""
    opened: list[int] = []
    try:
        for _ in range(_FILES_A_RANK * ranks + _OTHER_FILES):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise UsageError(
            f"-np {ranks} needs {_FILES_A_RANK} pipe ends a rank and {_OTHER_FILES} files more: "
            f"{error.strerror}; start fewer ranks, or allow more open files (ulimit -n)"
        ) from None
    finally:
        for descriptor in opened:
            os.close(descriptor)
