"""Refuses values of options that no machine could make good, or that need another option."""

from __future__ import annotations

import argparse
import math

from collective.job.errors import UsageError


def check_limits(options: argparse.Namespace) -> None:
    """Checks numbers, and options that are about others.

    Raises:
      UsageError: one can't be, or has no effect.
    """
    if options.framework is None and options.embedding_scope != "script":
        raise UsageError(
            "--embedding-scope is for scripts of other frameworks: give --as, too, or mark tables "
            "by strategy.embedding_scope()"
        )
    if options.max_restarts < 0:
        raise UsageError(f"--max-restarts {options.max_restarts}: give 0 or more")
    if options.grace is not None and not 0 <= options.grace < math.inf:
        raise UsageError(f"--grace {options.grace}: give a number of seconds, 0 or more")
    if not 0 <= options.stall_timeout < math.inf:
        raise UsageError(
            f"--stall-timeout {options.stall_timeout}: give a number of seconds, 0 for no limit"
        )
    pause = options.restart_pause
    if pause is not None and not 0 <= pause < math.inf:
        raise UsageError(f"--restart-pause {pause}: give a number of seconds, 0 or more")
    if pause is not None and not options.max_restarts:
        raise UsageError(
            f"--restart-pause {pause:g} is about restarts: give --max-restarts, too, 1 or more"
        )


def least_ranks(options: argparse.Namespace, size: int) -> int:
    """Returns how few ranks an elastic job may have; 0 if the job isn't elastic.

    Args:
      options: as given.
      size: the number of ranks with which it starts.

    Raises:
      UsageError: the options contradict each other.
    """
    if not options.elastic:
        if options.min_ranks is not None:
            raise UsageError(f"--min-np {options.min_ranks} is for --elastic: give that, too")
        return 0
    if not options.max_restarts:
        raise UsageError(
            "--elastic is about the ranks of a restart: give --max-restarts, too, 1 or more"
        )
    least = 1 if options.min_ranks is None else options.min_ranks
    if not 1 <= least <= size:
        raise UsageError(f"--min-np {least}: the job starts with {size}; give 1 to {size}")
    return least
