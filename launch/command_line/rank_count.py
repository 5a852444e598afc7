"""Counts the ranks of the launcher's own host, as -np, the environment or a list of hosts say."""

from __future__ import annotations

from collections.abc import Mapping

from collective.job.errors import UsageError
from collective.launch.command_line.host_options import HostList, ranks_from_environment


def rank_count(text: str) -> int | str:
    """Reads -np: a number, or 'auto', 'gpu', 'cpu'.

    Raises:
      UsageError: it is neither.
    """
    if text in ("auto", "gpu", "cpu"):
        return text
    try:
        return int(text)
    except ValueError:
        typed = text if text.strip() else repr(text)
        raise UsageError(f"-np {typed}: give a number of ranks, auto, gpu or cpu") from None


def has_ranks_here(listed: HostList | None) -> bool:
    """Tells whether this host has ranks: only the first one of a list is the launcher's own."""
    if listed is None:
        return True
    from collective.job.network import (
        is_this_host,  # here, because it needs psutil, which takes long to import
    )

    return is_this_host(listed.hosts[0][0])


def ranks_here(
    given: str | None, environment: Mapping[str, str], listed: HostList | None
) -> int | str:
    """Returns how many ranks this host has, as `rank_count` does.

    Args:
      given: -np.
      environment: the launcher's; it counts where there is no list.
      listed: the hosts of -H or of a host file, if it is a job of these.

    Raises:
      UsageError: -np isn't a number of ranks.
    """
    if listed is None and given is None:
        given = ranks_from_environment(environment)
    ranks = None if listed is None else listed.hosts[0][1]
    return rank_count("auto" if given is None else given) if ranks is None else ranks
